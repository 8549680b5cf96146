"""The critical section that flips weights, label and admission together; kept in one piece.

Who runs gets what the in-flight policy says; who waits runs on the new weights; who asked for
exactly the old ones ends with partial output, unless pinned to them. A failure leaves the old
weights serving, or a dead engine that the supervisor replaces: never unverified weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rollout_worker.core.runtime import Runtime
from rollout_worker.engine import (
    Engine,
    EngineCrashed,
    EngineError,
    EngineStats,
    KvPolicy,
    WeightsRejected,
)
from rollout_worker.requests.flights import Flights
from rollout_worker.requests.outputs import Output
from rollout_worker.schemas import (
    AbortReason,
    CommitRequest,
    CommitResponse,
    Lifecycle,
    StopReason,
    WeightsId,
)
from rollout_worker.wire.problems import ProblemError, conflict

from .slot import Slot
from .state import Updates

logger = logging.getLogger(__name__)

LOCK_SLACK_SECONDS = 60.0
PAUSE_SECONDS = 120.0
"""Longest wait for a step to end: a long prefill on a slow machine."""
CONFIRM_SECONDS = 60.0
FLIP_SECONDS = 600.0
POLL_SECONDS = 0.05
"""How stale the engine's counts may be seen while requests drain."""


@dataclass(slots=True)
class _Section:
    """One commit under way: the outputs that ran when it began, and its measured pause."""

    running: list[Output] = field(default_factory=list)
    closed_at: float = 0.0
    pause_seconds: float = 0.0

    def count(self, *, stopped: bool, aborted: bool = False) -> int:
        """How many of the outputs are still under way, aborted, or ended by themselves."""
        return sum(
            (output.stop_reason is not None) is stopped
            and (output.stop_reason is StopReason.ABORTED) is aborted
            for output in self.running
        )


class Commits:
    """Commits of one worker, one at a time."""

    def __init__(self, runtime: Runtime, updates: Updates, flights: Flights) -> None:
        self._runtime = runtime
        self._updates = updates
        self._flights = flights
        self._last: CommitResponse | None = None

    async def commit(self, caller: str, request: CommitRequest) -> CommitResponse:
        """Make staged weights the active ones; a repeated call gets the same answer.

        Runs to its end even if the caller goes away.

        Raises:
            ProblemError: 409 or 422, nothing changed; 503, the engine died and is being replaced.
        """
        return await asyncio.shield(asyncio.create_task(self._commit(caller, request)))

    async def _commit(self, caller: str, request: CommitRequest) -> CommitResponse:
        runtime, updates = self._runtime, self._updates
        runtime.loaded()
        self._check_policy(request)
        wait = request.deadline_seconds + LOCK_SLACK_SECONDS
        async with runtime.alone(wait), updates.slot_lock:
            done = self._already(request)
            if done is not None:
                return done
            slot = self._check(request)
            logger.info("committing weights %s for %r", slot.identity, caller)
            start = time.monotonic()
            try:
                await self._confirm(slot)
                answer = await self._flip(request, slot)
            except WeightsRejected as error:
                raise ProblemError("weights-rejected", f"{self._rest}: {error}") from error
            except EngineCrashed as error:
                raise ProblemError(
                    "failed",
                    f"the engine died in the commit and is restarted: {error}",
                    retry_after=5,
                ) from error
            except EngineError as error:
                raise ProblemError(
                    "engine-refused", f"{self._rest}: {error}", retry_after=5
                ) from error
            finally:
                seconds = time.monotonic() - start
                runtime.telemetry.update_seconds.labels("commit").observe(seconds)
        self._last = answer
        return answer

    @property
    def _rest(self) -> str:
        """What a commit leaves behind that didn't happen."""
        return "no weights are loaded yet" if self._updates.empty else "the old weights serve on"

    def _check_policy(self, request: CommitRequest) -> None:
        engine, info = self._runtime.loaded()
        able = engine.capabilities.in_flight
        asked: dict[str, str] = {"in_flight": request.in_flight}
        if _may_keep(request):
            asked["on_deadline"] = "Keep"
        for name, policy in asked.items():
            if policy not in able:
                fix = f"the engine {info.engine} can't {policy!r}: "
                fix += f"use one of {', '.join(able)}" if name == "in_flight" else "use 'Abort'"
                errors = [{"field": name, "message": fix}]
                raise ProblemError("unsupported", fix, errors=errors)

    def _already(self, request: CommitRequest) -> CommitResponse | None:
        """The answer if these weights are active already."""
        self._runtime.loaded()
        active = self._updates.active
        if active is None or self._updates.empty or active.identity != _identity(request):
            return None
        self._check_hash(request, active.root_hash)
        last = self._last
        if last is not None and last.active == active:
            return last
        return self._answer(_Section())

    def _check(self, request: CommitRequest) -> Slot:
        runtime, updates, identity = self._runtime, self._updates, _identity(request)
        if runtime.shutting_down:
            raise conflict("shutting-down", "the worker shuts down: commit on another replica")
        updates.check_order(identity)
        updates.check_resident()
        slot = updates.slot
        if slot is None or slot.identity != identity or not slot.staged:
            there = "nothing" if slot is None else f"{slot.identity} is {slot.view().phase}"
            raise conflict(
                "not-staged",
                f"weights {identity} are not staged (in the slot: {there}): POST /v1/weights/stage"
                " and wait for phase Staged",
                **updates.facts,
            )
        self._check_hash(request, slot.root_hash)
        return slot

    def _check_hash(self, request: CommitRequest, root_hash: str | None) -> None:
        if request.root_hash not in (None, root_hash):
            raise conflict(
                "content-mismatch",
                f"weights {_identity(request)} have root_hash {root_hash}, the call says"
                f" {request.root_hash}: publish new bytes under a higher version",
                root_hash=root_hash,
                **self._updates.facts,
            )

    async def _confirm(self, slot: Slot) -> None:
        """See that all nodes of a gang still hold it, while everything goes on.

        Raises:
            EngineError: one doesn't; it has to be staged again.
        """
        gang = self._runtime.gang
        if gang is None:
            return
        try:
            await self._runtime.call(
                gang.confirm(slot.shared, slot.root_hash), CONFIRM_SECONDS, "confirm", fatal=False
            )
        except EngineError as error:
            slot.error = str(error)
            raise

    async def _flip(self, request: CommitRequest, slot: Slot) -> CommitResponse:
        runtime, updates = self._runtime, self._updates
        engine, _ = runtime.loaded()
        if request.in_flight == "Pin":
            await self._await_unpinned(request)
        section = _Section(running=self._running())
        async with self._closed(engine, request, slot.identity, section):
            kv = _kv(request)
            if kv == "pin" and updates.empty:
                kv = "recompute"  # the former weights are no more
            flip = engine.commit(slot.identity, slot.take(), kv)
            try:
                await runtime.call(flip, FLIP_SECONDS, "commit")
            except EngineError as error:
                slot.error = str(error)
                slot.give_up(slot.error)
                raise
            updates.activate(slot)
            runtime.holds.committed()
            await self._end_exact(slot.identity, section)
        runtime.telemetry.pause_seconds.observe(section.pause_seconds)
        answer = self._answer(section)
        _log(answer)
        return answer

    def _answer(self, section: _Section) -> CommitResponse:
        updates = self._updates
        assert updates.active is not None
        return CommitResponse(
            active=updates.active,
            previous=updates.previous,
            commit_seq=updates.commit_seq,
            pause_seconds=section.pause_seconds,
            finished=section.count(stopped=True),
            aborted=section.count(stopped=True, aborted=True),
            kept=section.count(stopped=False),
        )

    @asynccontextmanager
    async def _closed(
        self, engine: Engine, request: CommitRequest, identity: WeightsId, section: _Section
    ) -> AsyncIterator[None]:
        """Settle what runs and keep the engine from stepping inside the block."""
        runtime = self._runtime
        ours = runtime.lifecycle.state is Lifecycle.ACTIVE
        runtime.holds.committing = identity
        runtime.changed.fire()
        with self._updates.freeing.later():
            try:
                await self._settle(engine, request, section, ours)
                if ours:
                    await runtime.call(engine.pause(), PAUSE_SECONDS, "pause")
                section.closed_at = time.monotonic()
                yield
            finally:
                try:
                    if ours and runtime.alive:
                        await self._resume(engine)
                finally:  # also if the engine dies just now: its successor commits nothing
                    section.pause_seconds = time.monotonic() - section.closed_at
                    runtime.holds.committing = None
                    runtime.changed.fire()

    async def _resume(self, engine: Engine) -> None:
        """Let it step again; one that refuses would stand still for ever, so it is replaced.

        Raises:
            EngineCrashed: it could not.
        """
        runtime = self._runtime
        try:
            await runtime.call(engine.resume(), PAUSE_SECONDS, "resume")
        except EngineCrashed:
            raise
        except EngineError as error:
            runtime.crashed(f"resume failed: {error}")
            raise EngineCrashed(f"resume failed: {error}") from error

    async def _settle(
        self, engine: Engine, request: CommitRequest, section: _Section, ours: bool
    ) -> None:
        """Let running requests end, or end them, as the policy says; the queue stays."""
        if request.in_flight not in ("Drain", "Abort"):
            return
        await self._runtime.call(engine.hold_admission(), PAUSE_SECONDS, "hold_admission")
        # Who was started between the first look and the hold counts as running, too.
        section.running.extend(o for o in self._running() if o not in section.running)
        if request.in_flight == "Drain":
            # What another's hold has frozen can't end by itself.
            if ours:
                await self._wait_while(lambda now: now.running, request.deadline_seconds)
                self._runtime.check_alive()
            if request.on_deadline == "Keep":
                return
        await self._flights.abort_outputs(self._running(), AbortReason.WEIGHTS)

    async def _wait_while(self, still: Callable[[EngineStats], object], seconds: float) -> None:
        runtime, until = self._runtime, time.monotonic() + seconds
        while runtime.alive and still(runtime.stats()) and time.monotonic() < until:
            left = max(0.0, until - time.monotonic())
            await runtime.changed.wait(min(POLL_SECONDS, left))

    async def _await_unpinned(self, request: CommitRequest) -> None:
        """Wait until no output runs on weights before the active ones: an engine holds two sets.

        Everything goes on meanwhile. Past the deadline those outputs end, or, with `Keep`, go
        over to the weights committed now.
        """
        runtime = self._runtime
        # What another's hold has frozen can't end by itself.
        seconds = request.deadline_seconds if runtime.lifecycle.state is Lifecycle.ACTIVE else 0
        await self._wait_while(lambda now: now.pinned_ids, seconds)
        runtime.check_alive()
        if request.on_deadline == "Abort":
            pinned = self._outputs(runtime.stats().pinned_ids)
            await self._flights.abort_outputs(pinned, AbortReason.WEIGHTS)

    def _running(self) -> list[Output]:
        return self._outputs(self._runtime.stats().running_ids)

    def _outputs(self, ids: Collection[str]) -> list[Output]:
        unfinished = self._flights.unfinished
        return [unfinished[i] for i in ids if i in unfinished]

    async def _end_exact(self, active: WeightsId, section: _Section) -> None:
        """End those who asked for exactly other weights; nothing steps meanwhile.

        Who is pinned goes on: only the weights before the active ones are, and they asked for them.
        """
        pinned = self._runtime.stats().pinned_ids
        outputs = [
            output
            for output in self._flights.exact_elsewhere(active)
            if output.request.request_id not in pinned
        ]
        section.running.extend(o for o in outputs if o not in section.running)
        await self._flights.abort_outputs(outputs, AbortReason.WEIGHTS)


def _identity(request: CommitRequest) -> WeightsId:
    return WeightsId(epoch=request.epoch, version=request.version)


def _may_keep(request: CommitRequest) -> bool:
    """Whether those that still run at the deadline go on with their KV."""
    return request.in_flight in ("Drain", "Pin") and request.on_deadline == "Keep"


def _kv(request: CommitRequest) -> KvPolicy:
    """Only who asked to keep KV keeps it; requests that have none yet are prefilled anyway."""
    if request.in_flight == "Pin":
        return "pin"
    keep = request.in_flight == "Keep" or _may_keep(request)
    return "keep" if keep else "recompute"


def _log(answer: CommitResponse) -> None:
    was = None if answer.previous is None else answer.previous.identity
    figures = {name: getattr(answer, name) for name in ("finished", "aborted", "kept")}
    figures["pause_seconds"] = round(answer.pause_seconds, 6)
    logger.info("committed weights %s, before %s", answer.active.identity, was, extra=figures)
