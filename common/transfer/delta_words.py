"""Deltas by numpy: defines the format, reads deltas, and finds and applies them where `delta_native` is missing.

A delta counts words of two bytes, since a trainer's update leaves most words of a 16-bit model unchanged.
Blocks have 64 Ki words, so that the offset of a word takes two bytes, too. A delta holds *new* values: to
apply it twice is the same as once, and it may be applied to a run that has some of them already.

    u32 blocks | u32 index, u32 count for each | u16 offsets | u16 values | the last byte, if the size is odd

All numbers are little-endian; blocks ascend, and so do the offsets within one. The functions that need numpy import it.
"""

from __future__ import annotations

import struct
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Words = npt.NDArray[np.uint16]
    Places = npt.NDArray[np.int64]
    Count = npt.NDArray[Any]

BLOCK_WORDS = 1 << 16
BLOCK_BYTES = 2 * BLOCK_WORDS

_FOUR, _EIGHT = 4, 8
_SPARSE = 0.02
"""If a smaller share of the words differs, it is faster to compare four at once and then the words of unequal ones."""
_PIECE_BLOCKS = 8
_PIECE_WORDS = _PIECE_BLOCKS * BLOCK_WORDS
"""How many words are processed at once: numpy takes its temporary arrays from memory that it has already."""
_HEAD = struct.Struct("<I")
_own = threading.local()


class DeltaError(ValueError):
    """This is not a delta of these bytes; the text says why. Nothing was written."""


def encode_words(
    base: memoryview | bytes, new: memoryview | bytes, most: float | None
) -> bytes | None:
    """Return what turns one run of bytes into another one; as `delta.encode_delta`."""
    import numpy as np

    left = most_words(base, new, most)
    words = len(new) // 2
    before = np.frombuffer(base, dtype="<u2", count=words)
    after = np.frombuffer(new, dtype="<u2", count=words)
    ends, offsets, values = [], [], []
    edges = np.arange(BLOCK_WORDS, _PIECE_WORDS + BLOCK_WORDS, BLOCK_WORDS)
    sparse, total = True, 0
    for begin in range(0, words, _PIECE_WORDS):
        piece = after[begin : begin + _PIECE_WORDS]
        changed = _changed_words(before[begin : begin + _PIECE_WORDS], piece, left, sparse=sparse)
        if changed is None:
            return None
        places, found = changed
        left -= len(places)
        sparse = len(places) < _SPARSE * len(piece)
        ends.append(total + places.searchsorted(edges[: -(-len(piece) // BLOCK_WORDS)]))
        total += len(places)
        offsets.append(places.astype("<u2"))  # the lower half: where in its block
        values.append(found)
    return pack_delta(np.diff(np.concatenate(([0], *ends))), offsets, values, new)


def apply_words(delta: memoryview | bytes, memory: memoryview) -> None:
    """Apply a delta to the bytes that it was made for; as `delta.apply_delta`."""
    import numpy as np

    words, odd = divmod(len(memory), 2)
    index, counts, offsets, values = read_delta(delta, words, odd)
    there = np.frombuffer(memory, dtype="<u2", count=words)
    places = np.repeat(index * BLOCK_WORDS, counts)
    places += offsets
    there[places] = values
    if odd:
        memory[len(memory) - 1 :] = delta[len(delta) - 1 :]


def most_words(base: memoryview | bytes, new: memoryview | bytes, most: float | None) -> int:
    """Return how many words a delta may have: each takes four bytes of the delta and covers two.

    Raises:
        ValueError: The versions have different sizes.
    """
    size = len(new)
    if len(base) != size:
        raise ValueError(f"the base has {len(base)} bytes, the new version {size}")
    return size // 2 if most is None else int(most * size / 4)


def pack_delta(
    count: Count, offsets: list[Words], values: list[Words], new: memoryview | bytes
) -> bytes:
    """Return a delta: how many words change in each block, their offsets and their new values."""
    import numpy as np

    index = np.flatnonzero(count)
    table = np.column_stack((index, count[index])).astype("<u4")
    last = bytes(new[len(new) - 1 :]) if len(new) % 2 else b""
    parts = [each.tobytes() for each in (table, *offsets, *values)]
    return b"".join((_HEAD.pack(len(index)), *parts, last))


def _changed_words(
    before: Words, after: Words, most: int, *, sparse: bool
) -> tuple[Places, Words] | None:
    """Return the ascending places of words that differ, and their new values; None: more than `most` differ.

    `sparse`: whether few are expected, so that it is faster to compare four words as one number.
    """
    import numpy as np

    if not sparse:
        places = _unequal_places(before, after, most)
        return None if places is None else (places, after.take(places))
    end = len(after) // _FOUR * _FOUR
    old, new = before[:end].view("<u8"), after[:end].view("<u8")
    fours = _unequal_places(old, new, most)
    if fours is None:
        return None
    words = new.take(fours).view("<u2")
    within = (old.take(fours).view("<u2") != words).nonzero()[0]
    places, values = _unfold_rows(fours, within, _FOUR), words.take(within)
    if end < len(after):
        rest = end + (before[end:] != after[end:]).nonzero()[0]
        places, values = np.append(places, rest), np.append(values, after[rest])
    return (places, values) if len(places) <= most else None


def _unequal_places(before: npt.NDArray[Any], after: npt.NDArray[Any], most: int) -> Places | None:
    """Return the ascending places of numbers that differ; None: more than `most` differ.

    Eight results of the comparison count as one number: with few changes most of these are 0 and need one look.
    """
    import numpy as np

    differ = _scratch_memory(-(-len(after) // _EIGHT) * _EIGHT)
    np.not_equal(before, after, out=differ[: len(after)])
    differ[len(after) :] = False
    by_eight = differ.view(np.uint64)
    rows = (by_eight != 0).nonzero()[0]
    if len(rows) > most:
        return None
    within = by_eight.take(rows).view(bool).nonzero()[0]
    return _unfold_rows(rows, within, _EIGHT) if len(within) <= most else None


def _unfold_rows(rows: Places, within: Places, width: int) -> Places:
    """Return flat places from places `within` the chosen rows; `width`: of a row, a power of two."""
    shift = width.bit_length() - 1  # numpy divides ten times slower
    places = rows.take(within >> shift)
    places <<= shift
    places += within & (width - 1)
    return places


def _scratch_memory(size: int) -> npt.NDArray[np.bool_]:
    """Return a buffer of this thread, which is reused: fresh pages cost more than the comparison."""
    import numpy as np

    there: npt.NDArray[np.bool_] | None = getattr(_own, "differ", None)
    if there is None or len(there) < size:
        there = _own.differ = np.empty(size, dtype=bool)
    return there[:size]


def read_delta(
    delta: memoryview | bytes, words: int, odd: int
) -> tuple[Places, Places, Words, Words]:
    """Return the blocks, how many words of each change, their offsets and their new values.

    Raises:
        DeltaError: It is not a delta, or would write outside of the bytes.
    """
    import numpy as np

    size = len(delta)
    if size < _HEAD.size:
        raise DeltaError(f"a delta of {size} bytes has no head")
    (blocks,) = _HEAD.unpack_from(delta)
    begin = _HEAD.size + 8 * blocks
    if begin > size:
        raise DeltaError(f"a delta of {size} bytes can't have {blocks} blocks")
    table = np.frombuffer(delta, dtype="<u4", offset=_HEAD.size, count=2 * blocks).reshape(-1, 2)
    index, counts = table[:, 0].astype(np.int64), table[:, 1].astype(np.int64)
    total = int(counts.sum())
    if begin + 4 * total + odd != size:
        raise DeltaError(f"a delta of {size} bytes can't have {total} words, as its blocks say")
    if not counts.all():
        raise DeltaError("a block of the delta has no words")
    offsets = np.frombuffer(delta, dtype="<u2", offset=begin, count=total)
    values = np.frombuffer(delta, dtype="<u2", offset=begin + 2 * total, count=total)
    _check_places(index, counts, offsets, words)
    return index, counts, offsets, values


def _check_places(index: Places, counts: Places, offsets: Words, words: int) -> None:
    """Refuse words that are out of order, that come twice, or that lie outside."""
    rising = offsets[1:] > offsets[:-1]
    rising[counts.cumsum()[:-1] - 1] = True  # where a block begins
    if not rising.all() or not (index[1:] > index[:-1]).all():
        raise DeltaError("the words of the delta are not in order")
    last = int(index[-1]) * BLOCK_WORDS + int(offsets[-1]) if len(index) else -1
    if last >= words:
        raise DeltaError(f"word {last} of the delta lies outside: there are {words}")
