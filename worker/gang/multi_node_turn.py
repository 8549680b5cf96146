"""The turn of an engine that spans several nodes: for the devices of all of them, or for none.

The head takes its own node's turn, then makes the members take theirs, rank after rank. Others may take the
same locks in another order, so the wait for a lock is short while other locks are held: after it all are
given back, and the next attempt begins at the node that was not free, with nothing held.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping

from typing_extensions import override

from rollout_common.wire import Progress, TurnState
from rollout_worker.device_turn import DeviceTurn, waits_for
from rollout_worker.engine import EngineError
from rollout_worker.observe.worker_telemetry import WorkerTelemetry
from rollout_worker.settings import WorkerSettings

from .gang_head import GangHead, WatchedMember, run_together
from .member_client import MemberSilent
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


class WholeTurn(DeviceTurn):
    """The turn of the head's node, extended to all members.

    Args:
        settings: The worker's.
        telemetry: The worker's.
        head: Calls the members.
    """

    def __init__(
        self, settings: WorkerSettings, telemetry: WorkerTelemetry, head: GangHead
    ) -> None:
        super().__init__(settings, telemetry)
        self._head = head
        self._number = 0
        self._holds_all = False
        self._waits_for_all = False
        self._blocked: Mapping[str, str] = {}

    @override
    async def take(self, report: Report, wanted: Wanted = lambda: True) -> bool:
        if self._holds_all:
            return True
        began, self._waits_for_all = time.monotonic(), True
        try:
            self._holds_all = await self._make_attempts(report, wanted)
        finally:
            self._waits_for_all, self._blocked = False, {}
        if self._holds_all:
            super()._observe_wait(time.monotonic() - began)
        elif (wrong := self._head.broken_reason()) is not None:
            raise EngineError(wrong)
        return self._holds_all

    @override
    def _observe_wait(self, seconds: float) -> None:
        pass  # the head's node is a part of the whole wait

    async def _make_attempts(self, report: Report, wanted: Wanted) -> bool:
        first = 0

        def goes_on() -> bool:
            return wanted() and self._head.broken_reason() is None

        while goes_on():
            if (absent := self._head.silent_members()) is not None:  # so take no lock yet
                report(Progress(message=absent))
                await asyncio.sleep(MEMBERS_POLL_SECONDS)
                continue
            try:
                return await self._attempt(first, report, goes_on)
            except Late as late:
                logger.info("the turn was given back and is attempted again: %s", late)
                first = late.rank
            await asyncio.sleep(random.uniform(0, PAUSE_SECONDS))
        return False

    async def _attempt(self, first: int, report: Report, wanted: Wanted) -> bool:
        """Try once; wait without limit at the node `first`, where nothing is held yet.

        Raises:
            Late: nothing is held; begin the next attempt at that node.
        """
        self._number += 1
        self._head.attempt = attempt = self._number
        ranks = sorted(range(len(self._head.members) + 1), key=lambda rank: rank != first)
        had = False
        try:
            for rank in ranks:
                take = self._take_own if rank == 0 else self._take_member
                until = None if rank == first else time.monotonic() + PATIENCE_SECONDS
                if not await take(rank, report, wanted, until):
                    return False
            await run_together(self._use_member, self._head.members)
            had = True
        finally:
            if not had:
                self._head.attempt = None
                self.give()
                await self._head.give_turns(attempt)
        return True

    async def _take_own(
        self, rank: int, report: Report, wanted: Wanted, until: float | None
    ) -> bool:
        def goes_on() -> bool:
            # The memory of an earlier holder has its own time limit.
            return wanted() and (not _is_past(until) or self._turn.held)

        def report_own(progress: Progress) -> None:
            report(Progress(message=f"rank 0: {progress.message}"))

        had = await super().take(report_own, goes_on)
        if not had and wanted():
            raise Late(rank, "others keep the devices of rank 0")
        return had

    async def _take_member(
        self, rank: int, report: Report, wanted: Wanted, until: float | None
    ) -> bool:
        line = self._head.members[rank - 1].line
        while wanted():
            checking = False
            try:
                turn = await line.take_turn(self._number)
            except MemberSilent as error:
                if error.status == CONFLICT:
                    raise Late(rank, f"{line.name}: {error}") from error
                why, self._blocked = f"does not answer ({error})", {}
                await asyncio.sleep(MEMBERS_POLL_SECONDS)
            else:
                self._blocked = turn.waiting_for
                if turn.phase == "Failed":
                    raise EngineError(f"{line.name}: {turn.message}")
                if turn.phase in ("Held", "InUse"):
                    return True
                why = turn.message or "takes its turn"
                if turn.waiting_for:
                    why = waits_for(turn.waiting_for)
                checking = turn.phase == "Checking"  # the memory of an earlier holder
            report(Progress(message=f"{line.name}: {why}"))
            if not checking and _is_past(until):
                raise Late(rank, f"{line.name}: {why}")
        return False

    async def _use_member(self, member: WatchedMember) -> None:
        """Make a member keep its turn."""
        until = time.monotonic() + USE_SECONDS
        while True:
            try:
                await member.line.use_turn(self._number)
            except MemberSilent as error:
                if error.status == CONFLICT or _is_past(until):
                    raise Late(member.line.rank, f"{member.line.name}: {error}") from error
                await asyncio.sleep(MEMBERS_POLL_SECONDS)
            else:
                return

    @override
    async def note_use(self) -> None:
        if not self._holds_all:
            return
        calls = (member.line.use_turn(self._number) for member in self._head.members)
        # A node that does not answer goes on with the figures that it has.
        await asyncio.gather(super().note_use(), *calls, return_exceptions=True)

    @override
    async def give_back(self) -> None:
        if not self._holds_all:
            return
        self._holds_all, self._head.attempt = False, None
        await asyncio.gather(super().give_back(), self._head.give_turns(self._number))

    @override
    def leave(self) -> None:
        self._holds_all = False
        super().leave()

    @override
    def view(self) -> TurnState:
        """The turn as `/v1/state` shows it: Held once every node has its own."""
        own = super().view()
        theirs = [m.state.turn for m in self._head.members if m.state is not None]
        devices = [device for turn in theirs if turn is not None for device in turn.devices]
        waits = self._waits_for_all
        return TurnState(
            state="Held" if self._holds_all else "Waiting" if waits else "Released",
            devices=(*own.devices, *devices),
            waiting_for={**own.waiting_for, **self._blocked} if waits else {},
        )


def _is_past(until: float | None) -> bool:
    return until is not None and time.monotonic() > until
