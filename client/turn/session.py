"""One turn of one rank: how all ranks of a trainer take it together, and how each gives it back.

`TurnVerbs` adds `pool.turn()` to a pool.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Unpack

from rollout_client.errors import ClusterError, RolloutError, StateTaken, SteeringFailed, TurnFailed
from rollout_client.steering.steering_protocol import PoolState, Steering
from rollout_client.steering.steering_verbs import SteeringVerbs

from .locks import DeviceLocks, HeldTurn
from .plan import TurnOptions, TurnPlan, given_devices, holder_name, lock_directory
from .settings import TURN_RETRY_SECONDS, UNDO_TIMEOUT_SECONDS
from .turn_devices import pod_devices

logger = logging.getLogger(__name__)

FindDevices = Callable[[], Awaitable[Sequence[str]]]
TurnStep = Callable[[], Coroutine[Any, Any, None]]


class StepRunner:
    """Does the steps of a turn for a task of an event loop.

    Attributes:
        cancelled: The cancellation that came during a vote. The other ranks wait for this rank's vote, so the vote
            ends first and the next round fails with this.
    """

    def __init__(self, plan: TurnPlan) -> None:
        self._plan = plan
        self.cancelled: asyncio.CancelledError | None = None

    async def run_step(self, step: TurnStep) -> None:
        """Await one step."""
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
        plan: The caller's options.
        find: Returns the devices of this process, if nobody names them.
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
        return self._locks.held_turn

    @property
    def command_environment(self) -> dict[str, str]:
        """The environment by which a command knows that the turn is held for it."""
        return self._locks.command_environment

    async def acquire_turn(self, caller: StepRunner | None = None) -> None:
        """Take the turn together with the other ranks: all of them get it, or none.

        All ranks go through the same rounds and vote at the end of each, so a failure of one ends the turn of all.
        They lock their devices one rank after the other: a second trainer waits at the first rank, instead of
        holding half of the devices while it waits for the other half.

        Args:
            caller: Does the steps; default: this task.

        Raises:
            TurnFailed: Another rank failed. An error of this rank is raised as it is.
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
        """Find the devices to lock, and refuse what can't be had before the pool sleeps for it."""
        plan = self._plan
        if plan.locks:
            devices = given_devices(plan.devices)
            if devices is None:
                devices = list(await self._find())
            who = holder_name(plan.rank, plan.world)
            self._locks = DeviceLocks(lock_directory(plan.directory), devices, who, self._pool)
        self._locks.check_takeable()

    async def sleep_pool(self) -> None:
        """Put the pool to sleep, and remember its state before."""
        if self._pool is None:
            return
        kept = self._locks.has_kept
        try:
            async with asyncio.timeout(self._remaining_seconds):
                steering = await self._pool._get_steering()
                self._before = await _read_wanted_state(steering, self._remaining_seconds)
        except TimeoutError:
            raise SteeringFailed(
                f"the pool's state was not known within {self._plan.seconds:g} s: does the API server answer?"
            ) from None
        self._asked = True
        if kept:  # don't wait: a worker may be waking that waits for these very locks
            return await steering.ask_state("Asleep", self._remaining_seconds)
        while True:
            try:
                return await self._pool.sleep(seconds=self._remaining_seconds)
            except SteeringFailed as error:
                # Another trainer's turn has ended and it woke the pool: try again.
                if self._remaining_seconds < TURN_RETRY_SECONDS or not await _was_state_taken(
                    "Active", error, steering
                ):
                    raise
            await asyncio.sleep(TURN_RETRY_SECONDS)

    async def take_locks(self) -> None:
        """Wait for the locks of this rank's devices."""
        await self._locks.take_locks(self._remaining_seconds)

    async def undo_sleep(self) -> None:
        """Ask the pool for the state that it had before this turn."""
        before = self._before or "Active"
        if self._pool is None or not self._asked or before == "Asleep":
            return
        steering = await self._pool._get_steering()
        if await steering.wanted_state() == "Asleep":  # else somebody has asked for another state
            await steering.ask_state(before, UNDO_TIMEOUT_SECONDS)

    def end_block(self, failure: BaseException | None) -> bool:
        """Give the locks back, or keep them after a failure; return whether this process took them, not its parent."""
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
        """Ask the pool to be Active, and keep the locks: they fall with the last process that has them."""
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
        """Wake the pool and return once it serves, after another trainer's turn if one began."""
        until = time.monotonic() + self._plan.seconds
        while True:
            try:
                return await pool.wake(seconds=max(0.0, until - time.monotonic()))
            except SteeringFailed as error:
                if time.monotonic() > until or not await _was_state_taken(
                    "Asleep", error, steering
                ):
                    raise
            # That trainer wakes the pool at its end; asking before would only disturb its turn.
            await _wait_until_awake(steering, until)


class TurnVerbs(SteeringVerbs):
    """What a trainer does that shares its accelerators with the pool."""

    _find_devices: FindDevices = staticmethod(pod_devices)

    @asynccontextmanager
    async def turn(self, **options: Unpack[TurnOptions]) -> AsyncIterator[HeldTurn]:
        """Hold the devices that this process shares with the pool, for a block.

        The pool falls asleep, this process takes the node's locks, the block runs, the locks are given
        back, the pool wakes. Free all memory of the devices before the block ends. After an error in the
        block this process keeps the locks until it ends, or until its next turn on these devices ends well: what
        the error refers to is still in memory. The pool is asked to wake all the same, and not waited for.
        A forked child that leaves the block gives nothing back. See docs/share-gpus.md.

        Args:
            **options: See `rollout_client.turn.TurnOptions`.

        Raises:
            TurnFailed: The turn was not had; the pool is asked for its former state.
            SteeringFailed: The pool did not fall asleep, or did not serve afterwards, in time.
            EpochLost, ClusterError: See `sleep`.
        """
        session = TurnSession(self, TurnPlan.from_options(options), self._find_devices)
        await session.acquire_turn()
        try:
            yield session.held_turn
        except BaseException as error:
            await session.leave_turn(error)
            raise
        await session.leave_turn(None)


async def _do_round(step: TurnStep | None, caller: StepRunner) -> None:
    failure: BaseException | None = None
    try:
        if caller.cancelled is not None:
            raise caller.cancelled
        if step is not None:
            await caller.run_step(step)
    except GeneratorExit:
        raise
    except BaseException as error:  # noqa: BLE001  # the other ranks must learn of every failure
        failure = error
    agreed = await caller.collect_votes(failure is None)
    if failure is not None or not agreed:
        raise (
            caller.cancelled
            or failure
            or TurnFailed(
                "another process of this trainer did not get the turn, so this one gave its own up: see its error"
            )
        )


async def _read_wanted_state(steering: Steering, seconds: float) -> PoolState | None:
    """Return the state that was asked for last; repeat the request for `seconds` while the API server is away."""
    until = time.monotonic() + seconds
    while True:
        try:
            return await steering.wanted_state()
        except ClusterError as error:
            if not error.is_transient or time.monotonic() > until:
                raise
        await asyncio.sleep(TURN_RETRY_SECONDS)


async def _was_state_taken(state: PoolState, error: SteeringFailed, steering: Steering) -> bool:
    """Return whether the error came from another trainer's turn, which wanted this state.

    That turn may have ended since, so the error counts before the state of now.
    """
    if isinstance(error, StateTaken):
        return error.wanted == state
    return await steering.wanted_state() == state


async def _wait_until_awake(steering: Steering, until: float) -> None:
    """Return once the wanted state is not Asleep any more, or when the time is up."""
    while True:
        if time.monotonic() > until or await steering.wanted_state() != "Asleep":
            return
        await asyncio.sleep(TURN_RETRY_SECONDS)
