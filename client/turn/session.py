"""One turn of one rank: how all ranks of a trainer take it together, and how each gives it back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_client.errors import (
    ClusterError,
    RolloutError,
    StateTaken,
    SteeringFailed,
    TurnFailed,
)
from rollout_client.steering.steering_protocol import PoolState, Steering
from rollout_client.steering.steering_verbs import SteeringVerbs

from .locks import DeviceLocks
from .plan import TurnPlan, given_devices, holder_name, lock_directory
from .settings import TURN_RETRY_SECONDS, UNDO_TIMEOUT_SECONDS

logger = logging.getLogger(__name__)

FindDevices = Callable[[], Awaitable[Sequence[str]]]
TurnStep = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class HeldTurn:
    """The turn that a block has.

    Attributes:
        devices: Names of the devices that are locked for it; none without locks.
        filenos: Their open lock files, and what lets the locks fall last when a process dies. One that
            inherits them all (`pass_fds`) and outlives this one keeps the turn until it has ended.
    """

    devices: tuple[str, ...]
    filenos: tuple[int, ...]


class StepRunner:
    """Does the steps of a turn for a task of an event loop.

    Attributes:
        cancelled: The cancellation that came during a vote. The other ranks wait in the same vote, so it ends
            first; the next round then fails with this.
    """

    def __init__(self, plan: TurnPlan) -> None:
        self._plan = plan
        self.cancelled: asyncio.CancelledError | None = None

    async def run_step(self, step: TurnStep) -> None:
        """Do one step."""
        await step()

    async def collect_votes(self, yes: bool) -> bool:
        """Return whether all ranks vote yes; `agree` blocks, so it runs in a thread."""
        vote = asyncio.ensure_future(asyncio.to_thread(self._plan.all_agree, yes))
        while not vote.done():
            try:
                await asyncio.wait({vote})
            except asyncio.CancelledError as error:
                self.cancelled = error
        return vote.result()


class TurnSession:
    """The turn of one rank.

    Args:
        pool: To put to sleep; None: only the locks are taken.
        plan: What was asked for.
        find: Asks which devices this process has, where nobody names them.
    """

    def __init__(self, pool: SteeringVerbs | None, plan: TurnPlan, find: FindDevices) -> None:
        self._pool = pool
        self._plan = plan
        self._find = find
        self._until = time.monotonic() + plan.seconds
        self._locks = DeviceLocks(lock_directory(plan.directory), (), "", pool)
        self._before: PoolState | None = None
        self._asked = False

    @property
    def held_turn(self) -> HeldTurn:
        """What the block gets."""
        return HeldTurn(self._locks.devices, tuple(self._locks.lock_filenos()))

    @property
    def command_environment(self) -> dict[str, str]:
        """What tells a program that the turn is held for it."""
        return self._locks.command_environment()

    async def acquire_turn(self, caller: StepRunner | None = None) -> None:
        """Take the turn, together with the other ranks: all of them have it, or none.

        All ranks go through the same rounds and vote at the end of each, so that a failure of one ends the turn
        of all. They lock their devices one rank after the other: a second trainer waits at the first rank,
        instead of holding half of the devices while it waits for the other half.

        Args:
            caller: Does the steps; default: this task.

        Raises:
            TurnFailed: Another rank failed; what failed here is raised as it is.
            asyncio.CancelledError: The caller was cancelled; nothing is held.
        """
        caller = StepRunner(self._plan) if caller is None else caller
        rank, world = self._plan.rank, self._plan.world
        rounds: list[TurnStep | None] = [self.find_devices, self.sleep_pool if rank == 0 else None]
        rounds += [self.take_locks if each == rank else None for each in range(world)]
        try:
            for step in rounds:
                await _do_round(step, caller)
            if caller.cancelled is not None:
                raise caller.cancelled
            self.begin_block()
        except GeneratorExit:
            raise
        except BaseException as error:
            self.give_back()
            if rank == 0:
                try:
                    await caller.run_step(self.undo_sleep)
                except RolloutError as second:
                    error.add_note(f"the pool could not be asked back to what it was: {second}")
            raise

    def begin_block(self) -> None:
        """Note that the code that follows runs inside this turn."""
        self._locks.begin_block()

    def give_back(self) -> None:
        """Give back what is held; may be called again."""
        self._locks.give_back()

    @property
    def _remaining_seconds(self) -> float:
        return max(0.0, round(self._until - time.monotonic(), 2))

    async def find_devices(self) -> None:
        """Find out which devices to lock, and refuse what can't be had before anybody sleeps for it."""
        plan = self._plan
        if plan.locks:
            devices = given_devices(plan.devices)
            if devices is None:
                devices = list(await self._find())
            who = holder_name(plan.rank, plan.world)
            self._locks = DeviceLocks(lock_directory(plan.directory), devices, who, self._pool)
        self._locks.check_takeable()

    async def sleep_pool(self) -> None:
        """Put the pool to sleep, and remember what it was before."""
        if self._pool is None:
            return
        kept = self._locks.has_kept
        try:
            async with asyncio.timeout(self._remaining_seconds):
                self._before = await _read_wanted_state(
                    await self._pool._get_steering(), self._remaining_seconds
                )
        except TimeoutError:
            raise SteeringFailed(
                f"nobody said within {self._plan.seconds:g} s what state the pool is in: is the API server "
                "there?"
            ) from None
        self._asked = True
        steering = await self._pool._get_steering()
        if kept:  # a worker that waits for these very locks can't be waited for
            return await steering.ask_state("Asleep", self._remaining_seconds)
        while True:
            try:
                return await self._pool.sleep(seconds=self._remaining_seconds)
            except SteeringFailed as error:
                # Another trainer's turn has ended meanwhile, and it woke the pool: once more.
                if self._remaining_seconds < TURN_RETRY_SECONDS or not await _was_state_taken(
                    "Active", error, steering
                ):
                    raise
            await asyncio.sleep(TURN_RETRY_SECONDS)

    async def take_locks(self) -> None:
        """Wait for the locks of this rank's devices."""
        await self._locks.take_locks(self._remaining_seconds)

    async def undo_sleep(self) -> None:
        """Ask the pool back to what it was before this turn put it to sleep."""
        before = self._before or "Active"
        if self._pool is None or not self._asked or before == "Asleep":
            return
        steering = await self._pool._get_steering()
        if await steering.wanted_state() == "Asleep":  # else somebody has asked for another state
            await steering.ask_state(before, UNDO_TIMEOUT_SECONDS)

    def end_block(self, failure: BaseException | None) -> bool:
        """Give the locks back, or keep them after a failure; whether this process took them, and no parent of it."""
        if failure is None:
            self.give_back()
        else:
            self._locks.keep_after_failure(failure)
        return not self._locks.is_forked

    async def leave_turn(self, failure: BaseException | None) -> None:
        """Give the turn back, then wake the pool; after a failure keep the locks and only ask for it.

        Raises:
            SteeringFailed: The pool was asked, but does not serve in time.
            EpochLost: Another trainer has the pool.
            ClusterError: Not allowed, or no answer.
        """
        took = self.end_block(failure)
        if not took or self._pool is None or not self._plan.wake or self._plan.rank != 0:
            return
        if failure is None:
            return await self._wake_pool(self._pool, self._plan.serving)
        try:
            await self._wake_pool(self._pool, serving=False)
        except RolloutError as second:
            failure.add_note(f"the pool was not asked to wake: {second}")
        return None

    async def ask_awake(self) -> None:
        """Ask the pool to be Active and keep the locks: they fall with the last process that has them."""
        if self._pool is not None and self._plan.wake:
            await self._wake_pool(self._pool, serving=False)

    async def _wake_pool(self, pool: SteeringVerbs, serving: bool) -> None:
        steering = await pool._get_steering()
        seconds = self._plan.seconds if serving else UNDO_TIMEOUT_SECONDS
        if await _read_wanted_state(steering, seconds) == "Paused":
            logger.info("somebody paused the pool during the turn, so it stays as they want it")
        elif serving:
            await self._wake_until_serving(pool, steering)
        else:
            await steering.ask_state("Active", UNDO_TIMEOUT_SECONDS)

    async def _wake_until_serving(self, pool: SteeringVerbs, steering: Steering) -> None:
        """Wake the pool and return once it serves; another trainer's turn before that is waited for."""
        until = time.monotonic() + self._plan.seconds
        while True:
            try:
                return await pool.wake(seconds=max(0.0, until - time.monotonic()))
            except SteeringFailed as error:
                if time.monotonic() > until or not await _was_state_taken(
                    "Asleep", error, steering
                ):
                    raise
            # It wakes the pool at its end; asking before would only keep it from its turn.
            await _wait_until_awake(steering, until)


async def _do_round(step: TurnStep | None, caller: StepRunner) -> None:
    failure: BaseException | None = None
    try:
        if caller.cancelled is not None:
            raise caller.cancelled
        if step is not None:
            await caller.run_step(step)
    except GeneratorExit:
        raise
    except BaseException as error:  # noqa: BLE001  # whatever it is, the other ranks must learn of it
        failure = error
    agreed = await caller.collect_votes(failure is None)
    if failure is not None or not agreed:
        raise (
            caller.cancelled
            or failure
            or TurnFailed(
                "another process of this trainer did not get the turn, so this one gave up its own: see there"
            )
        )


async def _read_wanted_state(steering: Steering, seconds: float) -> PoolState | None:
    """Return the state that was asked for last; an API server that is away is asked for so long.

    Raises:
        ClusterError: Not allowed, or no answer within these seconds.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            return await steering.wanted_state()
        except ClusterError as error:
            if not error.is_transient or time.monotonic() > until:
                raise
        await asyncio.sleep(TURN_RETRY_SECONDS)


async def _was_state_taken(state: PoolState, error: SteeringFailed, steering: Steering) -> bool:
    """Whether it was another trainer's turn that got in the way, which wants this state.

    By now it may have ended, and the pool be asked for the former state again.
    """
    if isinstance(error, StateTaken):
        return error.wanted == state
    return await steering.wanted_state() == state


async def _wait_until_awake(steering: Steering, until: float) -> None:
    """Return once somebody has asked for another state than Asleep, or when the time is up."""
    while True:
        if time.monotonic() > until or await steering.wanted_state() != "Asleep":
            return
        await asyncio.sleep(TURN_RETRY_SECONDS)
