"""What the ranks of one node have of a version: whole pieces, which the node serves, and a rest that it sends to rank 0. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from rollout_client.steering.pushing.push_tensors import Spec
from rollout_common.transfer.connections.frames import CHUNK_BYTES
from rollout_common.transfer.layout import ITEM_BYTES, Placed, PushLayout

from .tensor_boxes import Box, Run, nbytes_of, pieces_of, rows_of, volume


class Chunk(NamedTuple):
    """Some bytes of a tensor: a run of them, or a box that is not one."""

    placed: Placed
    run: Run | None
    box: Box | None

    @property
    def nbytes(self) -> int:
        """Its size."""
        if self.run is not None:
            return self.run[1] - self.run[0]
        assert self.box is not None
        return nbytes_of(spec_of_placed(self.placed), self.box)


def spec_of_placed(placed: Placed) -> Spec:
    """Return name, dtype and shape of a tensor."""
    return placed.name, placed.dtype, placed.shape


def node_runs(spec: Spec, boxes: Sequence[Box]) -> tuple[Run, ...] | None:
    """Return disjoint boxes of a tensor as runs of its bytes; None: together they are not runs."""
    rows = [rows_of(spec, box) for box in boxes]
    found = sorted(run for run in rows if run is not None)
    if len(found) < len(boxes):
        hull = tuple(
            (min(begin for begin, _ in cuts), max(end for _, end in cuts))
            for cuts in zip(*boxes, strict=True)
        )
        run = rows_of(spec, hull)
        return (run,) if run is not None and volume(hull) == sum(map(volume, boxes)) else None
    merged: list[Run] = []
    for begin, end in found:
        if merged and merged[-1][1] == begin:
            merged[-1] = merged[-1][0], end
        else:
            merged.append((begin, end))
    return tuple(merged)


def scattered_tensors(
    specs: Collection[Spec], nodes: Sequence[Mapping[str, Sequence[Box]]]
) -> frozenset[str]:
    """Return the names of the tensors whose boxes are not runs on each node, so that only rank 0 can hash them.

    Args:
        specs: Of all tensors.
        nodes: By node: the boxes of its ranks, by name of the tensor.
    """
    return frozenset(
        spec[0]
        for spec in specs
        if any(node_runs(spec, node[spec[0]]) is None for node in nodes if spec[0] in node)
    )


@dataclass(frozen=True)
class NodePart:
    """The part of a version that the ranks of a node write.

    Attributes:
        layout: Of the version.
        boxes: By name of the tensor: the boxes of its ranks.
        scattered: The tensors that only rank 0 can hash.
    """

    layout: PushLayout
    boxes: Mapping[str, Sequence[Box]]
    scattered: Collection[str]

    @cached_property
    def runs(self) -> Mapping[str, tuple[Run, ...]]:
        """By name of a tensor that is not scattered: the runs of its bytes."""
        found = {}
        for name in sorted(self.boxes):
            if name not in self.scattered:
                runs = node_runs(spec_of_placed(self.layout[name]), self.boxes[name])
                assert runs is not None, "else it is scattered"
                found[name] = runs
        return found

    @cached_property
    def whole(self) -> bytes:
        """By piece: 1 if all of it is here."""
        pieces = self.layout.pieces
        covered = bytearray(pieces.leaf_count)
        for name, runs in self.runs.items():
            for run in runs:
                leaves = pieces.whole_leaves(self.layout[name], *run)
                covered[leaves.start : leaves.stop] = b"\1" * len(leaves)
        parts = (pieces.leaves_of(piece) for piece in range(len(pieces)))
        return bytes(0 not in covered[each.start : each.stop] for each in parts)

    @property
    def nbytes(self) -> int:
        """How many bytes its ranks write."""
        return sum(
            nbytes_of(spec_of_placed(self.layout[name]), box)
            for name, boxes in self.boxes.items()
            for box in boxes
        )

    @property
    def blocks(self) -> Mapping[str, Run]:
        """By name: the run that boxes of several runs make up together, once all of them are written."""
        found = {}
        for name, boxes in self.boxes.items():
            placed = self.layout[name]
            if name not in self.scattered and any(
                rows_of(spec_of_placed(placed), box) is None for box in boxes
            ):
                [found[name]] = self.runs[name]
        return found

    def rest(self) -> Iterator[Chunk]:
        """Yield what it sends to rank 0 in any case, in this order."""
        yield from self._cut(held=False)
        for name in sorted(set(self.boxes) & set(self.scattered)):
            placed = self.layout[name]
            most = CHUNK_BYTES // ITEM_BYTES[placed.dtype]
            for box in sorted(self.boxes[name]):
                for piece in pieces_of(box, most):
                    yield Chunk(placed, None, piece)

    def held(self) -> Iterator[Chunk]:
        """Yield what it serves, and sends to rank 0 if that needs all bytes, in this order."""
        return self._cut(held=True)

    def _cut(self, *, held: bool) -> Iterator[Chunk]:
        """Yield a chunk for each leaf of its runs, or the part of the leaf that is here."""
        pieces = self.layout.pieces
        for name, runs in self.runs.items():
            placed = self.layout[name]
            for begin, end in runs:
                for leaf in pieces.leaves_in(placed, begin, end):
                    if bool(self.whole[pieces.piece_of_leaf[leaf]]) is held:
                        first, last = pieces.leaf_span(leaf)
                        run = max(begin, first - placed.start), min(end, last - placed.start)
                        yield Chunk(placed, run, None)

    def whole_leaves(self) -> Iterator[range]:
        """Yield runs of the leaves that it serves."""
        pieces = self.layout.pieces
        numbers = (piece for piece in range(len(pieces)) if self.whole[piece])
        for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
            run = list(map(itemgetter(1), group))
            yield range(pieces.leaves_of(run[0]).start, pieces.leaves_of(run[-1]).stop)
