"""The member's side: runs this node's ranks, fills slots when the head asks, and ends with its gang."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rollout_worker.engine import (
    EngineError,
    Entry,
    Gang,
    Given,
    Member,
    MemberInfo,
    Sink,
    WeightsRejected,
)
from rollout_worker.schemas import CHECKPOINT, Progress, PushedBytes
from rollout_worker.settings import Settings
from rollout_worker.sources.fetching import Fetching
from rollout_worker.sources.filling import Located, fill, locate, resolve_within
from rollout_worker.sources.incoming import Incoming
from rollout_worker.sources.memory import Memory
from rollout_worker.sources.outward import Outward
from rollout_worker.sources.pushed import receive
from rollout_worker.weights import check_layout
from rollout_worker.wire.gang import GangSlot, GangState, SlotRequest
from rollout_worker.wire.problems import ProblemError, conflict

from .places import GangBroken
from .silence import Silence

logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.5
SILENCE_SECONDS = 8.0
"""Silence after which the head counts as dead; with what else it takes, this node ends within 10 s."""
LEAVING_SECONDS = 3.0
"""The same once this member was told to end: it stays while its head drains."""
STARTING_SECONDS = 60.0
"""The same while either of the two still loads."""
TELL_SECONDS = 3.0
"""How long a member that gives up stays, so that its head hears why."""
CLOSE_SECONDS = 5.0
"""What giving the slots back may take at the end; the ranks end after it."""
STOP_SECONDS = 30.0
LOOK_UP_SECONDS = 10.0

Claim = Callable[[int], Callable[[], None]]
"""Charges memory of staged weights, as `Staging.claim`; returns what gives it back."""


class Held:
    """One slot of this node, being filled or filled."""

    def __init__(self, slot: str, request: SlotRequest) -> None:
        self.id = slot
        self.request = request
        self.done = 0
        self.total = 0
        self.root_hash: str | None = None
        self.error: str | None = None
        self.sink: Sink | None = None
        self.task: asyncio.Task[None] | None = None

    def report(self, done: int, total: int) -> None:
        """Note progress; may be called from any thread."""
        self.done, self.total = done, total

    def verify(self, root_hash: str) -> None:
        """Note what was found.

        Raises:
            WeightsRejected: it isn't what the head expects.
        """
        if self.request.root_hash not in (None, root_hash):
            raise WeightsRejected(
                f"the source has root_hash {root_hash} on this node, it should have"
                f" {self.request.root_hash}"
            )
        self.root_hash = root_hash

    async def close(self) -> None:
        """End the filling and give the memory back."""
        if self.task is not None and not self.task.done():
            self.task.cancel()
            await asyncio.wait([self.task])
        sink, self.sink = self.sink, None
        if sink is not None:
            await asyncio.to_thread(sink.close)

    def view(self) -> GangSlot:
        """The slot as the head sees it."""
        phase = "Failed" if self.error else "Filling" if self.sink is None else "Filled"
        return GangSlot.model_validate(
            {
                "id": self.id,
                "phase": phase,
                "bytes_done": self.done,
                "bytes_total": self.total,
                "root_hash": self.root_hash,
                "error": self.error,
            }
        )


class MemberWorker:
    """The worker of a node whose rank is above 0, without its socket.

    Args:
        settings: The worker's.
        gang: What the engine is told.
        create: Makes this node's part of the engine.
        claim: Charges memory of weights that are fetched from the head.
    """

    def __init__(
        self, settings: Settings, gang: Gang, create: Callable[[], Member], claim: Claim
    ) -> None:
        self.settings = settings
        self._claim = claim
        self._outward = Outward.of(settings)
        self.boot_id = uuid.uuid4().hex
        self._gang = gang
        self._create = create
        self._member: Member | None = None
        self._info: MemberInfo | None = None
        self._leader: str | None = None
        self._leader_started = False
        self._silence = Silence()
        self._leaving = False
        self._wrong: str | None = None
        self._told = asyncio.Event()
        self._held: dict[str, Held] = {}

    @property
    def ready(self) -> bool:
        """Whether this node's ranks run."""
        return self._info is not None and self._wrong is None

    async def run(self) -> None:
        """Load and watch until the gang is broken.

        Raises:
            GangBroken: says why.
        """
        starting = asyncio.create_task(self._start())
        try:
            while self._wrong is None:
                await asyncio.wait([starting], timeout=WATCH_SECONDS)
                if starting.done() and starting.exception() is None:
                    await asyncio.sleep(WATCH_SECONDS)
                self._wrong = self._wrong or self._look(starting)
            if self._silence.seconds() < SILENCE_SECONDS:  # else nobody is there to hear it
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TELL_SECONDS):
                        await self._told.wait()
            raise GangBroken(self._wrong)
        finally:
            starting.cancel()
            await asyncio.wait([starting], timeout=STOP_SECONDS)

    async def _start(self) -> None:
        timeout = self.settings.start_timeout
        async with asyncio.timeout(timeout):
            # In a thread: importing an engine takes seconds, and probes need answers.
            self._member = await asyncio.to_thread(self._create)
            self._info = await self._member.start(self._report)
        logger.info("the ranks of this node run", extra={"root_hash": self._info.root_hash})

    async def leave(self) -> None:
        """Wait, not for long, until the head needs these ranks no more: it may finish requests."""
        self._leaving = True
        limit = self.settings.drain_seconds + self.settings.shutdown_grace
        until = asyncio.get_running_loop().time() + limit
        while self._leader_started and self._wrong is None:
            if asyncio.get_running_loop().time() > until:
                return
            await asyncio.sleep(WATCH_SECONDS)

    def _report(self, progress: Progress) -> None:
        if progress.fraction is None:  # what has one is told a hundred times
            logger.info("loading: %s", progress.message)

    def _look(self, starting: asyncio.Task[None]) -> str | None:
        """None while the gang can go on, else what is wrong."""
        if starting.done() and (error := starting.exception()) is not None:
            if isinstance(error, TimeoutError):
                limit = self.settings.start_timeout
                return f"the ranks did not load within --start-timeout {limit:g} s"
            return f"the ranks did not start: {error}"
        quiet = self._silence.seconds()
        started = self._info is not None and self._leader_started
        limit = SILENCE_SECONDS if started else STARTING_SECONDS
        if self._leaving:
            limit = LEAVING_SECONDS
        if self._leader is not None and quiet > limit:
            return f"the head has not asked for {quiet:.0f} s"
        return None if self._member is None or self._info is None else self._member.alive()

    # What the head calls.

    def hear(self, leader: str, *, started: bool | None = None) -> None:
        """Note a call of the head; another head's means that ours is gone.

        Raises:
            ProblemError: 409, it is another one.
        """
        if self._leader not in (None, leader):
            self._wrong = self._wrong or "the head was restarted"
            raise conflict("changed-meanwhile", "this member belongs to a head before: it ends")
        self._leader = leader
        self._silence.heard()
        if started is not None:
            self._leader_started = started

    def state(self) -> GangState:
        """How this node is, with all its slots."""
        if self._wrong is not None:
            self._told.set()
        return GangState(
            boot_id=self.boot_id,
            rank=self._gang.rank,
            phase="Starting" if self._info is None else "Ready",
            wrong=self._wrong,
            root_hash=None if self._info is None else self._info.root_hash,
            slots=tuple(held.view() for held in self._held.values()),
        )

    def open(self, slot: str, request: SlotRequest) -> GangSlot:
        """Begin to fill a slot; a repeated call changes nothing.

        Raises:
            ProblemError: 503, nothing is loaded yet.
        """
        if self._info is None or self._member is None:
            raise ProblemError(
                "starting", "the ranks have not loaded yet: try again", retry_after=2
            )
        held = self._held.get(slot)
        if held is None:
            held = self._held[slot] = Held(slot, request)
            held.task = asyncio.create_task(self._fill(held, self._member, self._info))
        return held.view()

    def slot(self, slot: str) -> GangSlot:
        """One slot.

        Raises:
            ProblemError: 404.
        """
        if slot not in self._held:
            raise ProblemError("not-found", f"this member has no slot {slot}: stage again")
        return self._held[slot].view()

    async def close_slot(self, slot: str) -> None:
        """Give a slot back, if there is one; it is listed as long as its memory is there."""
        held = self._held.get(slot)
        if held is not None:
            await held.close()
            self._held.pop(slot, None)

    async def _fill(self, held: Held, member: Member, info: MemberInfo) -> None:
        seconds, pushed = held.request.deadline_seconds, held.request.source.pushed
        open_slot = partial(member.open_slot, held.id, on_disk=held.request.on_disk)
        try:
            async with asyncio.timeout(seconds):
                if pushed is not None:
                    held.sink = await self._fetch(held, pushed, member, info)
                    return
                located = await self._located(held.request, info)
                held.sink = await fill(open_slot, info.layout, located, held.verify, held.report)
        except TimeoutError:
            held.error = f"not staged within {seconds:g} s"
        except (EngineError, ProblemError) as error:
            held.error = str(error)
        except Exception as error:
            logger.exception("filling slot %s failed", held.id)
            held.error = f"internal error: {error}"

    async def _fetch(
        self, held: Held, pushed: PushedBytes, member: Member, info: MemberInfo
    ) -> Sink:
        """Fetch pushed bytes from the head, and keep none beside the sink."""
        check = partial(check_layout, info.layout, where="what was pushed")
        incoming = Incoming(CHECKPOINT, pushed, check, self._room)  # its identity is the head's

        async def open_slot(entries: Sequence[Entry], given: Given | None = None) -> Sink:
            # Ranks look where the head's sink has its tensors, so given memory is copied on all nodes.
            return await member.open_slot(held.id, entries, on_disk=held.request.on_disk)

        Fetching(incoming, pushed.peers, self._outward).start()
        try:
            return await receive(open_slot, info.layout, incoming, held.verify, held.report)
        finally:
            incoming.close("the slot is filled, or was given up")

    def _room(self, nbytes: int) -> tuple[Memory, Callable[[], None]]:
        """Take memory for what is fetched; returns what takes it off the budget, too.

        Raises:
            EngineError: There is none.
            ArenaError: The kernel gives none.
        """
        give_back = self._claim(nbytes)
        try:
            return Memory(max(nbytes, 1), hollow=True), give_back
        except BaseException:
            give_back()
            raise

    async def _located(self, request: SlotRequest, info: MemberInfo) -> Located:
        resolved = await resolve_within(request.source.named, self.settings, LOOK_UP_SECONDS)
        return locate(resolved, self.settings, Path(info.model))

    async def stop(self) -> None:
        """Give everything back; what a volume that does not answer holds goes with the process."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                for slot in list(self._held):
                    await self.close_slot(slot)
        except TimeoutError:
            logger.warning("a slot is still being filled after %g s", CLOSE_SECONDS)
        if self._member is not None:
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await self._member.stop()
            except Exception:  # whatever the adapter raised, the process ends
                logger.exception("the ranks failed to stop")
        shutil.rmtree(self._gang.slots, ignore_errors=True)
