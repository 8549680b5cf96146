"""The critical section that flips weights, label and admission together.

Running requests end or go on as the in-flight policy says. Queued requests run on the new weights. A request for
exactly the old weights ends with partial output, unless it is pinned to them. A failure leaves the old
weights serving, or a dead engine that the supervisor replaces: never unverified weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rollout_common.wire import (
    AbortReason,
    CommitRequest,
    CommitResponse,
    Lifecycle,
    StopReason,
    WeightsId,
)
from rollout_common.wire.problems import ProblemError, conflict_problem
from rollout_worker.core.worker_runtime import WorkerRuntime
from rollout_worker.engine import (
    Engine,
    EngineCrashed,
    EngineError,
    EngineStats,
    KvPolicy,
    WeightsRejected,
)
from rollout_worker.requests.in_flight_requests import InFlightRequests
from rollout_worker.requests.running_output import RunningOutput

from .settings import (
    DRAIN_POLL_SECONDS,
    ENGINE_COMMIT_SECONDS,
    ENGINE_PAUSE_SECONDS,
    LOCK_SLACK_SECONDS,
    MEMBERS_CONFIRM_SECONDS,
)
from .staging_slot import StagingSlot
from .weight_updates import WeightUpdates

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _CommitSection:
    """One commit under way: the outputs that ran when it began, and the measured pause."""

    running: list[RunningOutput] = field(default_factory=list)
    closed_at: float = 0.0
    pause_seconds: float = 0.0

    def count_outputs(self, *, stopped: bool, aborted: bool = False) -> int:
        """Count the outputs that still run, were aborted, or ended by themselves."""
        return sum(
            (output.stop_reason is not None) is stopped
            and (output.stop_reason is StopReason.ABORTED) is aborted
            for output in self.running
        )


class WeightCommits:
    """Commits of one worker, one at a time."""

    def __init__(
        self, runtime: WorkerRuntime, updates: WeightUpdates, flights: InFlightRequests
    ) -> None:
        self._runtime = runtime
        self._updates = updates
        self._flights = flights
        self._last: CommitResponse | None = None

    async def commit_weights(self, caller: str, request: CommitRequest) -> CommitResponse:
        """Make staged weights the active ones; a repeated call gets the same answer.

        Runs to its end even if the caller goes away.

        Raises:
            ProblemError: 409 or 422, nothing changed; 503, the engine died and is being replaced.
        """
        return await asyncio.shield(asyncio.create_task(self._commit_locked(caller, request)))

    async def _commit_locked(self, caller: str, request: CommitRequest) -> CommitResponse:
        runtime, updates = self._runtime, self._updates
        runtime.loaded_engine()
        self._check_policy(request)
        wait = request.deadline_seconds + LOCK_SLACK_SECONDS
        async with runtime.exclusive_within(wait), updates.slot_lock:
            done = self._answer_if_active(request)
            if done is not None:
                return done
            slot = self._check_staged(request)
            if slot.adapters:
                self._check_policy(request, adapters=True)
            logger.info("committing weights %s for %r", slot.identity, caller)
            start = time.monotonic()
            try:
                await self._confirm_members(slot)
                answer = await self._flip_weights(request, slot)
            except WeightsRejected as error:
                raise ProblemError(
                    "weights-rejected", f"{self._state_without_commit}: {error}"
                ) from error
            except EngineCrashed as error:
                raise ProblemError(
                    "failed",
                    f"the engine died in the commit and is restarted: {error}",
                    retry_after=5,
                ) from error
            except EngineError as error:
                raise ProblemError(
                    "engine-refused", f"{self._state_without_commit}: {error}", retry_after=5
                ) from error
            finally:
                seconds = time.monotonic() - start
                runtime.telemetry.update_seconds.labels("commit").observe(seconds)
        self._last = answer
        return answer

    @property
    def _state_without_commit(self) -> str:
        """What a commit that failed leaves behind."""
        return "no weights are loaded yet" if self._updates.empty else "the old weights serve on"

    def _check_policy(self, request: CommitRequest, *, adapters: bool = False) -> None:
        """Refuse a policy that the engine can't keep to; `adapters`: of a commit that brings some."""
        engine, info = self._runtime.loaded_engine()
        able, when = engine.capabilities.in_flight, ""
        if adapters:
            able, when = engine.capabilities.adapters_in_flight, " while adapters change"
        asked: dict[str, str] = {"in_flight": request.in_flight}
        if _keeps_kv_at_deadline(request):
            asked["on_deadline"] = "Keep"
        for name, policy in asked.items():
            if policy not in able:
                fix = f"the engine {info.engine} can't {policy!r}{when}: "
                fix += f"use one of {', '.join(able)}" if name == "in_flight" else "use 'Abort'"
                errors = [{"field": name, "message": fix}]
                raise ProblemError("unsupported", fix, errors=errors)

    def _answer_if_active(self, request: CommitRequest) -> CommitResponse | None:
        self._runtime.loaded_engine()
        active = self._updates.active
        if active is None or self._updates.empty or active.identity != request.identity:
            return None
        self._check_hash(request, active.root_hash)
        last = self._last
        if last is not None and last.active == active:
            return last
        return self._commit_answer(_CommitSection())

    def _check_staged(self, request: CommitRequest) -> StagingSlot:
        runtime, updates, identity = self._runtime, self._updates, request.identity
        if runtime.shutting_down:
            raise conflict_problem(
                "shutting-down", "the worker shuts down: commit on another replica"
            )
        updates.check_order(identity)
        updates.check_resident()
        slot = updates.slot
        if slot is None or slot.identity != identity or not slot.is_staged:
            there = "nothing" if slot is None else f"{slot.identity} is {slot.to_view().phase}"
            raise conflict_problem(
                "not-staged",
                f"weights {identity} are not staged (in the slot: {there}): POST /v1/weights/stage"
                " and wait for phase Staged",
                **updates.refusal_facts,
            )
        self._check_hash(request, slot.root_hash)
        return slot

    def _check_hash(self, request: CommitRequest, root_hash: str | None) -> None:
        if request.root_hash not in (None, root_hash):
            raise conflict_problem(
                "content-mismatch",
                f"weights {request.identity} have root_hash {root_hash}, the call says"
                f" {request.root_hash}: publish new bytes under a higher version",
                root_hash=root_hash,
                **self._updates.refusal_facts,
            )

    async def _confirm_members(self, slot: StagingSlot) -> None:
        """Check that all nodes of a gang still hold the slot, before anything is paused.

        Raises:
            EngineError: a node doesn't; the slot must be staged again.
        """
        gang = self._runtime.gang
        if gang is None:
            return
        try:
            await self._runtime.call_engine(
                gang.confirm_slots(slot.shared_sink_id, slot.root_hash),
                MEMBERS_CONFIRM_SECONDS,
                "confirm",
                fatal=False,
            )
        except EngineError as error:
            slot.error = str(error)
            raise

    async def _flip_weights(self, request: CommitRequest, slot: StagingSlot) -> CommitResponse:
        runtime, updates = self._runtime, self._updates
        engine, _ = runtime.loaded_engine()
        if request.in_flight == "Pin":
            await self._await_unpinned(request)
        section = _CommitSection(running=self._running_outputs())
        async with self._engine_paused(engine, request, slot.identity, section):
            kv = _kv_policy(request)
            if kv == "pin" and updates.empty:
                kv = "recompute"  # sleep has dropped the former weights
            await self._abort_without_adapter(slot, section, kv)
            flip = engine.commit(slot.identity, slot.take_sink(), kv)
            try:
                await runtime.call_engine(flip, ENGINE_COMMIT_SECONDS, "commit")
            except EngineError as error:
                slot.error = str(error)
                slot.give_up_push(slot.error)
                raise
            updates.activate_slot(slot)
            runtime.holds.note_committed()
            await self._abort_pinned_elsewhere(slot.identity, section)
        runtime.telemetry.pause_seconds.observe(section.pause_seconds)
        answer = self._commit_answer(section)
        _log_commit(answer)
        return answer

    def _commit_answer(self, section: _CommitSection) -> CommitResponse:
        updates = self._updates
        assert updates.active is not None
        return CommitResponse(
            active=updates.active,
            previous=updates.previous,
            commit_seq=updates.commit_seq,
            pause_seconds=section.pause_seconds,
            finished=section.count_outputs(stopped=True),
            aborted=section.count_outputs(stopped=True, aborted=True),
            kept=section.count_outputs(stopped=False),
        )

    @asynccontextmanager
    async def _engine_paused(
        self, engine: Engine, request: CommitRequest, identity: WeightsId, section: _CommitSection
    ) -> AsyncIterator[None]:
        """End running requests as the policy says, and keep the engine from stepping inside the block."""
        runtime = self._runtime
        ours = runtime.lifecycle.current_state is Lifecycle.ACTIVE
        runtime.holds.committing = identity
        runtime.changed.notify_all()
        with self._updates.freeing.postpone_freeing():
            try:
                await self._settle_requests(engine, request, section, ours)
                if ours:
                    await runtime.call_engine(engine.pause(), ENGINE_PAUSE_SECONDS, "pause")
                section.closed_at = time.monotonic()
                yield
            finally:
                try:
                    if ours and runtime.is_alive:
                        await self._resume_engine(engine)
                finally:  # also if the engine dies now: the next one continues no commit
                    section.pause_seconds = time.monotonic() - section.closed_at
                    runtime.holds.committing = None
                    runtime.changed.notify_all()

    async def _resume_engine(self, engine: Engine) -> None:
        """Let the engine step again; report it as dead if it refuses, because nothing else would resume it.

        Raises:
            EngineCrashed: the engine refused or died.
        """
        runtime = self._runtime
        try:
            await runtime.call_engine(engine.resume(), ENGINE_PAUSE_SECONDS, "resume")
        except EngineCrashed:
            raise
        except EngineError as error:
            runtime.report_crash(f"resume failed: {error}")
            raise EngineCrashed(f"resume failed: {error}") from error

    async def _settle_requests(
        self, engine: Engine, request: CommitRequest, section: _CommitSection, ours: bool
    ) -> None:
        """Wait for running requests or abort them, as the policy says; queued ones stay."""
        if request.in_flight not in ("Drain", "Abort"):
            return
        await self._runtime.call_engine(
            engine.hold_admission(), ENGINE_PAUSE_SECONDS, "hold_admission"
        )
        # Requests that began after the first look and before the hold ran, too.
        section.running.extend(o for o in self._running_outputs() if o not in section.running)
        if request.in_flight == "Drain":
            # Requests that another caller's hold has frozen can't end by themselves.
            if ours:
                await self._wait_while(lambda now: now.running, request.deadline_seconds)
                self._runtime.check_alive()
            if request.on_deadline == "Keep":
                return
        await self._flights.abort_outputs(self._running_outputs(), AbortReason.WEIGHTS)

    async def _wait_while(self, still: Callable[[EngineStats], object], seconds: float) -> None:
        runtime, until = self._runtime, time.monotonic() + seconds
        while runtime.is_alive and still(runtime.engine_stats()) and time.monotonic() < until:
            left = max(0.0, until - time.monotonic())
            await runtime.changed.wait_for_change(min(DRAIN_POLL_SECONDS, left))

    async def _await_unpinned(self, request: CommitRequest) -> None:
        """Wait until no output runs on weights before the active ones: an engine holds two sets.

        The engine keeps stepping. Past the deadline those outputs end or, with `Keep`, change to the
        weights committed now.
        """
        runtime = self._runtime
        # Outputs that another caller's hold has frozen can't end by themselves.
        active = runtime.lifecycle.current_state is Lifecycle.ACTIVE
        seconds = request.deadline_seconds if active else 0
        await self._wait_while(lambda now: now.pinned_ids, seconds)
        runtime.check_alive()
        if request.on_deadline == "Abort":
            pinned = self._outputs_of(runtime.engine_stats().pinned_ids)
            await self._flights.abort_outputs(pinned, AbortReason.WEIGHTS)

    def _running_outputs(self) -> list[RunningOutput]:
        return self._outputs_of(self._runtime.engine_stats().running_ids)

    def _outputs_of(self, ids: Collection[str]) -> list[RunningOutput]:
        unfinished = self._flights.unfinished_outputs
        return [unfinished[i] for i in ids if i in unfinished]

    async def _abort_without_adapter(
        self, slot: StagingSlot, section: _CommitSection, kv: KvPolicy
    ) -> None:
        """End outputs whose adapter the new weights don't have, while the engine is paused; pinned ones keep theirs."""
        names = {adapter.name for adapter in slot.adapters}
        keeping = self._runtime.engine_stats().running_ids if kv == "pin" else frozenset()
        outputs = [
            output
            for request_id, output in self._flights.unfinished_outputs.items()
            if output.request.adapter not in (None, *names) and request_id not in keeping
        ]
        section.running.extend(o for o in outputs if o not in section.running)
        await self._flights.abort_outputs(outputs, AbortReason.WEIGHTS)

    async def _abort_pinned_elsewhere(self, active: WeightsId, section: _CommitSection) -> None:
        """End outputs that asked for exactly other weights, while the engine is paused.

        Pinned outputs go on: they run on the weights before the active ones, which they asked for.
        """
        pinned = self._runtime.engine_stats().pinned_ids
        outputs = [
            output
            for output in self._flights.outputs_pinned_elsewhere(active)
            if output.request.request_id not in pinned
        ]
        section.running.extend(o for o in outputs if o not in section.running)
        await self._flights.abort_outputs(outputs, AbortReason.WEIGHTS)


def _keeps_kv_at_deadline(request: CommitRequest) -> bool:
    """Return whether outputs that still run at the deadline go on with their KV."""
    return request.in_flight in ("Drain", "Pin") and request.on_deadline == "Keep"


def _kv_policy(request: CommitRequest) -> KvPolicy:
    if request.in_flight == "Pin":
        return "pin"
    keep = request.in_flight == "Keep" or _keeps_kv_at_deadline(request)
    return "keep" if keep else "recompute"


def _log_commit(answer: CommitResponse) -> None:
    was = None if answer.previous is None else answer.previous.identity
    figures = {name: getattr(answer, name) for name in ("finished", "aborted", "kept")}
    figures["pause_seconds"] = round(answer.pause_seconds, 6)
    logger.info("committed weights %s, before %s", answer.active.identity, was, extra=figures)
