"""A member of a gang: it runs this node's ranks, fills slots when the head asks, and ends with its gang."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import uuid
from collections.abc import Callable

from rollout_common.wire import Progress
from rollout_common.wire.gang_models import GangSlot, GangState, GangTurn, SlotRequest
from rollout_common.wire.problems import ProblemError, conflict_problem
from rollout_worker.device_turn import DeviceTurn
from rollout_worker.engine import EngineMember, GangMembership, MemberInfo
from rollout_worker.engines.shared_memory.staging_budget import StagingBudget
from rollout_worker.settings import WorkerSettings

from .gang_addresses import GangBroken
from .member_slots import MemberSlots
from .member_turn import MemberTurn
from .settings import (
    FAILURE_REPORT_SECONDS,
    GANG_WATCH_SECONDS,
    HEAD_LEAVE_SECONDS,
    HEAD_SILENCE_SECONDS,
    HEAD_START_SECONDS,
    RANKS_STOP_SECONDS,
    SLOTS_CLOSE_SECONDS,
)
from .silence_timer import SilenceTimer

logger = logging.getLogger(__name__)


class MemberWorker:
    """The worker of a node whose rank is above 0, without its socket.

    Args:
        settings: The worker's.
        gang: This node's part in the gang.
        create: Makes this node's part of the engine.
        staging: Weights that are fetched from the head are charged to it.
        locks: Of this node's devices, if others use them by turns.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        gang: GangMembership,
        create: Callable[[], EngineMember],
        staging: StagingBudget,
        locks: DeviceTurn | None = None,
    ) -> None:
        self.settings = settings
        self._turn = None if locks is None else MemberTurn(locks, self._break_gang)
        self.slots = MemberSlots(settings, staging)
        self.boot_id = uuid.uuid4().hex
        self._gang = gang
        self._create = create
        self._member: EngineMember | None = None
        self._info: MemberInfo | None = None
        self._leader: str | None = None
        self._leader_started = False
        self._silence = SilenceTimer()
        self._leaving = False
        self._wrong: str | None = None
        self._reported = asyncio.Event()
        """Set once the head has read why the gang can't go on."""

    @property
    def is_ready(self) -> bool:
        """Whether this node's ranks run."""
        return self._info is not None and self._wrong is None

    async def run_until_broken(self) -> None:
        """Load and watch until the gang is broken.

        Raises:
            GangBroken: with the reason.
        """
        starting = asyncio.create_task(self._start_ranks())
        try:
            while self._wrong is None:
                await asyncio.wait([starting], timeout=GANG_WATCH_SECONDS)
                if starting.done() and starting.exception() is None:
                    await asyncio.sleep(GANG_WATCH_SECONDS)
                self._wrong = self._wrong or self._find_trouble(starting)
            # A silent head can't read the reason.
            if self._silence.silent_seconds() < HEAD_SILENCE_SECONDS:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(FAILURE_REPORT_SECONDS):
                        await self._reported.wait()
            raise GangBroken(self._wrong)
        finally:
            starting.cancel()
            await asyncio.wait([starting], timeout=RANKS_STOP_SECONDS)

    def _break_gang(self, why: str) -> None:
        self._wrong = self._wrong or why

    @property
    def member_turn(self) -> MemberTurn:
        """This node's turn.

        Raises:
            ProblemError: 409, it takes no turns.
        """
        if self._turn is None:
            raise conflict_problem(
                "changed-meanwhile", "this member takes no turns: give it --turn-devices, too"
            )
        return self._turn

    def give_turn(self, attempt: int) -> GangTurn:
        """Give the turn back; see `MemberTurn.give`."""
        return self.member_turn.give(attempt, loaded=self._leader_started)

    async def _start_ranks(self) -> None:
        if self._turn is not None:
            await self._turn.used.wait()  # however long others have the devices
        async with asyncio.timeout(self.settings.start_timeout):
            # In a thread: importing an engine takes seconds, and probes need answers.
            self._member = await asyncio.to_thread(self._create)
            self._info = await self._member.start(self._report_progress)
        logger.info("the ranks of this node run", extra={"root_hash": self._info.root_hash})

    async def wait_released(self) -> None:
        """Wait, within the drain time, until the head has finished the requests that these ranks run."""
        self._leaving = True
        limit = self.settings.drain_seconds + self.settings.shutdown_grace
        until = asyncio.get_running_loop().time() + limit
        while self._leader_started and self._wrong is None:
            if asyncio.get_running_loop().time() > until:
                return
            await asyncio.sleep(GANG_WATCH_SECONDS)

    def _report_progress(self, progress: Progress) -> None:
        if progress.fraction is None:  # steps with a fraction come by the hundred
            logger.info("loading: %s", progress.message)

    def _find_trouble(self, starting: asyncio.Task[None]) -> str | None:
        if starting.done() and (error := starting.exception()) is not None:
            if isinstance(error, TimeoutError):
                limit = self.settings.start_timeout
                return f"the ranks did not load within --start-timeout {limit:g} s"
            return f"the ranks did not start: {error}"
        quiet = self._silence.silent_seconds()
        if self._turn is not None:
            self._turn.check(quiet)
        started = self._info is not None and self._leader_started
        limit = HEAD_SILENCE_SECONDS if started else HEAD_START_SECONDS
        if self._leaving:
            limit = HEAD_LEAVE_SECONDS
        if self._leader is not None and quiet > limit:
            return f"the head has not asked for {quiet:.0f} s"
        return None if self._member is None or self._info is None else self._member.alive()

    def note_head(self, leader: str, *, started: bool | None = None) -> None:
        """Note a call of the head; a call of another head breaks the gang.

        Raises:
            ProblemError: 409, it is another head.
        """
        if self._leader not in (None, leader):
            self._break_gang("the head was restarted")
            raise conflict_problem(
                "changed-meanwhile", "this member belongs to an earlier head: it ends"
            )
        self._leader = leader
        self._silence.note_heard()
        if started is not None:
            self._leader_started = started

    def gang_state(self) -> GangState:
        """This node's state, with all its slots."""
        if self._wrong is not None:
            self._reported.set()
        return GangState(
            boot_id=self.boot_id,
            rank=self._gang.rank,
            phase="Starting" if self._info is None else "Ready",
            wrong=self._wrong,
            root_hash=None if self._info is None else self._info.root_hash,
            slots=tuple(self.slots),
            turn=None if self._turn is None else self._turn.view(),
        )

    def open_slot(self, slot: str, request: SlotRequest) -> GangSlot:
        """Begin to fill a slot; a repeated call changes nothing.

        Raises:
            ProblemError: 503, the ranks have not loaded yet.
        """
        if self._info is None or self._member is None:
            raise ProblemError(
                "starting", "the ranks have not loaded yet: try again", retry_after=2
            )
        return self.slots.open_slot(slot, request, self._member, self._info)

    async def stop_worker(self) -> None:
        """Give everything back; a fill that hangs on a volume ends with the process."""
        try:
            async with asyncio.timeout(SLOTS_CLOSE_SECONDS):
                await self.slots.close_all()
        except TimeoutError:
            logger.warning("a slot is still being filled after %g s", SLOTS_CLOSE_SECONDS)
        ended = await self._stop_ranks()
        if self._turn is not None:
            await self._turn.stop(ended=ended)
        shutil.rmtree(self._gang.slots, ignore_errors=True)

    async def _stop_ranks(self) -> bool:
        """Stop this node's ranks; return whether all have ended."""
        if self._member is None:
            return True
        try:
            async with asyncio.timeout(RANKS_STOP_SECONDS):
                await self._member.stop()
            return True
        except Exception:  # the process ends, whatever the adapter raised
            logger.exception("the ranks failed to stop")
            return False
