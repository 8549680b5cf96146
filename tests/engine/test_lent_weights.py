"""Lent weights: what becomes of them, of the turn and of the pool, whatever the trainer does or whenever it dies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollout_client import PublishFailed, RolloutPool
from rollout_client.turn import HeldTurn, bucket_stream, local_turn, locks
from rollout_common.transfer.tensor_sums import sum_tensors
from rollout_common.turn.lock_files import holders
from rollout_worker.ports import lending_port
from tests.support.engine.lending_trainer import read_tensors
from tests.support.engine.lending_worker import (
    GPUS,
    fall_asleep,
    has_turn,
    lend,
    next_version,
    tokens_of,
    turn_flags,
)
from tests.support.engine.push_rig import Nursery
from tests.support.engine.reference import Reference
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import PROMPT, InProcess, in_process, ports_of
from tests.support.waiting import until_sync


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("turn")


@pytest.fixture(scope="module")
def worker(tiny_models: TinyModels, directory: Path) -> Iterator[InProcess]:
    """An hf worker on two devices."""
    with in_process(
        tiny_models.model(1),
        *turn_flags(directory),
        "--weights-port",
        "0",
        "--restart-delays",
        "0",
        "--weights-roots",
        str(tiny_models.home),
    ) as worker:
        worker.post("require", epoch=0, min_version=0)
        yield worker


@pytest.fixture(scope="module")
def references(tiny_models: TinyModels) -> dict[int, list[int]]:
    """The greedy tokens of the weights of each seed."""
    return {seed: Reference(tiny_models.weights(seed)).greedy(PROMPT, 8) for seed in (1, 2, 3)}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, directory: Path) -> Iterator[None]:
    monkeypatch.setattr(lending_port, "LENT_IDLE_SECONDS", 0.5)
    monkeypatch.setattr(lending_port, "LENDING_LOOK_SECONDS", 0.05)
    yield
    # A test that failed in its turn would keep the devices from all that follow.
    if any(turn.held for idle in locks._idle_turns.values() for turn in idle):
        with taking_turn(directory):
            pass


@pytest.fixture
def asleep(worker: InProcess, tiny_models: TinyModels, directory: Path) -> tuple[int, int]:
    """The worker has the weights of seed 1 from files, and sleeps; returns the next identity."""
    worker.post("wake")
    until_sync(lambda: worker.state()["lifecycle"] == "Active", 20, what="the worker to serve")
    worker.update(*next_version(worker), tiny_models.weights(1))
    identity = next_version(worker)
    fall_asleep(worker, directory)
    return identity


@contextlib.contextmanager
def taking_turn(directory: Path) -> Iterator[HeldTurn]:
    with local_turn(GPUS, directory, seconds=20) as turn:
        yield turn


def test_a_trainer_that_is_killed_before_any_message_leaves_the_old_weights(
    worker: InProcess,
    tiny_models: TinyModels,
    directory: Path,
    references: dict[int, list[int]],
    tmp_path: Path,
) -> None:
    nursery = Nursery(tmp_path / "nursery.log")
    survived = False
    try:
        for kill_at in range(1, 40):
            until_sync(lambda: worker.state()["lifecycle"] == "Active", 60, what="it serves")
            worker.update(*next_version(worker), tiny_models.weights(1))
            identity = next_version(worker)
            fall_asleep(worker, directory)
            out = tmp_path / f"{kill_at}.out"
            words = [
                str(directory),
                ",".join(GPUS),
                str(tiny_models.weights(2)),
                *map(str, identity),
                str(kill_at),
            ]
            pid = nursery.start("lender", words, out, None)
            assert nursery.ended(pid, 60)
            survived = "sum" in out.read_text()
            if survived and has_turn(worker):
                break
            # Its turn ended with it, and with the engine that shared it.
            with taking_turn(directory):
                assert worker.state()["resident"] == {"weights": False, "kv_cache": False}
            worker.post("wake")
            assert tokens_of(worker) == references[1], kill_at
    finally:
        nursery.close()
    assert survived
    assert kill_at > 8
    worker.post("wake", tags=["weights"], load=False)
    worker.commit(*identity, in_flight="Abort")
    worker.post("wake")
    assert tokens_of(worker) == references[2]


def test_tensors_that_the_model_lacks_leave_it_as_it_was(
    worker: InProcess,
    asleep: tuple[int, int],
    tiny_models: TinyModels,
    directory: Path,
    references: dict[int, list[int]],
) -> None:
    good = read_tensors(tiny_models.weights(2))
    name = next(iter(good))
    wrong: dict[str, tuple[dict[str, Tensor], str]] = {
        "missing": ({k: v for k, v in good.items() if k != name}, "is missing"),
        "unknown": ({**good, "no.such.weight": torch.zeros(3)}, "is unknown to the model"),
        "shape": ({**good, name: torch.zeros(3)}, "the model's checkpoint has"),
    }
    with taking_turn(directory) as turn:
        for tensors, why in wrong.values():
            with pytest.raises(PublishFailed, match=why):
                lend(turn, asleep, tensors)
        lend(turn, asleep, good)
    worker.post("wake", tags=["weights"], load=False)
    worker.commit(*asleep, in_flight="Abort")
    worker.post("wake")
    assert tokens_of(worker) == references[2]


def test_a_later_version_replaces_one_that_was_lent_in_the_same_turn(
    worker: InProcess,
    asleep: tuple[int, int],
    tiny_models: TinyModels,
    directory: Path,
    references: dict[int, list[int]],
) -> None:
    epoch, version = asleep
    with taking_turn(directory) as turn:
        lend(turn, asleep, read_tensors(tiny_models.weights(2)))
        lend(turn, (epoch, version + 1), read_tensors(tiny_models.weights(3)))
    worker.post("wake", tags=["weights"], load=False)
    worker.commit(epoch, version + 1, in_flight="Abort")
    worker.post("wake")
    assert tokens_of(worker) == references[3]


def test_a_worker_that_wakes_without_a_commit_serves_the_old_weights(
    worker: InProcess,
    asleep: tuple[int, int],
    tiny_models: TinyModels,
    directory: Path,
    references: dict[int, list[int]],
) -> None:
    with taking_turn(directory) as turn:
        lend(turn, asleep, read_tensors(tiny_models.weights(2)))
    worker.post("wake")
    assert tokens_of(worker) == references[1]


def test_a_discarded_version_gives_its_memory_back(
    worker: InProcess,
    asleep: tuple[int, int],
    tiny_models: TinyModels,
    directory: Path,
    references: dict[int, list[int]],
) -> None:
    epoch, version = asleep
    with taking_turn(directory) as turn:
        lend(turn, asleep, read_tensors(tiny_models.weights(2)))
        assert worker.state()["resident"]["weights"]
        worker.post("weights/discard", epoch=epoch, version=version)
        until_sync(lambda: not worker.state()["resident"]["weights"], what="its memory to go")
        until_sync(
            lambda: worker.state()["turn"]["state"] == "Released",
            what="its share of the turn to go",
        )
    worker.post("wake")
    assert tokens_of(worker) == references[1]


def test_a_worker_that_nobody_wakes_lets_others_have_the_devices(
    worker: InProcess,
    asleep: tuple[int, int],
    tiny_models: TinyModels,
    directory: Path,
    references: dict[int, list[int]],
) -> None:
    with taking_turn(directory) as turn:
        lend(turn, asleep, read_tensors(tiny_models.weights(2)))
    assert worker.state()["turn"]["state"] == "Held"
    with taking_turn(directory):
        assert worker.state()["resident"] == {"weights": False, "kv_cache": False}
    worker.post("wake")
    assert tokens_of(worker) == references[1]


def test_damaged_values_never_serve(
    worker: InProcess,
    asleep: tuple[int, int],
    tiny_models: TinyModels,
    directory: Path,
    references: dict[int, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = sum_tensors
    monkeypatch.setattr(
        bucket_stream, "sum_tensors", lambda tensors: ["0" * 16, *right(tensors)[1:]]
    )
    with taking_turn(directory) as turn, pytest.raises(PublishFailed, match="damaged"):
        lend(turn, asleep, read_tensors(tiny_models.weights(2)))
    worker.post("wake")
    assert tokens_of(worker) == references[1]


def test_an_error_in_the_block_takes_the_memory_back(
    worker: InProcess,
    asleep: tuple[int, int],
    tiny_models: TinyModels,
    directory: Path,
    references: dict[int, list[int]],
) -> None:
    tensors = read_tensors(tiny_models.weights(2))

    def fail_in_turn() -> None:
        with taking_turn(directory) as turn:
            lend(turn, asleep, tensors)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_turn()
    assert worker.state()["turn"]["state"] == "Released"
    assert worker.state()["resident"] == {"weights": False, "kv_cache": False}
    waking = worker.in_background(lambda: worker.post("wake"))
    assert set(holders(directory)) == set(GPUS)
    with taking_turn(directory):  # the same process may go on
        assert worker.state()["resident"] == {"weights": False, "kv_cache": False}
    waking.result(60)
    assert tokens_of(worker) == references[1]


def test_a_pool_without_an_operator_publishes_what_was_lent(
    worker: InProcess,
    asleep: tuple[int, int],
    tiny_models: TinyModels,
    directory: Path,
    references: dict[int, list[int]],
) -> None:
    del asleep
    worker.post("wake")
    tokens_of(worker)
    with RolloutPool.from_urls(**ports_of([worker])) as pool:
        epoch, version = pool.acquire(), 1
        with pool.turn(devices=GPUS, directory=directory, seconds=60) as turn:
            handed = lend(turn, (epoch, version), read_tensors(tiny_models.weights(3)))
            done = pool.publish_handed_over(handed)
            assert done.root_hash == handed.root_hash
        assert tokens_of(worker) == references[3]
        with pool.turn(devices=GPUS, directory=directory, seconds=60) as turn:
            handed = lend(turn, (epoch, version + 1), read_tensors(tiny_models.weights(2)))
            pool.publish_handed_over(handed)
        assert tokens_of(worker) == references[2]


def test_nobody_lends_outside_a_turn_or_where_nobody_sleeps(
    worker: InProcess, asleep: tuple[int, int], tiny_models: TinyModels, directory: Path
) -> None:
    tensors = read_tensors(tiny_models.weights(2))
    with taking_turn(directory) as turn:
        pass
    with pytest.raises(PublishFailed, match="only the process that holds a turn"):
        lend(turn, asleep, tensors)
    with (
        local_turn(["gpu-9"], directory, seconds=5) as turn,
        pytest.raises(PublishFailed, match="no engine sleeps on gpu-9"),
    ):
        lend(turn, asleep, tensors)
    worker.post("wake")
