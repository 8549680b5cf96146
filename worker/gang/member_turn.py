"""A member's side of the turn: it takes its node's locks when the head says so, and gives them back with it.

Nothing is held for a head that is silent, unless the head has told that the turn is used: from then on
memory of the devices may be there, and the locks stay until the head gives them back or this node's
processes have ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from rollout_common.turn import TurnReplaced
from rollout_common.wire import Progress, TurnState
from rollout_common.wire.gang_models import GangTurn
from rollout_common.wire.problems import ProblemError, conflict_problem
from rollout_worker.engine import EngineError

from .settings import SILENCE_SECONDS, WAIT_SECONDS

logger = logging.getLogger(__name__)


class Locks(Protocol):
    """The turn for this node's devices alone; see `core.device_turn`."""

    async def take(
        self, report: Callable[[Progress], None], wanted: Callable[[], bool] = ...
    ) -> bool:
        """Wait for it, and for the memory of who had it before."""
        ...

    def check_files(self) -> str | None:
        """Log, once, that lock files were removed."""
        ...

    async def note_use(self) -> None:
        """Note what is free while the engine has all its memory."""
        ...

    async def give_back(self) -> None:
        """Give it back after use."""
        ...

    def give(self) -> None:
        """Give it back unused."""
        ...

    def close(self) -> None:
        """Let go for good."""
        ...

    def view(self) -> TurnState:
        """Whether it is had, and who has it."""
        ...


class MemberTurn:
    """The attempts of the head to have the turns of all nodes, one after the other.

    Args:
        locks: Of this node.
        broken: Told why the gang can't go on.
    """

    def __init__(self, locks: Locks, broken: Callable[[str], None]) -> None:
        self.used = asyncio.Event()
        """Set once the head uses a turn: the ranks may load."""
        self._locks = locks
        self._broken = broken
        self._attempt = 0
        """The highest number that was heard of; lower ones are over."""
        self._phase = "Released"
        self._message: str | None = None
        self._taking: asyncio.Task[None] | None = None
        self._giving: asyncio.Task[None] | None = None

    async def take(self, attempt: int) -> GangTurn:
        """Take the turn in this attempt; returns as soon as it is had, or how far it is.

        Raises:
            ProblemError: 409, this attempt is over.
        """
        if attempt > self._attempt:
            self._end()
            self._attempt, self._phase, self._message = attempt, "Waiting", None
            self._taking = asyncio.create_task(self._take(self._giving))
        self._check(attempt)
        assert self._taking is not None, "an attempt that is not over has one"
        await asyncio.wait([self._taking], timeout=WAIT_SECONDS)
        self._check(attempt)
        return self.view()

    async def use(self, attempt: int) -> GangTurn:
        """Keep the turn from now on, whether the head is heard or not; told again, note what is free in use.

        Raises:
            ProblemError: 409, this attempt is over, or has not got it yet.
        """
        self._check(attempt)
        if self._phase not in ("Held", "InUse"):
            raise conflict_problem("changed-meanwhile", f"the turn is {self._phase}: take it first")
        if self._phase == "InUse":
            await self._locks.note_use()
            self._check(attempt)
        self._phase = "InUse"
        self.used.set()
        return self.view()

    def give(self, attempt: int, *, loaded: bool) -> GangTurn:
        """End this attempt and all before it.

        Args:
            attempt: Its number.
            loaded: Whether the engine runs on all nodes. If not, ranks of a turn that is used may have
                memory that nobody will free: the gang ends, and the locks fall with its processes.
        """
        if attempt >= self._attempt:
            if self._phase == "InUse" and not loaded:
                self._broken("the head gave the turn back while the ranks of this node load")
            else:
                self._end()
                self._attempt = attempt
        return self.view()

    def look(self, quiet: float) -> None:
        """Give back what is held for nothing: the head has been silent for so many seconds."""
        self._locks.check_files()
        if quiet > SILENCE_SECONDS and self._phase not in ("InUse", "Released"):
            logger.warning("the head has been silent for %.0f s: giving the turn up", quiet)
            self._end()

    def view(self) -> GangTurn:
        """How far it is."""
        now = self._locks.view()
        phase = self._phase
        if phase == "Waiting" and now.state == "Held":
            phase = "Checking"
        return GangTurn.model_validate(
            {
                "attempt": self._attempt,
                "phase": phase,
                "devices": now.devices,
                "waiting_for": now.waiting_for if phase == "Waiting" else {},
                "message": self._message,
            }
        )

    async def stop(self, *, ended: bool) -> None:
        """Let go for good; what ranks use that have not `ended` stays until this process has."""
        if self._phase == "InUse":
            if ended:
                self._locks.close()
            return
        self._end()
        if self._giving is not None:
            await asyncio.wait([self._giving], timeout=WAIT_SECONDS)
        self._locks.close()

    def _check(self, attempt: int) -> None:
        if attempt != self._attempt or self._phase == "Released":
            raise conflict_problem(
                "changed-meanwhile", f"attempt {attempt} at the turn is over: begin anew"
            )

    async def _take(self, before: asyncio.Task[None] | None) -> None:
        """Take the locks, once the attempt before has given them back."""
        if before is not None:
            await asyncio.wait([before])
        try:
            if await self._locks.take(self._report):
                self._phase, self._message = "Held", None
        except TurnReplaced as error:
            self._broken(str(error))
        except EngineError as error:
            self._phase, self._message = "Failed", str(error)
        except Exception as error:
            logger.exception("taking the turn failed")
            self._phase, self._message = "Failed", f"internal error: {error}"

    def _report(self, progress: Progress) -> None:
        self._message = progress.message

    def _end(self) -> None:
        if self._phase != "Released":
            give = self._give(self._taking, self._giving, used=self._phase == "InUse")
            self._phase, self._message = "Released", None
            self._giving = asyncio.create_task(give)

    async def _give(
        self,
        taking: asyncio.Task[None] | None,
        before: asyncio.Task[None] | None,
        *,
        used: bool,
    ) -> None:
        """Give back what an attempt has; the next one begins after that."""
        for task in (taking, before):
            if task is not None:
                if task is taking:
                    task.cancel()
                await asyncio.wait([task])
        if used:
            await self._locks.give_back()
        else:
            self._locks.give()


def lacking() -> ProblemError:
    """What a member answers that takes no turns."""
    return conflict_problem(
        "changed-meanwhile", "this member takes no turns: give it --turn-devices, too"
    )
