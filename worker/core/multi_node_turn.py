"""The turn of an engine that spans several nodes: for the devices of all of them, or for none.

The head takes its own node's, then tells the members to take theirs, rank after rank. Others may take the
same locks in another order, so nobody waits long for a lock while others are held: after a while all are
given back, and the next attempt begins where this one was held up, with nothing in its hands.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping

from rollout_common.wire import Progress, TurnState
from rollout_worker.engine import EngineError
from rollout_worker.gang.gang_head import GangHead, WatchedMember, run_together
from rollout_worker.gang.member_client import MemberSilent
from rollout_worker.observe.worker_telemetry import WorkerTelemetry

from .device_turn import DeviceTurn, waits_for
from .settings import MEMBERS_POLL_SECONDS, PATIENCE_SECONDS, PAUSE_SECONDS, USE_SECONDS

logger = logging.getLogger(__name__)

Report = Callable[[Progress], None]
Wanted = Callable[[], bool]

CONFLICT = 409


class Late(Exception):
    """This attempt failed at one of the nodes."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(why)
        self.rank = rank


class WholeTurn:
    """What `DeviceTurn` is to a worker of one node.

    Args:
        own: The turn of the head's node.
        head: Speaks with the members.
        telemetry: Counts what the waits took.
    """

    def __init__(self, own: DeviceTurn, head: GangHead, telemetry: WorkerTelemetry) -> None:
        self._own = own
        self._head = head
        self._telemetry = telemetry
        self._number = 0
        self._held = False
        self._waiting = False
        self._blocked: Mapping[str, str] = {}

    async def take(self, report: Report, wanted: Wanted = lambda: True) -> bool:
        """Wait for the turn on all nodes; False, and nothing held, once it is not `wanted` any more.

        Raises:
            EngineError: a node's locks can't be used, or the gang can't go on.
            TurnReplaced: not with the processes that share the head's turn now.
        """
        if self._held:
            return True
        began, self._waiting = time.monotonic(), True
        try:
            self._held = await self._attempts(report, wanted)
        finally:
            self._waiting, self._blocked = False, {}
        if self._held:
            self._telemetry.turn_seconds.observe(time.monotonic() - began)
        elif (wrong := self._head.broken_reason()) is not None:
            raise EngineError(wrong)
        return self._held

    async def _attempts(self, report: Report, wanted: Wanted) -> bool:
        first = 0

        def goes_on() -> bool:
            return wanted() and self._head.broken_reason() is None

        while goes_on():
            if (absent := self._head.silent_members()) is not None:  # so nothing is held for it
                report(Progress(message=absent))
                await asyncio.sleep(MEMBERS_POLL_SECONDS)
                continue
            try:
                return await self._attempt(first, report, goes_on)
            except Late as late:
                logger.info("the turn is given back and waited for anew: %s", late)
                first = late.rank
            await asyncio.sleep(random.uniform(0, PAUSE_SECONDS))
        return False

    async def _attempt(self, first: int, report: Report, wanted: Wanted) -> bool:
        """Try once, from the node at which to wait without end.

        Raises:
            Late: begin anew there; nothing is held.
        """
        self._number += 1
        self._head.attempt = attempt = self._number
        had = False
        try:
            had = await self._all(first, report, wanted)
            return had
        finally:
            if not had:
                self._head.attempt = None
                self._own.give()
                await self._head.give_turns(attempt)

    async def _all(self, first: int, report: Report, wanted: Wanted) -> bool:
        ranks = range(len(self._head.members) + 1)
        for rank in (first, *(each for each in ranks if each != first)):
            if not await self._one(rank, report, wanted, patient=rank == first):
                return False
        await run_together(self._use, self._head.members)
        return True

    async def _one(self, rank: int, report: Report, wanted: Wanted, *, patient: bool) -> bool:
        """Have one node's turn; False if none is `wanted` any more.

        Raises:
            Late: others kept it, and this attempt may not wait for ever.
        """
        until = time.monotonic() + PATIENCE_SECONDS

        def in_time() -> bool:
            return patient or time.monotonic() < until

        if rank > 0:
            return await self._member(self._head.members[rank - 1], report, wanted, in_time)

        def may() -> bool:
            # Memory of who had it before comes back within its own time.
            return wanted() and (in_time() or self._own.view().state == "Held")

        def tell(progress: Progress) -> None:
            report(Progress(message=f"rank 0: {progress.message}"))

        had = await self._own.take(tell, may)
        if not had and wanted():
            raise Late(0, "others keep the devices of rank 0")
        return had

    async def _member(
        self, member: WatchedMember, report: Report, wanted: Wanted, in_time: Callable[[], bool]
    ) -> bool:
        line, why = member.line, ""
        while wanted():
            try:
                turn = await line.take_turn(self._number)
            except MemberSilent as error:
                if error.status == CONFLICT:
                    raise Late(line.rank, f"{line.name}: {error}") from error
                why, self._blocked, checking = f"does not answer ({error})", {}, False
                await asyncio.sleep(MEMBERS_POLL_SECONDS)
            else:
                if turn.phase == "Failed":
                    raise EngineError(f"{line.name}: {turn.message}")
                if turn.phase in ("Held", "InUse"):
                    self._blocked = {}
                    return True
                why, self._blocked = turn.message or "takes its turn", turn.waiting_for
                if turn.waiting_for:
                    why = waits_for(turn.waiting_for)
                checking = turn.phase == "Checking"
            report(Progress(message=f"{line.name}: {why}"))
            if not (checking or in_time()):
                raise Late(line.rank, f"{line.name}: {why}")
        return False

    async def _use(self, member: WatchedMember) -> None:
        """Have a member keep its turn.

        Raises:
            Late: it has not got it any more.
        """
        until = time.monotonic() + USE_SECONDS
        while True:
            try:
                await member.line.use_turn(self._number)
            except MemberSilent as error:
                if error.status == CONFLICT or time.monotonic() > until:
                    raise Late(member.line.rank, f"{member.line.name}: {error}") from error
                await asyncio.sleep(MEMBERS_POLL_SECONDS)
            else:
                return

    def check_files(self) -> str | None:
        """Say what is wrong with the lock files of the head's node; a member logs it of its own."""
        return self._own.check_files()

    async def note_use(self) -> None:
        """Note on each node what is free while the engine has all its memory."""
        if not self._held:
            return
        number = self._number
        told = (member.line.use_turn(number) for member in self._head.members)
        # A node that does not answer goes on with what it knows.
        await asyncio.gather(self._own.note_use(), *told, return_exceptions=True)

    async def give_back(self) -> None:
        """Give the turn back on all nodes; each remembers what the engine leaves free there."""
        if not self._held:
            return
        self._held, self._head.attempt = False, None
        await asyncio.gather(self._own.give_back(), self._head.give_turns(self._number))

    def leave(self) -> None:
        """Let go of the turn: on each node it stays with those of the engine's processes that haven't ended."""
        self._held = False
        self._own.leave()

    def close(self) -> None:
        """Let go for good."""
        self._held = False
        self._own.close()

    def view(self) -> TurnState:
        """The turn as `/v1/state` shows it: held where all nodes have theirs."""
        own = self._own.view()
        theirs = [m.state.turn for m in self._head.members if m.state is not None]
        devices = [device for turn in theirs if turn is not None for device in turn.devices]
        waiting_for = {**own.waiting_for, **self._blocked} if self._waiting else {}
        return TurnState.model_validate(
            {
                "state": "Held" if self._held else "Waiting" if self._waiting else "Released",
                "devices": (*own.devices, *devices),
                "waiting_for": waiting_for,
            }
        )
