"""The workers: what a pass returns or raises decides when the key comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from rollout_common.kube.errors import Conflict, FencedError, Forbidden, Unavailable
from rollout_operator.api.objects import PoolKey
from rollout_operator.cache.workqueue import WorkQueue
from rollout_operator.operator_telemetry import OperatorTelemetry
from rollout_operator.passes.pass_loop import PassLoop
from tests.support.unit.virtualtime import in_virtual_time, loop_time

KEY = PoolKey("rl", "math")


class Bench:
    """Passes over a queue that has one pool; `act` is a pass, which gets its number from 1."""

    def __init__(self, act: Callable[[int], float | None] = lambda number: None) -> None:
        self.seen: list[tuple[PoolKey, float]] = []
        """Which passes have begun, and when."""
        self.ended: list[PoolKey] = []
        self.seconds = {KEY: 0.0}
        """How long a pass over a pool takes."""
        self.stays_until: asyncio.Event | None = None
        """Until then a pass does not let itself be cancelled."""
        self.may_run = True
        self.is_listed = True
        self.act = act
        self.queue: WorkQueue[PoolKey] = WorkQueue(clock=loop_time)
        self.telemetry = OperatorTelemetry()
        self.passes = PassLoop(
            self.reconcile,
            self.queue,
            self.telemetry,
            workers=2,
            may_run=lambda: self.may_run,
            is_listed=lambda namespace: self.is_listed,
        )

    async def reconcile(self, key: PoolKey) -> float | None:
        self.seen.append((key, loop_time()))
        while self.stays_until is not None and not self.stays_until.is_set():
            with suppress(asyncio.CancelledError):
                await self.stays_until.wait()
        await asyncio.sleep(self.seconds.get(key, 0))
        self.ended.append(key)
        return self.act(len(self.seen))

    @property
    def moments(self) -> list[float]:
        return [at for _, at in self.seen]

    def count(self, result: str) -> float:
        name = "rollout_operator_reconcile_total"
        return self.telemetry.registry.get_sample_value(name, {"result": result}) or 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        """Run passes; at the end all are over."""
        self.queue.add(KEY)
        task = asyncio.create_task(self.passes.run())
        yield task
        await self.passes.drain_passes(task, 1)
        assert task.done()


def failing_first(error: Exception) -> Callable[[int], float | None]:
    def act(number: int) -> float | None:
        if number == 1:
            raise error
        return None

    return act


@in_virtual_time
async def test_a_pass_that_is_done_does_not_come_back() -> None:
    bench = Bench()
    async with bench.running():
        await asyncio.sleep(60)
    assert bench.seen == [(KEY, 0.0)]
    assert bench.count("ok") == 1
    name = "rollout_operator_reconcile_duration_seconds_sum"
    took = bench.telemetry.registry.get_sample_value(name)
    assert took is not None
    assert 0 < took < 5


@in_virtual_time
async def test_a_pass_says_when_to_look_again() -> None:
    bench = Bench(lambda number: 7 if number < 3 else None)
    async with bench.running():
        await asyncio.sleep(60)
    assert bench.moments == pytest.approx([0, 7, 14])
    assert bench.count("ok") == 3


@pytest.mark.parametrize(
    ("error", "result", "least", "traceback"),
    [
        (Conflict(409, "Conflict", "changed"), "conflict", 0.5, False),
        (Unavailable(503, "Down", "later"), "error", 0.5, False),
        (Unavailable(429, "TooMany", "slow down", retry_after=12), "error", 12, False),
        (Forbidden(403, "Forbidden", "no right"), "error", 0.5, False),
        (ZeroDivisionError("by zero"), "error", 0.5, True),
    ],
    ids=["conflict", "unavailable", "told to wait", "forbidden", "bug"],
)
@in_virtual_time
async def test_an_error_brings_the_key_back_with_its_back_off(
    error: Exception, result: str, least: float, traceback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(failing_first(error))
    async with bench.running():
        await asyncio.sleep(60)
    [first, second] = bench.moments
    assert least <= second - first <= least + 1
    assert (bench.count(result), bench.count("ok")) == (1, 1)
    assert bench.queue.failure_count(KEY) == 0, "success resets the back-off"
    assert ("Traceback" in caplog.text) is traceback


@in_virtual_time
async def test_fenced_keys_wait_and_are_not_lost() -> None:
    bench = Bench()
    bench.may_run = False
    async with bench.running():
        await asyncio.sleep(60)
        assert bench.seen == []
        bench.may_run = True
        await asyncio.sleep(3)
    assert bench.ended == [KEY]


@in_virtual_time
async def test_no_pass_begins_before_all_of_its_namespace_is_listed() -> None:
    bench = Bench()
    bench.is_listed = False
    async with bench.running():
        await asyncio.sleep(60)
        assert bench.seen == []
        bench.is_listed = True
        bench.queue.add(KEY)  # as the informer does
        await asyncio.sleep(1)
    assert bench.ended == [KEY]


@in_virtual_time
async def test_a_write_that_was_fenced_is_no_failure_of_the_pool() -> None:
    bench = Bench(failing_first(FencedError("create pods rl/a")))
    async with bench.running():
        await asyncio.sleep(3)
    assert bench.count("fenced") == 1
    assert bench.queue.failure_count(KEY) == 0
    assert len(bench.seen) == 2


@in_virtual_time
async def test_finish_waits_for_a_pass_and_cuts_it_off_at_last() -> None:
    bench, endless = Bench(), PoolKey("rl", "endless")
    bench.seconds = {KEY: 0.2, endless: 60}
    bench.queue.add(endless)
    async with bench.running() as task:
        await asyncio.sleep(0.1)
        await bench.passes.drain_passes(task, 0.6)
        assert bench.ended == [KEY]
        assert task.done()


@in_virtual_time
async def test_finish_waits_no_longer_for_a_pass_that_does_not_let_itself_be_cancelled() -> None:
    bench, over = Bench(), asyncio.Event()
    bench.stays_until = over
    async with bench.running() as task:
        await asyncio.sleep(0.1)
        await bench.passes.drain_passes(task, 0)
        assert not task.done()
        over.set()
        await asyncio.wait({task})


@in_virtual_time
async def test_a_slow_pool_delays_no_other() -> None:
    bench = Bench()
    bench.seconds = {KEY: 100.0}
    others = [PoolKey("rl", f"pool-{number}") for number in range(20)]
    async with bench.running():
        await asyncio.sleep(0.1)
        for key in others:
            bench.queue.add(key)
        await asyncio.sleep(0.1)
        assert bench.ended == others
