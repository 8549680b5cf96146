"""Deltas for tests: the ways of finding and applying them, versions that differ, deltas that lie."""

from __future__ import annotations

import ctypes
import random
import struct
from dataclasses import dataclass

import pytest

from rollout_common.transfer import delta_native as native
from rollout_common.transfer import delta_words as vectors
from rollout_common.transfer.delta import BLOCK_BYTES, BLOCK_WORDS

SIZES = [0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 130, 4097]
EDGES = [BLOCK_BYTES + more for more in (-2, -1, 0, 1, 2, 64, BLOCK_BYTES)]


LIBRARY = native.LIBRARY
Run = bytes | memoryview


class Numpy:
    """What is there everywhere."""

    def encode(self, base: Run, new: Run, most: float | None = None) -> bytes | None:
        return vectors.encode_words(base, new, most)

    def apply(self, delta: Run, memory: memoryview) -> None:
        vectors.apply_words(delta, memory)


@dataclass(frozen=True)
class Native:
    """What was compiled."""

    library: ctypes.CDLL

    def encode(self, base: Run, new: Run, most: float | None = None) -> bytes | None:
        return native.encode_natively(self.library, base, new, most)

    def apply(self, delta: Run, memory: memoryview) -> None:
        native.apply_natively(self.library, delta, memory)


Way = Numpy | Native
WAYS: dict[str, Way] = {"numpy": Numpy()}
if LIBRARY is not None:
    WAYS["native"] = Native(LIBRARY)

every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
built = pytest.mark.skipif(LIBRARY is None, reason="libdelta.so was not built: make, or a wheel")


def made(size: int, changes: dict[int, int]) -> tuple[bytes, bytes]:
    """Bytes and what becomes of them: these places get another value."""
    base = random.Random(size).randbytes(size)
    new = bytearray(base)
    for place, by in changes.items():
        new[place % size] ^= by
    return base, bytes(new)


def applied(way: Way, delta: bytes | None, base: bytes) -> bytes:
    assert delta is not None
    memory = bytearray(base)
    way.apply(delta, memoryview(memory))
    way.apply(delta, memoryview(memory))  # new values: twice is as good as once
    return bytes(memory)


def lie(*table: int, offsets: tuple[int, ...] = (), values: int | None = None) -> bytes:
    """A delta that says what it likes."""
    count = len(offsets) if values is None else values
    words = struct.pack(f"<{len(offsets)}H", *offsets) + bytes(2 * count)
    return struct.pack(f"<{1 + len(table)}I", len(table) // 2, *table) + words


LIES = {
    "no head": b"\0\0\0",
    "can't have 9 blocks": struct.pack("<I", 9) + bytes(8),
    "can't have 4294967295 blocks": b"\xff" * 4,
    "can't have 2 words": lie(0, 2, offsets=(1,)),
    "can't have 4294967295 words": lie(0, 2**32 - 1, offsets=(1,)),
    "can't have 1 words": lie(0, 1, offsets=(1,), values=2),
    "can't have 0 words": lie() + b"\0",
    "has no words": lie(0, 0, 1, 1, offsets=(1,)),
    "word 100 of the delta lies outside": lie(0, 1, offsets=(100,)),
    f"word {BLOCK_WORDS}": lie(1, 1, offsets=(0,)),
    f"word {(2**32 - 1) * BLOCK_WORDS}": lie(2**32 - 1, 1, offsets=(0,)),
    "not in order": lie(0, 2, offsets=(5, 4)),
}
