"""What the ranks of one node have of a version: whole pieces, which the node serves, and a rest that it sends to rank 0. Pure."""

from __future__ import annotations

import base64
import json
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

from pydantic import TypeAdapter

from rollout_client.steering.plain_tensors import Spec
from rollout_common.transfer.connections.frames import CHUNK_BYTES
from rollout_common.transfer.layout import ITEM_BYTES, Placed, PushLayout

from .shard_plan import Share
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


class NodeShare(NamedTuple):
    """Tensors that are alike on all ranks, and what the ranks of one node write of each.

    Attributes:
        numbers: Of the tensors, by the order of their names.
        boxes: By rank of the node: what it writes of each of them.
        runs: The runs of bytes of each that the boxes make; None: only rank 0 can hash these tensors, since
            some node's boxes don't make runs.
    """

    numbers: Sequence[int]
    boxes: Mapping[int, Box]
    runs: tuple[Run, ...] | None


_SHARES = TypeAdapter(tuple[NodeShare, ...])


def pack_layout(layout: PushLayout) -> str:
    """Return a layout as text: it is the longest part of an order, and goes to many ranks."""
    text = json.dumps(layout.to_json()).encode()
    return base64.b64encode(zlib.compress(text, 1)).decode()


def node_parts(
    layout: PushLayout, shares: Iterable[Share], node_of: Mapping[int, int]
) -> dict[int, NodePart]:
    """Return by node what its ranks write; `node_of` has the node of each rank."""
    found: dict[int, list[NodeShare]] = {node: [] for node in node_of.values()}
    for numbers, boxes in shares:
        spec = spec_of_placed(layout.tensors[numbers[0]])
        by_node: dict[int, dict[int, Box]] = {}
        for rank, box in boxes.items():
            by_node.setdefault(node_of[rank], {})[rank] = box
        runs = {node: node_runs(spec, tuple(here.values())) for node, here in by_node.items()}
        are_runs = None not in runs.values()
        for node, here in by_node.items():
            found[node].append(NodeShare(numbers, here, runs[node] if are_runs else None))
    return {node: NodePart(layout, tuple(each)) for node, each in found.items()}


@dataclass(frozen=True)
class NodePart:
    """The part of a version that the ranks of a node write."""

    layout: PushLayout
    shares: Sequence[NodeShare]

    @classmethod
    def from_json(cls, head: Mapping[str, Any]) -> Self:
        """Return the part that another rank described, with `pack_layout` and `to_json`.

        Raises:
            LayoutError: It is not a valid layout.
        """
        layout = json.loads(zlib.decompress(base64.b64decode(head["layout"])))
        return cls(PushLayout.from_json(layout), _SHARES.validate_python(head["shares"]))

    def to_json(self, ranks: Collection[int]) -> list[NodeShare]:
        """Return the shares of these ranks as `from_json` takes them."""
        theirs = (
            share._replace(boxes={r: box for r, box in share.boxes.items() if r in ranks})
            for share in self.shares
        )
        return [share for share in theirs if share.boxes]

    def boxes_of(self, rank: int) -> dict[str, Box]:
        """Return by name of the tensor what one of its ranks writes."""
        tensors = self.layout.tensors
        return {
            tensors[number].name: share.boxes[rank]
            for share in self.shares
            if rank in share.boxes
            for number in share.numbers
        }

    def _tensors(self, share: NodeShare) -> Iterator[Placed]:
        return map(self.layout.tensors.__getitem__, share.numbers)

    @cached_property
    def whole(self) -> bytes:
        """By piece: 1 if all of it is here."""
        pieces = self.layout.pieces
        found = bytearray(len(pieces))
        at_edges: Counter[int] = Counter()
        for placed, run in self._runs():
            leaves = pieces.whole_leaves(placed, *run)
            if not leaves:
                continue
            first, last = pieces.piece_of_leaf[leaves[0]], pieces.piece_of_leaf[leaves[-1]]
            found[first + 1 : last] = b"\1" * (last - first - 1)
            for piece in {first, last}:  # others may have the rest of it
                every = pieces.leaves_of(piece)
                at_edges[piece] += min(leaves.stop, every.stop) - max(leaves.start, every.start)
        for piece, count in at_edges.items():
            found[piece] = count == len(pieces.leaves_of(piece))
        return bytes(found)

    def _runs(self) -> Iterator[tuple[Placed, Run]]:
        for share in self.shares:
            for placed in self._tensors(share):
                for run in share.runs or ():
                    yield placed, run

    @cached_property
    def nbytes(self) -> int:
        """How many bytes its ranks write."""
        return sum(
            len(share.numbers) * nbytes_of(self._spec(share), box)
            for share in self.shares
            for box in share.boxes.values()
        )

    def _spec(self, share: NodeShare) -> Spec:
        return spec_of_placed(self.layout.tensors[share.numbers[0]])

    @cached_property
    def scattered(self) -> frozenset[str]:
        """The names of the tensors that only rank 0 can hash."""
        return frozenset(
            placed.name
            for share in self.shares
            if share.runs is None
            for placed in self._tensors(share)
        )

    @cached_property
    def blocks(self) -> Mapping[str, Run]:
        """By name: the run that boxes of several ranks make up together, once all of them are written."""
        found: dict[str, Run] = {}
        for share in self.shares:
            spec = self._spec(share)
            if share.runs and any(rows_of(spec, box) is None for box in share.boxes.values()):
                [run] = share.runs
                found |= {placed.name: run for placed in self._tensors(share)}
        return found

    def rest(self) -> Iterator[Chunk]:
        """Yield what it sends to rank 0 in any case, in this order."""
        yield from self._cut(held=False)
        for share in self.shares:
            for placed in self._tensors(share) if share.runs is None else ():
                most = CHUNK_BYTES // ITEM_BYTES[placed.dtype]
                for box in sorted(share.boxes.values()):
                    for piece in pieces_of(box, most):
                        yield Chunk(placed, None, piece)

    def held(self) -> Iterator[Chunk]:
        """Yield what it serves, and sends to rank 0 if that needs all bytes, in this order."""
        return self._cut(held=True)

    def _cut(self, *, held: bool) -> Iterator[Chunk]:
        """Yield a chunk for each leaf of its runs, or the part of the leaf that is here."""
        pieces, there = self.layout.pieces, self.whole
        for placed, (begin, end) in self._runs():
            leaves = pieces.leaves_in(placed, begin, end)
            numbers = pieces.piece_of_leaf[leaves[0]], pieces.piece_of_leaf[leaves[-1]] + 1
            for few in _ranges(there, int(held), *numbers):
                first, last = pieces.leaves_of(few[0]).start, pieces.leaves_of(few[-1]).stop
                for leaf in range(max(first, leaves.start), min(last, leaves.stop)):
                    start, stop = pieces.leaf_span(leaf)
                    run = max(begin, start - placed.start), min(end, stop - placed.start)
                    yield Chunk(placed, run, None)

    def whole_leaves(self) -> Iterator[range]:
        """Yield runs of the leaves that it serves."""
        pieces = self.layout.pieces
        for few in _ranges(self.whole, 1, 0, len(pieces)):
            yield range(pieces.leaves_of(few[0]).start, pieces.leaves_of(few[-1]).stop)


def _ranges(of: bytes, value: int, begin: int, end: int) -> Iterator[range]:
    """Yield the longest ranges of bytes between two offsets that have this value, 0 or 1."""
    while (begin := of.find(value, begin, end)) >= 0:
        stop = of.find(1 - value, begin, end)
        yield range(begin, end if stop < 0 else stop)
        if stop < 0:
            return
        begin = stop
