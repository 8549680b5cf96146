"""Keeps the bytes of a pushed version, and serves them to other workers, also while they still arrive."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from rollout_common.transfer.connections.frame_stream import FrameStream
from rollout_common.transfer.connections.frames import Frame, Kind
from rollout_common.transfer.held_version import HeldVersion, VersionEnd
from rollout_common.transfer.layout import PushLayout
from rollout_common.transfer.nixl.agent_handle import NixlFailed
from rollout_common.transfer.nixl.memory_serving import memory_server
from rollout_common.transfer.piece_server import PieceServer
from rollout_common.transfer.settings import LEASE_SECONDS
from rollout_common.wire import KeptWeights, WeightsId
from rollout_worker.engine import TensorEntry
from rollout_worker.sources.source_reading import ReadableSource, ReadLeaf

from .arrived_deltas import DeltaPatch
from .arrived_version import entries_of, read_placed
from .incoming_version import IncomingVersion
from .peer_route import PeerRoute
from .pushed_memory import Memory, TransferFailed

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeptVersion(ReadableSource):
    """A committed version whose bytes are still here; `release` frees them."""

    identity: WeightsId
    held: HeldVersion
    memory: Memory
    end: VersionEnd
    release: Callable[[], None]
    patch: DeltaPatch | None = None
    """The deltas from the version before it; None: unknown."""

    @property
    def layout(self) -> PushLayout:
        """Where its tensors lie in its memory."""
        return self.held.layout

    def to_view(self) -> KeptWeights:
        """Return it as clients see it in the state of the worker."""
        return KeptWeights(
            epoch=self.identity.epoch,
            version=self.identity.version,
            root_hash=self.end.root_hash,
            bytes=self.layout.nbytes,
        )

    @property
    @override
    def entries(self) -> tuple[TensorEntry, ...]:
        return entries_of(self.layout)

    @override
    def open_tensor(
        self, entry: TensorEntry, cancelled: Callable[[], bool]
    ) -> AbstractContextManager[ReadLeaf]:
        return nullcontext(read_placed(self.layout[entry.name], self.memory))


def kept_of(incoming: IncomingVersion) -> KeptVersion | None:
    """Return the kept bytes of a version that serves now; its own hold on them ends. None: it leaves no bytes."""
    release = incoming.hand_over()
    held = incoming.held
    if held is None or incoming.memory is None or held.end is None:
        return None
    patch = incoming.deltas.make_patch(held.layout.nbytes)
    return KeptVersion(incoming.identity, held, incoming.memory, held.end, release, patch)


def take_kept(incoming: IncomingVersion, kept: KeptVersion) -> None:
    """Give a version that is to arrive the bytes that are kept of it, without a copy of them.

    Raises:
        Refusal: Its stage announced others, or they aren't this model's.
        TransferFailed: They are gone.
    """
    # First: pieces that are marked without their bytes would be taken for verified ones.
    release = kept.memory.add_hold()
    try:
        held = incoming.begin(kept.layout)
        for piece in range(len(held.pieces)):
            held.mark_piece(piece, kept.held.leaf_digests(piece))
        held.finish(kept.end)
        # Last: from now on it is read, and nothing may be fetched into it.
        incoming.lay(kept.memory)
    finally:
        release()


@asynccontextmanager
async def _let_read(memory: Memory) -> AsyncIterator[Mapping[str, Any] | None]:
    """Register memory for the block, if others may read it by NIXL; without it they get its bytes over TCP."""
    async with AsyncExitStack() as stack:
        registered = None
        if memory.by_nixl and memory.handle is not None:
            serving = memory_server().serve_memory(memory.handle, memory.size)
            try:
                registered = await stack.enter_async_context(serving)
            except NixlFailed as error:
                logger.warning("other workers get these weights over TCP: %s", error)
        yield registered


async def give_version(
    stream: FrameStream, source: KeptVersion | IncomingVersion, peer_route: PeerRoute, first: Frame
) -> None:
    """Serve a version to a worker that fetches it, until that worker closes the connection.

    Args:
        stream: The connection to that worker.
        source: The version, which is here or still arrives.
        peer_route: Has the rate at which this worker sends.
        first: The `FETCH` frame of that worker.

    Raises:
        TransferError: The connection has ended.
        TransferFailed: The bytes are gone, or did not come.
    """
    if isinstance(source, IncomingVersion):
        incoming = source
        await incoming.wait_change(
            lambda: incoming.memory is not None or incoming.failure is not None, LEASE_SECONDS
        )
    held, memory = source.held, source.memory
    if held is None or memory is None:
        raise TransferFailed("these weights did not arrive")
    release = memory.add_hold()
    try:
        await stream.send(Kind.LAYOUT, {"layout": held.layout.to_json()})
        base = first.head.get("base")
        deltas = source.deltas if isinstance(source, IncomingVersion) else None
        delta_of = None if deltas is None else deltas.find_deltas(base, held.layout)
        async with _let_read(memory) as registered:
            await PieceServer(stream, held, peer_route.pace, delta_of, registered=registered).run()
    finally:
        release()
