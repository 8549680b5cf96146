"""The head's side: watches the members, lets them fill slots, and asks for their votes.

Nobody repairs a gang in place. A member that died, was restarted, or is silent for too long makes
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
    """One member as the head knows it."""

    def __init__(self, line: MemberClient, *, takes_turns: bool) -> None:
        self.line = line
        self._takes_turns = takes_turns
        self.silence = SilenceTimer()
        self.state: GangState | None = None
        self.wrong: str | None = None
        self.trouble: str | None = None
        """Why it did not answer last."""
        self.loaded = asyncio.Event()
        """Set once its ranks run."""

    def note_answer(self, state: GangState) -> None:
        """Take an answer in."""
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
        """Take note that it did not answer; before its first answer only the start's limit counts."""
        if self.trouble is None:
            logger.warning("%s does not answer: %s", self.line.name, trouble)
        self.trouble = trouble
        quiet = self.silence.silent_seconds()
        if self.state is not None and quiet > (
            MEMBER_SILENCE_SECONDS if started else MEMBER_START_SECONDS
        ):
            self.wrong = f"it has not answered for {quiet:.0f} s ({trouble})"


class GangHead:
    """The gang as its head sees it.

    Args:
        settings: The worker's.
        gang: What the engine was told.
        boot_id: The worker's.
        crashed: Told why the gang can't go on, as often as that is seen.
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
        """Of the attempts at the turn of all nodes the one in which members may have theirs."""
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
        """None while the gang can go on, else which member is the reason."""
        for member in self.members:
            if member.wrong is not None:
                return f"{member.line.name}: {member.wrong}"
        return None

    def missing_members(self) -> str | None:
        """Who has not started yet, and why not as far as known."""
        for member in self.members:
            if not member.loaded.is_set():
                return f"{member.line.name} has not started ({member.trouble or 'it loads'})"
        return None

    async def wait_agreed(self, root_hash: str) -> None:
        """Wait until all have loaded, and see that it is the checkpoint of this hash.

        Raises:
            EngineError: it isn't; names the member.
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
        # Now, not with the next look: who knows that all run misses a dead head sooner.
        await run_together(_announce_start, self.members)

    def silent_members(self) -> str | None:
        """Who has not answered when it was asked last, and why; None if all are there."""
        for member in self.members:
            if member.state is None or member.trouble is not None:
                return f"{member.line.name} does not answer ({member.trouble or 'not asked yet'})"
        return None

    async def give_turns(self, attempt: int) -> None:
        """End an attempt everywhere; who does not hear of it now is told by the watch."""
        await self._release_on_members(
            "its turn", lambda line: line.give_turn(attempt, started=self.started)
        )

    async def _release_on_members(
        self, what: str, told: Callable[[MemberClient], Awaitable[object]]
    ) -> None:
        """Tell all members to give something back; who does not hear of it is named."""

        async def one(member: WatchedMember) -> None:
            try:
                await told(member.line)
            except MemberSilent as error:
                logger.warning("%s did not give %s back: %s", member.line.name, what, error)

        await asyncio.wait(
            [asyncio.ensure_future(run_together(one, self.members))], timeout=SLOT_CLOSE_SECONDS
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
        """Fill a slot on every member; returns which root hash each found.

        `source` is asked once for each: a ticket for pushed bytes is good for one. Whatever goes
        wrong, no member keeps it.

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
        """See that every member still holds a slot, right before it is committed.

        Raises:
            EngineError: one doesn't; names it.
        """

        async def one(member: WatchedMember) -> None:
            held = await _poll_member_slot(member.line, slot)
            if held.phase != "Filled" or held.root_hash != root_hash:
                raise EngineError(
                    f"{member.line.name} does not hold these weights: stage them again"
                )

        await run_together(one, self.members)

    async def close(self, slot: str) -> None:
        """Have a slot given back everywhere; who does not hear of it now is told by the watch."""
        await self._release_on_members(f"slot {slot}", lambda line: line.close_slot(slot))

    async def _sweep_member(self, member: WatchedMember) -> None:
        """Have a member give back the slots that are closed here, and a turn that is over."""
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
                    return  # the next look sees it again


async def run_together(
    one: Callable[[WatchedMember], Awaitable[T]], members: Sequence[WatchedMember]
) -> list[T]:
    """Do it with all at once; the first failure ends the others and is raised."""
    tasks = [asyncio.ensure_future(one(member)) for member in members]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _announce_start(member: WatchedMember) -> None:
    """Tell a member that the head's engine runs; one that does not answer is the watch's to miss."""
    try:
        await member.line.get_state(started=True)
    except MemberSilent as error:
        logger.warning("%s was not told of the start: %s", member.line.name, error)


async def _fill_member_slot(line: MemberClient, slot: str, request: SlotRequest) -> str:
    """Have a member fill a slot; returns the root hash that it found."""
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
    """Look at a slot; a member that does not answer is asked again while the head waits for it."""
    silence = SilenceTimer()
    while True:
        try:
            return await line.get_slot(slot)
        except MemberSilent as error:
            if silence.silent_seconds() > MEMBER_SILENCE_SECONDS or error.status is not None:
                raise EngineError(f"{line.name} has lost its slot: {error}") from error
            await asyncio.sleep(SLOT_POLL_SECONDS)
