"""What this worker keeps of a pushed version, and gives to others that fetch it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import xxhash

from rollout_worker.engine import Entry
from rollout_worker.schemas import KeptWeights, WeightsId
from rollout_worker.transfer.frames import (
    CHUNK_BYTES,
    Connection,
    Frame,
    Kind,
    Malformed,
)
from rollout_worker.transfer.layout import PushLayout

from .incoming import End, Incoming, Memory, copied, entries_of

MAX_RANGES = 4096


@dataclass(frozen=True, slots=True)
class Kept:
    """A committed version whose bytes are still here; `release` gives them up."""

    identity: WeightsId
    layout: PushLayout
    memory: Memory
    end: End
    release: Callable[[], None]

    def view(self) -> KeptWeights:
        """What clients see of it."""
        return KeptWeights(
            epoch=self.identity.epoch,
            version=self.identity.version,
            root_hash=self.end.root_hash,
            bytes=self.layout.nbytes,
        )

    @property
    def entries(self) -> tuple[Entry, ...]:
        """See `Readable.entries`."""
        return entries_of(self.layout)

    @property
    def bytes_total(self) -> int:
        """See `Readable.bytes_total`."""
        return sum(placed.nbytes for placed in self.layout.tensors)

    def chunks(
        self, entry: Entry, view: memoryview | None, cancelled: Callable[[], bool]
    ) -> Iterator[memoryview]:
        """See `Readable.chunks`."""
        placed, step = self.layout[entry.name], 4 * CHUNK_BYTES
        for begin in range(placed.start, placed.end, step):
            end = min(begin + step, placed.end)
            yield from copied(self.memory.bytes(begin, end), view, begin - placed.start)

    def check(self, digests: Mapping[str, str], root: str) -> None:
        """See `Readable.check`: the root hash says it all."""


def kept_of(incoming: Incoming) -> Kept | None:
    """Return what a version that serves now leaves here; it has given up its own hold."""
    release = incoming.hand_over()
    if incoming.layout is None or incoming.memory is None or incoming.end is None:
        return None
    return Kept(incoming.identity, incoming.layout, incoming.memory, incoming.end, release)


def give(connection: Connection, kept: Kept) -> None:
    """Answer what a peer asks for until it closes the connection.

    Raises:
        TransferError: The connection has ended.
    """
    release = kept.memory.hold()
    try:
        connection.keep_alive()
        head = {"layout": kept.layout.to_json(), "root_hash": kept.end.root_hash}
        connection.send(Kind.LAYOUT, {**head, "digests": dict(kept.end.digests)})
        while True:
            frame = connection.expect(Kind.GET)
            connection.skip(frame)
            for begin, end in _ranges(frame, kept.layout.nbytes):
                _send(connection, kept, begin, end)
    finally:
        release()


def _send(connection: Connection, kept: Kept, begin: int, end: int) -> None:
    for offset in range(begin, end, CHUNK_BYTES):
        with kept.memory.bytes(offset, min(offset + CHUNK_BYTES, end)) as view:
            digest = xxhash.xxh3_128_hexdigest(view)
            connection.send(Kind.DATA, {"offset": offset, "hash": digest}, view)


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
