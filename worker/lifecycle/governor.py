"""Moves the worker to the state that its live holds ask for; whole, for each step follows from another.

One level-triggered task compares target and state and takes one step at a time, under the same lock
as commits. Verbs only change holds and wait until the worker has `settled`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from math import inf
from typing import Literal

from rollout_worker.core.holds import EVERYTHING, Target, Want
from rollout_worker.core.runtime import Runtime
from rollout_worker.engine import EngineCrashed, EngineError, WeightsRejected
from rollout_worker.requests.flights import Flights
from rollout_worker.schemas import AbortReason, Lifecycle, MemoryTag
from rollout_worker.updates.state import Updates
from rollout_worker.wire.problems import ProblemError, conflict

from .turning import turn_to_wake

logger = logging.getLogger(__name__)

Mode = Literal["drain", "abort", "keep"]

PAUSE_SECONDS = 120.0
MEMORY_SECONDS = 600.0
"""Longest time to release or restore memory, weights included."""
RETRY_SECONDS = 5.0

_SETTLED = {
    Want.ACTIVE: Lifecycle.ACTIVE,
    Want.PAUSED: Lifecycle.PAUSED,
    Want.ASLEEP: Lifecycle.ASLEEP,
}


class Governor:
    """Holds → lifecycle, for one worker."""

    def __init__(self, runtime: Runtime, updates: Updates, flights: Flights) -> None:
        self._runtime = runtime
        self._updates = updates
        self._flights = flights
        self._failure: EngineError | None = None
        self._failures = 0
        self._steps = {
            Lifecycle.ACTIVE: self._leave_active,
            Lifecycle.PAUSING: self._quiesce,
            Lifecycle.DRAINING: self._quiesce,
            Lifecycle.PAUSED: self._leave_paused,
            Lifecycle.ASLEEP: self._change_sleep,
        }
        self.engine_replaced()

    def engine_replaced(self) -> None:
        """Start over with a fresh engine, which is running and has all its memory."""
        self._frozen = self._resuming = False
        self._released: frozenset[MemoryTag] = frozenset()
        self._level = 1
        self._forget_plan()

    def engine_gone(self) -> None:
        """Take note that the engine died and all its memory with it, while it was to be asleep."""
        self._forget_plan()
        self._released, self._level = EVERYTHING, self._runtime.target().level
        self._updates.empty = False

    def _forget_plan(self) -> None:
        self._drain_until = inf
        self._keep = False

    def ask(self, mode: Mode, deadline_seconds: float) -> None:
        """Set how running requests end; the earliest deadline wins."""
        self._keep = mode == "keep"
        if mode != "keep":
            until = time.monotonic() + (deadline_seconds if mode == "drain" else 0.0)
            self._drain_until = min(self._drain_until, until)
        self._runtime.changed.fire()

    @property
    def settled(self) -> bool:
        """Whether the state is what the holds ask for."""
        target = self._runtime.target()
        if self._resuming or self._runtime.lifecycle.state is not _SETTLED[target.want]:
            return False
        if self._lacks_values(target):
            return False
        if target.want is not Want.ASLEEP:
            return True
        return target.released == self._released and not self._deeper(target)

    def _lacks_values(self, target: Target) -> bool:
        """Whether the weights' memory is there without values, and nobody waits for a commit."""
        return self._updates.empty and target.load and "weights" not in target.released

    @property
    def weights_away(self) -> bool:
        """Whether there are no values of weights in memory."""
        return self._updates.empty or "weights" in self._released

    def _deeper(self, target: Target) -> bool:
        return target.level > self._level and "weights" in target.released & self._released

    def resident(self, tags: Collection[MemoryTag]) -> bool:
        """Whether all of this memory that no hold wants released is back, with its values."""
        target = self._runtime.target()
        if "weights" in tags and self._lacks_values(target):
            return False
        return self._released.difference(target.released).isdisjoint(tags)

    async def reach(
        self, reached: Callable[[], bool], seconds: float, wanted: Callable[[], bool]
    ) -> None:
        """Wait until `reached` is true.

        Raises:
            ProblemError: the transition failed, took over `seconds`, or `wanted` became false.
        """
        runtime, failures = self._runtime, self._failures
        until = time.monotonic() + seconds
        while True:
            # First: what is reached without the hold was not reached for it, nor stays so.
            if not wanted():
                raise conflict(
                    "changed-meanwhile", "the hold expired or was released in the meantime"
                )
            if reached():
                return
            if not runtime.lifecycle.has_engine or runtime.shutting_down:
                raise runtime.wrong_state("try again once it is serving")
            if self._failures != failures:
                rejected = isinstance(self._failure, WeightsRejected)
                slug = "weights-rejected" if rejected else "engine-refused"
                raise ProblemError(
                    slug, f"{self._failure}; the worker keeps retrying", retry_after=5
                )
            left = until - time.monotonic()
            if left <= 0 or not await runtime.changed.wait(left):
                raise ProblemError(
                    "deadline-exceeded",
                    f"still {runtime.lifecycle.state.value} after {seconds:g} s; the hold remains",
                )

    async def run(self) -> None:
        """Follow the holds until cancelled."""
        runtime = self._runtime
        while True:
            pause = max(0.0, runtime.holds.next_expiry() - time.monotonic())
            try:
                if await self._advance():
                    continue
            except EngineCrashed as error:
                logger.warning("the engine died during a transition: %s", error)
            except EngineError as error:
                self._failed(error)
                pause = min(pause, RETRY_SECONDS)
                await asyncio.sleep(pause)
                continue
            await runtime.changed.wait(None if pause == inf else pause)

    def _failed(self, error: EngineError) -> None:
        logger.error("a transition failed: %s", error)
        self._failure, self._failures = error, self._failures + 1
        self._runtime.last_error = str(error)
        self._runtime.changed.fire()

    async def _advance(self) -> bool:
        """Take one step; return False if there is none to take."""
        runtime = self._runtime
        if self.settled or not runtime.lifecycle.has_engine or runtime.shutting_down:
            return False
        async with runtime.exclusive:
            step = self._steps.get(runtime.lifecycle.state)
            if self.settled or step is None or not runtime.alive or runtime.shutting_down:
                return False
            await step()
        # Some steps change memory but not the state: waiters must check again.
        runtime.changed.fire()
        return True

    async def _leave_active(self) -> None:
        asleep = self._runtime.target().want is Want.ASLEEP
        self._runtime.lifecycle.move(Lifecycle.DRAINING if asleep else Lifecycle.PAUSING)

    async def _leave_paused(self) -> None:
        target = self._runtime.target()
        if target.want is Want.ASLEEP:
            self._runtime.lifecycle.move(Lifecycle.DRAINING)
        elif self._lacks_values(target):
            await self._load()
        else:
            await self._resume()

    async def _load(self) -> None:
        """Bring the active weights into memory that woke without them: no commit came instead."""
        runtime, updates = self._runtime, self._updates
        engine, _ = runtime.loaded()
        active = updates.identity
        assert active is not None, "an engine has loaded weights"
        logger.info("reading weights %s, without which the memory woke", active)
        with runtime.telemetry.transition("wake"):
            await runtime.call(engine.pause(), PAUSE_SECONDS, "pause")
            async with updates.slot_lock:  # what is staged stays: a commit of it may come yet
                sink = await runtime.call(updates.refill(), MEMORY_SECONDS, "refill")
                filling = engine.commit(active, sink, "recompute")
                await runtime.call(filling, MEMORY_SECONDS, "commit")
                updates.empty = False

    async def _resume(self) -> None:
        if self._updates.empty:
            await self._load()
        engine, _ = self._runtime.loaded()
        # Before the await: a pause that arrives during it sets a plan of its own.
        self._forget_plan()
        # Nor is that pause met yet, though the state still says so: the engine may step already.
        self._resuming = True
        try:
            with self._runtime.telemetry.transition("resume"):
                await self._runtime.call(engine.resume(), PAUSE_SECONDS, "resume")
        finally:
            self._resuming = False
        self._frozen = False
        self._runtime.lifecycle.move(Lifecycle.ACTIVE)

    async def _quiesce(self) -> None:
        """From Pausing or Draining: end or freeze running requests, then follow the holds."""
        runtime = self._runtime
        engine, _ = runtime.loaded()
        with runtime.telemetry.transition("quiesce"):
            await self._drain()
            runtime.check_alive()
            want = runtime.target().want
            if want is Want.ACTIVE:
                await self._resume()
                return
            if not self._frozen:
                await self._end_rest(want)
                await runtime.call(engine.pause(), PAUSE_SECONDS, "pause")
                self._frozen = True
            elif want is Want.ASLEEP:
                await self._end_rest(want)
        # The holds may have changed while the engine was pausing.
        want = runtime.target().want
        if want is Want.PAUSED:
            runtime.lifecycle.move(Lifecycle.PAUSED)
        elif want is Want.ASLEEP:
            await self._fall_asleep()
        else:
            await self._resume()

    async def _drain(self) -> None:
        """Wait for accepted requests to finish; return early if the plan or target changes."""
        runtime = self._runtime
        while not self._frozen and not self._keep and len(self._flights) and runtime.alive:
            left = self._drain_until - time.monotonic()
            if left <= 0 or runtime.target().want is Want.ACTIVE or runtime.shutting_down:
                return
            expiry = runtime.holds.next_expiry() - time.monotonic()
            left = min(left, max(0.01, expiry))
            await runtime.changed.wait(None if left == inf else left)

    async def _end_rest(self, want: Want) -> None:
        if not self._keep:
            reason = AbortReason.SLEEP if want is Want.ASLEEP else AbortReason.CONTROL
            await self._flights.abort_all(reason)

    async def _fall_asleep(self) -> None:
        runtime = self._runtime
        if runtime.lifecycle.state is Lifecycle.PAUSING:
            runtime.lifecycle.move(Lifecycle.DRAINING)
        target = runtime.target()
        await self._release(target)
        runtime.lifecycle.move(Lifecycle.ASLEEP)

    async def _release(self, target: Target) -> None:
        """Give memory back; all weights that are there go together, not the active ones alone."""
        if "weights" not in target.released:
            await self._sleep(target)
            return
        async with self._updates.slot_lock:  # nobody stages until they are gone
            staged = self._updates.slot
            if staged is not None:
                logger.info("falling asleep: weights %s are given up", staged.identity)
            await self._updates.clear_slot()
            # What is still being freed may become the spare.
            await self._updates.settle()
            self._updates.pushes.spare.drop()
            await self._end_pinned()
            await self._sleep(target)

    async def _end_pinned(self) -> None:
        """End who may not go on with the active weights once the former ones are gone."""
        active = self._updates.identity
        assert active is not None, "an engine has loaded weights"
        await self._flights.abort_outputs(
            self._flights.exact_elsewhere(active), AbortReason.WEIGHTS
        )
        self._runtime.check_alive()

    async def _sleep(self, target: Target) -> None:
        runtime = self._runtime
        engine, _ = runtime.loaded()
        level = 2 if self._updates.empty else target.level  # there are no values to keep
        if runtime.turn is not None and not self._released:
            await runtime.turn.note_use()
        with runtime.telemetry.transition("sleep"):
            asleep = engine.sleep(level, target.released, self._updates.refill)
            await runtime.call(asleep, MEMORY_SECONDS, "sleep")
        self._released, self._level = self._released | target.released, level
        if "weights" in target.released:
            self._updates.empty = False
        await self._give_turn()

    async def _give_turn(self) -> None:
        """Let others have the devices if the engine has no memory of them."""
        if self._runtime.turn is not None and self._released.issuperset(EVERYTHING):
            await self._runtime.turn.give_back()

    async def _change_sleep(self) -> None:
        """From Asleep: restore memory that no hold wants released, or release more."""
        target = self._runtime.target()
        surplus = self._released - target.released
        if self._lacks_values(target):
            await self._load()
        elif surplus or target.want is not Want.ASLEEP:
            await self._wake(surplus)
        else:
            await self._release(target)

    def _beyond_reload(self, tags: Collection[MemoryTag]) -> bool:
        """Whether sleep dropped weights that only a stage can bring again, which needs their memory."""
        return self._level == 2 and "weights" in tags and self._updates.without_copy

    async def _wake(self, tags: frozenset[MemoryTag]) -> None:
        runtime = self._runtime
        engine, _ = runtime.loaded()
        runtime.lifecycle.move(Lifecycle.WAKING)
        try:
            if tags and not await turn_to_wake(runtime, lambda: not self.resident(tags)):
                runtime.lifecycle.move(Lifecycle.ASLEEP)
                return
            load = runtime.target().load and not self._beyond_reload(tags)
            if not load and "weights" in tags:
                logger.info("waking without weights %s, to be replaced", self._updates.identity)
            with runtime.telemetry.transition("wake"):
                awake = engine.wake(tags, self._updates.refill if load else None)
                await runtime.call(awake, MEMORY_SECONDS, "wake")
        except EngineCrashed:
            raise
        except EngineError:
            await self._give_turn()
            runtime.lifecycle.move(Lifecycle.ASLEEP)
            raise
        self._released -= tags
        if "weights" in tags:
            self._level, self._updates.empty = 1, not load
        target = runtime.target()
        if self._released or target.want is Want.ASLEEP:
            runtime.lifecycle.move(Lifecycle.ASLEEP)
        elif target.want is Want.PAUSED or self._lacks_values(target):
            runtime.lifecycle.move(Lifecycle.PAUSED)
        else:
            await self._resume()
