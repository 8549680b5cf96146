"""Boxes: parts of a tensor, converted to runs of its bytes where possible, and cut into chunks. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rollout_client.steering.plain_tensors import Spec
from rollout_common.transfer.layout import ITEM_BYTES

Box = tuple[tuple[int, int], ...]
"""A part of a tensor: begin and end in each dimension."""

Run = tuple[int, int]
"""Begin and end of consecutive bytes of a tensor."""


def shape_of(box: Box) -> tuple[int, ...]:
    """Return its size in each dimension."""
    return tuple(end - begin for begin, end in box)


def volume(box: Box) -> int:
    """Return how many elements it has."""
    return math.prod(shape_of(box))


def overlap(one: Box, other: Box) -> bool:
    """Whether two boxes of a tensor have an element in common."""
    return all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(one, other, strict=True))


def nbytes_of(spec: Spec, box: Box) -> int:
    """Return the size in bytes of a box of this tensor."""
    return ITEM_BYTES[spec[1]] * volume(box)


def rows_of(spec: Spec, box: Box) -> Run | None:
    """Return a box of whole rows as a run of bytes; None: it is cut in other dimensions, too.

    Either all ranks' boxes of a tensor are rows, or none is.
    """
    _, dtype, shape = spec
    if any(part != (0, size) for part, size in zip(box[1:], shape[1:], strict=True)):
        return None
    row = ITEM_BYTES[dtype] * math.prod(shape[1:])
    begin, end = box[0] if box else (0, 1)  # a single number is one row
    return begin * row, end * row


def pieces_of(box: Box, most: int) -> Iterator[Box]:
    """Cut a box into consecutive boxes of at most `most` elements, each of them without a gap."""
    if volume(box) <= most:
        yield box
        return
    dim = next(dim for dim, size in enumerate(shape_of(box)) if size > 1)
    begin, end = box[dim]
    step = max(1, most // volume(box[dim + 1 :]))
    for at in range(begin, end, step):
        piece = (*box[:dim], (at, min(at + step, end)), *box[dim + 1 :])
        yield from pieces_of(piece, most)


def slices_of(box: Box) -> tuple[slice, ...]:
    """Return what selects it in its whole tensor."""
    return tuple(slice(begin, end) for begin, end in box)
