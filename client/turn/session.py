"""One turn of one process: what each step of `rounds` does, and the way back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_client.errors import ClusterError, RolloutError, StateTaken, SteeringFailed
from rollout_client.steering.protocol import PoolState, Steering
from rollout_client.steering.verbs import SteeringVerbs

from .locks import Locks
from .plan import Plan, given_devices, holder_name, lock_directory
from .rounds import Deed, Steps, Vote, taking

logger = logging.getLogger(__name__)

UNDO_SECONDS = 10.0
"""How long a turn that failed tries to ask the pool back before it says that it could not."""

AGAIN_SECONDS = 0.5

FindDevices = Callable[[], Awaitable[Sequence[str]]]


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


class Session:
    """See the module.

    Args:
        pool: To put to sleep; None: only the locks are taken.
        plan: What was asked for.
        find: Asks which devices this process has, where nobody names them.
    """

    def __init__(self, pool: SteeringVerbs | None, plan: Plan, find: FindDevices) -> None:
        self._pool = pool
        self._plan = plan
        self._find = find
        self._until = time.monotonic() + plan.seconds
        self._locks = Locks(lock_directory(plan.directory), (), "", pool)
        self._before: PoolState | None = None
        self._asked = False

    @property
    def held(self) -> HeldTurn:
        """What the block gets."""
        return HeldTurn(self._locks.devices, tuple(self._locks.filenos()))

    @property
    def environment(self) -> dict[str, str]:
        """What tells a program that the turn is held for it."""
        return self._locks.environment()

    def steps(self) -> Steps:
        """Return what is to be done, in order."""
        return taking(self._plan.rank, self._plan.world)

    def agreed(self, yes: bool) -> bool:
        """Return whether all ranks say yes."""
        return self._plan.agreed(yes)

    def begin(self) -> None:
        """Note that the code that follows runs inside this turn."""
        self._locks.begin()

    def give(self) -> None:
        """Give back what is held; may be called again."""
        self._locks.give()

    async def do(self, deed: Deed) -> None:
        """Do one deed but `begin`, which belongs into the caller's own context."""
        match deed:
            case "find":
                await self._look()
            case "sleep":
                await self._sleep()
            case "take":
                await self._locks.take(self._left)
            case "give":
                self.give()
            case "undo":
                await self._undo()

    @property
    def _left(self) -> float:
        return max(0.0, round(self._until - time.monotonic(), 2))

    async def _look(self) -> None:
        plan = self._plan
        if plan.locks:
            devices = given_devices(plan.devices)
            if devices is None:
                devices = list(await self._find())
            who = holder_name(plan.rank, plan.world)
            self._locks = Locks(lock_directory(plan.directory), devices, who, self._pool)
        self._locks.check()

    async def _sleep(self) -> None:
        if self._pool is None:
            return
        kept = self._locks.kept
        try:
            async with asyncio.timeout(self._left):
                self._before = await _state(await self._pool._get_steering(), self._left)
        except TimeoutError:
            raise SteeringFailed(
                f"nobody said within {self._plan.seconds:g} s what state the pool is in: is the API server "
                "there?"
            ) from None
        self._asked = True
        steering = await self._pool._get_steering()
        if kept:  # a worker that waits for these very locks can't be waited for
            return await steering.ask_state("Asleep", self._left)
        while True:
            try:
                return await self._pool.sleep(seconds=self._left)
            except SteeringFailed as error:
                # Another trainer's turn has ended meanwhile, and it woke the pool: once more.
                if self._left < AGAIN_SECONDS or not await _became("Active", error, steering):
                    raise
            await asyncio.sleep(AGAIN_SECONDS)

    async def _undo(self) -> None:
        """Ask the pool back to what it was before this turn put it to sleep."""
        before = self._before or "Active"
        if self._pool is None or not self._asked or before == "Asleep":
            return
        steering = await self._pool._get_steering()
        if (
            await steering.wanted_state() == "Asleep"
        ):  # else somebody wants something else meanwhile
            await steering.ask_state(before, UNDO_SECONDS)

    def end_block(self, failure: BaseException | None) -> bool:
        """Give the locks back, or keep them after a failure; whether this process took them, and no parent of it."""
        if failure is None:
            self.give()
        else:
            self._locks.keep_after(failure)
        return not self._locks.forked

    async def leave(self, failure: BaseException | None) -> None:
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
            return await self._wake(self._pool, self._plan.serving)
        try:
            await self._wake(self._pool, serving=False)
        except RolloutError as second:
            failure.add_note(f"the pool was not asked to wake: {second}")
        return None

    async def ask_awake(self) -> None:
        """Ask the pool to be Active and keep the locks: they fall with the last process that has them."""
        if self._pool is not None and self._plan.wake:
            await self._wake(self._pool, serving=False)

    async def _wake(self, pool: SteeringVerbs, serving: bool) -> None:
        steering = await pool._get_steering()
        seconds = self._plan.seconds if serving else UNDO_SECONDS
        if await _state(steering, seconds) == "Paused":
            logger.info("somebody paused the pool during the turn, so it stays as they want it")
        elif serving:
            await self._serve(pool, steering)
        else:
            await steering.ask_state("Active", UNDO_SECONDS)

    async def _serve(self, pool: SteeringVerbs, steering: Steering) -> None:
        """Wake the pool and return once it serves; another trainer's turn before that is waited for."""
        until = time.monotonic() + self._plan.seconds
        while True:
            try:
                return await pool.wake(seconds=max(0.0, until - time.monotonic()))
            except SteeringFailed as error:
                if time.monotonic() > until or not await _became("Asleep", error, steering):
                    raise
            # It wakes the pool at its end; asking before would only keep it from its turn.
            await _until_awake(steering, until)


async def _state(steering: Steering, seconds: float) -> PoolState | None:
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
        await asyncio.sleep(AGAIN_SECONDS)


async def _became(state: PoolState, error: SteeringFailed, steering: Steering) -> bool:
    """Whether it was another trainer's turn that got in the way, which wants this state.

    By now it may have ended, and the pool be asked for the former state again.
    """
    if isinstance(error, StateTaken):
        return error.wanted == state
    return await steering.wanted_state() == state


async def _until_awake(steering: Steering, until: float) -> None:
    """Return once somebody has asked for another state than Asleep, or when the time is up."""
    while True:
        if time.monotonic() > until or await steering.wanted_state() != "Asleep":
            return
        await asyncio.sleep(AGAIN_SECONDS)


async def follow(session: Session) -> None:
    """Do the steps in an event loop; a cancelled caller votes no before it leaves.

    Raises:
        RolloutError: The turn was not had.
        asyncio.CancelledError: The caller was cancelled; nothing is held.
    """
    steps, way = session.steps(), _Way()
    send: Callable[[Any], Any] = steps.send
    value: Any = None
    try:
        while True:
            try:
                step = send(value)
            except StopIteration:
                return
            try:
                send, value = steps.send, await way.one(session, step)
            except BaseException as error:  # noqa: BLE001  # the rounds say what it means
                send, value = steps.throw, error
    except RolloutError:
        if way.cancelled is not None:
            raise way.cancelled from None
        raise


class _Way:
    """Does steps and remembers that the caller was cancelled while a vote could not be broken off."""

    def __init__(self) -> None:
        self.cancelled: asyncio.CancelledError | None = None

    async def one(self, session: Session, step: Deed | Vote) -> bool:
        if isinstance(step, Vote):
            return await self._vote(session, step.yes and self.cancelled is None)
        if self.cancelled is not None and step in ("find", "sleep", "take", "begin"):
            raise self.cancelled
        if step == "begin":
            session.begin()
        else:
            await session.do(step)
        return True

    async def _vote(self, session: Session, yes: bool) -> bool:
        """Vote in a thread; the others wait in the same vote, so it can't be broken off."""
        vote = asyncio.ensure_future(asyncio.to_thread(session.agreed, yes))
        while not vote.done():
            try:
                await asyncio.wait({vote})
            except asyncio.CancelledError as error:
                self.cancelled = error
        return vote.result()
