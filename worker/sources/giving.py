"""What this worker keeps of a pushed version, and gives to others that fetch it.

The other nodes of a gang fetch from their head while the version still arrives there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import xxhash

from rollout_common.transfer.connection import Connection
from rollout_common.transfer.frames import CHUNK_BYTES, Frame, Kind, Malformed
from rollout_common.transfer.layout import PushLayout
from rollout_common.wire import KeptWeights, WeightsId
from rollout_worker.engine import TensorEntry

from .arrived import content_bytes, entries_of, read_placed
from .basis import Patch
from .incoming import End, Incoming
from .outward import Outward
from .pushed_memory import Memory, TransferFailed
from .source_reading import ContentHashes, ReadLeaf, WholeVersion

MAX_RANGES = 4096


@dataclass(frozen=True, slots=True)
class Kept(WholeVersion):
    """A committed version whose bytes are still here; `release` gives them up."""

    identity: WeightsId
    layout: PushLayout
    memory: Memory
    end: End
    release: Callable[[], None]
    patch: Patch | None = None
    """How it differs from the version before it; None: not known."""
    hashes: dict[int, str] = field(default_factory=dict, repr=False)
    """Of its chunks, as far as they were verified one by one, or were given before."""

    def view(self) -> KeptWeights:
        """What clients see of it."""
        return KeptWeights(
            epoch=self.identity.epoch,
            version=self.identity.version,
            root_hash=self.end.root_hash,
            bytes=self.layout.nbytes,
        )

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """See `ReadableSource.entries`."""
        return entries_of(self.layout)

    @property
    def bytes_total(self) -> int:
        """See `ReadableSource.bytes_total`."""
        return content_bytes(self.layout)

    def open_tensor(
        self, entry: TensorEntry, cancelled: Callable[[], bool]
    ) -> AbstractContextManager[ReadLeaf]:
        """See `ReadableSource.open_tensor`."""
        return nullcontext(read_placed(self.layout[entry.name], self.memory))

    def check_promise(self, found: Mapping[str, ContentHashes]) -> None:
        """See `ReadableSource.check_promise`: the root hash says it all."""


def kept_of(incoming: Incoming) -> Kept | None:
    """Return what a version that serves now leaves here; it has given up its own hold."""
    release = incoming.hand_over()
    if incoming.layout is None or incoming.memory is None or incoming.end is None:
        return None
    return Kept(
        incoming.identity, incoming.layout, incoming.memory, incoming.end, release, incoming.patch,
        incoming.hashes,
    )  # fmt: skip


Gives = Kept | Incoming
"""What a peer can fetch: all of it is here, or will be."""


def give(connection: Connection, source: Gives, outward: Outward) -> None:
    """Answer what a peer asks for until it closes the connection; waits for what is still to come.

    Raises:
        TransferError: The connection has ended.
        TransferFailed: The bytes are gone, or never came.
    """
    layout, memory = source.layout, source.memory
    if layout is None or memory is None:
        raise TransferFailed("none of these weights has arrived yet")
    release = memory.hold()
    try:
        connection.keep_alive()
        connection.send(Kind.LAYOUT, {"layout": layout.to_json(), **_hashes(source.end)})
        while True:
            frame = connection.expect(Kind.GET)
            connection.skip(frame)
            for begin, end in _ranges(frame, layout.nbytes):
                for at in range(begin, end, CHUNK_BYTES):
                    outward.wait_for(connection, min(CHUNK_BYTES, end - at))
                    _send(connection, source, memory, at, min(at + CHUNK_BYTES, end))
            if frame.head.get("hashes") is True:
                connection.send(Kind.END, _hashes(_awaited_end(source)))
    finally:
        release()


def _hashes(end: End | None) -> Mapping[str, object]:
    """Return what all of it should hash to, as frames have it; nothing as long as nobody knows."""
    return {} if end is None else {"root_hash": end.root_hash, "digests": dict(end.digests)}


def _awaited_end(source: Gives) -> End:
    if isinstance(source, Incoming):
        source.follow(lambda: source.end is not None, _never)
    assert source.end is not None
    return source.end


def _never() -> bool:
    """Who fetches and is gone is noticed when the next bytes are sent: it comes, or its end does."""
    return False


def _send(connection: Connection, source: Gives, memory: Memory, begin: int, end: int) -> None:
    """Send one chunk, once it is there."""
    if isinstance(source, Incoming) and source.upto < end:
        source.follow(lambda: source.upto >= end, _never)
    with memory.bytes(begin, end) as view:
        # As it was when it came: what has changed in this memory since, the peer finds.
        digest = source.hashes.get(begin // CHUNK_BYTES)
        if digest is None:
            digest = source.hashes[begin // CHUNK_BYTES] = xxhash.xxh3_128_hexdigest(view)
        connection.send(Kind.DATA, {"offset": begin, "hash": digest}, view)


def _ranges(frame: Frame, size: int) -> list[tuple[int, int]]:
    """Return what a peer wants.

    Raises:
        Malformed: It is not a list of whole chunks.
    """
    given = frame.head.get("ranges")
    if not isinstance(given, list) or len(given) > MAX_RANGES:
        raise Malformed(f"GET.ranges must be a list of at most {MAX_RANGES}")
    found = []
    for each in given:
        pair = each if isinstance(each, list) and len(each) == 2 else [None, None]
        wanted = Frame(Kind.GET, {"begin": pair[0], "end": pair[1]})
        begin = wanted.integer("begin", 0, size)
        end = wanted.integer("end", begin, size)
        if begin % CHUNK_BYTES or (end % CHUNK_BYTES and end != size):
            raise Malformed("GET.ranges must begin and end with chunks")
        found.append((begin, end))
    return found
