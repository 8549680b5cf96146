"""Sends the bytes of a node to rank 0, chunk by chunk over TCP.

Both ends cut a node's part in the same way (`node_parts`), so the order of the chunks is fixed: a wrong or repeated
chunk is refused before a byte of it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from rollout_client.steering.plain_tensors import torch_dtype
from rollout_client.steering.pushing.tensor_copying import flat_bytes
from rollout_common.transfer.connections.blocking_connection import Connection
from rollout_common.transfer.connections.frames import (
    CHUNK_BYTES,
    Frame,
    Kind,
    Malformed,
    TransferError,
)
from rollout_common.transfer.memory.slot import Slot

from .merged_version import MergedVersion
from .node_parts import Chunk, NodePart
from .shard_writing import scatter
from .tensor_boxes import Box, shape_of, slices_of

if TYPE_CHECKING:
    from rollout_common.transfer.layout import Placed


class Damaged(TransferError):
    """A chunk is not what was sent."""


def send_chunks(
    connection: Connection, slot: Slot, chunks: Iterable[Chunk], stopped: Callable[[], bool]
) -> None:
    """Send chunks of a version to rank 0, until `stopped`, which is called before each of them.

    Raises:
        TransferError: Rank 0 is gone.
        SharedMemoryError: The memory was freed.
    """
    import xxhash

    for chunk in chunks:
        if stopped():
            return
        head = {"name": chunk.placed.name, "run": chunk.run, "box": chunk.box}
        with _chunk_content(slot, chunk) as content:
            digest = xxhash.xxh3_128_hexdigest(content)
            connection.send(Kind.DATA, {**head, "hash": digest}, content)


def _chunk_content(slot: Slot, chunk: Chunk) -> memoryview:
    """Return the bytes of a chunk; those of a box are copied where they don't lie in order."""
    import torch

    placed = chunk.placed
    if chunk.run is not None:
        return slot.view_bytes(placed.start + chunk.run[0], placed.start + chunk.run[1])
    assert chunk.box is not None
    with slot.view_tensor(placed) as whole:
        flat = torch.frombuffer(whole, dtype=torch_dtype(placed.dtype))
        own: Any = flat_bytes(placed.name, flat.view(placed.shape)[slices_of(chunk.box)]).numpy()
    return memoryview(own)


class ArrivingChunks:
    """Writes the chunks that another node sends, which are its part of a version, to their places."""

    def __init__(self, filling: MergedVersion, part: NodePart) -> None:
        self.part = part
        self._filling = filling
        self._due: Iterator[Chunk] = chain(part.rest(), part.held())
        self._buffer = memoryview(bytearray(CHUNK_BYTES))

    def take(self, connection: Connection, frame: Frame) -> None:
        """Write the chunk that a frame brings, and note it.

        Raises:
            Malformed: It is not the next chunk.
            Damaged: Its hash differs from the one that was sent with it; names the tensor.
            TransferError: It did not come completely.
        """
        chunk = next(self._due, None)
        said = frame.head.get("name"), frame.head.get("run"), frame.head.get("box")
        if chunk is None or said != _named(chunk):
            raise Malformed(f"a chunk of {said[0]!r} came that was not due")
        placed = chunk.placed
        if frame.payload != chunk.nbytes:
            raise Malformed(
                f"a chunk of {said[0]!r} came with {frame.payload} bytes, not {chunk.nbytes}"
            )
        if chunk.run is not None:
            # Read directly to its place: nothing reads it there before it is noted.
            begin, end = chunk.run
            with self._filling.slot.view_bytes(placed.start + begin, placed.start + end) as place:
                _read_chunk(connection, frame, place)
            return self._filling.received(placed.name, begin, end)
        assert chunk.box is not None
        content = self._buffer[: chunk.nbytes]
        _read_chunk(connection, frame, content)
        self._write_box(placed, chunk.box, content)
        return self._filling.block(placed.name, chunk.nbytes)

    def _write_box(self, placed: Placed, box: Box, content: memoryview) -> None:
        import torch

        values = torch.frombuffer(content, dtype=torch_dtype(placed.dtype))
        with self._filling.slot.view_tensor(placed) as whole:
            scatter(whole, placed.shape, box, values.view(shape_of(box)))


def _named(chunk: Chunk) -> tuple[str, object, object]:
    """Return how a frame names a chunk, as JSON."""
    run = None if chunk.run is None else list(chunk.run)
    box = None if chunk.box is None else [list(cut) for cut in chunk.box]
    return chunk.placed.name, run, box


def _read_chunk(connection: Connection, frame: Frame, place: memoryview) -> None:
    """Read a chunk and verify it."""
    import xxhash

    connection.read_into(place)
    if xxhash.xxh3_128_hexdigest(place) != frame.text("hash"):
        name = frame.text("name")
        raise Damaged(f"a chunk of {name!r} arrived damaged: check its node's memory and network")
