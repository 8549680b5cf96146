"""A worker inside this process, over the tiny engine: settings, threads, its end; no torch but for tensors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import torch

from rollout_worker.embedded import (
    AsyncWorker,
    HandOverFailed,
    InvalidSettings,
    Worker,
    WorkerEnded,
)
from rollout_worker.embedded.setting_keywords import settings_from_keywords
from rollout_worker.engine import Engine, EngineError
from tests.support.unit.tiny_engine import TinyEngine, raising, write_weights
from tests.support.waiting import until_sync

ALONE: dict[str, Any] = {
    "auth": "none",
    "control_host": "127.0.0.1",
    "data_host": "127.0.0.1",
    "data_port": 0,
    "control_port": 0,
    "weights_port": 0,
    "restart_delays": [0],
}


Kinds = tuple[type[Worker], type[AsyncWorker]]


@pytest.fixture
def engines() -> list[TinyEngine]:
    """Those that were made, the present one last."""
    return []


@pytest.fixture
def before() -> dict[str, Any]:
    """`before` of the engines that are made."""
    return {}


@pytest.fixture
def kinds(tmp_path: Path, engines: list[TinyEngine], before: dict[str, Any]) -> Kinds:
    """Both faces over a tiny engine that steps freely."""
    model = write_weights(tmp_path / "model", 100)

    def make(self: object = None) -> Engine:
        engine = TinyEngine(model)
        engine.free = True
        engine.before.update(before)
        engines.append(engine)
        return cast(Engine, engine)

    class Tiny(Worker):
        _make_engine = staticmethod(make)

    class AsyncTiny(AsyncWorker):
        _make_engine = staticmethod(make)

    return Tiny, AsyncTiny


@pytest.fixture
def tiny(kinds: Kinds) -> Iterator[Worker]:
    with kinds[0](model="model", **ALONE) as worker:
        yield worker


def number(value: int) -> dict[str, torch.Tensor]:
    """Weights whose tokens are this number."""
    return {
        "number": torch.tensor([value], dtype=torch.uint8),
        "rest": torch.zeros(1, dtype=torch.uint8),
    }


def generate(worker: Worker, **fields: Any) -> httpx.Response:
    body = {"token_ids": [1], "sampling": {"max_tokens": 2}, **fields}
    return httpx.post(f"{worker.data_url}/v1/generate", json=body, trust_env=False)


def ours() -> set[str]:
    """Names of the threads of this process."""
    return {thread.name for thread in threading.enumerate()}


def test_it_takes_tensors_and_serves_them(tiny: Worker) -> None:
    done = tiny.hand_over(7, number(42), epoch=3, labels={"step": "7"})
    assert (done.epoch, done.version, done.committed) == (3, 7, True)
    answer = generate(tiny).json()["outputs"][0]
    assert answer["token_ids"] == [42, 42]
    assert answer["weights"] == [
        {"epoch": 3, "version": 7, "start": 0, "end": 2, "stale_kv": False}
    ]
    assert tiny.hand_over(8, number(43).items()).epoch == 3  # the one that serves
    state = tiny.state()
    assert state.weights.active is not None
    assert state.weights.active.root_hash != done.root_hash


def test_the_trainers_turn(tiny: Worker) -> None:
    tiny.hand_over(1, number(42))
    with tiny.turn():
        assert tiny.state().lifecycle == "Asleep"
        assert generate(tiny).status_code == 503
        tiny.hand_over(2, number(43))
        assert generate(tiny).status_code == 503
    assert generate(tiny).json()["outputs"][0]["token_ids"] == [43, 43]
    tiny.pause()
    assert generate(tiny).status_code == 503
    tiny.resume()
    assert generate(tiny).status_code == 200


def test_an_error_in_a_turn_goes_through_and_leaves_the_worker_asleep(tiny: Worker) -> None:
    with pytest.raises(ZeroDivisionError), tiny.turn():
        raise ZeroDivisionError
    assert tiny.state().lifecycle == "Asleep"


def test_a_failed_hand_over_names_the_tensor(tiny: Worker) -> None:
    with pytest.raises(HandOverFailed, match="'rest' is missing in 'what was handed over'"):
        tiny.hand_over(1, {"number": number(1)["number"]})
    assert generate(tiny).json()["outputs"][0]["token_ids"] == [100, 100]


def test_in_a_pool_only_the_operator_commits(kinds: Kinds) -> None:
    with kinds[0](model="model", pool="math", namespace="train", **ALONE) as worker:
        with pytest.raises(ValueError, match="commit: in a pool the operator commits"):
            worker.hand_over(1, number(42), commit=True)
        done = worker.hand_over(1, number(42))
        assert not done.committed
        state = worker.state().weights
        assert state.staged is not None
        assert (state.staged.version, state.staged.phase) == (1, "Staged")
        assert state.staged.root_hash == done.root_hash
        assert generate(worker).status_code == 503  # fenced
        with worker.turn():
            worker.hand_over(2, number(43))
        url = worker.control_url
        fence = {"epoch": 0, "min_version": 0}
        httpx.post(f"{url}/v1/require", json=fence, trust_env=False).raise_for_status()
        commit = {"epoch": 0, "version": 2}
        httpx.post(f"{url}/v1/weights/commit", json=commit, trust_env=False).raise_for_status()
        until_sync(lambda: worker.state().serving, what="it to serve")
        assert generate(worker).json()["outputs"][0]["token_ids"] == [43, 43]


def test_nothing_is_left_of_it(kinds: Kinds) -> None:
    before, descriptors = ours(), len(os.listdir("/proc/self/fd"))
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    root = (list(logging.getLogger().handlers), logging.getLogger().level)
    worker = kinds[0](model="model", **ALONE)

    def trainer() -> None:
        with worker:
            assert generate(worker).status_code == 200
            assert {each: signal.getsignal(each) for each in handlers} == handlers
            assert (logging.getLogger().handlers, logging.getLogger().level) == root
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trainer()
    url = worker.data_url
    assert not worker.running
    assert ours() <= before
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", trust_env=False)
    worker.close()
    with pytest.raises(WorkerEnded, match="it was closed"):
        worker.state()
    with pytest.raises(WorkerEnded, match="make another one"):
        worker.__enter__()


def test_two_workers_share_a_process(kinds: Kinds) -> None:
    with kinds[0](model="model", **ALONE) as one, kinds[0](model="model", **ALONE) as two:
        one.hand_over(1, number(41))
        two.hand_over(1, number(42))
        found = [generate(each).json()["outputs"][0]["token_ids"][0] for each in (one, two)]
        port = two.control_url.rpartition(":")[2]
        with (
            pytest.raises(InvalidSettings, match=rf"--control-port .*{port} can't be used"),
            kinds[0](model="model", **{**ALONE, "control_port": port}),
        ):
            raise AssertionError
    assert found == [41, 42]


def test_ports_end_and_open_again_although_a_child_was_forked(kinds: Kinds) -> None:
    """The processes of a data loader live on, with copies of every socket."""
    with contextlib.ExitStack() as stack:
        with kinds[0](model="model", **ALONE) as worker:
            urls = worker.data_url, worker.control_url
            clients = [stack.enter_context(httpx.Client(trust_env=False)) for _ in urls]
            for client, url in zip(clients, urls, strict=True):
                assert client.get(url).status_code == 404  # its connection stays open
            child = os.fork()
            if child == 0:
                signal.pause()
                os._exit(0)
            stack.callback(os.waitpid, child, 0)
            stack.callback(os.kill, child, signal.SIGKILL)
        for client, url in zip(clients, urls, strict=True):
            with pytest.raises((httpx.ConnectError, httpx.RemoteProtocolError)):
                client.get(url, timeout=5)
        again = {
            f"{name}_port": int(url.rpartition(":")[2])
            for name, url in zip(("data", "control"), urls, strict=True)
        }
        with kinds[0](model="model", **{**ALONE, **again}) as worker:
            assert (worker.data_url, worker.control_url) == urls
            assert generate(worker).status_code == 200


async def test_the_same_within_an_event_loop(kinds: Kinds) -> None:
    async with kinds[1](model="model", **ALONE) as worker:
        await worker.hand_over(1, number(42))
        async with worker.turn():
            assert (await worker.state()).lifecycle == "Asleep"
            await worker.hand_over(2, number(43))
        async with httpx.AsyncClient(trust_env=False) as client:
            body = {"token_ids": [1], "sampling": {"max_tokens": 1}}
            answer = await client.post(f"{worker.data_url}/v1/generate", json=body)
        assert answer.json()["outputs"][0]["token_ids"] == [43]
        await worker.pause()
        await worker.sleep(1)
        await worker.resume()
    assert not worker.running


async def test_a_cancelled_start_leaves_no_worker(kinds: Kinds, before: dict[str, Any]) -> None:
    threads = ours()
    worker = kinds[1](model="model", **ALONE)
    reached, forever = threading.Event(), asyncio.Event()

    async def hang() -> None:
        reached.set()
        await forever.wait()

    before["start"] = hang
    entering = asyncio.create_task(worker.__aenter__())
    await asyncio.to_thread(reached.wait, 30)
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert not worker.running
    assert {name for name in ours() - threads if name.startswith("rollout")} == set()


def test_an_engine_that_does_not_load_is_told_at_once(kinds: Kinds, before: dict[str, Any]) -> None:
    worker = kinds[0](model="model", **ALONE)
    before["start"] = raising(EngineError("no such model"))
    with pytest.raises(WorkerEnded, match="the engine did not load: no such model"), worker:
        raise AssertionError
    assert not worker.running


def test_a_process_in_which_no_engine_works_ends_the_worker_and_not_the_trainer(
    tiny: Worker, engines: list[TinyEngine]
) -> None:
    tiny.hand_over(1, number(42))
    engines[-1].spent = "the GPU's context of this process is lost"
    until_sync(lambda: not tiny.running, what="the worker to end")
    with pytest.raises(WorkerEnded, match="no engine works in this process any more: the GPU"):
        tiny.hand_over(2, number(43))


def test_a_dead_engine_is_replaced_and_copies_that_are_gone_fence_the_worker(
    tiny: Worker, engines: list[TinyEngine]
) -> None:
    tiny.hand_over(1, number(42))
    engines[-1].wrong = "killed by the test"
    until_sync(lambda: len(engines) == 2 and tiny.state().lifecycle == "Active", what="the next")
    assert "hand over new ones, or sleep at level 2" in str(tiny.state().last_error)
    assert generate(tiny).status_code == 503
    tiny.hand_over(2, number(43))
    assert generate(tiny).json()["outputs"][0]["token_ids"] == [43, 43]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (
            {"log_level": "debug"},
            "log_level is not a setting of an embedded worker: logging is the",
        ),
        ({"turn_devices": ["a"]}, "turn_devices is not a setting .* rollout_client.turn"),
        ({"rank": 1}, "rank is not a setting .* one node"),
        ({"nodes": 2, "leader_address": None}, "--nodes above 1 needs"),
        ({"max_length": "x"}, "--max-length is 'x'"),
        ({"max_queue": 0}, "--max-queue is '0': must be at least 1"),
        ({"engine_arg": "--threads"}, "engine_arg is '--threads': give a list of strings"),
        ({"model": object()}, "model is <object .*: give text"),
        ({"auth": "token"}, "--auth token needs --auth-token-file"),
        ({"auth": "none", "control_host": "0.0.0.0"}, "--auth none would open"),
    ],
)
def test_wrong_settings_are_refused_by_name(keywords: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidSettings, match=message):
        settings_from_keywords({"model": "model", **ALONE, **keywords}, {})


def test_settings_come_from_keywords_then_variables_then_defaults() -> None:
    environ = {
        "ROLLOUT_POOL": "math",
        "ROLLOUT_NAMESPACE": "train",
        "ROLLOUT_MAX_QUEUE": "7",
        "ROLLOUT_TURN_DEVICES": "gpu/a",  # the trainer's own
        "ROLLOUT_LOG_LEVEL": "debug",
    }
    found = settings_from_keywords(
        {
            **ALONE,
            "model": Path("model"),
            "max_queue": 8,
            "drain_seconds": None,
            "weights_roots": ["/a", "/b"],
            "engine_arg": ["--threads=1", "--x"],
        },
        environ,
    )
    assert (found.pool, found.namespace, found.max_queue) == ("math", "train", 8)
    assert (found.drain_seconds, found.shutdown_grace) == (30, 0)
    assert found.weights_roots == (Path("/a"), Path("/b"))
    assert found.engine_arg == ("--threads=1", "--x")
    assert found.turn_devices == ()
    with pytest.raises(TypeError, match="no setting 'modell'"):
        settings_from_keywords({"modell": "model"}, {})


SCRIPT = """
import os, sys, threading
from pathlib import Path
sys.path[:0] = {paths!r}
from tests.support.unit.tiny_engine import TinyEngine
from rollout_worker.embedded import Worker, WorkerEnded

class Tiny(Worker):
    _make_engine = staticmethod(lambda: TinyEngine(Path({model!r})))

worker = Tiny(model="model", auth="none", control_host="127.0.0.1", data_port=0, control_port=0)
{rest}
"""
LEFT_OPEN = """
worker.__enter__()
print("serving", flush=True)
"""
TOO_LATE = """
def late():
    threading.main_thread().join()
    try:
        worker.__enter__()
    except WorkerEnded as error:
        print(error)

threading.Thread(target=late).start()
"""


def run_script(folder: Path, rest: str) -> subprocess.CompletedProcess[str]:
    """Run a program with a worker of its own."""
    model = str(write_weights(folder / "model", 100))
    script = SCRIPT.format(paths=sys.path, model=model, rest=rest)
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("end", "status"), [("1 / 0", 1), ("if not os.fork(): sys.exit(0)", 0)], ids=["raises", "forks"]
)
def test_the_interpreter_ends_though_nobody_closed_it(
    tmp_path: Path, end: str, status: int
) -> None:
    done = run_script(tmp_path, LEFT_OPEN + end)
    assert done.returncode == status, done.stderr
    assert done.stdout == "serving\n"
    assert ("ZeroDivisionError" in done.stderr) is (end == "1 / 0")
    assert "Exception ignored" not in done.stderr
    assert "Task was destroyed" not in done.stderr


def test_a_worker_that_starts_while_the_interpreter_ends_says_so(tmp_path: Path) -> None:
    done = run_script(tmp_path, TOO_LATE)
    assert "the interpreter ends, for its main thread has ended" in done.stdout, done.stderr
    assert "start the worker before that" in done.stdout
