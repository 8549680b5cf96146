"""How often a head is asked: paces, back-off and staleness, over minutes of virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise

import pytest

from rollout_client.worker_control import ControlUnreachable
from rollout_operator.api.objects import PoolKey
from rollout_operator.workers.head_poller import HeadObservation, HeadPoller
from rollout_operator.workers.settings import POLL_TICK_SECONDS
from rollout_worker.schemas import Lifecycle, WorkerState
from tests.support.unit.simworker import SimWorker
from tests.support.unit.virtualtime import run

KEY = PoolKey("rl", "math")
ANSWER = SimWorker("b1", loading=False).state()


class Heads:
    """Heads that answer or don't, and when each was asked."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.asked: dict[str, list[float]] = {}
        self.down: set[str] = set()
        self.hangs: set[str] = set()
        self.answer: WorkerState = ANSWER
        self.woken: list[float] = []
        self.poller = HeadPoller(self.ask, lambda key: self.woken.append(clock()), clock=clock)

    async def ask(self, key: PoolKey, address: str) -> WorkerState:
        self.asked.setdefault(address, []).append(self.clock())
        if address in self.hangs:
            await asyncio.sleep(3600)
        if address in self.down:
            raise ControlUnreachable("down")
        return self.answer

    def gaps(self, address: str = "a", since: float = 0.0) -> list[float]:
        times = [t for t in self.asked[address] if t >= since]
        return [later - sooner for sooner, later in pairwise(times)]

    async def pass_by(self, seconds: float) -> None:
        task = asyncio.create_task(self.poller.run())
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.wait({task})

    def seen(self, uid: str = "a") -> HeadObservation:
        found = self.poller.last_observation(uid)
        assert found is not None
        return found


@pytest.mark.parametrize(("fast", "pace"), [(True, 0.5), (False, 5.0)])
def test_fast_and_slow(fast: bool, pace: float) -> None:
    async def scene(clock: Callable[[], float]) -> None:
        heads = Heads(clock)
        heads.poller.watch_head(KEY, "a", "a", fast)
        await heads.pass_by(100)
        gaps = heads.gaps()
        least = 0.9 * pace - POLL_TICK_SECONDS
        assert least <= min(gaps) < pace < max(gaps) <= 1.1 * pace, "with some jitter"
        assert heads.woken == [0.0], "equal answers wake nobody"

    run(scene)


def test_slow_polls_go_out_together() -> None:
    async def scene(clock: Callable[[], float]) -> None:
        heads = Heads(clock)
        for number in range(100):
            heads.poller.watch_head(PoolKey("rl", f"p{number}"), str(number), str(number), False)
        await heads.pass_by(60)
        later = [at for times in heads.asked.values() for at in times if at > 10]
        moments = {round(at, 3) for at in later}
        assert len(later) > 900
        assert len(moments) <= 50 / POLL_TICK_SECONDS + 1, "at ticks, not one by one"

    run(scene)


def test_a_head_that_turns_fast_and_slow_again() -> None:
    async def scene(clock: Callable[[], float]) -> None:
        heads = Heads(clock)
        heads.poller.watch_head(KEY, "a", "a", False)
        await heads.pass_by(6)
        heads.poller.watch_head(KEY, "a", "a", True)
        await heads.pass_by(6)
        assert max(heads.gaps(since=6)) < 1
        heads.poller.watch_head(KEY, "a", "a", False)
        await heads.pass_by(60)
        assert min(heads.gaps(since=14)) > 4

    run(scene)


@pytest.mark.parametrize(
    ("fast", "answered", "longest"), [(True, False, 1.0), (True, True, 5.0), (False, False, 5.0)]
)
def test_a_head_that_fails_is_asked_less_and_less(
    fast: bool, answered: bool, longest: float
) -> None:
    async def scene(clock: Callable[[], float]) -> None:
        heads = Heads(clock)
        heads.poller.watch_head(KEY, "a", "a", fast)
        if answered:
            await heads.pass_by(0.1)
        heads.down.add("a")
        await heads.pass_by(60)
        wanted = [min(longest, 0.5 * 2**i) for i in range(8)]
        gaps = heads.gaps(since=0.1 if answered else 0.0)[: len(wanted)]
        assert all(0.9 * w <= g <= 1.1 * w for w, g in zip(wanted, gaps, strict=True)), gaps
        assert heads.seen().error == "down"
        assert heads.seen().failures > 8

    run(scene)


def test_one_that_hangs_is_given_up_after_its_deadline() -> None:
    async def scene(clock: Callable[[], float]) -> None:
        heads = Heads(clock)
        heads.hangs.add("a")
        heads.poller.watch_head(KEY, "a", "a", True)
        passing = asyncio.create_task(heads.pass_by(60))
        await asyncio.sleep(3.9)
        assert heads.poller.last_observation("a") is None
        await asyncio.sleep(0.2)
        assert heads.seen().error == "no answer within 3 s"
        assert heads.seen().state is None
        await passing

    run(scene)


@pytest.mark.parametrize(("heads_in_all", "until"), [(1, 15.0), (2000, 30.0)])
def test_silence_counts_after_fifteen_seconds_or_three_rounds(
    heads_in_all: int, until: float
) -> None:
    async def scene(clock: Callable[[], float]) -> None:
        heads = Heads(clock)
        heads.poller.watch_head(KEY, "a", "a", True)
        await heads.pass_by(0.01)
        heads.down.add("a")
        for number in range(1, heads_in_all):
            heads.poller.watch_head(KEY, str(number), str(number), False)
        answered = heads.seen().at
        while clock() < answered + until - 0.1:
            assert not heads.seen().stale
            await asyncio.sleep(0.5)
        await asyncio.sleep(answered + until + 0.1 - clock())
        assert heads.seen().stale
        assert heads.seen().state == ANSWER, "kept, not believed"

    run(scene)


def test_turning_stale_and_coming_back_wake() -> None:
    async def scene(clock: Callable[[], float]) -> None:
        heads = Heads(clock)
        heads.poller.watch_head(KEY, "a", "a", True)
        await heads.pass_by(0.1)
        heads.down.add("a")
        await heads.pass_by(60)
        assert len(heads.woken) == 3, "the answer, the first failure, the end of its credit"
        heads.down.clear()
        await heads.pass_by(10)
        assert len(heads.woken) == 4
        assert heads.seen().failures == 0
        assert not heads.seen().stale

    run(scene)


@pytest.mark.parametrize(("count", "fast", "pace"), [(400, True, 2.0), (2000, False, 10.0)])
def test_no_more_than_two_hundred_polls_a_second(count: int, fast: bool, pace: float) -> None:
    async def scene(clock: Callable[[], float]) -> None:
        heads = Heads(clock)
        for number in range(count):
            heads.poller.watch_head(KEY, str(number), str(number), fast)
        await heads.pass_by(2.5 * pace)
        gaps = heads.gaps("0")
        assert all(0.9 * pace <= gap <= 1.1 * pace for gap in gaps), gaps
        assert gaps

    run(scene)


def test_only_what_means_something_to_a_pool_wakes_it() -> None:
    async def scene(clock: Callable[[], float]) -> None:
        heads = Heads(clock)
        heads.poller.watch_head(KEY, "a", "a", True)
        await heads.pass_by(1)
        heads.answer = ANSWER.model_copy(update={"in_flight": 9, "queued": 9})
        await heads.pass_by(2)
        assert len(heads.woken) == 1
        assert heads.seen().state == heads.answer
        heads.answer = ANSWER.model_copy(update={"lifecycle": Lifecycle.PAUSED})
        await heads.pass_by(2)
        assert len(heads.woken) == 2

    run(scene)


def test_refresh_gives_up_on_a_head_that_hangs() -> None:
    async def scene(clock: Callable[[], float]) -> None:
        heads = Heads(clock)
        heads.poller.watch_head(KEY, "a", "a", True)
        began = clock()
        await heads.poller.refresh_state("a")  # nobody polls at all
        assert clock() - began == 6

    run(scene)


@pytest.mark.parametrize(("silent", "fast"), [(600, True), (600, False), (4000, True)])
def test_silent_heads_of_one_pool_delay_no_other_pools_polls(silent: int, fast: bool) -> None:
    async def scene(clock: Callable[[], float]) -> None:
        heads = Heads(clock)
        lost, well = PoolKey("rl", "lost"), [f"well {n}" for n in range(100)]
        for number in range(silent):
            heads.poller.watch_head(lost, str(number), str(number), fast)
        for address in well:
            heads.poller.watch_head(KEY, address, address, False)
        heads.poller.watch_head(KEY, "moving", "moving", True)
        passing = asyncio.create_task(heads.pass_by(80))
        await asyncio.sleep(30)
        heads.hangs = {str(number) for number in range(silent)}  # their packets are dropped
        while clock() < 79:
            await asyncio.sleep(1)
            believed = [heads.seen(address) for address in (*well, "moving")]
            assert not any(each.failures or each.stale for each in believed)
        await passing
        assert heads.seen("0").failures > 1
        settled = 30 + 1.1 * max(5.0, silent / 200) + 3
        gaps = heads.gaps("moving", since=settled)
        assert max(gaps) < 0.6, "as if those were not there"
        assert max(max(heads.gaps(each, since=settled)) for each in well) < 6

    run(scene)


def test_a_large_pool_stretches_its_own_interval_and_no_others() -> None:
    async def scene(clock: Callable[[], float]) -> None:
        heads = Heads(clock)
        for number in range(2000):
            heads.poller.watch_head(PoolKey("rl", "large"), str(number), str(number), True)
        heads.poller.watch_head(KEY, "moving", "moving", True)
        heads.poller.watch_head(KEY, "resting", "resting", False)
        await heads.pass_by(40)
        assert min(heads.gaps("0")) > 8
        assert max(heads.gaps("moving")) < 0.6
        assert max(heads.gaps("resting")) < 6

    run(scene)
