"""The poller against real HTTP servers on loopback: bounded, backing off, waking on change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rollout_client.worker_control import WorkerControl
from rollout_operator.api.objects import PoolKey
from rollout_operator.workers.head_poller import MAX_CONCURRENT_POLLS, HeadPoller
from rollout_operator.workers.settings import STALE_STATE_SECONDS
from rollout_operator.workers.worker_connections import WorkerConnections
from rollout_worker.schemas import WorkerState
from tests.support.loopback import Loopback, loopback
from tests.support.unit.states import serving_state
from tests.support.waiting import until

KEY = PoolKey("rl", "math")


class Clock:
    """The loop's own clock, which a test may push forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() + self.ahead


class Bench:
    def __init__(self, worker: Loopback, connections: WorkerConnections) -> None:
        self.worker = worker
        self.connections = connections
        self.clock = Clock()
        self.woken: list[PoolKey] = []
        self.poller = HeadPoller(self.ask, self.woken.append, clock=self.clock)

    async def ask(self, key: PoolKey, address: str) -> WorkerState:
        async def token() -> str | None:
            return None

        return await WorkerControl(
            f"http://{address}", token, self.connections.send_request
        ).state()

    def watch(self, uid: str = "u1", *, fast: bool = True) -> None:
        self.poller.watch_head(KEY, uid, self.worker.address, fast)

    async def polled(self, times: int = 1) -> None:
        """Wait until the worker was asked so often from now on and the answers were taken."""
        before = len(self.worker.requests)
        await until(lambda: len(self.worker.requests) >= before + times, 10)
        await asyncio.sleep(0.05)


@asynccontextmanager
async def bench_of(worker: Loopback) -> AsyncIterator[Bench]:
    connections = WorkerConnections()
    bench = Bench(worker, connections)
    running = asyncio.create_task(bench.poller.run())
    try:
        yield bench
    finally:
        running.cancel()
        await asyncio.wait({running})
        await connections.close()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with loopback() as worker, bench_of(worker) as made:
        yield made


async def test_the_first_answer_wakes_and_equal_ones_do_not(bench: Bench) -> None:
    bench.worker.answer("GET", "/v1/state", serving_state())
    assert bench.poller.last_observation("u1") is None
    bench.watch()
    await bench.polled()
    assert bench.woken == [KEY]
    seen = bench.poller.last_observation("u1")
    assert seen is not None
    assert seen.state is not None
    assert (seen.state.boot_id, seen.error, seen.failures, seen.stale) == ("b1", None, 0, False)
    await bench.polled(2)
    assert bench.woken == [KEY]


@pytest.mark.parametrize(
    "change",
    [
        {"in_flight": 5, "queued": 3},
        {"holds": [{"holder": "trainer", "state": "Paused", "ttl": 3.5}]},
    ],
    ids=["counters", "time left of a hold"],
)
async def test_what_changes_all_the_time_does_not_wake(
    bench: Bench, change: dict[str, Any]
) -> None:
    hold = {"holder": "trainer", "state": "Paused", "ttl": 4.5}
    start = serving_state(holds=[hold]) if "holds" in change else serving_state()
    bench.worker.answer("GET", "/v1/state", start)
    bench.watch()
    await bench.polled()
    bench.worker.answer("GET", "/v1/state", {**start, **change})
    await bench.polled()
    assert bench.woken == [KEY]
    seen = bench.poller.last_observation("u1")
    assert seen is not None
    assert seen.state == WorkerState.model_validate({**start, **change}), "but it is shown"


async def test_a_change_wakes(bench: Bench) -> None:
    bench.worker.answer("GET", "/v1/state", serving_state())
    bench.watch()
    await bench.polled()
    bench.worker.answer("GET", "/v1/state", serving_state(lifecycle="Asleep", serving=False))
    await bench.polled()
    assert bench.woken == [KEY, KEY]


async def test_an_error_keeps_the_last_answer_wakes_once_and_backs_off(bench: Bench) -> None:
    bench.worker.answer("GET", "/v1/state", serving_state())
    bench.watch()
    await bench.polled()
    bench.worker.answer("GET", "/v1/state", "down", 503)
    await bench.polled(3)
    seen = bench.poller.last_observation("u1")
    assert seen is not None
    assert seen.state is not None
    assert seen.error == "503: down"
    assert seen.failures >= 2
    assert bench.woken == [KEY, KEY], "one for the answer, one for the first error"
    bench.worker.answer("GET", "/v1/state", serving_state())
    await bench.polled()
    assert bench.woken == [KEY, KEY, KEY]
    seen = bench.poller.last_observation("u1")
    assert seen is not None
    assert (seen.error, seen.failures) == (None, 0)


async def test_a_head_that_never_answered_has_no_state(bench: Bench) -> None:
    bench.poller.watch_head(KEY, "u1", "127.0.0.1:1", True)
    await until(lambda: bench.poller.last_observation("u1") is not None)
    seen = bench.poller.last_observation("u1")
    assert seen is not None
    assert seen.state is None
    assert seen.error is not None
    assert "127.0.0.1:1" in seen.error
    assert not seen.stale


async def test_an_answer_goes_stale(bench: Bench) -> None:
    bench.worker.answer("GET", "/v1/state", serving_state())
    bench.watch()
    await bench.polled()
    bench.worker.answer("GET", "/v1/state", "down", 503)
    await bench.polled()
    bench.clock.ahead += STALE_STATE_SECONDS + 1
    seen = bench.poller.last_observation("u1")
    assert seen is not None
    assert seen.stale
    woken = len(bench.woken)
    bench.poller.poll_now("u1")
    await bench.polled()
    assert len(bench.woken) == woken + 1, "turning stale wakes"


async def test_poke_and_refresh_ask_at_once(bench: Bench) -> None:
    bench.worker.answer("GET", "/v1/state", serving_state())
    bench.watch(fast=False)
    await bench.polled()
    bench.worker.answer("GET", "/v1/state", serving_state(boot_id="b2"))
    async with asyncio.timeout(4):
        await bench.poller.refresh_state("u1")
    seen = bench.poller.last_observation("u1")
    assert seen is not None
    assert seen.state is not None
    assert seen.state.boot_id == "b2"
    await bench.poller.refresh_state("unknown")


async def test_refresh_does_not_take_an_answer_that_was_asked_for_before(bench: Bench) -> None:
    bench.worker.delay("GET", "/v1/state", serving_state(boot_id="old"), 0.3)
    bench.watch(fast=False)
    await until(lambda: bench.worker.requests)
    bench.worker.answer("GET", "/v1/state", serving_state(boot_id="new"))
    async with asyncio.timeout(3):
        await bench.poller.refresh_state("u1")
    seen = bench.poller.last_observation("u1")
    assert seen is not None
    assert seen.state is not None
    assert seen.state.boot_id == "new"


async def test_who_waits_for_a_poll_hurries_none_and_takes_none_that_was_asked_before(
    bench: Bench,
) -> None:
    bench.worker.delay("GET", "/v1/state", serving_state(boot_id="old"), 0.3)
    bench.watch()
    await until(lambda: bench.worker.requests)
    bench.worker.answer("GET", "/v1/state", serving_state(boot_id="new"))
    began = asyncio.get_running_loop().time()
    async with asyncio.timeout(4):
        seen = await bench.poller.wait_for_poll("u1")
    assert seen is not None
    assert seen.state is not None
    assert (seen.state.boot_id, len(bench.worker.requests)) == ("new", 2)
    assert asyncio.get_running_loop().time() - began > 0.3, "it came at its own pace"


@pytest.mark.parametrize("asked", [True, False], ids=["a poll under way", "none under way"])
async def test_who_waits_for_a_poll_of_a_forgotten_head_waits_no_more(
    bench: Bench, asked: bool
) -> None:
    bench.worker.delay("GET", "/v1/state", serving_state(), 0.3)
    bench.watch(fast=False)
    waiting = asyncio.create_task(bench.poller.wait_for_poll("u1"))
    await until(lambda: bench.worker.requests)
    if not asked:
        await until(lambda: bench.woken)
        waiting = asyncio.create_task(bench.poller.wait_for_poll("u1"))
        await asyncio.sleep(0)
    bench.poller.unwatch_head("u1")
    async with asyncio.timeout(3):
        assert await waiting is None
        assert await bench.poller.wait_for_poll("u1") is None


async def test_a_calls_answer_outlasts_a_poll_that_asked_before(bench: Bench) -> None:
    bench.worker.delay("GET", "/v1/state", serving_state(boot_id="old"), 0.3)
    bench.watch(fast=True)
    await until(lambda: len(bench.worker.requests) == 1)
    bench.poller.note_state("u1", WorkerState.model_validate(serving_state(boot_id="new")))
    await until(lambda: len(bench.worker.requests) == 2, what="the poll after that one")
    seen = bench.poller.last_observation("u1")
    assert seen is not None
    assert seen.state is not None
    assert seen.state.boot_id == "new"
    bench.poller.note_state("unknown", WorkerState.model_validate(serving_state()))


async def test_fast_heads_that_turn_slow_are_not_asked_once_more(bench: Bench) -> None:
    bench.worker.answer("GET", "/v1/state", serving_state())
    bench.watch(fast=True)
    await bench.polled()
    bench.watch(fast=False)
    await asyncio.sleep(0.7)
    assert len(bench.worker.requests) == 1, "five seconds have not passed"
    async with asyncio.timeout(4):
        await bench.poller.refresh_state("u1")


async def test_slow_heads_are_asked_at_once_when_they_turn_fast(bench: Bench) -> None:
    bench.worker.answer("GET", "/v1/state", serving_state())
    bench.watch(fast=False)
    await bench.polled()
    await asyncio.sleep(0.7)
    assert len(bench.worker.requests) == 1, "five seconds have not passed"
    bench.watch(fast=True)
    await bench.polled(2)


async def test_an_unwatched_head_is_left_alone(bench: Bench) -> None:
    bench.worker.answer("GET", "/v1/state", serving_state())
    bench.watch()
    await bench.polled()
    bench.poller.unwatch_head("u1")
    asked = len(bench.worker.requests)
    await asyncio.sleep(0.7)
    assert len(bench.worker.requests) == asked
    assert bench.poller.last_observation("u1") is None


async def test_another_address_is_another_head(bench: Bench) -> None:
    bench.worker.answer("GET", "/v1/state", serving_state())
    bench.watch()
    await bench.polled()
    bench.poller.watch_head(KEY, "u1", "127.0.0.1:1", True)
    assert bench.poller.last_observation("u1") is None


async def test_no_more_than_64_begin_at_once_and_a_hanging_head_stops_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollout_operator.workers.head_poller.POLL_SLOT_SECONDS", 10.0)
    async with loopback() as slow, loopback() as good, bench_of(slow) as bench:
        slow.delay("GET", "/v1/state", serving_state(), 0.3)
        good.answer("GET", "/v1/state", serving_state())
        for number in range(100):
            bench.poller.watch_head(KEY, f"slow-{number}", slow.address, False)
        bench.poller.watch_head(KEY, "good", good.address, False)
        await until(lambda: bench.poller.last_observation("good") is not None, 5)
        await until(lambda: len(slow.requests) >= 100, 5)
        assert slow.most_at_once <= MAX_CONCURRENT_POLLS


async def test_many_fast_heads_are_asked_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_operator.workers.head_poller.MAX_POLLS_PER_SECOND", 10.0)
    async with loopback() as worker, bench_of(worker) as bench:
        worker.answer("GET", "/v1/state", serving_state())
        for number in range(20):
            bench.watch(f"u{number}")
        await until(lambda: len(worker.requests) >= 20)
        await asyncio.sleep(1.2)
        assert len(worker.requests) == 20, "at 10 a second each waits for 2 s"
        for number in range(2, 20):
            bench.poller.unwatch_head(f"u{number}")
        await bench.polled(4)
