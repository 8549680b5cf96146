"""An engine that dies under a real worker, one that never loads, and lost weights."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import InProcess, in_process, slug
from tests.support.processes import held
from tests.support.waiting import until_sync

CYCLES = int(os.environ.get("ROLLOUT_CYCLES", "8"))
"""Deaths in a row."""


@pytest.fixture
def worker(tiny_models: TinyModels) -> Iterator[InProcess]:
    with in_process(tiny_models.model(1), "--restart-delays", "0.1") as worker:
        yield worker


@pytest.fixture
def slow_to_restart(tiny_models: TinyModels) -> Iterator[InProcess]:
    """Stays Failed long enough to be seen so."""
    with in_process(tiny_models.model(1)) as worker:
        yield worker


def crash_and_return(worker: InProcess) -> None:
    restarts = worker.state()["restarts"]
    worker.crash()
    until_sync(
        lambda: (
            worker.state()["restarts"] > restarts and worker.worker.runtime.lifecycle.has_engine
        ),
        60,
        what="the restart",
    )


def test_a_crash_ends_requests_as_aborted_and_is_reported(slow_to_restart: InProcess) -> None:
    worker = slow_to_restart
    before = worker.sample()
    plain = worker.long("plain")
    streamed = worker.in_background(lambda: worker.stream(sampling={"ignore_eos": True}))
    until_sync(lambda: worker.state()["in_flight"] == 2, what="both to run")
    worker.crash("the test ended it")
    output = plain.result(10).json()["outputs"][0]
    assert (output["stop_reason"], output["abort_reason"]) == ("aborted", "engine")
    assert output["weights"][-1]["end"] == len(output["token_ids"]) > 0
    name, done = streamed.result(10)[-1]
    assert name == "done"
    assert done["outputs"][0]["abort_reason"] == "engine"
    state = worker.state()
    assert state["lifecycle"] == "Failed"
    assert "the test ended it" in state["last_error"]
    assert worker.data.get("/health").status_code == 200
    answer = worker.generate()
    assert (answer.status_code, slug(answer)) == (503, "failed")
    until_sync(worker.ready, 60, what="the restart")
    assert worker.state()["restarts"] == 1
    assert "rollout_worker_engine_restarts_total 1.0" in worker.data.get("/metrics").text
    assert worker.sample() == before


def break_step(worker: InProcess, fault: Any = None) -> None:
    """Let the engine's next forward pass do something else; called in the worker's loop."""
    engine: Any = worker.worker.runtime.engine
    engine._parts.core._forward = SimpleNamespace(run_pass=fault)


def nothing_left(*_: Any, **__: Any) -> Any:
    return torch.empty(1 << 45)


def no_memory(*_: Any, **__: Any) -> Any:
    raise MemoryError


@pytest.mark.parametrize(
    ("fault", "said"),
    [(None, "NoneType"), (nothing_left, "memory"), (no_memory, "MemoryError")],
    ids=["a bug", "torch out of memory", "Python out of memory"],
)
def test_a_step_that_raises_is_found_and_healed(worker: InProcess, fault: Any, said: str) -> None:
    """A fault inside the engine itself, which nobody reports to the supervisor."""
    before = worker.sample()
    running = worker.long()
    worker.call(lambda: break_step(worker, fault))
    output = running.result(30).json()["outputs"][0]
    assert (output["stop_reason"], output["abort_reason"]) == ("aborted", "engine")
    assert len(output["token_ids"]) > 0
    until_sync(lambda: worker.state()["restarts"] == 1 and worker.ready(), 60, what="the restart")
    assert said in worker.state()["last_error"]
    assert worker.sample() == before


def test_a_hang_is_found_while_the_worker_is_paused(tiny_models: TinyModels) -> None:
    with in_process(tiny_models.model(1), "--engine-arg=--step-deadline-seconds=3") as worker:
        running, over = worker.long(), threading.Event()
        engine: Any = worker.worker.runtime.engine
        engine._parts.thread.run_command(lambda: over.wait(60))
        began = time.monotonic()
        answer = worker.post("pause", mode="keep")
        noticed = time.monotonic() - began
        over.set()
        assert (answer.status_code, slug(answer)) == (409, "failed")
        assert noticed < 30
        assert running.result(30).json()["outputs"][0]["abort_reason"] == "engine"
        until_sync(lambda: worker.state()["lifecycle"] == "Paused", 60, what="the restart")
        assert "its deadline is 3 s" in worker.state()["last_error"]
        assert worker.post("resume").json()["lifecycle"] == "Active"


def test_a_step_that_hangs_is_found_and_healed(tiny_models: TinyModels) -> None:
    deadline, hangs = 1.0, 4.0
    flag = f"--engine-arg=--step-deadline-seconds={deadline}"
    with in_process(tiny_models.model(1), flag) as worker:
        before = worker.sample()
        running = worker.long()
        began = time.monotonic()
        worker.call(lambda: break_step(worker, lambda *_, **__: sleep(hangs)))
        output = running.result(30).json()["outputs"][0]
        assert time.monotonic() - began < hangs, "noticed before it ended by itself"
        assert (output["stop_reason"], output["abort_reason"]) == ("aborted", "engine")
        assert worker.data.get("/health").status_code == 200
        until_sync(lambda: worker.state()["restarts"] == 1 and worker.ready(), 60, what="restart")
        assert "deadline" in worker.state()["last_error"]
        assert worker.sample() == before


@pytest.fixture
def unlogged() -> Iterator[None]:
    """Pytest keeps what is logged, an exception with its frames, and so the model of each death."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.soak
@pytest.mark.usefixtures("unlogged")
@pytest.mark.timeout(60 + 30 * CYCLES)
def test_many_deaths_leave_no_thread_file_or_memory(tiny_models: TinyModels) -> None:
    """Of the engine that shares the worker's process; for the others see the contract suite.

    A model that stays after its death is 4 MiB.
    """
    with in_process(tiny_models.model(1), "--restart-delays", "0") as worker:
        for cycle in range(1 + CYCLES):
            if cycle == 1:  # the first one warms up what stays
                first = held(os.getpid())
            running = worker.long()
            worker.call(partial(break_step, worker))
            assert running.result(30).json()["outputs"][0]["abort_reason"] == "engine"

            def back(cycle: int = cycle) -> bool:
                return worker.state()["restarts"] == cycle + 1 and worker.ready()

            until_sync(back, 60, what="the restart")
        now = held(os.getpid())
    assert now["threads"] <= first["threads"] + 1
    assert now["descriptors"] <= first["descriptors"] + 2
    assert now["MiB"] <= first["MiB"] + 8 + CYCLES, (first, now)


def test_a_restarted_engine_serves_the_last_weights(
    worker: InProcess, tiny_models: TinyModels
) -> None:
    worker.update(1, 3, tiny_models.weights(2))
    before, boot = worker.sample(), worker.state()["boot_id"]
    worker.stage(1, 4, tiny_models.weights(3))
    crash_and_return(worker)
    assert worker.sample() == before
    state = worker.state()
    assert state["boot_id"] == boot
    assert state["weights"]["active"]["version"] == 3
    assert state["weights"]["staged"]["phase"] == "Failed"
    assert "stage again" in state["weights"]["staged"]["error"]
    assert worker.update(1, 4, tiny_models.weights(3))["active"]["version"] == 4


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_weights_that_are_lost_leave_the_worker_fenced(
    worker: InProcess, tiny_models: TinyModels, tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "v"
    shutil.copytree(tiny_models.weights(2), folder)
    worker.update(1, 1, folder)
    shutil.rmtree(folder)
    if damage == "changed":
        shutil.copytree(tiny_models.weights(3), folder)
    crash_and_return(worker)
    state = worker.state()
    assert (state["lifecycle"], state["serving"]) == ("Active", False)
    assert "(1, 1) could not be reloaded" in state["last_error"]
    assert state["weights"]["active"]["version"] == 0
    assert state["weights"]["required"] == {"epoch": 1, "version": 1}
    assert slug(worker.generate()) == "fenced"
    worker.update(1, 1, tiny_models.weights(2))
    assert worker.ready()


@pytest.mark.parametrize("verb", ["pause", "sleep"])
def test_holds_outlive_a_crash(worker: InProcess, verb: str) -> None:
    settled = worker.post(verb).json()
    crash_and_return(worker)
    until_sync(
        lambda: worker.state()["lifecycle"] == settled["lifecycle"], 30, what=settled["lifecycle"]
    )
    assert worker.state()["resident"] == settled["resident"]
    assert worker.post("resume" if verb == "pause" else "wake").json()["lifecycle"] == "Active"


def test_a_crash_in_a_drain_fails_the_verb(worker: InProcess) -> None:
    running = worker.long()
    pausing = worker.in_background(lambda: worker.post("pause", deadline_seconds=600))
    until_sync(lambda: worker.state()["lifecycle"] == "Pausing", what="Pausing")
    worker.crash()
    answer = pausing.result(10)
    assert (answer.status_code, slug(answer)) == (409, "failed")
    assert running.result(10).json()["outputs"][0]["abort_reason"] == "engine"


def test_a_crash_in_a_commit_leaves_the_old_weights(
    worker: InProcess, tiny_models: TinyModels
) -> None:
    worker.stage(1, 1, tiny_models.weights(2))
    running = worker.long()
    committing = worker.in_background(
        lambda: worker.post("weights/commit", epoch=1, version=1, deadline_seconds=600)
    )
    until_sync(lambda: bool(worker.state()["holds"]), what="the commit to begin")
    assert worker.state()["holds"][0]["holder"] == "commit"
    assert worker.state()["lifecycle"] == "Active", "a commit flips no gate"
    crash_and_return(worker)
    answer = committing.result(10)
    assert (answer.status_code, slug(answer)) == (503, "failed")
    assert running.result(10).json()["outputs"][0]["abort_reason"] == "engine"
    state = worker.state()
    assert (state["weights"]["active"]["version"], state["holds"]) == (0, [])
    assert worker.sample()["weights"][0]["version"] == 0
    assert worker.update(1, 1, tiny_models.weights(2))["commit_seq"] == 1


@pytest.mark.parametrize("damage", ["no folder", "no weights"])
def test_a_model_that_does_not_load_is_reported_and_tried_again(
    tiny_models: TinyModels, tmp_path: Path, damage: str
) -> None:
    model = tmp_path / "model"
    if damage == "no weights":
        shutil.copytree(tiny_models.model(1), model)
        (model / "model.safetensors").unlink()
    with in_process(model, wait=False) as worker:
        until_sync(lambda: worker.state()["last_error"], 60, what="the failure")
        assert str(model) in worker.state()["last_error"]
        assert worker.data.get("/health").status_code == 200
        assert slug(worker.data.get("/ready")) in ("starting", "failed")
        assert slug(worker.data.get("/v1/info")) == "starting"
        shutil.copytree(tiny_models.model(1), model, dirs_exist_ok=True)
        until_sync(worker.ready, 60, what="the next try")
        assert worker.sample()["token_ids"]


def test_a_bad_engine_flag_is_reported(tiny_models: TinyModels) -> None:
    with in_process(tiny_models.model(1), "--engine-arg=--nonsense", wait=False) as worker:
        until_sync(lambda: worker.state()["last_error"], 60, what="the failure")
        assert "--nonsense" in worker.state()["last_error"]
