"""How a layout is cut into pieces, the unit in which versions are announced, requested, verified and resumed.

A piece is a run of whole leaves (`rollout_common.wire.root_hash`). It spans at most `piece_span` bytes of the layout,
gaps included: large tensors have several pieces of their own, small tensors share one. Both ends get the same pieces,
since these depend on the layout only.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from rollout_common.wire.root_hash import DIGEST_BYTES, LEAF_BYTES, hash_leaf

if TYPE_CHECKING:
    from .layout import Placed


MOST_PIECES = 4096
"""Pieces get larger with the version, so that there are about as many at most: each costs both ends some 50 µs of the
interpreter's lock."""

MOST_LEAVES = 4
"""Leaves of a large tensor in one piece at most: a shard of a large model still consists of whole pieces, nearly."""


def piece_span(nbytes: int) -> int:
    """Return how many bytes of a layout of this size a piece may span."""
    leaves = 1
    while leaves < MOST_LEAVES and nbytes > leaves * LEAF_BYTES * MOST_PIECES:
        leaves *= 2
    return leaves * LEAF_BYTES


class PieceMap:
    """The pieces and leaves of a layout, numbered in the order of their bytes.

    Args:
        tensors: Of the layout, in any order.
    """

    def __init__(self, tensors: Sequence[Placed]) -> None:
        self.first_leaf: dict[str, int] = {}
        """By name of the tensor: the number of its first leaf; tensors without bytes have none."""
        self._leaf_begins, self._leaf_ends = array("Q"), array("Q")
        self._piece_leaves = array("I", [0])
        """By piece: the number of its first leaf; one more at the end."""
        self.piece_of_leaf = array("I")
        placed_tensors = sorted((t for t in tensors if t.nbytes), key=lambda each: each.start)
        span = piece_span(sum(each.nbytes for each in placed_tensors))
        begin, most = 0, 0  # of the last piece: where it begins, and where it ends at most
        for placed in placed_tensors:
            leaf = self.first_leaf[placed.name] = len(self._leaf_begins)
            # Shards of a large tensor consist of whole pieces, since it begins one.
            if (
                placed.nbytes >= span
                or not leaf
                or placed.start + min(placed.nbytes, LEAF_BYTES) > most
            ):
                begin = placed.start
                if leaf:
                    self._piece_leaves.append(leaf)
            begin = self._add_leaves(placed, begin, span)
            most = begin + span
        if self._leaf_begins:
            self._piece_leaves.append(len(self._leaf_begins))

    def _add_leaves(self, placed: Placed, begin: int, span: int) -> int:
        """Add the leaves of a tensor, by arrays: there may be millions. Return where the last piece begins.

        The first leaf belongs to the last piece so far, which starts at `begin`; a piece may span `span` bytes.
        """
        first, start, end = len(self._leaf_begins), placed.start, placed.end
        self._leaf_begins.extend(range(start, end, LEAF_BYTES))
        self._leaf_ends.extend(range(start + LEAF_BYTES, end, LEAF_BYTES))
        self._leaf_ends.append(end)
        here, last = first, len(self._leaf_begins)
        while True:
            stop = last
            if end - begin > span:  # only so many whole leaves still fit into this piece
                stop = here + (begin + span - self._leaf_begins[here]) // LEAF_BYTES
            self.piece_of_leaf.extend(array("I", [len(self._piece_leaves) - 1]) * (stop - here))
            if stop == last:
                return begin
            self._piece_leaves.append(stop)
            here, begin = stop, self._leaf_begins[stop]

    def __len__(self) -> int:
        """How many pieces there are."""
        return len(self._piece_leaves) - 1

    @property
    def leaf_count(self) -> int:
        """How many leaves there are."""
        return len(self._leaf_begins)

    def leaves_of(self, piece: int) -> range:
        """Return the numbers of a piece's leaves."""
        return range(self._piece_leaves[piece], self._piece_leaves[piece + 1])

    def leaf_span(self, leaf: int) -> tuple[int, int]:
        """Return begin and end of a leaf in the layout's bytes."""
        return self._leaf_begins[leaf], self._leaf_ends[leaf]

    def span(self, piece: int) -> tuple[int, int]:
        """Return begin and end of a piece in the layout's bytes."""
        return (
            self._leaf_begins[self._piece_leaves[piece]],
            self._leaf_ends[self._piece_leaves[piece + 1] - 1],
        )

    def nbytes_of(self, piece: int) -> int:
        """Return the size of a piece."""
        begin, end = self.span(piece)
        return end - begin

    def hash_leaves(self, piece: int, content: memoryview) -> bytes:
        """Return the concatenated digests of a piece's leaves; `content`: [bytes] all of it."""
        hashes = LeafHashes(self, piece, content)
        hashes.hash_upto(len(content))
        return hashes.digests

    def pieces_of(self, tensors: Collection[Placed]) -> Iterator[int]:
        """Yield the pieces that contain bytes of these tensors; a piece may come more than once."""
        for placed in tensors:
            first = self.first_leaf.get(placed.name)
            if first is not None:
                last = first + -(-placed.nbytes // LEAF_BYTES) - 1
                yield from range(self.piece_of_leaf[first], self.piece_of_leaf[last] + 1)

    def whole_leaves(self, placed: Placed, begin: int, end: int) -> range:
        """Return the leaves of a tensor that a run of its bytes has all of."""
        first = self.first_leaf.get(placed.name, 0)
        last = -(-end // LEAF_BYTES) if end == placed.nbytes else end // LEAF_BYTES
        return range(first + -(-begin // LEAF_BYTES), first + last)

    def leaves_in(self, placed: Placed, begin: int, end: int) -> range:
        """Return the leaves of a tensor that have bytes of a run of it."""
        first = self.first_leaf.get(placed.name, 0)
        return range(first + begin // LEAF_BYTES, first + -(-end // LEAF_BYTES))

    def tensor_leaves(self, placed: Placed) -> slice:
        """Return the slice of a tensor's leaves among all leaves."""
        first = self.first_leaf.get(placed.name, 0)
        count = -(-placed.nbytes // LEAF_BYTES)
        return slice(first * DIGEST_BYTES, (first + count) * DIGEST_BYTES)


class LeafHashes:
    """The digests of a piece's leaves, each hashed as soon as its bytes are there and while they are in the cache.

    Args:
        pieces: The pieces of the layout.
        piece: Its number.
        content: [bytes] its memory, which is filled from its begin to its end.
    """

    def __init__(self, pieces: PieceMap, piece: int, content: memoryview) -> None:
        start, _ = pieces.span(piece)
        self._spans = deque(pieces.leaf_span(leaf) for leaf in pieces.leaves_of(piece))
        self._start, self._content = start, content
        self.digests = b""
        """The concatenated digests of the leaves that are there."""

    def hash_upto(self, count: int) -> None:
        """Hash the leaves that are there now that so many bytes are."""
        while self._spans and self._spans[0][1] - self._start <= count:
            begin, end = self._spans.popleft()
            with self._content[begin - self._start : end - self._start] as part:
                self.digests += hash_leaf(part)
