"""The queue: a key is never lost, never handed out twice at once, and waits its own back-off."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from rollout_operator.cache.settings import MAX_BACKOFF_SECONDS
from rollout_operator.cache.workqueue import QueueClosed, WorkQueue


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> WorkQueue[str]:
    return WorkQueue(clock=clock, rand=lambda: 0.0)


def test_failures_wait_longer_and_longer(queue: WorkQueue[str], clock: Clock) -> None:
    waits = []
    for _ in range(10):
        before = clock.now
        queue.add("a", rate_limited=True)
        while queue.get_due() is None:
            clock.now += 0.5
        queue.mark_done("a")
        waits.append(clock.now - before)
    assert waits[:4] == [0.5, 1, 2, 4]
    assert waits[-1] == MAX_BACKOFF_SECONDS
    assert queue.failure_count("a") == 10
    queue.reset_backoff("a")
    assert queue.failure_count("a") == 0


def test_a_failing_key_delays_no_other(queue: WorkQueue[str], clock: Clock) -> None:
    for _ in range(6):
        queue.add("bad", rate_limited=True)
    queue.add("good")
    assert queue.get_due() == "good"


def test_an_event_cuts_a_back_off_short(queue: WorkQueue[str]) -> None:
    queue.add("a", rate_limited=True)
    queue.add("a")
    assert queue.get_due() == "a"


def test_jitter_only_lengthens(clock: Clock) -> None:
    queue: WorkQueue[str] = WorkQueue(clock=clock, rand=lambda: 0.999)
    queue.add("a", rate_limited=True)
    clock.now += 0.55
    assert queue.get_due() is None
    clock.now += 0.06
    assert queue.get_due() == "a"


def test_waits_are_reported(clock: Clock) -> None:
    waits: list[float] = []
    queue: WorkQueue[str] = WorkQueue(clock=clock, on_wait=waits.append)
    queue.add("a", 1)
    clock.now += 3
    queue.get_due()
    assert waits == [2]


async def test_get_waits_for_a_key_and_for_its_time() -> None:
    queue: WorkQueue[str] = WorkQueue()
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0.01)
    queue.add("a", 0.05)
    assert not waiting.done()
    assert await asyncio.wait_for(waiting, 1) == "a"


async def test_each_waiting_worker_gets_a_key_of_its_own() -> None:
    queue: WorkQueue[int] = WorkQueue()
    workers = [asyncio.create_task(queue.get()) for _ in range(8)]
    await asyncio.sleep(0)
    for number in range(8):
        queue.add(number)
    assert sorted(await asyncio.wait_for(asyncio.gather(*workers), 1)) == list(range(8))


async def test_a_key_handed_to_a_cancelled_worker_is_not_lost() -> None:
    queue: WorkQueue[str] = WorkQueue()
    worker = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add("a")  # handed over, but the worker has not run yet
    worker.cancel()
    with pytest.raises(asyncio.CancelledError):
        await worker
    assert await asyncio.wait_for(queue.get(), 1) == "a"


async def test_close_ends_all_waiting_and_hands_out_nothing() -> None:
    queue: WorkQueue[str] = WorkQueue()
    workers = [asyncio.create_task(queue.get()) for _ in range(3)]
    await asyncio.sleep(0)
    queue.close()
    for worker in workers:
        with pytest.raises(QueueClosed):
            await asyncio.wait_for(worker, 1)
    queue.add("a")
    with pytest.raises(QueueClosed):
        await queue.get()


async def test_a_key_that_was_added_at_work_goes_to_a_waiting_worker_afterwards() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a")
    assert await queue.get() == "a"
    waiting = asyncio.create_task(queue.get())
    queue.add("a")
    await asyncio.sleep(0)
    assert not waiting.done(), "nobody works on it twice at once"
    queue.mark_done("a")
    assert await asyncio.wait_for(waiting, 1) == "a"


class Model(RuleBasedStateMachine):
    """The queue against a plain dictionary: due times of waiting keys, and the keys at work."""

    keys = Bundle("keys")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.queue: WorkQueue[str] = WorkQueue(clock=self.clock, rand=lambda: 0.0)
        self.due: dict[str, float] = {}
        self.busy: set[str] = set()

    @rule(target=keys, key=st.sampled_from("abcde"))
    def name(self, key: str) -> str:
        return key

    @rule(key=keys, delay=st.integers(-1, 5))
    def add(self, key: str, delay: int) -> None:
        self.queue.add(key, delay)
        due = self.clock.now + max(0, delay)
        self.due[key] = min(due, self.due.get(key, due))

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @rule()
    def take(self) -> None:
        key = self.queue.get_due()
        ready = {
            k: due for k, due in self.due.items() if due <= self.clock.now and k not in self.busy
        }
        if key is None:
            assert not ready, "a key that is due was not handed out"
            return
        assert key in ready, "handed out too early, twice, or out of nothing"
        assert ready[key] == min(ready.values()), "not the one that has waited longest"
        del self.due[key]
        self.busy.add(key)

    @rule(key=keys)
    def done(self, key: str) -> None:
        if key in self.busy:
            self.busy.discard(key)
            self.queue.mark_done(key)

    @invariant()
    def counts_agree(self) -> None:
        ready = [d for k, d in self.due.items() if d <= self.clock.now and k not in self.busy]
        assert self.queue.due_count() == len(ready)
        assert self.queue.busy_count() == len(self.busy)
        assert self.queue.oldest_age() == max((self.clock.now - d for d in ready), default=0)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=40)


async def test_a_key_that_is_due_earlier_than_all_others_wakes_a_worker_in_time() -> None:
    queue: WorkQueue[str] = WorkQueue()
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add("late", 30)
    queue.add("later", 60)
    queue.add("soon", 0.05)
    assert await asyncio.wait_for(waiting, 1) == "soon"
