"""Calls: one at a time per pod, a deadline each, failures remembered with a back-off."""

from __future__ import annotations

import asyncio
import time

import pytest

from rollout_client.worker_control import ControlError
from rollout_operator.api.objects import PoolKey
from rollout_operator.core.observed_pool import FailedCall
from rollout_operator.workers.settings import CALL_BACKOFF_MAX_SECONDS
from rollout_operator.workers.worker_calls import WorkerCalls
from tests.support.waiting import until

KEY = PoolKey("rl", "math")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """Calls, who was woken, and what was looked at afterwards."""

    def __init__(self) -> None:
        self.fenced = False
        self.clock = Clock()
        self.woken: list[PoolKey] = []
        self.looked: list[str] = []
        self.answers: list[object] = []
        self.calls = WorkerCalls(
            self.woken.append, after=self._look, clock=self.clock, may_start=lambda: not self.fenced
        )

    async def _look(self, slot: str, answer: object) -> None:
        assert self.calls.running_call(slot), "the slot must stay taken until the look is over"
        self.looked.append(slot)
        self.answers.append(answer)

    async def end(self, slot: str = "u1") -> None:
        await until(lambda: self.calls.running_call(slot) is None, 3, what="the end of the call")

    async def fail(self, error: Exception, name: str = "commit") -> FailedCall:
        async def call() -> None:
            raise error

        assert self.calls.start_call(KEY, "u1", name, call, 1)
        await self.end()
        return self.calls.call_failures("u1")[name]


async def well() -> str:
    return "done"


async def test_a_call_runs_beside_and_wakes_at_its_end() -> None:
    bench = Bench()
    gate = asyncio.Event()
    assert bench.calls.start_call(KEY, "u1", "commit", gate.wait, 5)
    await asyncio.sleep(0)
    assert bench.calls.running_call("u1") == "commit"
    assert bench.woken == []
    gate.set()
    await bench.end()
    assert (bench.woken, bench.looked) == ([KEY], ["u1"])
    assert "commit" not in bench.calls.call_failures("u1")


async def test_one_call_per_pod_but_many_pods() -> None:
    bench = Bench()
    gate = asyncio.Event()
    assert bench.calls.start_call(KEY, "u1", "stage", gate.wait, 5)
    assert not bench.calls.start_call(KEY, "u1", "commit", well, 5)
    assert bench.calls.start_call(KEY, "u2", "commit", gate.wait, 5)
    gate.set()
    await bench.end("u1")
    await bench.end("u2")
    assert bench.calls.start_call(KEY, "u1", "commit", well, 5)
    await bench.end()


async def test_a_call_that_is_not_wanted_any_more_gives_way_and_has_not_failed() -> None:
    bench = Bench()
    gate = asyncio.Event()
    assert bench.calls.start_call(KEY, "u1", "wake", asyncio.Event().wait, 60)
    await asyncio.sleep(0)
    assert not bench.calls.start_call(KEY, "u1", "sleep", gate.wait, 5, instead_of={"pause"})
    assert bench.calls.start_call(KEY, "u1", "sleep", gate.wait, 5, instead_of={"pause", "wake"})
    await asyncio.sleep(0.01)
    assert bench.calls.running_call("u1") == "sleep", "the end of the other one left it there"
    assert bench.looked == []
    gate.set()
    await bench.end()
    assert (bench.looked, bench.calls.call_failures("u1")) == (["u1"], {})


async def test_what_may_not_start_ends_nothing() -> None:
    bench = Bench()
    assert bench.calls.start_call(KEY, "u1", "wake", asyncio.Event().wait, 60)
    bench.fenced = True
    assert not bench.calls.start_call(KEY, "u1", "sleep", well, 5, instead_of={"wake"})
    await asyncio.sleep(0.01)
    assert bench.calls.running_call("u1") == "wake"
    await bench.calls.cancel_all()


async def test_failures_count_and_wait_longer() -> None:
    bench = Bench()
    delays = []
    for count in range(1, 8):
        failure = await bench.fail(ControlError(409, "asleep", "wake it first"))
        told = (failure.count, failure.message, failure.slug)
        assert told == (count, "wake it first", "asleep")
        delays.append(failure.retry_in)
    assert delays == [1, 2, 4, 8, 16, CALL_BACKOFF_MAX_SECONDS, CALL_BACKOFF_MAX_SECONDS]
    bench.clock.now += 40
    assert bench.calls.call_failures("u1")["commit"].retry_in == CALL_BACKOFF_MAX_SECONDS - 40


async def test_success_clears_only_the_same_call() -> None:
    bench = Bench()
    await bench.fail(ControlError(500, "", "broken"), "stage")
    await bench.fail(ControlError(500, "", "broken"), "commit")
    bench.calls.start_call(KEY, "u1", "commit", well, 5)
    await bench.end()
    assert "commit" not in bench.calls.call_failures("u1")
    assert bench.calls.call_failures("u1").get("stage") is not None


async def test_a_deadline_is_a_failure_with_a_name() -> None:
    bench = Bench()
    bench.calls.start_call(KEY, "u1", "commit", asyncio.Event().wait, 0.05)
    await bench.end()
    assert bench.calls.call_failures("u1")["commit"].message == "no answer within 0.05 s"
    assert bench.woken == [KEY]


async def test_an_unforeseen_error_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    failure = await bench.fail(ZeroDivisionError("by zero"))
    assert failure.message == "ZeroDivisionError: by zero"
    assert "Traceback" in caplog.text


async def test_forget_cancels_and_clears() -> None:
    bench = Bench()
    await bench.fail(ControlError(500, "", "broken"))
    bench.calls.start_call(KEY, "u1", "stage", asyncio.Event().wait, 60)
    await asyncio.sleep(0)
    bench.calls.forget_calls("u1")
    await bench.end()
    assert "commit" not in bench.calls.call_failures("u1")
    assert bench.looked == ["u1"], "a cancelled call is not looked at again"


async def test_cancel_all_ends_every_call() -> None:
    bench = Bench()
    for slot in ("u1", "u2", "u3"):
        bench.calls.start_call(KEY, slot, "commit", asyncio.Event().wait, 60)
    await bench.calls.cancel_all()
    assert [bench.calls.running_call(slot) for slot in ("u1", "u2", "u3")] == [None, None, None]


async def test_a_clock_that_is_set_keeps_no_call_waiting() -> None:
    """The wall clock of a node may be set back by an hour."""
    calls = WorkerCalls(lambda key: None)

    async def refused() -> None:
        raise ControlError(409, "asleep", "wake it first")

    began = time.monotonic()
    assert calls.start_call(KEY, "u1", "commit", refused, 1)
    await until(lambda: calls.running_call("u1") is None, 3, what="the end of the call")
    _, again = calls._failures["u1"]["commit"]
    assert began <= again - 1 <= time.monotonic()
    assert 0 < calls.call_failures("u1")["commit"].retry_in <= 1
