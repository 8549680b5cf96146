"""What all parts of a worker share: state, engine, locks, and guarded calls to the engine.

The parts are `requests`, `updates` (weights), the governor (holds → lifecycle) and the supervisor (the
engine's life); `service` puts them together. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from rollout_common.turn import TurnReplaced
from rollout_common.wire import Lifecycle, Progress, Resident, WorkerState
from rollout_common.wire.problems import ProblemError, conflict_problem
from rollout_worker.device_turn import DeviceTurn
from rollout_worker.engine import (
    Engine,
    EngineCrashed,
    EngineError,
    EngineInfo,
    EngineStats,
    GangMembership,
)
from rollout_worker.gang.gang_head import GangHead
from rollout_worker.gang.multi_node_turn import WholeTurn
from rollout_worker.observe.worker_telemetry import WorkerTelemetry
from rollout_worker.settings import WorkerSettings

from .holds import Holds, HoldTarget, WantedState
from .lifecycle_states import LifecycleTracker
from .settings import CANCEL_GRACE_SECONDS, STATE_LOOK_SECONDS, STATE_PACE_SECONDS

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_WAITING = 64
"""Callers that wait for another state at once; any more get their answer without a wait, and ask again."""
NOTHING_RESIDENT = Resident(weights=False, kv_cache=False)


class ChangeNotifier:
    """Wakes all current waiters, each of which then rechecks its condition."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify_all(self) -> None:
        """Wake all current waiters."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait_for_change(self, seconds: float | None) -> bool:
        """Wait for the next call of `notify_all`; return False if none came within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            return False
        return True


class StateSequence:
    """Counts the changes of a state that somebody has seen.

    What changes all the time does not count: requests that run and wait, and how long a hold still lasts. `look`
    returns the state as of now, numbered; `is_ending` whether the worker shuts down, which no caller may delay.
    """

    def __init__(
        self,
        look: Callable[[], WorkerState],
        changed: ChangeNotifier,
        is_ending: Callable[[], bool],
    ) -> None:
        self._look, self._changed, self._is_ending = look, changed, is_ending
        self._seen: WorkerState | None = None
        self._number = 0
        self._waiting = 0

    def number_state(self, state: WorkerState) -> WorkerState:
        """Return a state with its number, which is higher than that of any other state before it."""
        plain = state.model_copy(
            update={
                "seq": 0,
                "caller": "",
                "in_flight": 0,
                "queued": 0,
                "holds": tuple(hold.model_copy(update={"ttl": None}) for hold in state.holds),
            }
        )
        if plain != self._seen:
            self._seen, self._number = plain, self._number + 1
        return state.model_copy(update={"seq": self._number})

    async def wait_past(self, since: int, seconds: float) -> None:
        """Return once the state has another number than `since`, or the time is over.

        Not only a higher one: a lower one is of another process, whose state the caller has not seen.
        """
        until = time.monotonic() + seconds
        if self._waiting >= MAX_WAITING:
            return
        self._waiting += 1
        try:
            while self._look().seq == since and not self._is_ending():
                left = until - time.monotonic()
                if left <= 0:
                    return
                # Some changes, such as the end of a hold, come with time alone.
                if await self._changed.wait_for_change(min(left, STATE_LOOK_SECONDS)):
                    await asyncio.sleep(min(left, STATE_PACE_SECONDS))
        finally:
            self._waiting -= 1


class WorkerRuntime:
    """The shared state of one worker process."""

    def __init__(self, settings: WorkerSettings, gang: GangMembership | None = None) -> None:
        self.settings = settings
        self.boot_id = uuid.uuid4().hex
        self.telemetry = WorkerTelemetry(settings.pool, settings.namespace)
        self.lifecycle = LifecycleTracker(self._note_move)
        self.holds = Holds()
        self.changed = ChangeNotifier()
        """Fires when the state, a hold or a request changes."""
        self.exclusive = asyncio.Lock()
        """Held while the lifecycle moves, weights are committed or the engine is replaced."""
        self.turn: DeviceTurn | None = None
        """Set if others use the same devices by turns."""
        self.gang: GangHead | None = None
        """Set on the head of a replica of several nodes."""
        if gang is not None:
            self.gang = GangHead(settings, gang, self.boot_id, self.report_crash)
        if settings.turn_devices:
            self.turn = (
                DeviceTurn(settings, self.telemetry)
                if self.gang is None
                else WholeTurn(settings, self.telemetry, self.gang)
            )
        self.engine: Engine | None = None
        self.info: EngineInfo | None = None
        self.died: asyncio.Future[str] | None = None
        """For the current engine; resolves to the reason once it crashes."""
        self.progress: Progress | None = None
        self.last_error: str | None = None
        self.restarts = 0
        self.shutting_down = False
        self.admitting = True
        """False once a shutdown refuses new requests."""
        self.generation: int | None = None
        self.drain_seconds = settings.drain_seconds
        """How long running requests may go on after SIGTERM."""

    def _note_move(self, old: Lifecycle, new: Lifecycle) -> None:
        logger.info("lifecycle %s -> %s", old.value, new.value)
        self.telemetry.export_lifecycle(new)
        self.changed.notify_all()

    def hold_target(self) -> HoldTarget:
        """What the live holds currently ask for."""
        now = time.monotonic()
        for holder in self.holds.expire_holds(now):
            logger.info("the hold by %r expired", holder)
        target = self.holds.merged_target(now)
        if target.want is not WantedState.ASLEEP:
            self.holds.lending = False
        return target

    @property
    def is_held(self) -> bool:
        """Whether any hold keeps the worker from generating."""
        return self.hold_target().want is not WantedState.ACTIVE

    def engine_stats(self) -> EngineStats:
        """The engine's counts; zeros while no engine is loaded."""
        if self.engine is None or not self.lifecycle.has_engine:
            return EngineStats(running=0, resident=NOTHING_RESIDENT)
        return self.engine.stats()

    def loaded_engine(self) -> tuple[Engine, EngineInfo]:
        """Return the engine, for verbs that need one.

        Raises:
            ProblemError: 409 that names the state.
        """
        if self.engine is None or self.info is None or not self.lifecycle.has_engine:
            raise self.wrong_state_problem("wait for the engine to load and try again")
        return self.engine, self.info

    def wrong_state_problem(self, fix: str) -> Exception:
        """A 409 that names the current state and the fix."""
        state = self.lifecycle.current_state
        why = f" ({self.last_error})" if state is Lifecycle.FAILED and self.last_error else ""
        return conflict_problem(
            state.value.lower(), f"the worker is {state.value}{why}: {fix}", lifecycle=state.value
        )

    @property
    def is_alive(self) -> bool:
        """Whether there is an engine that is not known to be dead."""
        return self.engine is not None and self.died is not None and not self.died.done()

    def check_alive(self) -> None:
        """Raise if the engine died while a verb waited for something else.

        Raises:
            EngineCrashed: with the reason.
        """
        if self.died is not None and self.died.done():
            raise EngineCrashed(self.died.result())

    async def take_turn(self, wanted: Callable[[], bool]) -> bool:
        """Wait until a sleeping engine may allocate memory; return False once that isn't `wanted`.

        Raises:
            EngineCrashed: the engine died, or its processes can't share a turn and must be replaced.
            EngineError: the locks can't be used.
        """
        if self.turn is None:
            return True

        def report(progress: Progress) -> None:
            self.progress = progress

        def goes_on() -> bool:
            return wanted() and self.is_alive and not self.shutting_down

        try:
            had = await self.turn.take(report, goes_on)
            self.check_alive()
            return had
        except TurnReplaced as error:
            self.report_crash(str(error))
            raise EngineCrashed(str(error)) from error
        finally:
            self.progress = None

    def report_crash(self, reason: str) -> None:
        """Report the engine as dead; the supervisor replaces it. Idempotent."""
        if self.died is not None and not self.died.done():
            self.died.set_result(reason)
            self.changed.notify_all()

    def see_generation(self, generation: int | None) -> None:
        """Remember the generation of the object that an operator's call follows.

        Raises:
            ProblemError: 409 if a newer one was seen: the caller has read a stale object.
        """
        if generation is None:
            return
        if self.generation is not None and generation < self.generation:
            raise conflict_problem(
                "stale-generation",
                f"generation {generation} is older than {self.generation}, which this worker has"
                " already seen: read the object again",
                generation=self.generation,
            )
        self.generation = generation

    @asynccontextmanager
    async def exclusive_within(self, seconds: float) -> AsyncIterator[None]:
        """Hold `exclusive`, waiting at most `seconds` to acquire it.

        Raises:
            ProblemError: another verb took longer.
        """
        try:
            async with asyncio.timeout(seconds):
                await self.exclusive.acquire()
        except TimeoutError:
            raise ProblemError(
                "deadline-exceeded",
                f"another verb was still running after {seconds:g} s: try again",
                retry_after=1,
            ) from None
        try:
            yield
        finally:
            self.exclusive.release()

    async def call_engine(
        self, work: Coroutine[Any, Any, T], seconds: float, what: str, *, fatal: bool = True
    ) -> T:
        """Await a call to an engine that may hang or die during it.

        With `fatal`, an error other than `EngineError` counts as a crash: the engine's state is unknown after it.

        Raises:
            EngineCrashed: the engine died, or did not answer within `seconds` and is presumed dead.
        """
        died = self.died
        assert died is not None, "call it only while there is an engine"
        task = asyncio.ensure_future(work)
        try:
            both: set[asyncio.Future[Any]] = {task, died}
            await asyncio.wait(both, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await _cancel_call(task)
            raise
        if not task.done():
            self.report_crash(f"{what} took more than {seconds:g} s")
            await _cancel_call(task)
            raise EngineCrashed(died.result())
        try:
            return task.result()
        except EngineCrashed as error:
            self.report_crash(str(error))
            raise
        except EngineError:
            raise
        except Exception as error:
            if not fatal:
                raise
            logger.exception("%s failed in the engine", what)
            self.report_crash(f"{what} failed: {error}")
            raise EngineCrashed(died.result()) from error


async def _cancel_call(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=CANCEL_GRACE_SECONDS)
    if task.done() and not task.cancelled():
        task.exception()  # retrieved, so that asyncio does not log an error that nobody wants
