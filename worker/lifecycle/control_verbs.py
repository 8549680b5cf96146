"""The control port's verbs for holds and requests: pause, resume, sleep, wake, abort, cache reset.

Each is idempotent and waits until the worker has reached the state it asks for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from math import inf

from rollout_common import wire
from rollout_common.wire import AbortReason, Lifecycle, MemoryTag
from rollout_common.wire.problems import ProblemError, conflict_problem
from rollout_worker.core.holds import WantedState
from rollout_worker.core.worker_runtime import WorkerRuntime
from rollout_worker.engine import Engine, EngineCrashed, EngineError, can_wake_empty
from rollout_worker.requests.in_flight_requests import InFlightRequests

from .governor import LifecycleGovernor, Mode
from .settings import QUICK_CALL_SECONDS, TRANSITION_SLACK_SECONDS

logger = logging.getLogger(__name__)


class ControlVerbs:
    """The verbs of one worker."""

    def __init__(
        self, runtime: WorkerRuntime, flights: InFlightRequests, governor: LifecycleGovernor
    ) -> None:
        self._runtime = runtime
        self._flights = flights
        self._governor = governor

    async def pause_worker(self, holder: str, request: wire.PauseRequest) -> None:
        """Hold the worker Paused for this caller, renewing or replacing the caller's earlier hold.

        Raises:
            ProblemError: the worker can't be paused now; 409 `changed-meanwhile`, the hold expired
                or was released before the worker was paused.
        """
        ttl = request.ttl_seconds
        expires = inf if ttl is None else time.monotonic() + ttl
        if self._is_resting(request.generation):
            # Pausing needs an engine; it loads unless another caller holds the worker asleep.
            self._runtime.holds.hold_paused(holder, expires)
            await self._begin_loading()
        self._ready_for_verbs(request.generation)
        self._runtime.holds.hold_paused(holder, expires)
        await self._stop_serving(
            holder, request.mode, request.deadline_seconds, AbortReason.CONTROL
        )

    async def put_to_sleep(self, holder: str, request: wire.SleepRequest) -> None:
        """Hold the worker Asleep for this caller, releasing the tags' memory.

        Raises:
            ProblemError: the worker can't be put to sleep now.
        """
        if self._is_resting(request.generation):
            self._runtime.holds.hold_asleep(holder, request.level, request.tags)
            return
        engine = self._ready_for_verbs(request.generation)
        if request.level not in engine.capabilities.sleep_levels:
            able = " and ".join(map(str, engine.capabilities.sleep_levels))
            fix = (
                f"this engine only supports sleep level {able}"
                if able
                else "this engine can't sleep: pause it instead"
            )
            raise ProblemError("unsupported", fix, errors=[{"field": "level", "message": fix}])
        self._runtime.holds.hold_asleep(holder, request.level, request.tags)
        await self._stop_serving(holder, request.mode, request.deadline_seconds, AbortReason.SLEEP)

    def _is_resting(self, generation: int | None) -> bool:
        """Whether the worker is asleep without an engine, as a worker that takes turns may be."""
        runtime = self._runtime
        runtime.see_generation(generation)
        resting = runtime.lifecycle.current_state is Lifecycle.ASLEEP and runtime.engine is None
        return resting and not runtime.shutting_down

    async def _begin_loading(self) -> None:
        """Let a worker without an engine begin to load one, if its holds allow it now."""
        runtime = self._runtime
        runtime.changed.notify_all()
        if not runtime.hold_target().is_all_released:
            await runtime.changed.wait_for_change(QUICK_CALL_SECONDS)

    def _ready_for_verbs(self, generation: int | None) -> Engine:
        runtime = self._runtime
        runtime.see_generation(generation)
        if runtime.shutting_down:
            raise conflict_problem(
                "shutting-down", "the worker is shutting down and will free its memory soon"
            )
        return runtime.loaded_engine()[0]

    async def _stop_serving(
        self, holder: str, mode: Mode, deadline_seconds: float, reason: AbortReason
    ) -> None:
        runtime = self._runtime
        logger.info("held by %r: %s", holder, mode)
        self._governor.plan_drain(holder, mode, deadline_seconds)
        await self._governor.wait_until(
            lambda: self._governor.is_settled,
            deadline_seconds + TRANSITION_SLACK_SECONDS,
            lambda: runtime.holds.want_of(holder, time.monotonic()) is not WantedState.ACTIVE,
        )
        # Requests that an earlier `keep` has frozen still wait.
        if mode == "abort" and runtime.is_held:
            await self._flights.abort_all(reason)

    async def resume_worker(self, holder: str, request: wire.ReleaseRequest) -> None:
        """Release this caller's pause.

        Raises:
            ProblemError: 409, this caller holds it asleep, or others hold it; the latter still
                releases the pause.
        """
        runtime = self._runtime
        runtime.see_generation(request.generation)
        if runtime.holds.want_of(holder, time.monotonic()) is WantedState.ASLEEP:
            raise conflict_problem(
                "asleep", "this caller's hold is a sleep, not a pause: use POST /v1/wake"
            )
        runtime.holds.release_hold(holder)
        await self._wait_serving(holder, ())

    async def wake_worker(self, holder: str, request: wire.WakeRequest) -> None:
        """Release this caller's sleep for these tags.

        Without `load`, weights that are asleep wake without values, and the hold goes on until a commit.

        Raises:
            ProblemError: 409, others hold the worker; the sleep is released anyway. 422, the engine
                can't wake without values.
        """
        runtime, engine = self._runtime, self._runtime.engine
        runtime.see_generation(request.generation)
        if request.load is False and engine is not None and not can_wake_empty(engine):
            fix = "this engine can't replace its weights: wake it with them, without load: false"
            raise ProblemError("unsupported", fix, errors=[{"field": "load", "message": fix}])
        load = request.load is not False or not self._governor.has_no_weights
        runtime.holds.release_tags(holder, request.tags, load=load)
        await self._wait_serving(holder, request.tags)

    async def _wait_serving(self, holder: str, tags: Collection[MemoryTag]) -> None:
        """Wait until the tags' memory is back and the worker serves, unless other callers hold it."""
        runtime, governor = self._runtime, self._governor
        logger.info("released by %r", holder)
        runtime.changed.notify_all()
        if self._is_resting(None):
            self._check_other_holders(holder)
            await self._begin_loading()
        runtime.loaded_engine()
        await governor.wait_until(
            lambda: governor.is_resident(tags), TRANSITION_SLACK_SECONDS, lambda: True
        )
        await governor.wait_until(
            lambda: runtime.is_held or governor.is_settled, TRANSITION_SLACK_SECONDS, lambda: True
        )
        self._check_other_holders(holder)

    def _check_other_holders(self, holder: str) -> None:
        runtime = self._runtime
        others = runtime.holds.other_holders(holder, time.monotonic())
        if others:
            state = runtime.lifecycle.current_state.value
            raise conflict_problem(
                "held",
                f"the caller's hold is released, but the worker stays {state}: it is also held by {', '.join(others)}",
                holders=others,
            )

    async def abort_requests(self, caller: str, request: wire.AbortRequest) -> wire.AbortResponse:
        """End requests with partial output; return once they have ended."""
        wanted = request.request_ids
        logger.info("aborting %s requests for %r", "all" if wanted is None else len(wanted), caller)
        ids = self._flights.request_ids() if wanted is None else list(dict.fromkeys(wanted))
        aborted = await self._flights.abort_ids(ids, AbortReason.CONTROL)
        return wire.AbortResponse(
            aborted=tuple(i for i in ids if i in aborted),
            unknown=tuple(i for i in ids if i not in aborted),
        )

    async def reset_prefix_cache(self, caller: str) -> None:
        """Clear the prefix cache.

        Raises:
            ProblemError: 409, no engine is loaded; 503, it died or refused.
        """
        engine, _ = self._runtime.loaded_engine()
        logger.info("resetting the prefix cache for %r", caller)
        try:
            await self._runtime.call_engine(engine.reset_cache(), 60, "reset_cache")
        except EngineCrashed as error:
            raise ProblemError("failed", f"the engine died: {error}", retry_after=5) from error
        except EngineError as error:
            raise ProblemError("engine-refused", str(error), retry_after=5) from error
