"""How heads are asked and what is known of them: paces, back-off and staleness, over minutes of virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from rollout_client.worker_control import ControlUnreachable
from rollout_operator.api.objects import PoolKey
from rollout_operator.workers.head_poller import MAX_CONCURRENT_POLLS, HeadObservation, HeadPoller
from rollout_operator.workers.settings import POLL_TICK_SECONDS
from rollout_worker.schemas import Lifecycle, WorkerState
from tests.support.unit.simworker import SimWorker
from tests.support.unit.states import serving_state
from tests.support.unit.virtualtime import in_virtual_time, loop_time

KEY = PoolKey("rl", "math")
ANSWER = SimWorker("b1", loading=False).state()
OLD, NEW = (ANSWER.model_copy(update={"boot_id": name}) for name in ("old", "new"))


class Heads:
    """Heads that answer or don't, and when each was asked."""

    def __init__(self) -> None:
        self.asked: dict[str, list[float]] = {}
        self.down: set[str] = set()
        self.hangs: set[str] = set()
        self.answer: WorkerState = ANSWER
        self.takes = 0.0
        """Seconds until an answer comes, which is that of the moment when it was asked for."""
        self.at_once = self.most_at_once = 0
        self.woken: list[float] = []
        self.poller = HeadPoller(
            self.ask, lambda key: self.woken.append(loop_time()), clock=loop_time
        )

    async def ask(self, key: PoolKey, address: str) -> WorkerState:
        self.asked.setdefault(address, []).append(loop_time())
        answer, self.at_once = self.answer, self.at_once + 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(3600 if address in self.hangs else self.takes)
        finally:
            self.at_once -= 1
        if address in self.down:
            raise ControlUnreachable("down")
        return answer

    def watch(self, address: str = "a", *, fast: bool = True, key: PoolKey = KEY) -> None:
        self.poller.watch_head(key, address, address, fast)

    def gaps(self, address: str = "a", since: float = 0.0) -> list[float]:
        times = [t for t in self.asked[address] if t >= since]
        return [later - sooner for sooner, later in pairwise(times)]

    @asynccontextmanager
    async def polled(self) -> AsyncIterator[None]:
        """Poll as long as this lasts."""
        task = asyncio.create_task(self.poller.run())
        await asyncio.sleep(0)
        yield
        task.cancel()
        await asyncio.wait({task})

    async def pass_by(self, seconds: float) -> None:
        async with self.polled():
            await asyncio.sleep(seconds)

    def seen(self, uid: str = "a") -> HeadObservation:
        found = self.poller.last_observation(uid)
        assert found is not None
        return found


@pytest.fixture
def heads() -> Heads:
    return Heads()


@pytest.mark.parametrize(("fast", "pace"), [(True, 0.5), (False, 5.0)])
@in_virtual_time
async def test_fast_and_slow(heads: Heads, fast: bool, pace: float) -> None:
    heads.watch(fast=fast)
    assert heads.poller.last_observation("a") is None
    await heads.pass_by(100)
    gaps = heads.gaps()
    least = 0.9 * pace - POLL_TICK_SECONDS
    assert least <= min(gaps) < pace < max(gaps) <= 1.1 * pace, "with some jitter"
    assert heads.woken == [0.0], "equal answers wake nobody"
    seen = heads.seen()
    assert (seen.state, seen.error, seen.failures, seen.stale) == (ANSWER, None, 0, False)


@in_virtual_time
async def test_slow_polls_go_out_together(heads: Heads) -> None:
    for number in range(100):
        heads.watch(str(number), fast=False, key=PoolKey("rl", f"p{number}"))
    await heads.pass_by(60)
    later = [at for times in heads.asked.values() for at in times if at > 10]
    assert len(later) > 900
    moments = {round(at, 3) for at in later}
    assert len(moments) <= 50 / POLL_TICK_SECONDS + 1, "at ticks, not one by one"


@in_virtual_time
async def test_a_head_that_turns_fast_and_slow_again(heads: Heads) -> None:
    heads.watch(fast=False)
    await heads.pass_by(6)
    heads.watch(fast=True)
    await heads.pass_by(6)
    assert min(at for at in heads.asked["a"] if at >= 6) < 6.2, "it was asked at once"
    assert max(heads.gaps(since=6)) < 1
    heads.watch(fast=False)
    await heads.pass_by(60)
    since = [at for at in heads.asked["a"] if at >= 12]
    assert since[0] > 16, "not once more at the pace that nobody wants any longer"
    assert min(heads.gaps(since=12)) > 4


@pytest.mark.parametrize(
    ("fast", "answered", "longest"), [(True, False, 1.0), (True, True, 5.0), (False, False, 5.0)]
)
@in_virtual_time
async def test_a_head_that_fails_is_asked_less_and_less(
    heads: Heads, fast: bool, answered: bool, longest: float
) -> None:
    heads.watch(fast=fast)
    if answered:
        await heads.pass_by(0.1)
    heads.down.add("a")
    await heads.pass_by(60)
    wanted = [min(longest, 0.5 * 2**i) for i in range(8)]
    gaps = heads.gaps(since=0.1 if answered else 0.0)[: len(wanted)]
    assert all(0.9 * w <= g <= 1.1 * w for w, g in zip(wanted, gaps, strict=True)), gaps
    assert heads.seen().error == "down"
    assert heads.seen().failures > 8
    assert heads.seen().state == (ANSWER if answered else None), "kept, not believed"


@in_virtual_time
async def test_one_that_hangs_is_given_up_after_its_deadline(heads: Heads) -> None:
    heads.hangs.add("a")
    heads.watch()
    async with heads.polled():
        await asyncio.sleep(3.9)
        assert heads.poller.last_observation("a") is None
        await asyncio.sleep(0.2)
        assert heads.seen().error == "no answer within 3 s"
        assert heads.seen().state is None


@pytest.mark.parametrize(("heads_in_all", "until_stale"), [(1, 15.0), (2000, 30.0)])
@in_virtual_time
async def test_silence_counts_after_fifteen_seconds_or_three_rounds(
    heads: Heads, heads_in_all: int, until_stale: float
) -> None:
    heads.watch()
    await heads.pass_by(0.01)
    heads.down.add("a")
    for number in range(1, heads_in_all):
        heads.watch(str(number), fast=False)
    answered = heads.seen().at
    while loop_time() < answered + until_stale - 0.1:
        assert not heads.seen().stale
        await asyncio.sleep(0.5)
    await asyncio.sleep(answered + until_stale + 0.1 - loop_time())
    assert heads.seen().stale
    assert heads.seen().state == ANSWER, "kept, not believed"


@in_virtual_time
async def test_turning_stale_and_coming_back_wake(heads: Heads) -> None:
    heads.watch()
    await heads.pass_by(0.1)
    heads.down.add("a")
    await heads.pass_by(60)
    assert len(heads.woken) == 3, "the answer, the first failure, the end of its credit"
    heads.down.clear()
    await heads.pass_by(10)
    assert len(heads.woken) == 4
    assert (heads.seen().error, heads.seen().failures, heads.seen().stale) == (None, 0, False)


@pytest.mark.parametrize(("count", "fast", "pace"), [(400, True, 2.0), (2000, False, 10.0)])
@in_virtual_time
async def test_no_more_than_two_hundred_polls_a_second(
    heads: Heads, count: int, fast: bool, pace: float
) -> None:
    for number in range(count):
        heads.watch(str(number), fast=fast)
    await heads.pass_by(2.5 * pace)
    gaps = heads.gaps("0")
    assert all(0.9 * pace <= gap <= 1.1 * pace for gap in gaps), gaps
    assert gaps
    for number in range(1, count):
        heads.poller.unwatch_head(str(number))
    await heads.pass_by(2.5 * pace)
    usual = 0.5 if fast else 5.0
    assert heads.gaps("0")[-1] <= 1.1 * usual, "those that are gone take no part of the rate"


@in_virtual_time
async def test_only_what_means_something_to_a_pool_wakes_it(heads: Heads) -> None:
    held = serving_state(holds=[{"holder": "trainer", "state": "Paused", "ttl": 4.5}])
    heads.answer = WorkerState.model_validate(held)
    heads.watch()
    await heads.pass_by(1)
    held["holds"][0]["ttl"] = 3.5
    heads.answer = WorkerState.model_validate({**held, "in_flight": 9, "queued": 9})
    await heads.pass_by(2)
    assert len(heads.woken) == 1, "load, and what is left of a hold"
    assert heads.seen().state == heads.answer
    heads.answer = heads.answer.model_copy(update={"lifecycle": Lifecycle.PAUSED})
    await heads.pass_by(2)
    assert len(heads.woken) == 2


@in_virtual_time
async def test_refresh_asks_at_once_and_gives_up_on_a_head_that_hangs(heads: Heads) -> None:
    heads.watch(fast=False)
    async with heads.polled():
        await asyncio.sleep(1)
        heads.answer = NEW
        await heads.poller.refresh_state("a")
        assert loop_time() < 1.1
        assert heads.seen().state == NEW
        await heads.poller.refresh_state("unknown")
    began = loop_time()
    await heads.poller.refresh_state("a")  # nobody polls at all
    assert loop_time() - began == 6


@pytest.mark.parametrize("hurries", [True, False], ids=["refresh", "wait"])
@in_virtual_time
async def test_no_answer_counts_that_was_asked_for_before(heads: Heads, hurries: bool) -> None:
    heads.answer, heads.takes = OLD, 0.3
    heads.watch()
    async with heads.polled():
        await asyncio.sleep(0.1)
        heads.answer, heads.takes = NEW, 0.0
        if hurries:
            await heads.poller.refresh_state("a")
        else:
            seen = await heads.poller.wait_for_poll("a")
            assert seen == heads.seen()
        assert heads.seen().state == NEW
        assert len(heads.asked["a"]) == 2
        assert loop_time() == pytest.approx(0.3, abs=0.05) if hurries else loop_time() > 0.7


@pytest.mark.parametrize("asked", [True, False], ids=["a poll under way", "none under way"])
@in_virtual_time
async def test_who_waits_for_a_poll_of_a_forgotten_head_waits_no_more(
    heads: Heads, asked: bool
) -> None:
    heads.takes = 0.3
    heads.watch(fast=False)
    async with heads.polled():
        await asyncio.sleep(0.1 if asked else 1)
        waiting = asyncio.create_task(heads.poller.wait_for_poll("a"))
        await asyncio.sleep(0)
        heads.poller.unwatch_head("a")
        assert await waiting is None
        assert await heads.poller.wait_for_poll("a") is None
        assert loop_time() <= 1


@in_virtual_time
async def test_a_calls_answer_outlasts_a_poll_that_asked_before(heads: Heads) -> None:
    heads.answer, heads.takes = OLD, 0.3
    heads.watch()
    async with heads.polled():
        await asyncio.sleep(0.1)
        heads.poller.note_state("a", NEW)
        await asyncio.sleep(0.5)
        assert heads.seen().state == NEW
        heads.poller.note_state("unknown", NEW)


@in_virtual_time
async def test_an_unwatched_head_is_left_alone_and_another_address_is_another_head(
    heads: Heads,
) -> None:
    heads.watch()
    await heads.pass_by(1)
    heads.poller.watch_head(KEY, "a", "b", True)
    assert heads.poller.last_observation("a") is None
    await heads.pass_by(1)
    assert heads.seen().state == ANSWER
    asked = [len(heads.asked[address]) for address in ("a", "b")]
    heads.poller.unwatch_head("a")
    await heads.pass_by(10)
    assert [len(heads.asked[address]) for address in ("a", "b")] == asked
    assert heads.poller.last_observation("a") is None


@in_virtual_time
async def test_no_more_than_64_begin_at_once(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_operator.workers.head_poller.POLL_SLOT_SECONDS", 10.0)
    heads.takes = 0.3
    for number in range(100):
        heads.watch(str(number), fast=False)
    await heads.pass_by(1)
    assert len(heads.asked) == 100
    assert heads.most_at_once == MAX_CONCURRENT_POLLS


@pytest.mark.parametrize(("silent", "fast"), [(600, False), (2000, True)])
@in_virtual_time
async def test_silent_heads_of_one_pool_delay_no_other_pools_polls(
    heads: Heads, silent: int, fast: bool
) -> None:
    well = [f"well {n}" for n in range(100)]
    for number in range(silent):
        heads.watch(str(number), fast=fast, key=PoolKey("rl", "lost"))
    for address in well:
        heads.watch(address, fast=False)
    heads.watch("moving")
    async with heads.polled():
        await asyncio.sleep(30)
        heads.hangs = {str(number) for number in range(silent)}  # their packets are dropped
        while loop_time() < 79:
            await asyncio.sleep(1)
            believed = [heads.seen(address) for address in (*well, "moving")]
            assert not any(each.failures or each.stale for each in believed)
    assert heads.seen("0").failures > 1
    settled = 30 + 1.1 * max(5.0, silent / 200) + 3
    gaps = heads.gaps("moving", since=settled)
    assert max(gaps) < 0.6, "as if those were not there"
    assert max(max(heads.gaps(each, since=settled)) for each in well) < 6


@in_virtual_time
async def test_a_large_pool_stretches_its_own_interval_and_no_others(heads: Heads) -> None:
    for number in range(2000):
        heads.watch(str(number), key=PoolKey("rl", "large"))
    heads.watch("moving")
    heads.watch("resting", fast=False)
    await heads.pass_by(40)
    assert min(heads.gaps("0")) > 8
    assert max(heads.gaps("moving")) < 0.6
    assert max(heads.gaps("resting")) < 6


@pytest.mark.parametrize("steps", range(6))
@in_virtual_time
async def test_a_head_is_polled_again_whenever_polling_was_cancelled(
    heads: Heads, steps: int
) -> None:
    """Also where its poll was handed to a task that had not begun yet."""
    heads.watch()
    polling = asyncio.create_task(heads.poller.run())
    for _ in range(steps):
        await asyncio.sleep(0)
    polling.cancel()
    await asyncio.wait({polling})
    before = len(heads.asked.get("a", ()))
    async with heads.polled():
        await heads.poller.refresh_state("a")
    assert len(heads.asked["a"]) > before
    assert loop_time() < 1
