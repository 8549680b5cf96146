"""Dead and hung engine processes under load, and what they leave behind.

`make soak` repeats the deaths, each of every process in turn, ROLLOUT_CYCLES times.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from rollout_common.wire import SamplingMask
from tests.support.engine.contracts import Served, made_by, outputs_of
from tests.support.engine.engine_kinds import HANG_SECONDS, kinds
from tests.support.engine.judging import greedy
from tests.support.engine.reference import Reference
from tests.support.engine.workers import PROMPT, slug
from tests.support.processes import Process, held, shared_descriptors, traces
from tests.support.waiting import until_sync

logger = logging.getLogger(__name__)

CYCLES = int(os.environ.get("ROLLOUT_CYCLES", "4"))
LONG = {"max_tokens": 1500, "ignore_eos": True}
PLAIN = 4
"""Requests of no other kind that run when an engine falls."""
KILLED = [
    pytest.param(kind, marks=[pytest.mark.soak] if kind.name == "sglang" else [])
    for kind in kinds()
]
"""SGLang's death is shown every day by test_contract_zz_adapters.py, with what it leaves behind by
tests/engine/test_sglang_engine.py; each more costs a start."""
STOPPED = [
    pytest.param(kind, marks=[pytest.mark.soak] if kind.name == "vllm" else []) for kind in kinds()
]
"""Each engine falls once a day, in one way: a start of vLLM is most of a minute of a processor. How its adapter
sees that a process stands still or that a step is due is in tests/unit/worker/engines/test_worker_vllm_parts.py."""
NOTICED_SECONDS = {signal.SIGKILL: 2.0, signal.SIGSTOP: HANG_SECONDS + 3.0}


def engine_processes(worker: Served) -> list[Process]:
    found = worker.engine_processes()
    if worker.kind.in_process:
        assert not found
        pytest.skip(
            f"{worker.kind} runs inside of the worker: its step thread has tests of its own"
        )
    assert found
    return found


def fall(
    worker: Served,
    victim: Process,
    how: signal.Signals,
    judge: Reference,
    *,
    pausing: bool = False,
) -> None:
    """End one process below running requests, and see everything that must come of it.

    `pausing`: while somebody pauses, whose own deadlines are for what may take long.
    """
    before = worker.state()
    family = worker.engine_processes()
    left = traces(family)
    running, others = worker.busy(PLAIN, 1500), busy_with_kinds(worker)
    began = time.monotonic()
    os.kill(victim.pid, how)
    if pausing:
        answer = worker.post("pause", mode="keep")
        assert (answer.status_code, slug(answer)) == (409, "failed")
    else:
        until_sync(lambda: not worker.ready(), NOTICED_SECONDS[how] + 20, what="somebody to notice")
    noticed = time.monotonic() - began
    for answer in running():
        [output] = outputs_of(answer)
        if output["stop_reason"] == "aborted":
            assert output["abort_reason"] == "engine"
            if output["logprobs"]:
                expected = judge.raw_logprobs(PROMPT, output["token_ids"])
                assert output["logprobs"] == pytest.approx(expected, abs=2e-4)
    others()
    if pausing:
        assert [hold["holder"] for hold in worker.state()["holds"]] == ["operator"], "it outlives"
        worker.post("resume")
    said, slowest = restarted(worker, before["restarts"])
    after = worker.state()
    assert after["boot_id"] == before["boot_id"]
    assert after["restarts"] == before["restarts"] + 1
    assert after["weights"]["active"] == before["weights"]["active"], "its weights are back"
    assert len(said) >= 2, f"progress told only {said}"
    [output] = worker.outputs({"temperature": 0, "max_tokens": 8, "ignore_eos": True})
    assert greedy(judge, PROMPT, output["token_ids"])
    assert made_by(output) == [(before["weights"]["active"]["version"], False)]
    assert not [process for process in family if process.alive]
    assert not shared_descriptors(worker.process.pid, worker.engine_processes()), (
        "nobody can close them there"
    )
    kept = {name for name in left - traces(worker.engine_processes()) if os.path.exists(name)}
    assert not kept, f"left behind: {kept}"
    assert noticed < NOTICED_SECONDS[how], f"noticed after {noticed:.1f} s"
    assert slowest < 5, "/health answers also during a restart, on a full machine"


def busy_with_kinds(worker: Served) -> Callable[[], None]:
    """Start a request of each other kind; returns a function that waits for them and sees that what was made is whole."""
    drawn = {"max_tokens": 1500, "top_k": 7, "ignore_eos": True}
    scored = {"sampling": LONG, "prompt_logprobs": True, "top_logprobs": 3}
    formed = {"sampling": {"max_tokens": 1500}, "structured": {"regex": "[01]{6000}"}}
    asked: list[dict[str, Any]] = [scored, formed]
    if worker.able["return_sampling_mask"]:
        asked.append({"sampling": drawn, "return_sampling_mask": True})
    started = [
        worker.in_background(partial(worker.generate, token_ids=PROMPT, **fields))
        for fields in asked
    ]

    until_sync(
        lambda: worker.state()["in_flight"] >= PLAIN + len(asked) or started[0].done(),
        30,
        what="a request of each kind to run",
    )

    def see_answers() -> None:
        for fields, future in zip(asked, started, strict=True):
            answer = future.result(180)
            [output] = outputs_of(answer)
            assert output["stop_reason"] in ("aborted", "length")
            count = len(output["token_ids"])
            if count and fields is scored:
                assert len(output["top_logprobs"]["token_ids"]) == count
                assert len(answer.json()["prompt_logprobs"]["logprobs"]) == len(PROMPT)
            if count and "return_sampling_mask" in fields:
                masks = SamplingMask.model_validate(output["sampling_mask"])
                assert len(masks.counts) == count

    return see_answers


def restarted(worker: Served, restarts: int) -> tuple[list[str], float]:
    """Wait until it serves again; what it said of its progress, and the slowest probe."""
    said: list[str] = []
    slowest = 0.0

    def serves() -> bool:
        nonlocal slowest
        began = time.monotonic()
        assert worker.data.get("/health").status_code == 200
        slowest = max(slowest, time.monotonic() - began)
        state = worker.state()
        message = (state["progress"] or {}).get("message")
        if message and message not in said:
            said.append(message)
        return bool(state["serving"] and state["restarts"] > restarts)

    until_sync(serves, worker.kind.start_seconds + 60, what="the restart")
    return said, slowest


@pytest.mark.timeout(500)
@pytest.mark.parametrize("kind", KILLED, indirect=True, ids=str)
def test_an_engine_process_is_killed(mortal: Served, reference: dict[int, Reference]) -> None:
    processes = engine_processes(mortal)
    mortal.load(2)
    fall(mortal, processes[0], signal.SIGKILL, reference[2])


@pytest.mark.timeout(500)
@pytest.mark.parametrize("kind", STOPPED, indirect=True, ids=str)
@pytest.mark.parametrize(
    "pausing", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["while it pauses", "alone"]
)
def test_an_engine_process_is_stopped(
    mortal: Served, reference: dict[int, Reference], pausing: bool
) -> None:
    processes = engine_processes(mortal)
    mortal.load(2)
    # Not the one that is killed: that is the first, this is the innermost.
    fall(mortal, processes[-1], signal.SIGSTOP, reference[2], pausing=pausing)


@pytest.mark.soak
@pytest.mark.timeout(200 * CYCLES + 100)
def test_many_falls(mortal: Served, reference: dict[int, Reference]) -> None:
    """Nothing of any death is left, and the worker that outlives them all has not grown."""
    mortal.load(2)
    family, left = set(mortal.engine_processes()), set[str]()
    fallen = partial(fall, mortal, judge=reference[2])
    fallen(engine_processes(mortal)[0], signal.SIGKILL)  # what stays is there from now on
    first, began = kept_by(mortal), time.monotonic()
    for cycle in range(CYCLES):
        processes = engine_processes(mortal)
        family |= set(processes)
        left |= traces(processes)
        how = (signal.SIGKILL, signal.SIGSTOP)[cycle % 2]
        fallen(processes[cycle // 2 % len(processes)], how)
        present = mortal.engine_processes()
        orphans = [process for process in family - set(present) if process.alive]
        kept = {name for name in left - traces(present) if os.path.exists(name)}
        now = kept_by(mortal)
        logger.info(
            "%s: %d deaths in %.0f s; left of %d processes: %d, of %d segments and sockets: %d;"
            " the worker holds %s, at first %s",
            *(mortal.kind, cycle + 1, time.monotonic() - began),
            *(len(family), len(orphans), len(left), len(kept), now, first),
        )
        assert not orphans
        assert not kept
    for what, count in now.items():
        assert count <= first[what] + SLACK[what], f"{what} grew from {first[what]} to {count}"


SLACK = {"files": 0, "descriptors": 8, "threads": 8, "MiB": 64}
"""By how much what a worker holds may differ between two moments."""


def kept_by(worker: Served) -> dict[str, int]:
    """What the worker's own process holds, and what lies in its temporary folder."""
    return {"files": len(list(worker.temporary.rglob("*"))), **held(worker.process.pid)}


def test_no_process_of_the_engine_has_what_the_worker_has_open(worker: Served) -> None:
    """Ports, connections and memory of staged weights: closed here, they are gone."""
    assert not shared_descriptors(worker.process.pid, worker.children())


def test_starting_told_its_progress(worker: Served) -> None:
    assert len(worker.said) >= 2, worker.said
