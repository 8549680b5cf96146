"""Tensors packed into buckets of a fixed size, for channels that take one buffer at a time.

A bucket takes whole tensors as long as they fit; a tensor that is larger than a bucket is split into
pieces. Every tensor arrives with its name, dtype and shape: also an empty tensor, a scalar, a view at
any offset of its storage, and the second name of a storage that has two.
`unpack_buckets` checks everything: a piece that is missing, doubled or misplaced is an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .layout import ALIGN, LayoutError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of one tensor's bytes in a bucket.

    Attributes:
        name: Of the tensor.
        dtype: Of the tensor, as torch calls it.
        shape: Of the whole tensor.
        offset: Of the first byte within the tensor.
        start: Of the first byte within the bucket.
        nbytes: How many bytes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Pieces and the buffer with their bytes.

    Attributes:
        pieces: By their start.
        buffer: [bytes] uint8, used for this bucket only, so views of it stay valid.
        last: Whether it is the last one; the last one may be empty.
    """

    pieces: tuple[Piece, ...]
    buffer: torch.Tensor
    last: bool


class _Filling:
    """The bucket that `pack_buckets` is filling."""

    def __init__(self, size: int, align: int, device: Any) -> None:
        self._size, self._align, self._device = size, align, device
        self._empty()

    def _empty(self) -> None:
        import torch

        self._buffer = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        self._pieces: list[Piece] = []
        self._end = 0

    def room_for(self, nbytes: int) -> bool:
        """Whether a run of so many bytes still fits."""
        return not nbytes or _align_up(self._end, self._align) + nbytes <= self._size

    def add(self, name: str, tensor: torch.Tensor, run: torch.Tensor, offset: int) -> None:
        """Copy a run of a tensor's bytes, which begins at `offset` in the tensor."""
        start, nbytes = _align_up(self._end, self._align), run.numel()
        if start + nbytes > self._size:  # only a run of no bytes, behind a full bucket
            start = self._end
        self._pieces.append(Piece(name, tensor.dtype, tuple(tensor.shape), offset, start, nbytes))
        self._buffer[self._end : start].zero_()
        self._buffer[start : start + nbytes].copy_(run)
        self._end = start + nbytes

    def give(self, last: bool) -> Bucket:
        """Return the filled bucket and begin the next one."""
        made = Bucket(tuple(self._pieces), self._buffer[: self._end], last)
        if not last:
            self._empty()
        return made


def pack_buckets(
    tensors: Iterable[tuple[str, torch.Tensor]],
    bucket_bytes: int,
    *,
    align: int = ALIGN,
    device: torch.device | str = "cpu",
) -> Iterator[Bucket]:
    """Yield buckets with all tensors, in their order; there is always a last one.

    If a tensor can't be sent, the buckets before it have been yielded when the error is raised.

    Args:
        tensors: Name and tensor; each is copied before the next one is asked for.
        bucket_bytes: Most bytes of a bucket.
        align: Every piece begins at a multiple of it; at least 8 lets any dtype be viewed in place.
        device: Where the buffers are.

    Raises:
        LayoutError: A name came twice, or a value is not a plain tensor with values.
        ValueError: The size or alignment is impossible.
    """
    if bucket_bytes < 1 or align < 1:
        raise ValueError("bucket_bytes and align must be 1 or more")
    filling = _Filling(bucket_bytes, align, device)
    names: set[str] = set()
    for name, tensor in tensors:
        if name in names:
            raise LayoutError(f"the tensor {name!r} came twice: send each name once", tensor=name)
        names.add(name)
        flat = flat_bytes(name, tensor)
        # A tensor without elements is sent as one run of no bytes.
        for offset in range(0, max(flat.numel(), 1), bucket_bytes):
            run = flat[offset : offset + bucket_bytes]
            if not filling.room_for(run.numel()):
                yield filling.give(last=False)
            filling.add(name, tensor, run, offset)
    yield filling.give(last=True)


def unpack_buckets(buckets: Iterable[Bucket]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) as `pack_buckets` took them; a tensor in one piece is a view of its bucket.

    Raises:
        LayoutError: A piece is missing, doubled, out of order or out of its bucket.
    """
    seen: set[str] = set()
    rest: tuple[Piece, torch.Tensor] | None = None
    ended = False
    for bucket in buckets:
        if ended:
            raise LayoutError("a bucket came after the last one")
        ended = bucket.last
        for piece in bucket.pieces:
            run = _piece_bytes(bucket, piece)
            if rest is None:
                _check_first(piece, seen)
                whole = piece.nbytes == _tensor_nbytes(piece)
                rest = None if whole else (piece, run.new_empty(_tensor_nbytes(piece)))
                if whole:
                    yield piece.name, _shape_tensor(piece, run)
                    continue
            rest = _fill_tensor(rest, piece, run)
            if piece.offset + piece.nbytes == _tensor_nbytes(piece):
                assert rest is not None
                yield piece.name, _shape_tensor(piece, rest[1])
                rest = None
    if rest is not None or not ended:
        raise LayoutError("the buckets ended before the last one came: send all of it again")


def flat_bytes(name: str, tensor: Any) -> torch.Tensor:
    """Return a tensor's bytes in order, [bytes] uint8: its own memory where that is contiguous.

    Raises:
        LayoutError: It is not a tensor, or has no plain values (sparse, quantised, meta).
    """
    import torch

    if not isinstance(tensor, torch.Tensor):
        kind = type(tensor).__name__
        raise LayoutError(f"{name!r} is a {kind}, not a tensor: leave it out", tensor=name)
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise LayoutError(
            f"tensor {name!r} has no plain values to send (sparse, quantised or on the meta device):"
            " give it as a dense tensor",
            tensor=name,
        )
    # Flat first: any stride of a scalar or a single row counts as contiguous, but `view` refuses it.
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if plain.stride(0) != 1:
        plain = plain.clone(memory_format=torch.contiguous_format)
    return plain.view(torch.uint8)


def _align_up(value: int, align: int) -> int:
    return -(-value // align) * align


def _tensor_nbytes(piece: Piece) -> int:
    """Return the size in bytes of the whole tensor of a piece."""
    return math.prod(piece.shape) * piece.dtype.itemsize


def _piece_bytes(bucket: Bucket, piece: Piece) -> torch.Tensor:
    """Return the bytes of a piece, which must lie in its bucket and its tensor."""
    inside = 0 <= piece.start <= piece.start + piece.nbytes <= bucket.buffer.numel()
    if not inside or not 0 <= piece.offset <= piece.offset + piece.nbytes <= _tensor_nbytes(piece):
        raise LayoutError(
            f"a piece of tensor {piece.name!r} lies outside of its bucket or its tensor",
            tensor=piece.name,
        )
    return bucket.buffer[piece.start : piece.start + piece.nbytes]


def _check_first(piece: Piece, seen: set[str]) -> None:
    if piece.name in seen:
        raise LayoutError(f"the tensor {piece.name!r} came twice", tensor=piece.name)
    if piece.offset:
        raise LayoutError(f"tensor {piece.name!r} came without its beginning", tensor=piece.name)
    seen.add(piece.name)


def _fill_tensor(
    rest: tuple[Piece, torch.Tensor] | None, piece: Piece, run: torch.Tensor
) -> tuple[Piece, torch.Tensor]:
    """Add a run to the tensor that its pieces make up."""
    assert rest is not None
    begun, buffer = rest
    same = (piece.name, piece.dtype, piece.shape) == (begun.name, begun.dtype, begun.shape)
    filled = begun.offset
    if not same or piece.offset != filled or not piece.nbytes:
        raise LayoutError(
            f"tensor {begun.name!r} is not whole: byte {filled} should have come next",
            tensor=begun.name,
        )
    buffer[filled : filled + piece.nbytes].copy_(run)
    return Piece(begun.name, begun.dtype, begun.shape, filled + piece.nbytes, 0, 0), buffer


def _shape_tensor(piece: Piece, flat: torch.Tensor) -> torch.Tensor:
    """Return bytes as a tensor of the piece's dtype and shape; a copy where they are not aligned for the dtype."""
    if flat.numel() == 0:
        return flat.new_empty(piece.shape, dtype=piece.dtype)
    if flat.storage_offset() % piece.dtype.itemsize:
        flat = flat.clone()
    return flat.view(piece.dtype).reshape(piece.shape)
