"""The workers: what a pass returns or raises decides when the key comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest

from rollout_common.kube.errors import Conflict, FencedError, Forbidden, Unavailable
from rollout_operator.api.objects import PoolKey
from rollout_operator.cache.workqueue import WorkQueue
from rollout_operator.operator_telemetry import OperatorTelemetry
from rollout_operator.passes.pass_loop import PassLoop
from tests.support.waiting import until

KEY = PoolKey("rl", "math")


class Bench:
    """Passes over a queue; `act` is the pass."""

    def __init__(self, act: Callable[[int], float | None], workers: int = 2) -> None:
        self.seen: list[PoolKey] = []
        self.may_run = True
        self.act = act
        self.queue: WorkQueue[PoolKey] = WorkQueue()
        self.telemetry = OperatorTelemetry()
        self.passes = PassLoop(
            self.reconcile,
            self.queue,
            self.telemetry,
            workers=workers,
            may_run=lambda: self.may_run,
        )

    async def reconcile(self, key: PoolKey) -> float | None:
        self.seen.append(key)
        return self.act(len(self.seen))

    def count(self, result: str) -> float:
        name = "rollout_operator_reconcile_total"
        return self.telemetry.registry.get_sample_value(name, {"result": result}) or 0

    async def run(self, until_seen: int, seconds: float = 5) -> None:
        task = asyncio.create_task(self.passes.run())
        await until(lambda: len(self.seen) >= until_seen, seconds, what=f"{until_seen} passes")
        await asyncio.sleep(0.02)
        await self.passes.drain_passes(task, 1)
        assert task.done()


def failing_first(error: Exception) -> Callable[[int], float | None]:
    def act(number: int) -> float | None:
        if number == 1:
            raise error
        return None

    return act


async def test_a_pass_that_is_done_does_not_come_back() -> None:
    bench = Bench(lambda number: None)
    bench.queue.add(KEY)
    await bench.run(1)
    assert bench.seen == [KEY]
    assert bench.count("ok") == 1
    took = bench.telemetry.registry.get_sample_value(
        "rollout_operator_reconcile_duration_seconds_sum"
    )
    assert took is not None
    assert 0 < took < 5


async def test_a_pass_says_when_to_look_again() -> None:
    bench = Bench(lambda number: 0.05 if number < 3 else None)
    bench.queue.add(KEY)
    await bench.run(3)
    assert bench.count("ok") == 3


@pytest.mark.parametrize(
    ("error", "result", "traceback"),
    [
        (Conflict(409, "Conflict", "changed"), "conflict", False),
        (Unavailable(503, "Down", "later"), "error", False),
        (Forbidden(403, "Forbidden", "no right"), "error", False),
        (ZeroDivisionError("by zero"), "error", True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_an_error_brings_the_key_back_with_its_back_off(
    error: Exception, result: str, traceback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(failing_first(error))
    bench.queue.add(KEY)
    began = asyncio.get_running_loop().time()
    await bench.run(2)
    assert asyncio.get_running_loop().time() - began >= 0.5
    assert (bench.count(result), bench.count("ok")) == (1, 1)
    assert bench.queue.failure_count(KEY) == 0, "success resets the back-off"
    assert ("Traceback" in caplog.text) is traceback


async def test_the_servers_wish_to_wait_is_kept() -> None:
    bench = Bench(failing_first(Unavailable(429, "TooMany", "slow down", retry_after=1.2)))
    bench.queue.add(KEY)
    began = asyncio.get_running_loop().time()
    await bench.run(2)
    assert asyncio.get_running_loop().time() - began >= 1.2


async def test_fenced_keys_wait_and_are_not_lost() -> None:
    bench = Bench(lambda number: None)
    bench.may_run = False
    bench.queue.add(KEY)
    task = asyncio.create_task(bench.passes.run())
    await asyncio.sleep(0.1)
    assert bench.seen == []
    bench.may_run = True
    await until(lambda: bench.seen, 3)
    await bench.passes.drain_passes(task, 1)


async def test_a_write_that_was_fenced_is_no_failure_of_the_pool() -> None:
    bench = Bench(failing_first(FencedError("create pods rl/a")))
    bench.queue.add(KEY)
    await bench.run(2)
    assert bench.count("fenced") == 1
    assert bench.queue.failure_count(KEY) == 0


async def test_finish_waits_for_a_pass_and_cuts_it_off_at_last() -> None:
    queue: WorkQueue[PoolKey] = WorkQueue()
    started, ended = asyncio.Event(), []

    async def reconcile(key: PoolKey) -> float | None:
        started.set()
        await asyncio.sleep(0.2 if key == KEY else 60)
        ended.append(key)
        return None

    passes = PassLoop(reconcile, queue, OperatorTelemetry(), workers=2, may_run=lambda: True)
    task = asyncio.create_task(passes.run())
    queue.add(KEY)
    queue.add(PoolKey("rl", "endless"))
    await started.wait()
    await passes.drain_passes(task, 0.6)
    assert ended == [KEY]
    assert task.done()


async def test_finish_waits_no_longer_for_a_pass_that_does_not_let_itself_be_cancelled() -> None:
    queue: WorkQueue[PoolKey] = WorkQueue()
    started, over = asyncio.Event(), asyncio.Event()

    async def reconcile(key: PoolKey) -> float | None:
        started.set()
        while not over.is_set():
            with suppress(asyncio.CancelledError):
                await over.wait()
        return None

    passes = PassLoop(reconcile, queue, OperatorTelemetry(), workers=1, may_run=lambda: True)
    task = asyncio.create_task(passes.run())
    queue.add(KEY)
    await started.wait()
    await asyncio.wait_for(passes.drain_passes(task, 0), 10)
    assert not task.done()
    over.set()
    await asyncio.wait({task})


async def test_a_slow_pool_delays_no_other() -> None:
    queue: WorkQueue[PoolKey] = WorkQueue()
    done: list[PoolKey] = []

    async def reconcile(key: PoolKey) -> float | None:
        await asyncio.sleep(1 if key == KEY else 0)
        done.append(key)
        return None

    passes = PassLoop(reconcile, queue, OperatorTelemetry(), workers=2, may_run=lambda: True)
    task = asyncio.create_task(passes.run())
    queue.add(KEY)
    others = [PoolKey("rl", f"pool-{number}") for number in range(20)]
    for key in others:
        queue.add(key)
    await until(lambda: len(done) == 20, 0.9)
    assert KEY not in done
    await passes.drain_passes(task, 2)
