"""An engine that dies under a real worker, one that never loads, and lost weights."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import InProcess, in_process
from tests.support.processes import held
from tests.support.waiting import until_sync

CYCLES = int(os.environ.get("ROLLOUT_CYCLES", "8"))
"""Deaths in a row."""


@pytest.fixture
def worker(tiny_models: TinyModels) -> Iterator[InProcess]:
    with in_process(tiny_models.model(1), "--restart-delays", "0.1") as worker:
        yield worker


def break_step(worker: InProcess, fault: Any = None) -> None:
    """Let the engine's next forward pass do something else; called in the worker's loop."""
    engine: Any = worker.worker.runtime.engine
    core = engine._parts.core
    core._forward = SimpleNamespace(run_pass=fault, vocab_size=core._forward.vocab_size)


def nothing_left(*_: Any, **__: Any) -> Any:
    return torch.empty(1 << 45)


@pytest.mark.parametrize(
    ("fault", "said"),
    [(None, "NoneType"), (nothing_left, "memory")],
    ids=["a bug", "out of memory"],
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
