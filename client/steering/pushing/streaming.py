"""Sends the boxes of a rank of another node to rank 0, in chunks over TCP.

Both ends cut the boxes in the same way, so the order of the chunks is fixed: a wrong or repeated chunk is
refused before a byte of it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rollout_common.transfer.buckets import flat_bytes
from rollout_common.transfer.connection import Connection
from rollout_common.transfer.frames import CHUNK_BYTES, Frame, Kind, Malformed, TransferError
from rollout_common.transfer.layout import ITEM_BYTES, LayoutError, Placed, PushLayout

from .boxes import Box, inside, nbytes_of, pieces_of, rows_of, run_of, shape_of
from .copying import Copier
from .merging import Merging
from .push_tensors import Spec, check_there, torch_dtype
from .writing import scatter

if TYPE_CHECKING:
    import torch

    from .shards import Part


class Damaged(TransferError):
    """A chunk is not what was sent."""


def _chunks(spec: Spec, box: Box) -> Iterator[Box]:
    return pieces_of(box, CHUNK_BYTES // ITEM_BYTES[spec[1]])


class Streaming:
    """Sends boxes, with at most one chunk of them in a buffer.

    Args:
        connection: The connection to rank 0.
        copier: Copies chunks from a device.
        stopped: Whether rank 0 has ended the publish; called before each chunk.
    """

    def __init__(self, connection: Connection, copier: Copier, stopped: Callable[[], bool]) -> None:
        self._connection, self._copier, self._stopped = connection, copier, stopped
        self._buffer = memoryview(bytearray(CHUNK_BYTES))

    def put(self, part: Part, mine: torch.Tensor, box: Box) -> None:
        """Send a box of this rank's part of a tensor, unless it is stopped.

        Raises:
            LayoutError: It has no plain values, its values don't match its placements, or it was freed.
            TransferError: Rank 0 is gone.
        """
        import torch
        import xxhash

        name = part.spec[0]
        if mine.layout != torch.strided or mine.is_quantized:
            flat_bytes(name, mine)  # raises with the reason
        if tuple(mine.shape) != shape_of(box):
            raise LayoutError(
                f"tensor {name!r}: this rank's shard is {list(mine.shape)}, and by its placements it"
                f" would be {list(shape_of(box))}",
                tensor=name,
            )
        check_there(name, mine)
        for piece in _chunks(part.spec, box):
            if self._stopped():
                return
            content = self._content(name, mine[inside(box, piece)])
            digest = xxhash.xxh3_128_hexdigest(content)
            self._connection.send(Kind.DATA, {"name": name, "box": piece, "hash": digest}, content)

    def _content(self, name: str, piece: torch.Tensor) -> memoryview:
        """Return the bytes of a chunk, without a copy where they lie in main memory, in order."""
        if piece.device.type == "cpu" and piece.is_contiguous():
            own: Any = flat_bytes(name, piece).numpy()
            return memoryview(own)
        view = self._buffer[: piece.numel() * piece.element_size()]
        self._copier.copy(name, piece, view, lambda count: None)
        return view


class Arriving:
    """Writes the chunks that a rank of another node sends to their places.

    Args:
        filling: The version that they are a part of.
        boxes: By name: the box that the rank has to send.
    """

    def __init__(self, filling: Merging, boxes: Mapping[str, Box]) -> None:
        self._filling = filling
        self._due = _due(filling.layout, boxes)
        self._buffer = memoryview(bytearray(CHUNK_BYTES))

    def take(self, connection: Connection, frame: Frame) -> None:
        """Write the chunk that a frame brings, and note it.

        Raises:
            Malformed: It is not the next chunk.
            Damaged: Its hash differs from the one that was sent with it; names the tensor.
            TransferError: It did not come completely.
        """
        import torch

        placed, piece, rows = next(self._due, (None, None, False))
        said = frame.head.get("name"), frame.head.get("box")
        if placed is None or piece is None or said != (placed.name, [list(cut) for cut in piece]):
            raise Malformed(f"a chunk of {said[0]!r} came that was not due")
        spec = placed.name, placed.dtype, placed.shape
        size = nbytes_of(spec, piece)
        if frame.payload != size:
            raise Malformed(f"a chunk of {said[0]!r} came with {frame.payload} bytes, not {size}")
        run = run_of(spec, piece)
        if run is None:
            content = self._buffer[:size]
            _read(connection, frame, content)
            values = torch.frombuffer(content, dtype=torch_dtype(placed.dtype))
            with self._filling.slot.view(placed) as whole:
                scatter(whole, placed.shape, piece, values.view(shape_of(piece)))
        else:
            # Read directly to its place: nothing reads it there before it is noted.
            start = placed.start
            with self._filling.slot.bytes(start + run[0], start + run[1]) as place:
                _read(connection, frame, place)
        if rows and run is not None:
            self._filling.arrived(placed.name, *run)
        else:
            self._filling.block(placed.name, size)


def _due(layout: PushLayout, boxes: Mapping[str, Box]) -> Iterator[tuple[Placed, Box, bool]]:
    """Yield all chunks in the order in which they are sent, and whether they consist of whole rows."""
    for name in sorted(boxes):
        placed, box = layout[name], boxes[name]
        spec = placed.name, placed.dtype, placed.shape
        rows = rows_of(spec, box) is not None
        for piece in _chunks(spec, box):
            yield placed, piece, rows


def _read(connection: Connection, frame: Frame, place: memoryview) -> None:
    """Read a chunk and verify it."""
    import xxhash

    connection.read_into(place)
    if xxhash.xxh3_128_hexdigest(place) != frame.text("hash"):
        name = frame.text("name")
        raise Damaged(f"a chunk of {name!r} arrived damaged: check its node's memory and network")
