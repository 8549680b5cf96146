"""Versions of small pieces in memory, and where fetchers put them: so that one of many pieces takes no time."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence

import pytest
from typing_extensions import override

from rollout_common.transfer import pieces
from rollout_common.transfer.delta import DeltaError
from rollout_common.transfer.held_version import HeldVersion, VersionEnd
from rollout_common.transfer.layout import PushLayout
from rollout_common.wire import root_hash
from rollout_common.wire.root_hash import (
    HashedTensor,
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


def fill_version(held: HeldVersion) -> None:
    """Note all pieces of a version whose bytes can be read already, and what it hashes to."""
    for placed in held.layout.tensors:
        first = held.pieces.first_leaf.get(placed.name, 0)
        for leaf, (begin, end) in enumerate(leaf_spans(placed.nbytes), first):
            with held.read_bytes(placed.start + begin, placed.start + end) as content:
                held.mark_leaf(leaf, hash_leaf(content))
    digests, tensors = held.tensor_digests(), held.layout.tensors
    root = root_hash_of({t.name: HashedTensor(t.dtype, t.shape, digests[t.name]) for t in tensors})
    held.finish(VersionEnd(root, digests))


def hold_everything(layout: PushLayout, content: memoryview) -> HeldVersion:
    """Return a version all of whose pieces are there."""
    held = HeldVersion(layout, lambda begin, end: content[begin:end])
    fill_version(held)
    return held


class MemoryVersion:
    """A version's layout and bytes."""

    def __init__(self, sizes: Sequence[int], seed: int = 3) -> None:
        self.layout = PushLayout.plan((f"t{n}", "U8", (size,)) for n, size in enumerate(sizes))
        self.content = memoryview(random.Random(seed).randbytes(self.layout.nbytes))
        end = hold_everything(self.layout, self.content).end
        assert end is not None
        self.end = end

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


class PlainMemory:
    """Memory of a fetcher, to which each piece comes whole."""

    def __init__(self, nbytes: int) -> None:
        self.memory = memoryview(bytearray(nbytes))

    def read_bytes(self, begin: int, end: int) -> memoryview:
        return self.memory[begin:end]

    def writable(self, begin: int, end: int) -> memoryview:
        return self.memory[begin:end]

    def commit_run(self, begin: int, content: memoryview, *, in_place: bool) -> None:
        if not in_place:
            self.memory[begin : begin + len(content)] = content

    def apply_delta(self, piece: int, begin: int, end: int, delta: bytes) -> memoryview:
        raise NotImplementedError


class PieceMemory(PlainMemory):
    """The same, with deltas; it counts how often each piece was committed."""

    def __init__(self, version: MemoryVersion, *, buffers: bool = False) -> None:
        super().__init__(version.layout.nbytes)
        self.buffers = buffers
        """Whether pieces come to buffers, as for hollow memory."""
        self.base: memoryview | None = None
        self.commits: list[int] = []

    @override
    def writable(self, begin: int, end: int) -> memoryview:
        return memoryview(bytearray(end - begin)) if self.buffers else super().writable(begin, end)

    @override
    def commit_run(self, begin: int, content: memoryview, *, in_place: bool) -> None:
        self.commits.append(begin)
        super().commit_run(begin, content, in_place=in_place and not self.buffers)

    @override
    def apply_delta(self, piece: int, begin: int, end: int, delta: bytes) -> memoryview:
        """A delta of these tests is the new bytes, exclusive or 1; another one writes half and fails."""
        if len(delta) != end - begin:
            self.memory[begin : begin + len(delta)] = delta
            raise DeltaError("it is none")
        self.memory[begin:end] = bytes(each ^ 1 for each in delta)
        self.commits.append(begin)
        return self.memory[begin:end]
