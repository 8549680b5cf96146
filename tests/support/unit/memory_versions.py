"""Versions of small pieces in memory, and where fetchers put them: so that one of many pieces takes no time."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence

import pytest

from rollout_common.transfer import pieces
from rollout_common.transfer.delta import DeltaError
from rollout_common.transfer.held_version import HeldVersion, VersionEnd
from rollout_common.transfer.layout import PushLayout
from rollout_common.wire import root_hash
from rollout_common.wire.root_hash import (
    HashedTensor,
    combine_leaves,
    hash_leaf,
    leaf_spans,
    root_hash_of,
)

LEAF = 1024


@contextlib.contextmanager
def small_leaves() -> Iterator[None]:
    """Leaves of a KiB."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pieces, "LEAF_BYTES", LEAF)
        patched.setattr(root_hash, "LEAF_BYTES", LEAF)
        yield


class MemoryVersion:
    """A version's layout and bytes."""

    def __init__(self, sizes: Sequence[int], seed: int = 3) -> None:
        self.layout = PushLayout.plan((f"t{n}", "U8", (size,)) for n, size in enumerate(sizes))
        self.content = memoryview(random.Random(seed).randbytes(self.layout.nbytes))
        digests = {
            each.name: combine_leaves(
                b"".join(
                    hash_leaf(self.content[each.start + begin : each.start + end])
                    for begin, end in leaf_spans(each.nbytes)
                )
            )
            for each in self.layout.tensors
        }
        hashed = {
            each.name: HashedTensor(each.dtype, each.shape, digests[each.name])
            for each in self.layout.tensors
        }
        self.end = VersionEnd(root_hash_of(hashed), digests)

    def bytes_of(self, piece: int) -> memoryview:
        return self.content[slice(*self.layout.pieces.span(piece))]

    def digests_of(self, piece: int) -> bytes:
        return self.layout.pieces.hash_leaves(piece, self.bytes_of(piece))

    def held(self, *numbers: int) -> HeldVersion:
        """The table of a holder that has these pieces."""
        held = HeldVersion(self.layout, lambda begin, end: self.content[begin:end])
        for piece in numbers:
            held.mark_piece(piece, self.digests_of(piece))
        return held


class PieceMemory:
    """Memory of a fetcher, which counts how often each piece was committed."""

    def __init__(self, version: MemoryVersion, *, buffers: bool = False) -> None:
        self.memory = memoryview(bytearray(version.layout.nbytes))
        self.buffers = buffers
        """Whether pieces come to buffers, as for hollow memory."""
        self.base: memoryview | None = None
        self.commits: list[int] = []

    def read_bytes(self, begin: int, end: int) -> memoryview:
        return self.memory[begin:end]

    def writable(self, begin: int, end: int) -> memoryview:
        return memoryview(bytearray(end - begin)) if self.buffers else self.memory[begin:end]

    def commit_run(self, begin: int, content: memoryview, *, in_place: bool) -> None:
        self.commits.append(begin)
        if self.buffers or not in_place:
            self.memory[begin : begin + len(content)] = content

    def apply_delta(self, piece: int, begin: int, end: int, delta: bytes) -> memoryview:
        """A delta of these tests is the new bytes, exclusive or 1; another one writes half and fails."""
        if len(delta) != end - begin:
            self.memory[begin : begin + len(delta)] = delta
            raise DeltaError("it is none")
        self.memory[begin:end] = bytes(each ^ 1 for each in delta)
        self.commits.append(begin)
        return self.memory[begin:end]
