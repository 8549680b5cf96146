"""Moves the worker to the state that its live holds ask for.

One level-triggered task compares target and state and takes one step at a time, under the same lock
as commits. Verbs only change holds and wait until the governor `is_settled`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from math import inf
from typing import Literal

from rollout_common.wire import AbortReason, Lifecycle, MemoryTag
from rollout_common.wire.problems import ProblemError, conflict_problem
from rollout_worker.core.holds import EVERYTHING, HoldTarget, WantedState
from rollout_worker.core.worker_runtime import WorkerRuntime
from rollout_worker.engine import EngineCrashed, EngineError, WeightsRejected
from rollout_worker.requests.in_flight_requests import InFlightRequests
from rollout_worker.updates.weight_updates import WeightUpdates

from .settings import ENGINE_PAUSE_SECONDS, MEMORY_CALL_SECONDS, TRANSITION_RETRY_SECONDS

logger = logging.getLogger(__name__)

Mode = Literal["drain", "abort", "keep"]

_SETTLED_STATES = {
    WantedState.ACTIVE: Lifecycle.ACTIVE,
    WantedState.PAUSED: Lifecycle.PAUSED,
    WantedState.ASLEEP: Lifecycle.ASLEEP,
}


class LifecycleGovernor:
    """Follows the holds of one worker."""

    def __init__(
        self, runtime: WorkerRuntime, updates: WeightUpdates, flights: InFlightRequests
    ) -> None:
        self._runtime = runtime
        self._updates = updates
        self._flights = flights
        self._failure: EngineError | None = None
        self._failures = 0
        self._steps = {
            Lifecycle.ACTIVE: self._leave_active,
            Lifecycle.PAUSING: self._quiesce_requests,
            Lifecycle.DRAINING: self._quiesce_requests,
            Lifecycle.PAUSED: self._leave_paused,
            Lifecycle.ASLEEP: self._change_sleep_tags,
        }
        self.note_engine_replaced()

    def note_engine_replaced(self) -> None:
        """Start over with a new engine, which runs and has all its memory."""
        self._frozen = self._resuming = False
        self._released: frozenset[MemoryTag] = frozenset()
        self._level, self._updates.dropped = 1, False
        self._forget_drain_plan()

    def note_engine_gone(self) -> None:
        """Note that the engine died while it should be asleep: all its memory is free."""
        self._forget_drain_plan()
        self._released, self._level = EVERYTHING, self._runtime.hold_target().level
        self._updates.empty, self._updates.dropped = False, True

    def _forget_drain_plan(self) -> None:
        self._drain_until = inf
        self._keep = False

    def plan_drain(self, holder: str, mode: Mode, deadline_seconds: float) -> None:
        """Set how running requests end for a hold; the earliest deadline of all holds wins."""
        runtime, now = self._runtime, time.monotonic()
        is_first = not runtime.holds.other_holders(holder, now)
        if is_first and runtime.lifecycle.current_state is Lifecycle.ACTIVE:
            self._forget_drain_plan()  # of holds that ended before a step was taken for them
        self._keep = mode == "keep"
        if mode != "keep":
            until = now + (deadline_seconds if mode == "drain" else 0.0)
            self._drain_until = min(self._drain_until, until)
        self._runtime.changed.notify_all()

    @property
    def is_frozen(self) -> bool:
        """Whether the engine makes no step for requests that run."""
        return self._frozen

    @property
    def is_settled(self) -> bool:
        """Whether the worker is in the state that the holds ask for."""
        target = self._runtime.hold_target()
        state = self._runtime.lifecycle.current_state
        if self._resuming or state is not _SETTLED_STATES[target.want]:
            return False
        if self._lacks_weight_values(target):
            return False
        if target.want is not WantedState.ASLEEP:
            return True
        return target.released == self._released and not self._needs_deeper_sleep(target)

    def _lacks_weight_values(self, target: HoldTarget) -> bool:
        """Whether the weights have memory but no values, and nobody waits for a commit."""
        return self._updates.empty and target.load and "weights" not in target.released

    @property
    def has_no_weights(self) -> bool:
        """Whether the values of the weights are missing from memory."""
        return self._updates.empty or "weights" in self._released

    def _needs_deeper_sleep(self, target: HoldTarget) -> bool:
        return target.level > self._level and "weights" in target.released & self._released

    def is_resident(self, tags: Collection[MemoryTag]) -> bool:
        """Whether this memory is back, with its values, as far as no hold wants it released."""
        target = self._runtime.hold_target()
        if "weights" in tags and self._lacks_weight_values(target):
            return False
        return self._released.difference(target.released).isdisjoint(tags)

    async def wait_until(
        self, reached: Callable[[], bool], seconds: float, wanted: Callable[[], bool]
    ) -> None:
        """Wait until `reached` is true.

        Raises:
            ProblemError: the transition failed, took over `seconds`, or `wanted` became false.
        """
        runtime, failures = self._runtime, self._failures
        until = time.monotonic() + seconds
        while True:
            # Before `reached`: without its hold the state would not stay.
            if not wanted():
                raise conflict_problem(
                    "changed-meanwhile", "the hold expired or was released in the meantime"
                )
            if reached():
                return
            if not runtime.lifecycle.has_engine or runtime.shutting_down:
                raise runtime.wrong_state_problem("try again once it is serving")
            if self._failures != failures:
                rejected = isinstance(self._failure, WeightsRejected)
                slug = "weights-rejected" if rejected else "engine-refused"
                raise ProblemError(
                    slug, f"{self._failure}; the worker keeps retrying", retry_after=5
                )
            now = time.monotonic()
            if now >= until:
                raise ProblemError(
                    "deadline-exceeded",
                    f"still {runtime.lifecycle.current_state.value} after {seconds:g} s; the hold remains",
                )
            # While a commit keeps the governor waiting, the end of a hold is not reported, and it stays listed.
            expiry = runtime.holds.next_expiry(now)
            await runtime.changed.wait_for_change(min(until, expiry) - now)

    async def follow_holds(self) -> None:
        """Follow the holds until cancelled."""
        runtime = self._runtime
        while True:
            pause = max(0.0, runtime.holds.next_expiry() - time.monotonic())
            try:
                if await self._take_step():
                    continue
            except EngineCrashed as error:
                logger.warning("the engine died during a transition: %s", error)
            except EngineError as error:
                self._note_failure(error)
                pause = min(pause, TRANSITION_RETRY_SECONDS)
                await asyncio.sleep(pause)
                continue
            await runtime.changed.wait_for_change(None if pause == inf else pause)

    def _note_failure(self, error: EngineError) -> None:
        logger.error("a transition failed: %s", error)
        self._failure, self._failures = error, self._failures + 1
        self._runtime.last_error = str(error)
        self._runtime.changed.notify_all()

    async def _take_step(self) -> bool:
        """Take one step; return False if none is left."""
        runtime = self._runtime
        if self.is_settled or not runtime.lifecycle.has_engine or runtime.shutting_down:
            return False
        async with runtime.exclusive:
            step = self._steps.get(runtime.lifecycle.current_state)
            if self.is_settled or step is None or not runtime.is_alive or runtime.shutting_down:
                return False
            await step()
        # Waiters must check again: some steps change memory but not the state.
        runtime.changed.notify_all()
        return True

    async def _leave_active(self) -> None:
        asleep = self._runtime.hold_target().want is WantedState.ASLEEP
        self._runtime.lifecycle.move_to(Lifecycle.DRAINING if asleep else Lifecycle.PAUSING)

    async def _leave_paused(self) -> None:
        target = self._runtime.hold_target()
        if target.want is WantedState.ASLEEP:
            self._runtime.lifecycle.move_to(Lifecycle.DRAINING)
        elif self._lacks_weight_values(target):
            await self._load_active_weights()
        else:
            await self._resume_engine()

    async def _load_active_weights(self) -> None:
        """Load the active weights into memory that woke without values; no commit came instead."""
        runtime, updates = self._runtime, self._updates
        engine, _ = runtime.loaded_engine()
        active = updates.active_identity
        assert active is not None, "an engine has loaded weights"
        logger.info("reading weights %s, without which the memory woke", active)
        with runtime.telemetry.time_transition("wake"):
            await runtime.call_engine(engine.pause(), ENGINE_PAUSE_SECONDS, "pause")
            # The lock keeps other versions that are staged: their commit may still come.
            async with updates.slot_lock:
                sink = await runtime.call_engine(
                    updates.refill_active(), MEMORY_CALL_SECONDS, "refill"
                )
                if updates.slot is not None and updates.slot.is_lent:
                    await updates.clear_slot()  # its values are where these go
                filling = engine.commit(active, sink, "recompute")
                await runtime.call_engine(filling, MEMORY_CALL_SECONDS, "commit")
                updates.empty = False

    async def _resume_engine(self) -> None:
        if self._updates.empty:
            await self._load_active_weights()
        engine, _ = self._runtime.loaded_engine()
        # Before the await: a pause that arrives during it sets a plan of its own.
        self._forget_drain_plan()
        # And that pause is not reached, though the state still says Paused: the engine may step already.
        self._resuming = True
        try:
            with self._runtime.telemetry.time_transition("resume"):
                await self._runtime.call_engine(engine.resume(), ENGINE_PAUSE_SECONDS, "resume")
        finally:
            self._resuming = False
        self._frozen = False
        self._runtime.lifecycle.move_to(Lifecycle.ACTIVE)

    async def _quiesce_requests(self) -> None:
        """Leave Pausing or Draining: end or freeze running requests, then follow the holds."""
        runtime = self._runtime
        engine, _ = runtime.loaded_engine()
        with runtime.telemetry.time_transition("quiesce"):
            await self._drain_requests()
            runtime.check_alive()
            if runtime.shutting_down and not self._frozen:
                return  # they get the shutdown's own time
            want = runtime.hold_target().want
            if want is WantedState.ACTIVE:
                await self._resume_engine()
                return
            if not self._frozen:
                await self._end_remaining(want)
                await runtime.call_engine(engine.pause(), ENGINE_PAUSE_SECONDS, "pause")
                self._frozen = True
            elif want is WantedState.ASLEEP:
                await self._end_remaining(want)
        # The holds may have changed while the engine was pausing.
        want = runtime.hold_target().want
        if want is WantedState.PAUSED:
            runtime.lifecycle.move_to(Lifecycle.PAUSED)
        elif want is WantedState.ASLEEP:
            await self._fall_asleep()
        else:
            await self._resume_engine()

    async def _drain_requests(self) -> None:
        """Wait until accepted requests have finished, or the plan or the target changes."""
        runtime = self._runtime
        while not self._frozen and not self._keep and len(self._flights) and runtime.is_alive:
            left = self._drain_until - time.monotonic()
            resumes = runtime.hold_target().want is WantedState.ACTIVE
            if left <= 0 or resumes or runtime.shutting_down:
                return
            expiry = runtime.holds.next_expiry() - time.monotonic()
            left = min(left, max(0.01, expiry))
            await runtime.changed.wait_for_change(None if left == inf else left)

    async def _end_remaining(self, want: WantedState) -> None:
        if not self._keep:
            reason = AbortReason.SLEEP if want is WantedState.ASLEEP else AbortReason.CONTROL
            await self._flights.abort_all(reason)

    async def _fall_asleep(self) -> None:
        runtime = self._runtime
        if runtime.lifecycle.current_state is Lifecycle.PAUSING:
            runtime.lifecycle.move_to(Lifecycle.DRAINING)
        target = runtime.hold_target()
        await self._release_memory(target)
        runtime.lifecycle.move_to(Lifecycle.ASLEEP)

    async def _release_memory(self, target: HoldTarget) -> None:
        """Give memory back; active, staged and pinned weights go together, what is pushed later stays."""
        if "weights" not in target.released - self._released:
            await self._put_to_sleep(target)
            return
        async with self._updates.slot_lock:  # so that nobody stages before they are gone
            staged = self._updates.slot
            if staged is not None:
                logger.info("falling asleep: weights %s are given up", staged.identity)
            await self._updates.clear_slot()
            # First, because memory that is being freed may become the spare.
            await self._updates.wait_until_freed()
            await asyncio.to_thread(self._updates.pushes.spare.drop_memory)
            await self._abort_pinned()
            await self._put_to_sleep(target)

    async def _abort_pinned(self) -> None:
        """End the outputs that may run only on weights before the active ones."""
        active = self._updates.active_identity
        assert active is not None, "an engine has loaded weights"
        await self._flights.abort_outputs(
            self._flights.outputs_pinned_elsewhere(active), AbortReason.WEIGHTS
        )
        self._runtime.check_alive()

    async def _put_to_sleep(self, target: HoldTarget) -> None:
        runtime = self._runtime
        engine, _ = runtime.loaded_engine()
        level = 2 if self._updates.empty else target.level  # no values to keep
        if runtime.turn is not None and not self._released:
            await runtime.turn.note_use()
        with runtime.telemetry.time_transition("sleep"):
            asleep = engine.sleep(level, target.released, self._updates.refill_base)
            await runtime.call_engine(asleep, MEMORY_CALL_SECONDS, "sleep")
        self._released, self._level = self._released | target.released, level
        if "weights" in target.released:
            self._updates.empty, self._updates.dropped = False, level == 2
        await self._give_devices_back()

    async def _give_devices_back(self) -> None:
        """Give the turn back if the engine has no memory of the devices."""
        if self._runtime.turn is not None and self._released.issuperset(EVERYTHING):
            await self._runtime.turn.give_back()

    async def _change_sleep_tags(self) -> None:
        """Stay Asleep or leave it: restore memory that no hold wants released, or release more."""
        target = self._runtime.hold_target()
        surplus = self._released - target.released
        if self._lacks_weight_values(target):
            await self._load_active_weights()
        elif surplus or target.want is not WantedState.ASLEEP:
            await self._wake_memory(surplus)
        else:
            await self._release_memory(target)

    def _needs_new_weights(self, tags: Collection[MemoryTag]) -> bool:
        """Whether sleep dropped weights that only a new stage can bring, which needs their memory."""
        return self._level == 2 and "weights" in tags and self._updates.has_no_copy

    async def _take_turn(self, tags: frozenset[MemoryTag]) -> bool:
        runtime = self._runtime
        # Weights wake in the turn of the trainer that lends them; the rest waits until it has left.
        turn = runtime.turn
        if runtime.holds.lending and tags == {"weights"} and turn is not None and turn.is_lent:
            return True
        return await runtime.take_turn(lambda: not self.is_resident(tags))

    async def _wake_memory(self, tags: frozenset[MemoryTag]) -> None:
        runtime = self._runtime
        engine, _ = runtime.loaded_engine()
        runtime.lifecycle.move_to(Lifecycle.WAKING)
        try:
            if tags and not await self._take_turn(tags):
                runtime.lifecycle.move_to(Lifecycle.ASLEEP)
                return
            # Adapters come without the weights that they change; what is lent replaces both.
            adapters = self._updates.serves_adapters and not runtime.holds.lending
            asked = runtime.hold_target().load or adapters
            load = asked and not self._needs_new_weights(tags)
            if not load and "weights" in tags:
                logger.info(
                    "waking without weights %s, to be replaced", self._updates.active_identity
                )
            with runtime.telemetry.time_transition("wake"):
                awake = engine.wake(tags, self._updates.refill_base if load else None)
                await runtime.call_engine(awake, MEMORY_CALL_SECONDS, "wake")
        except EngineCrashed:
            raise
        except EngineError:
            await self._give_devices_back()
            runtime.lifecycle.move_to(Lifecycle.ASLEEP)
            raise
        self._released -= tags
        if "weights" in tags:
            self._level, self._updates.empty, self._updates.dropped = 1, not load, False
        asleep = self._released or runtime.hold_target().want is WantedState.ASLEEP
        # From Paused the next step resumes the engine, again and again if that refuses.
        runtime.lifecycle.move_to(Lifecycle.ASLEEP if asleep else Lifecycle.PAUSED)
