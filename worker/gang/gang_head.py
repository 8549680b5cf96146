"""The head's side of a gang: it watches the members, makes them fill slots, and collects their votes.

A gang is never repaired in place. A member that died, was restarted, or is silent for too long makes
the engine count as dead, and the process ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from rollout_common.wire import StageSource
from rollout_common.wire.gang_models import GangSlot, GangState, SlotRequest
from rollout_worker.engine import ContentMismatch, EngineError, GangMembership
from rollout_worker.settings import WorkerSettings

from .gang_addresses import member_addresses
from .member_client import MemberClient, MemberSilent
from .settings import (
    MEMBER_POLL_SECONDS,
    MEMBER_SILENCE_SECONDS,
    MEMBER_START_SECONDS,
    SLOT_CLOSE_SECONDS,
    SLOT_POLL_SECONDS,
)
from .silence_timer import SilenceTimer

logger = logging.getLogger(__name__)

T = TypeVar("T")


class WatchedMember:
    """What the head knows of one member."""

    def __init__(self, line: MemberClient, *, takes_turns: bool) -> None:
        self.line = line
        self._takes_turns = takes_turns
        self.silence = SilenceTimer()
        self.state: GangState | None = None
        self.wrong: str | None = None
        self.trouble: str | None = None
        """Why it did not answer the last call."""
        self.loaded = asyncio.Event()
        """Set once its ranks run."""

    def note_answer(self, state: GangState) -> None:
        """Note an answer; set `wrong` if it means that the gang can't go on."""
        before, self.state, self.trouble = self.state, state, None
        self.silence.note_heard()
        if before is not None and before.boot_id != state.boot_id:
            self.wrong = "it was restarted"
        elif state.rank != self.line.rank:
            self.wrong = f"it says that it is rank {state.rank}: see --member-addresses"
        elif state.wrong is not None:
            self.wrong = state.wrong
        elif (state.turn is not None) != self._takes_turns:
            self.wrong = "either it takes turns or the head does: give --turn-devices to both"
        elif state.phase == "Ready":
            self.loaded.set()

    def note_silence(self, trouble: str, *, started: bool) -> None:
        """Note a call without an answer; before the first answer only the start's limit counts."""
        if self.trouble is None:
            logger.warning("%s does not answer: %s", self.line.name, trouble)
        self.trouble = trouble
        quiet = self.silence.silent_seconds()
        if self.state is not None and quiet > (
            MEMBER_SILENCE_SECONDS if started else MEMBER_START_SECONDS
        ):
            self.wrong = f"it has not answered for {quiet:.0f} s ({trouble})"


class GangHead:
    """The members of one gang, watched and called by its head.

    Args:
        settings: The worker's.
        gang: The engine's part in the gang.
        boot_id: The worker's.
        crashed: Gets the reason whenever the gang can't go on.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        gang: GangMembership,
        boot_id: str,
        crashed: Callable[[str], None],
    ) -> None:
        self.started = False
        """Whether the head's engine runs: from then on silence counts sooner."""
        self.attempt: int | None = None
        """The attempt at the turn in which members may hold locks; None: in none."""
        self._slots = gang.slots
        self._crashed = crashed
        self.members = [
            WatchedMember(
                MemberClient(rank, address, boot_id, settings),
                takes_turns=bool(settings.turn_devices),
            )
            for rank, address in enumerate(member_addresses(settings), 1)
        ]

    async def watch_members(self) -> None:
        """Watch the members until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for member in self.members:
                    tasks.create_task(self._watch_member(member))
        finally:
            await asyncio.gather(*(member.line.close() for member in self.members))
            shutil.rmtree(self._slots, ignore_errors=True)

    async def _watch_member(self, member: WatchedMember) -> None:
        while True:
            started = self.started
            try:
                member.note_answer(await member.line.get_state(started=started))
            except MemberSilent as error:
                member.note_silence(str(error), started=started)
            else:
                await self._sweep_member(member)
            if (wrong := self.broken_reason()) is not None:
                self._crashed(wrong)
            await asyncio.sleep(MEMBER_POLL_SECONDS)

    def broken_reason(self) -> str | None:
        """Return which member broke the gang and how, or None while it can go on."""
        broken = (f"{m.line.name}: {m.wrong}" for m in self.members if m.wrong is not None)
        return next(broken, None)

    def missing_members(self) -> str | None:
        """Return which member has not started yet and why, if one has not."""
        for member in self.members:
            if not member.loaded.is_set():
                return f"{member.line.name} has not started ({member.trouble or 'it loads'})"
        return None

    async def wait_agreed(self, root_hash: str) -> None:
        """Wait until all members have loaded the checkpoint of this hash.

        Raises:
            EngineError: a member has loaded another one; names it.
        """
        for member in self.members:
            await member.loaded.wait()
            have = None if member.state is None else member.state.root_hash
            if have != root_hash:
                raise EngineError(
                    f"{member.line.name} has loaded another checkpoint ({have}) than the head"
                    f" ({root_hash}): give all nodes the same model"
                )
        self.started = True
        # Now, not with the next poll: members that know of the start miss a dead head sooner.
        await self._tell_members(
            "does not know of the start", lambda line: line.get_state(started=True)
        )

    def silent_members(self) -> str | None:
        """Return which member did not answer its last call and why, or None if all did."""
        for member in self.members:
            if member.state is None or member.trouble is not None:
                return f"{member.line.name} does not answer ({member.trouble or 'not asked yet'})"
        return None

    async def give_turns(self, attempt: int) -> None:
        """End an attempt on every member; the watch repeats it for one that does not answer."""
        await self._tell_members(
            "did not give its turn back", lambda line: line.give_turn(attempt, started=self.started)
        )

    async def _tell_members(
        self, missed: str, call: Callable[[MemberClient], Awaitable[object]]
    ) -> None:
        """Call all members, for a short time; log what one `missed` that does not answer."""

        async def tell(member: WatchedMember) -> None:
            try:
                await call(member.line)
            except MemberSilent as error:
                logger.warning("%s %s: %s", member.line.name, missed, error)

        await asyncio.wait(
            [asyncio.ensure_future(run_together(tell, self.members))], timeout=SLOT_CLOSE_SECONDS
        )

    # Slots.

    async def fill_slots(
        self,
        slot: str,
        source: Callable[[], StageSource],
        root_hash: str | None,
        *,
        on_disk: bool,
        seconds: float,
    ) -> Mapping[str, str]:
        """Fill a slot on every member, or on none; return the root hash that each found.

        `source` is called once for each member: a ticket for pushed bytes is good for one.

        Raises:
            ContentMismatch: a member found other bytes; names it.
            EngineError: a member can't, or didn't in time; names it.
        """

        async def one(member: WatchedMember) -> str:
            await self._sweep_member(member)
            request = SlotRequest(
                source=source(), root_hash=root_hash, on_disk=on_disk, deadline_seconds=seconds
            )
            return await _fill_member_slot(member.line, slot, request)

        try:
            async with asyncio.timeout(seconds):
                found = await run_together(one, self.members)
        except BaseException as error:
            await self.close(slot)
            if isinstance(error, TimeoutError):
                raise EngineError(f"a member did not stage within {seconds:g} s") from None
            raise
        return {m.line.name: each for m, each in zip(self.members, found, strict=True)}

    async def confirm_slots(self, slot: str, root_hash: str | None) -> None:
        """Check that every member still holds a slot, right before it is committed.

        Raises:
            EngineError: a member doesn't; names it.
        """

        async def one(member: WatchedMember) -> None:
            held = await _poll_member_slot(member.line, slot)
            if held.phase != "Filled" or held.root_hash != root_hash:
                raise EngineError(
                    f"{member.line.name} does not hold these weights: stage them again"
                )

        await run_together(one, self.members)

    async def close(self, slot: str) -> None:
        """Make every member give a slot back; the watch repeats it for one that does not answer."""
        await self._tell_members(
            f"did not give slot {slot} back", lambda line: line.close_slot(slot)
        )

    async def _sweep_member(self, member: WatchedMember) -> None:
        """Make a member give back slots that are closed here, and a turn that is over."""
        turn = None if member.state is None else member.state.turn
        if turn is not None and turn.phase != "Released" and turn.attempt != self.attempt:
            with contextlib.suppress(MemberSilent):
                await member.line.give_turn(turn.attempt, started=self.started)
        held = () if member.state is None else member.state.slots
        for slot in held:
            if not (self._slots / slot.id).is_symlink():
                try:
                    await member.line.close_slot(slot.id)
                except MemberSilent:
                    return  # the next poll does it


async def run_together(
    one: Callable[[WatchedMember], Awaitable[T]], members: Sequence[WatchedMember]
) -> list[T]:
    """Call `one` for all members at the same time; the first failure cancels the others and is raised."""
    tasks = [asyncio.ensure_future(one(member)) for member in members]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _fill_member_slot(line: MemberClient, slot: str, request: SlotRequest) -> str:
    try:
        held = await line.open_slot(slot, request)
    except MemberSilent as error:
        raise EngineError(f"{line.name} can't stage: {error}") from error
    while held.phase == "Filling":
        await asyncio.sleep(SLOT_POLL_SECONDS)
        held = await _poll_member_slot(line, slot)
    if held.phase == "Failed" or held.root_hash is None:
        kind = ContentMismatch if held.slug == ContentMismatch.slug else EngineError
        raise kind(f"{line.name} can't stage: {held.error}")
    return held.root_hash


async def _poll_member_slot(line: MemberClient, slot: str) -> GangSlot:
    """Get a slot's state; repeat the call while the head still waits for a silent member."""
    silence = SilenceTimer()
    while True:
        try:
            return await line.get_slot(slot)
        except MemberSilent as error:
            if silence.silent_seconds() > MEMBER_SILENCE_SECONDS or error.status is not None:
                raise EngineError(f"{line.name} has lost its slot: {error}") from error
            await asyncio.sleep(SLOT_POLL_SECONDS)
