"""A member's side of the turn: it takes its node's locks when the head says so, and gives them back likewise.

A member gives up what it holds if its head falls silent, unless the head has said that the turn is in use: from
then on the ranks may have memory of the devices, and the locks stay until the head gives them back or this node's
processes have ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rollout_common.turn import TurnReplaced
from rollout_common.wire import Progress
from rollout_common.wire.gang_models import GangTurn, TurnPhase
from rollout_common.wire.problems import conflict_problem
from rollout_worker.device_turn import DeviceTurn
from rollout_worker.engine import EngineError

from .settings import SILENCE_SECONDS, WAIT_SECONDS

logger = logging.getLogger(__name__)


class MemberTurn:
    """This node's part of the head's attempts to have the turns of all nodes.

    Args:
        locks: Of this node.
        broken: Gets the reason if the gang can't go on.
    """

    def __init__(self, locks: DeviceTurn, broken: Callable[[str], None]) -> None:
        self.used = asyncio.Event()
        """Set once the head uses a turn: the ranks may load."""
        self._locks = locks
        self._broken = broken
        self._attempt = 0
        """The highest number so far; lower ones are over."""
        self._phase: TurnPhase = "Released"
        self._message: str | None = None
        self._taking: asyncio.Task[None] | None = None
        self._giving: asyncio.Task[None] | None = None

    async def take(self, attempt: int) -> GangTurn:
        """Take the turn in this attempt; answer once it is held, or how far it is after a moment.

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
        """Keep the turn from now on, even if the head falls silent; on a repeated call note the free memory.

        Raises:
            ProblemError: 409, this attempt is over, or does not hold the turn yet.
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
            loaded: Whether the engine runs on all nodes. If not, ranks that use the turn may have memory
                that nobody will free: the gang ends, and the locks end with its processes.
        """
        if attempt >= self._attempt:
            if self._phase == "InUse" and not loaded:
                self._broken("the head gave the turn back while the ranks of this node load")
            else:
                self._end()
                self._attempt = attempt
        return self.view()

    def check(self, silent_seconds: float) -> None:
        """Check the lock files, and give up an unused turn if the head has been silent for too long."""
        self._locks.check_files()
        if silent_seconds > SILENCE_SECONDS and self._phase not in ("InUse", "Released"):
            logger.warning(
                "the head has been silent for %.0f s: giving the turn up", silent_seconds
            )
            self._end()

    def view(self) -> GangTurn:
        """How far the attempt is."""
        now = self._locks.view()
        checks = self._phase == "Waiting" and now.state == "Held"
        phase = "Checking" if checks else self._phase
        return GangTurn(
            attempt=self._attempt,
            phase=phase,
            devices=now.devices,
            waiting_for=now.waiting_for if phase == "Waiting" else {},
            message=self._message,
        )

    async def stop(self, *, ended: bool) -> None:
        """Let go for good, but keep what ranks use that have not `ended` until this process has."""
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
                "changed-meanwhile", f"attempt {attempt} at the turn is over: begin another one"
            )

    async def _take(self, giving: asyncio.Task[None] | None) -> None:
        if giving is not None:  # the attempt before must have given the locks back
            await asyncio.wait([giving])
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
        self, taking: asyncio.Task[None] | None, giving: asyncio.Task[None] | None, *, used: bool
    ) -> None:
        if taking is not None:
            taking.cancel()
            await asyncio.wait([taking])
        if giving is not None:
            await asyncio.wait([giving])
        if used:
            await self._locks.give_back()
        else:
            self._locks.give()
