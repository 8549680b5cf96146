"""The slots of a member: memory of this node for new weights, filled when the head says so."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from rollout_common.transfer.connections.transfer_loop import run_on_loop
from rollout_common.transfer.memory.slot import Slot
from rollout_common.wire import CHECKPOINT, PushedBytes
from rollout_common.wire.gang_models import GangSlot, SlotRequest
from rollout_common.wire.problems import ProblemError
from rollout_worker.engine import (
    ContentMismatch,
    EngineError,
    EngineMember,
    GivenWeights,
    MemberInfo,
    Sink,
    TensorEntry,
)
from rollout_worker.engines.shared_memory.staging_budget import StagingBudget
from rollout_worker.settings import WorkerSettings
from rollout_worker.sources.pushed.incoming_version import IncomingVersion
from rollout_worker.sources.pushed.peer_route import PeerRoute
from rollout_worker.sources.pushed.pushed_memory import Memory, OwnMemory
from rollout_worker.sources.pushed.pushed_source import receive
from rollout_worker.sources.pushed.version_fetching import VersionFetching
from rollout_worker.sources.tensor_filling import (
    Located,
    SinkFilling,
    locate_source,
    resolve_within,
)
from rollout_worker.weights import check_layout

from .settings import SOURCE_LOOKUP_SECONDS

logger = logging.getLogger(__name__)


class MemberSlot:
    """One slot of this node."""

    def __init__(self, slot: str, request: SlotRequest) -> None:
        self.id = slot
        self.request = request
        self.done = 0
        self.total = 0
        self.unread: frozenset[str] = frozenset()
        """Names of the tensors that no rank of this node reads."""
        self.root_hash: str | None = None
        self.error: str | None = None
        self.slug: str | None = None
        self.sink: Sink | None = None
        self.task: asyncio.Task[None] | None = None

    def report_progress(self, done: int, total: int) -> None:
        """Note progress; may be called from any thread."""
        self.done, self.total = done, total

    def note_hash(self, root_hash: str) -> None:
        """Note the content's hash.

        Raises:
            ContentMismatch: the head expects another one.
        """
        if self.request.root_hash not in (None, root_hash):
            raise ContentMismatch(
                f"the source has root_hash {root_hash} on this node, it should have"
                f" {self.request.root_hash}"
            )
        self.root_hash = root_hash

    async def close(self) -> None:
        """Stop filling and give the memory back."""
        if self.task is not None and not self.task.done():
            self.task.cancel()
            await asyncio.wait([self.task])
        sink, self.sink = self.sink, None
        if sink is not None:
            await asyncio.to_thread(sink.close)

    def to_view(self) -> GangSlot:
        """The slot as the head sees it."""
        return GangSlot(
            id=self.id,
            phase="Failed" if self.error else "Filling" if self.sink is None else "Filled",
            bytes_done=self.done,
            bytes_total=self.total,
            root_hash=self.root_hash,
            error=self.error,
            slug=self.slug,
        )


class MemberSlots:
    """All slots of a node.

    Args:
        settings: The worker's.
        staging: Weights that are fetched from the head are charged to it.
    """

    def __init__(self, settings: WorkerSettings, staging: StagingBudget) -> None:
        self._settings = settings
        self._staging = staging
        self._peer_route = PeerRoute.of(settings)
        self._held: dict[str, MemberSlot] = {}

    def __iter__(self) -> Iterator[GangSlot]:
        return (held.to_view() for held in self._held.values())

    def open_slot(
        self, slot: str, request: SlotRequest, member: EngineMember, info: MemberInfo
    ) -> GangSlot:
        """Begin to fill a slot; a repeated call changes nothing."""
        held = self._held.get(slot)
        if held is None:
            held = self._held[slot] = MemberSlot(slot, request)
            held.task = asyncio.create_task(self._fill_slot(held, member, info))
        return held.to_view()

    def slot_view(self, slot: str) -> GangSlot:
        """One slot.

        Raises:
            ProblemError: 404.
        """
        if slot not in self._held:
            raise ProblemError("not-found", f"this member has no slot {slot}: stage again")
        return self._held[slot].to_view()

    async def close(self, slot: str) -> None:
        """Give a slot back, if it exists; it is listed until its memory is free."""
        held = self._held.get(slot)
        if held is not None:
            await held.close()
            self._held.pop(slot, None)

    async def close_all(self) -> None:
        """Give all slots back."""
        for slot in list(self._held):
            await self.close(slot)

    async def _fill_slot(self, held: MemberSlot, member: EngineMember, info: MemberInfo) -> None:
        seconds, pushed = held.request.deadline_seconds, held.request.source.pushed

        def unread(entries: Sequence[TensorEntry]) -> frozenset[str]:
            if self._settings.gang_fetch == "needed":
                held.unread = member.unread(entries)
            return held.unread

        async def open_slot(
            entries: Sequence[TensorEntry], given: GivenWeights | None = None
        ) -> Sink:
            # `given` is not used: ranks find a slot in its folder, so the bytes are copied there.
            if pushed is None:
                await asyncio.to_thread(unread, entries)
            return await member.open_slot(
                held.id, entries, on_disk=held.request.on_disk, unread=held.unread
            )

        try:
            async with asyncio.timeout(seconds):
                filling = SinkFilling(
                    *(open_slot, info.layout, held.note_hash, held.report_progress),
                    expected=held.request.root_hash,
                )
                if pushed is not None:
                    held.sink = await self._fetch_from_head(held, pushed, filling, unread)
                    return
                located = await self._locate_source(held.request, info)
                held.sink = await filling.fill_from_files(located)
        except TimeoutError:
            held.error = f"not staged within {seconds:g} s"
        except (EngineError, ProblemError) as error:
            held.error, held.slug = str(error), error.slug
        except Exception as error:
            logger.exception("filling slot %s failed", held.id)
            held.error = f"internal error: {error}"

    async def _fetch_from_head(
        self,
        held: MemberSlot,
        pushed: PushedBytes,
        filling: SinkFilling,
        unread: Callable[[Sequence[TensorEntry]], frozenset[str]],
    ) -> Sink:
        """Fetch the pushed bytes that ranks read here from the head; the sink keeps the only copy."""
        check = partial(check_layout, filling.layout, where="what was pushed")

        def open_memory(nbytes: int) -> tuple[Memory, Callable[[], None]]:
            return self._allocate_memory(nbytes, nbytes - incoming.nbytes_left_out)

        # The head knows the identity; a member needs none.
        free_soon = self._staging.freeing.free_soon
        incoming = IncomingVersion(
            CHECKPOINT, pushed, check, open_memory, unread=unread, free_soon=free_soon
        )
        fetching = VersionFetching(incoming, self._peer_route)
        run_on_loop(fetching.fetch_from_peers(pushed.peers))
        try:
            sink = await receive(filling, incoming)
        finally:
            incoming.close("the slot is filled, or was given up")
        _log_arrival(held, incoming)
        return sink

    def _allocate_memory(self, nbytes: int, needed: int) -> tuple[Memory, Callable[[], None]]:
        """Allocate memory for fetched bytes; return it, and a function that takes it off the budget.

        Args:
            nbytes: Of the whole version: offsets stay as they are.
            needed: Of the part that is fetched: no other pages are touched.
        """
        expected = max(needed, 0)
        give_back = self._staging.claim_memory(expected)
        try:
            return OwnMemory(Slot(nbytes, private=True, expected=expected)), give_back
        except BaseException:
            give_back()
            raise

    async def _locate_source(self, request: SlotRequest, info: MemberInfo) -> Located:
        resolved = await resolve_within(
            request.source.without_bytes, self._settings, SOURCE_LOOKUP_SECONDS
        )
        return locate_source(resolved, self._settings, Path(info.model))


def _log_arrival(held: MemberSlot, incoming: IncomingVersion) -> None:
    assert incoming.held is not None, "it was received"
    layout = incoming.held.layout
    logger.info(
        "fetched %d of %d pieces from the head",
        incoming.chunks,
        len(layout.pieces),
        extra={
            "bytes_read": held.total,
            "bytes_total": sum(placed.nbytes for placed in layout.tensors),
            "left_alone": len(held.unread),
        },
    )
