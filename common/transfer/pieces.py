"""How a layout is cut into pieces, the unit in which versions are announced, requested, verified and resumed.

A piece is a run of whole leaves (`rollout_common.wire.root_hash`) that spans at most `LEAF_BYTES` of the layout, gaps
included: each leaf of a large tensor is a separate piece, small tensors share one. Both ends get the same pieces,
since the pieces depend on the layout only.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from rollout_common.wire.root_hash import DIGEST_BYTES, LEAF_BYTES, hash_leaf, leaf_spans

if TYPE_CHECKING:
    from .layout import Placed


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
        begin = 0
        for placed in sorted(
            (each for each in tensors if each.nbytes), key=lambda each: each.start
        ):
            self.first_leaf[placed.name] = len(self._leaf_begins)
            for first, last in leaf_spans(placed.nbytes):
                here, end = placed.start + first, placed.start + last
                if not self._leaf_begins:
                    begin = here
                elif end - begin > LEAF_BYTES:
                    self._piece_leaves.append(len(self._leaf_begins))
                    begin = here
                self.piece_of_leaf.append(len(self._piece_leaves) - 1)
                self._leaf_begins.append(here)
                self._leaf_ends.append(end)
        if self._leaf_begins:
            self._piece_leaves.append(len(self._leaf_begins))

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
        """Return the concatenated digests of a piece's leaves.

        Args:
            piece: Its number.
            content: [bytes] all of the piece.
        """
        start, _ = self.span(piece)
        found = bytearray()
        for leaf in self.leaves_of(piece):
            begin, end = self.leaf_span(leaf)
            with content[begin - start : end - start] as part:
                found += hash_leaf(part)
        return bytes(found)

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
