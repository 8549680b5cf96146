"""Asks the heads for their state, a bounded number at once, and wakes a pool when one changes.

Workers don't push: the operator asks `GET /v1/state` twice a second while something is under way,
otherwise every five seconds. A head that fails to answer is asked less and less often; its last
answer stays, marked stale once it is too old to be trusted. In pools with hundreds of busy heads, or
thousands of heads, or many failing ones, these intervals stretch (`PollRateLimit`), so that polls leave time
for passes. After a call of ours its worker is asked at once (`refresh_state`).
Silent heads do not delay the polls of others: they have a pace of their own, and a poll that waits for its
answer soon leaves its place to the next one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial

from rollout_client.worker_control import ControlError, ControlUnreachable
from rollout_common.kube.errors import KubeError
from rollout_common.wire import WorkerState
from rollout_operator.api.objects import PoolKey
from rollout_operator.cache.workqueue import QueueClosed, WorkQueue

from .settings import (
    EARLY_POLL_SECONDS,
    FAST_POLL_SECONDS,
    FIRST_POLL_BACKOFF_SECONDS,
    MAX_POLL_BACKOFF_SECONDS,
    POLL_SLOT_SECONDS,
    POLL_TICK_SECONDS,
    POLL_TIMEOUT_SECONDS,
    SLOW_POLL_SECONDS,
    STALE_STATE_SECONDS,
    STARTING_POLL_BACKOFF_SECONDS,
)
from .shared_states import share_state

logger = logging.getLogger(__name__)

MAX_CONCURRENT_POLLS = 64
"""How many polls may begin at once."""

MAX_POLLS_PER_SECOND = 200.0
"""Polls of one pace in a second: of all pools that keep to their share, and of all others."""

POLL_JITTER = 0.1

_COMPARED_FIELDS = tuple(
    name for name in WorkerState.model_fields if name not in ("in_flight", "queued", "holds")
)
AskState = Callable[[PoolKey, str], Awaitable[WorkerState]]
"""Asks the control port at an address (host:port) of a pool's pod."""


@dataclass(frozen=True, slots=True)
class HeadObservation:
    """What the operator knows of a head.

    Attributes:
        state: Its last answer, perhaps of long ago; None: it never answered.
        error: Why the last poll failed; None if it went well.
        at: Monotonic time of `state`; of the end of the first poll if there is none.
        failures: Polls in a row that failed.
        stale: No answer for more than 15 s (longer where the interval is stretched).
        slot_seconds: How long its slot has held the same version in the same phase.
        silent_since: Wall clock of `at`, if polls have failed since then.
        silent_seconds: Seconds since `at`, likewise.
    """

    state: WorkerState | None
    error: str | None
    at: float
    failures: int
    stale: bool
    slot_seconds: float = 0.0
    silent_since: float | None = None
    silent_seconds: float = 0.0


@dataclass(slots=True)
class _PolledHead:
    key: PoolKey
    address: str
    since: float
    state: WorkerState | None = None
    error: str | None = None
    answered_at: float | None = None
    patience: float = 0.0
    """Seconds of silence that it had when it last answered: its next poll was put off accordingly."""
    failures: int = 0
    silent_since: float = 0.0
    """Wall clock, taken once for each silence: what a status says of it must not change by the second."""
    was_stale: bool = False
    slot: object = None
    """Version and phase of its staging slot; `slot_since` is when they were first seen."""
    slot_since: float = 0.0
    waiters: list[asyncio.Event] = field(default_factory=list)
    due_at: float = 0.0
    """When it is asked next; 0: at once."""


class PollRateLimit:
    """Heads that are asked equally often; `seconds` is the interval while they are few.

    Each pool has a share of the polls, so that large pools do not slow the others. At most
    `MAX_POLLS_PER_SECOND` are asked in a second, or twice as many while small pools keep to their share.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._pools: dict[PoolKey, set[str]] = {}
        self._count = 0

    def put(self, key: PoolKey, uid: str, *, inside: bool) -> None:
        """Count a head, or stop counting it."""
        heads = self._pools.setdefault(key, set())
        self._count -= len(heads)
        (heads.add if inside else heads.discard)(uid)
        self._count += len(heads)
        if not heads:
            del self._pools[key]

    def poll_interval(self, key: PoolKey) -> float:
        """Return the seconds between two polls of each of a pool's heads."""
        mine = len(self._pools.get(key, ()))
        return max(self._seconds, min(mine * len(self._pools), self._count) / MAX_POLLS_PER_SECOND)


class HeadPoller:
    """Polls heads while `run` is running, and wakes a head's pool when its answer changed.

    `ask` must have a deadline of its own; `clock` is monotonic seconds.
    """

    def __init__(
        self,
        ask: AskState,
        wake: Callable[[PoolKey], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._wake = wake
        self._clock = clock
        self._heads: dict[str, _PolledHead] = {}
        self._fast: set[str] = set()
        self._slow_pace = PollRateLimit(SLOW_POLL_SECONDS)
        """Of all that answer."""
        self._fast_pace = PollRateLimit(FAST_POLL_SECONDS)
        """Of the fast ones that answer."""
        self._failing_pace = PollRateLimit(0.0)
        self._queue: WorkQueue[str] = WorkQueue(clock=clock)
        self._first_poll_at = -math.inf
        """When a head's first poll ended last."""

    async def run(self) -> None:
        """Poll until cancelled."""
        async with asyncio.TaskGroup() as group:
            for number in range(MAX_CONCURRENT_POLLS):
                group.create_task(self._work_loop(group), name=f"poller {number}")

    def watch_head(self, key: PoolKey, pod_uid: str, address: str, fast: bool) -> None:
        """Poll this head from now on; a call with other arguments changes them."""
        head = self._heads.get(pod_uid)
        hurried = fast and pod_uid not in self._fast
        eased = not fast and pod_uid in self._fast
        (self._fast.add if fast else self._fast.discard)(pod_uid)
        renewed = head is None or (head.key, head.address) != (key, address)
        if head is None or renewed:
            self._drop_head(pod_uid)
            head = self._heads[pod_uid] = _PolledHead(key, address, self._clock())
        self._join_rate_limits(pod_uid, head)
        if renewed:
            self._queue.add(pod_uid)
        elif hurried:
            self._schedule_now(pod_uid, head)
        elif eased and not head.waiters:
            # The next fast poll is due in half a second, and nobody wants it any more.
            head.due_at = self._clock() + self._poll_interval(pod_uid, head)

    def unwatch_head(self, pod_uid: str) -> None:
        """Forget this head; callers that wait for its next poll go on without one."""
        self._drop_head(pod_uid)
        self._fast.discard(pod_uid)

    def _drop_head(self, pod_uid: str) -> None:
        self._leave_rate_limits(pod_uid)
        head = self._heads.pop(pod_uid, None)
        for waiter in () if head is None else head.waiters:
            waiter.set()

    def note_state(self, pod_uid: str, state: WorkerState) -> None:
        """Note the state in the answer to a call of ours: it is newer than that of a poll under way."""
        head = self._heads.get(pod_uid)
        if head is not None:
            self._note_outcome(pod_uid, head, state, None)

    def _schedule_now(self, pod_uid: str, head: _PolledHead) -> None:
        head.due_at = 0.0
        self._queue.add(pod_uid)

    async def refresh_state(self, pod_uid: str) -> None:
        """Poll this head now and return when its answer is there (or it failed to come)."""
        head = self._heads.get(pod_uid)
        if head is None:
            return
        polled = asyncio.Event()
        head.waiters.append(polled)
        self._schedule_now(pod_uid, head)
        try:
            # A poll that is under way ends first and does not count: it asked too early.
            async with asyncio.timeout(2 * POLL_TIMEOUT_SECONDS):
                await polled.wait()
        except TimeoutError:
            logger.debug("no fresh state of %s in time", head.address)

    def seconds_since_first_poll(self) -> float:
        """Return how long ago any head's first poll has ended; infinity: none has."""
        return self._clock() - self._first_poll_at

    async def wait_for_poll(self, pod_uid: str) -> HeadObservation | None:
        """Return what is known of this head after its next poll, which comes at its own pace.

        The poll asks after this call; `refresh_state` asks at once. None: the head is not watched any more.
        """
        head = self._heads.get(pod_uid)
        if head is None:
            return None
        polled = asyncio.Event()
        head.waiters.append(polled)
        await polled.wait()
        return self.last_observation(pod_uid) if self._heads.get(pod_uid) is head else None

    def last_observation(self, pod_uid: str) -> HeadObservation | None:
        """Return what is known of a head; None before its first poll ended."""
        head = self._heads.get(pod_uid)
        if head is None or (head.answered_at is None and head.failures == 0):
            return None
        at, now = _last_answer_at(head), self._clock()
        slot_seconds = now - head.slot_since if head.slot else 0.0
        found = HeadObservation(
            head.state, head.error, at, head.failures, self._is_stale(head), slot_seconds
        )
        if not head.failures:
            return found
        return replace(found, silent_since=head.silent_since, silent_seconds=now - at)

    async def _work_loop(self, group: asyncio.TaskGroup) -> None:
        while True:
            try:
                uid = await self._queue.get()
            except QueueClosed:
                return
            task = group.create_task(self._poll_if_due(uid))
            # Not a `finally` in the task: one that is cancelled before its first step never gets there.
            task.add_done_callback(partial(self._end_poll, uid))
            await asyncio.wait({task}, timeout=POLL_SLOT_SECONDS)

    def _end_poll(self, uid: str, task: asyncio.Task[None]) -> None:
        self._queue.mark_done(uid)

    async def _poll_if_due(self, uid: str) -> None:
        head = self._heads.get(uid)
        early = 0.0 if head is None else head.due_at - self._clock()
        if early > EARLY_POLL_SECONDS:
            # It was put off: in the queue the first due time stands.
            self._queue.add(uid, early)
        else:
            await self._poll_head(uid)

    async def _poll_head(self, uid: str) -> None:
        head = self._heads.get(uid)
        if head is None:
            return
        state, error, asked_at = None, None, self._clock()
        waiters, head.waiters = head.waiters, []
        head.due_at = math.inf
        try:
            async with asyncio.timeout(POLL_TIMEOUT_SECONDS + 1):
                state = await self._ask(head.key, head.address)
        except TimeoutError:
            error = f"no answer within {POLL_TIMEOUT_SECONDS:g} s"
        except (ControlError, ControlUnreachable, KubeError) as failure:
            error = str(failure)
        except Exception as failure:
            logger.exception("polling %s failed", head.address, extra={"pool": str(head.key)})
            error = f"{type(failure).__name__}: {failure}"
        watched = self._heads.get(uid) is head  # else no longer, or at another address
        overtaken = head.answered_at is not None and head.answered_at > asked_at
        changed = watched and not overtaken and self._note_outcome(uid, head, state, error)
        for waiter in waiters:
            waiter.set()
        if not watched:
            return
        interval = self._poll_interval(uid, head)
        if head.due_at == math.inf:  # else somebody asked for the next one during this poll
            head.due_at = self._clock() + interval
        self._queue.add(uid, interval)
        if changed:
            self._wake(head.key)

    def _note_outcome(
        self, uid: str, head: _PolledHead, state: WorkerState | None, error: str | None
    ) -> bool:
        """Take the outcome of a poll; return whether the pool should look."""
        if head.answered_at is None and head.failures == 0:
            self._first_poll_at = self._clock()
        was_answering = head.failures == 0
        if state is not None:
            changed = head.error is not None or head.was_stale
            if state != head.state:
                # Mostly it says what it said before, and what is kept is frozen already.
                changed = changed or _says_more_than_load(head.state, state)
                head.state = share_state(state)
            head.answered_at, head.patience = self._clock(), self._stale_after_seconds(head)
            staged = state.weights.staged
            slot = staged and (staged.epoch, staged.version, staged.phase)
            if slot != head.slot:
                head.slot, head.slot_since = slot, head.answered_at
            head.failures = 0
        else:
            changed = head.failures == 0
            if changed:
                head.silent_since = time.time() - (self._clock() - _last_answer_at(head))
            head.failures += 1
        if was_answering != (head.failures == 0):
            self._join_rate_limits(uid, head)
        head.error = error
        stale = self._is_stale(head)
        changed = changed or stale != head.was_stale
        head.was_stale = stale
        return changed

    def _is_stale(self, head: _PolledHead) -> bool:
        return self._clock() - _last_answer_at(head) > max(
            head.patience, self._stale_after_seconds(head)
        )

    def _stale_after_seconds(self, head: _PolledHead) -> float:
        return max(STALE_STATE_SECONDS, 3 * self._slow_pace.poll_interval(head.key))

    def _join_rate_limits(self, uid: str, head: _PolledHead) -> None:
        """Count the head in the paces that it belongs to."""
        answers = head.failures == 0
        self._slow_pace.put(head.key, uid, inside=answers)
        self._fast_pace.put(head.key, uid, inside=answers and uid in self._fast)
        self._failing_pace.put(head.key, uid, inside=not answers)

    def _leave_rate_limits(self, uid: str) -> None:
        if (head := self._heads.get(uid)) is not None:
            for pace in (self._slow_pace, self._fast_pace, self._failing_pace):
                pace.put(head.key, uid, inside=False)

    def _backoff_seconds(self, uid: str, head: _PolledHead) -> float:
        """Return the pause after a failure; short for a head that is starting, which somebody waits for."""
        starting = uid in self._fast and head.answered_at is None
        longest = STARTING_POLL_BACKOFF_SECONDS if starting else MAX_POLL_BACKOFF_SECONDS
        seconds = min(longest, FIRST_POLL_BACKOFF_SECONDS * 2.0 ** min(head.failures - 1, 10))
        return max(seconds, self._failing_pace.poll_interval(head.key))

    def _poll_interval(self, uid: str, head: _PolledHead) -> float:
        """Return the seconds until its next poll; slow polls go out together, at ticks of the clock."""
        jitter = random.uniform(1 - POLL_JITTER, 1 + POLL_JITTER)
        if head.failures:
            return self._backoff_seconds(uid, head) * jitter
        if uid in self._fast:
            return self._fast_pace.poll_interval(head.key) * jitter
        now = self._clock()
        due = now + self._slow_pace.poll_interval(head.key) * jitter
        return math.floor(due / POLL_TICK_SECONDS) * POLL_TICK_SECONDS - now


def _last_answer_at(head: _PolledHead) -> float:
    """Return when it last answered (monotonic); if never, when its first poll was asked for."""
    return head.since if head.answered_at is None else head.answered_at


def _says_more_than_load(before: WorkerState | None, now: WorkerState) -> bool:
    """Return whether more than the load is new, which changes all the time and which no pass reads."""
    if before is None:
        return True
    return _list_holders(before) != _list_holders(now) or any(
        getattr(before, name) != getattr(now, name) for name in _COMPARED_FIELDS
    )


def _list_holders(state: WorkerState) -> list[tuple[str, str]]:
    return [(hold.holder, hold.state) for hold in state.holds]
