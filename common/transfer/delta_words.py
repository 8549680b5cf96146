"""Deltas by numpy: defines the format, reads deltas, and finds and applies them where `delta_native` is missing.

A delta counts words of two bytes, since a trainer's update leaves most words of a 16-bit model unchanged.
Blocks have 64 Ki words, so that the offset of a word takes two bytes, too. A delta holds *new* values: to
apply it twice is the same as once, and it may be applied to a run that has some of them already.

    u32 blocks | u32 index, u32 count for each | u16 offsets | u16 values | the last byte, if the size is odd

All numbers are little-endian; blocks ascend, and so do the offsets within one. The functions that need numpy import it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Words = npt.NDArray[np.uint16]
    Places = npt.NDArray[np.int64]
    Count = npt.NDArray[Any]

BLOCK_WORDS = 1 << 16
BLOCK_BYTES = 2 * BLOCK_WORDS

_HEAD = struct.Struct("<I")


class DeltaError(ValueError):
    """This is not a delta of these bytes; the text says why. Nothing was written."""


def encode_words(
    base: memoryview | bytes, new: memoryview | bytes, most: float | None
) -> bytes | None:
    """Return what turns one run of bytes into another one; as `delta.encode_delta`."""
    import numpy as np

    words = len(new) // 2
    left = most_words(base, new, most)
    before = np.frombuffer(base, dtype="<u2", count=words)
    after = np.frombuffer(new, dtype="<u2", count=words)
    places = np.flatnonzero(before != after)
    if len(places) > left:
        return None
    counts = np.bincount(places // BLOCK_WORDS, minlength=-(-words // BLOCK_WORDS))
    # The lower half of a place is where in its block the word is.
    return pack_delta(counts, places.astype("<u2"), after[places], new)


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


def pack_delta(counts: Count, offsets: Words, values: Words, new: memoryview | bytes) -> bytes:
    """Return a delta: how many words change in each block, their offsets and their new values."""
    import numpy as np

    index = np.flatnonzero(counts)
    table = np.column_stack((index, counts[index])).astype("<u4")
    last = bytes(new[len(new) - 1 :]) if len(new) % 2 else b""
    parts = [each.tobytes() for each in (table, offsets, values)]
    return b"".join((_HEAD.pack(len(index)), *parts, last))


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
