"""The worker itself ends, by force or in order: no process of its engine outlives it."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.support.engine.contracts import Fleet, Served, outputs_of
from tests.support.engine.engine_kinds import EMBEDDED, kinds
from tests.support.processes import traces
from tests.support.waiting import until_sync


def daily(*names: str) -> list[Any]:
    """The kinds; of others than these it is for `make soak`: each worker ends once, a start of its engine."""
    soak = [pytest.mark.soak]
    return [pytest.param(kind, marks=[] if kind.name in names else soak) for kind in kinds()]


@pytest.fixture
def last(fleet: Fleet) -> Served:
    """The worker that the tests before have left, to end it: one more start is most of a minute."""
    worker = fleet.present_worker()
    worker.heal()
    return worker


# Of vLLM, tests/engine/test_vllm_live.py kills one.
@pytest.mark.parametrize("kind", daily("hf", "sglang"), indirect=True, ids=str)
def test_a_killed_worker_leaves_no_process(last: Served) -> None:
    last.busy(4, 1500)
    family = last.children()
    last.process.kill()
    last.process.wait(10)
    until_sync(
        lambda: not any(process.alive for process in family), 10, what=f"the end of {family}"
    )


# Of hf, tests/engine/test_worker_command.py ends some. The drain is the worker's own, and what SGLang
# leaves when it is stopped, test_sglang_engine's.
@pytest.mark.parametrize("kind", [*daily("vllm"), *EMBEDDED], indirect=True, ids=str)
def test_sigterm_drains_and_exits_0(last: Served) -> None:
    family = last.children()
    left = traces(family)
    running = last.busy(4, 300)
    last.terminate()
    for answer in running():
        [output] = outputs_of(answer)
        assert (output["stop_reason"], len(output["token_ids"])) == ("length", 300)
    assert last.process.wait(60) == 0
    until_sync(lambda: not any(p.alive for p in family), 10, what="the engine's processes")
    kept = {name for name in left if os.path.exists(name)}
    assert not kept, f"left behind: {kept}"
    assert [line["level"] for line in last.logged() if line["message"] == "stopped"] == ["info"]
