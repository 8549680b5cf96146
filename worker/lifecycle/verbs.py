"""The control port's verbs for holds and requests: pause, resume, sleep, wake, abort, cache reset.

Each is idempotent and waits until the worker has reached the state it asks for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from math import inf

from rollout_worker.core.holds import Want
from rollout_worker.core.runtime import Runtime
from rollout_worker.engine import Engine, EngineCrashed, EngineError
from rollout_worker.requests.flights import Flights
from rollout_worker.schemas import (
    AbortReason,
    AbortRequest,
    AbortResponse,
    Lifecycle,
    MemoryTag,
    PauseRequest,
    ReleaseRequest,
    SleepRequest,
    WakeRequest,
)
from rollout_worker.wire.problems import ProblemError, conflict

from .governor import Governor, Mode

logger = logging.getLogger(__name__)

QUICK_SECONDS = 5.0
SLACK_SECONDS = 660.0
"""How long a transition may take beyond its drain, to abort requests and move weights."""


def wakes_empty(engine: Engine) -> bool:
    """Whether its weights may wake without values: it can take others in their place."""
    return 2 in engine.capabilities.sleep_levels


class Verbs:
    """The verbs of one worker."""

    def __init__(self, runtime: Runtime, flights: Flights, governor: Governor) -> None:
        self._runtime = runtime
        self._flights = flights
        self._governor = governor

    async def pause(self, holder: str, request: PauseRequest) -> None:
        """Hold the worker Paused for this caller, renewing or replacing the caller's earlier hold.

        Raises:
            ProblemError: the worker can't be paused now; 409 `changed-meanwhile`, the hold expired
                or was released before the worker was paused.
        """
        ttl = request.ttl_seconds
        expires = inf if ttl is None else time.monotonic() + ttl
        if self._rests(request.generation):
            self._runtime.holds.pause(
                holder, expires
            )  # which loads an engine, unless others sleep on
            await self._loading()
        self._ready_for_verbs(request.generation)
        self._runtime.holds.pause(holder, expires)
        await self._close(holder, request.mode, request.deadline_seconds, AbortReason.CONTROL)

    async def sleep(self, holder: str, request: SleepRequest) -> None:
        """Hold the worker Asleep for this caller, releasing the tags' memory.

        Raises:
            ProblemError: the worker can't be put to sleep now.
        """
        if self._rests(request.generation):
            self._runtime.holds.sleep(holder, request.level, request.tags)
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
        self._runtime.holds.sleep(holder, request.level, request.tags)
        await self._close(holder, request.mode, request.deadline_seconds, AbortReason.SLEEP)

    def _rests(self, generation: int | None) -> bool:
        """Whether the worker is asleep without an engine, as one that takes turns may be."""
        runtime = self._runtime
        runtime.see_generation(generation)
        resting = runtime.lifecycle.state is Lifecycle.ASLEEP and runtime.engine is None
        return resting and not runtime.shutting_down

    async def _loading(self) -> None:
        """Let a worker without an engine begin to load one, if its holds ask for that now."""
        runtime = self._runtime
        runtime.changed.fire()
        if not runtime.target().all_released:
            await runtime.changed.wait(QUICK_SECONDS)

    def _ready_for_verbs(self, generation: int | None) -> Engine:
        runtime = self._runtime
        runtime.see_generation(generation)
        if runtime.shutting_down:
            raise conflict(
                "shutting-down", "the worker is shutting down and will free its memory soon"
            )
        return runtime.loaded()[0]

    async def _close(
        self, holder: str, mode: Mode, deadline_seconds: float, reason: AbortReason
    ) -> None:
        runtime = self._runtime
        logger.info("held by %r: %s", holder, mode)
        self._governor.ask(mode, deadline_seconds)
        await self._governor.reach(
            lambda: self._governor.settled,
            deadline_seconds + SLACK_SECONDS,
            lambda: runtime.holds.of(holder, time.monotonic()) is not Want.ACTIVE,
        )
        # Requests frozen by an earlier `keep` are still there.
        if mode == "abort" and runtime.held:
            await self._flights.abort_all(reason)

    async def resume(self, holder: str, request: ReleaseRequest) -> None:
        """Release this caller's pause.

        Raises:
            ProblemError: 409, this caller holds it asleep, or others hold it; the latter still
                releases the pause.
        """
        runtime = self._runtime
        runtime.see_generation(request.generation)
        if runtime.holds.of(holder, time.monotonic()) is Want.ASLEEP:
            raise conflict(
                "asleep", "this caller's hold is a sleep, not a pause: use POST /v1/wake"
            )
        runtime.holds.release(holder)
        await self._open(holder, ())

    async def wake(self, holder: str, request: WakeRequest) -> None:
        """Release this caller's sleep for these tags.

        Without `load`, weights that are asleep come without values, and the hold goes on until a commit.

        Raises:
            ProblemError: 409, others hold the worker; the sleep is released anyway. 422, the engine
                can't wake without values.
        """
        runtime = self._runtime
        runtime.see_generation(request.generation)
        if request.load is False and runtime.engine is not None and not wakes_empty(runtime.engine):
            fix = "this engine can't replace its weights: wake it with them, without load: false"
            raise ProblemError("unsupported", fix, errors=[{"field": "load", "message": fix}])
        load = request.load is not False or not self._governor.weights_away
        runtime.holds.wake(holder, request.tags, load=load)
        await self._open(holder, request.tags)

    async def _open(self, holder: str, tags: Collection[MemoryTag]) -> None:
        """Wait until the tags' memory is back and, unless someone holds the worker, it serves."""
        runtime, governor = self._runtime, self._governor
        logger.info("released by %r", holder)
        runtime.changed.fire()
        if self._rests(None):
            self._check_others(holder)
            await self._loading()
        runtime.loaded()
        await governor.reach(lambda: governor.resident(tags), SLACK_SECONDS, lambda: True)
        await governor.reach(lambda: runtime.held or governor.settled, SLACK_SECONDS, lambda: True)
        self._check_others(holder)

    def _check_others(self, holder: str) -> None:
        runtime = self._runtime
        others = runtime.holds.others(holder, time.monotonic())
        if others:
            raise conflict(
                "held",
                f"the caller's hold is released, but the worker stays"
                f" {runtime.lifecycle.state.value}: it is also held by {', '.join(others)}",
                holders=others,
            )

    async def abort(self, caller: str, request: AbortRequest) -> AbortResponse:
        """End requests with partial output; return once they have ended."""
        wanted = request.request_ids
        logger.info("aborting %s requests for %r", "all" if wanted is None else len(wanted), caller)
        ids = self._flights.ids() if wanted is None else list(dict.fromkeys(wanted))
        aborted = await self._flights.abort_ids(ids, AbortReason.CONTROL)
        return AbortResponse(
            aborted=tuple(i for i in ids if i in aborted),
            unknown=tuple(i for i in ids if i not in aborted),
        )

    async def reset_cache(self, caller: str) -> None:
        """Clear the prefix cache.

        Raises:
            ProblemError: 409, no engine is loaded; 503, it died or refused.
        """
        engine, _ = self._runtime.loaded()
        logger.info("resetting the prefix cache for %r", caller)
        try:
            await self._runtime.call(engine.reset_cache(), 60, "reset_cache")
        except EngineCrashed as error:
            raise ProblemError("failed", f"the engine died: {error}", retry_after=5) from error
        except EngineError as error:
            raise ProblemError("engine-refused", str(error), retry_after=5) from error
