"""What a node serves and what it sends to rank 0: each byte one of the two, whatever its ranks have."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence

import pytest

from rollout_client.steering.pushing.shards.node_parts import (
    Chunk,
    NodePart,
    node_parts,
    node_runs,
    pack_layout,
    spec_of_placed,
)
from rollout_client.steering.pushing.shards.shard_plan import Share
from rollout_client.steering.pushing.shards.tensor_boxes import Box, rows_of
from rollout_common.transfer.layout import PushLayout
from tests.support.unit.memory_versions import LEAF, small_leaves

SHAPES: Mapping[str, tuple[int, ...]] = {
    "bulk": (5, LEAF),
    "empty": (0, 4),
    "odd": (2 * LEAF + 77,),
    "one": (),
    "small a": (100,),
    "small b": (3, 50),
    "tall": (2 * LEAF, 2),
    "wide": (2, 5 * LEAF // 2),
}


def cut_grid(rng: random.Random, shape: Sequence[int], ranks: int) -> list[Box]:
    """Cut a tensor as a mesh of ranks does: evenly along one dimension, or along two."""
    whole: Box = tuple((0, size) for size in shape)
    boxes = [whole]
    for dim in rng.sample(range(len(shape)), min(len(shape), rng.randint(0, 2))):
        pieces = rng.choice((2, ranks))
        step = math.ceil(shape[dim] / pieces)
        cuts = [(at, min(at + step, shape[dim])) for at in range(0, shape[dim], step)]
        boxes = [(*box[:dim], each, *box[dim + 1 :]) for box in boxes for each in cuts]
    return boxes


def parts_of(rng: random.Random, nodes: int) -> list[NodePart]:
    """Share all tensors out to nodes at random: as runs of the boxes, or each box to any node."""
    layout = PushLayout.plan((name, "U8", shape) for name, shape in SHAPES.items())
    node_of = {rank: rank % nodes for rank in range(nodes * 100)}
    shares = []
    for number, placed in enumerate(layout.tensors):
        boxes = cut_grid(rng, placed.shape, 4) if placed.nbytes else []
        in_order = rng.random() < 0.7
        by_rank = {}
        for at, box in enumerate(boxes):
            node = at * nodes // len(boxes) if in_order else rng.randrange(nodes)
            by_rank[nodes * at + node] = box
        shares.append(Share([number], by_rank))
    parts = node_parts(layout, shares, node_of)
    return [parts[node] for node in range(nodes)]


def bytes_in(chunks: Iterable[Chunk]) -> list[tuple[str, int]]:
    """Return each byte of some chunks, as name of the tensor and offset."""
    found: list[tuple[str, int]] = []
    for chunk in chunks:
        before = len(found)
        name, shape = chunk.placed.name, chunk.placed.shape
        if chunk.run is not None:
            found += [(name, at) for at in range(*chunk.run)]
        else:
            assert chunk.box is not None
            for place in itertools.product(*(range(*cut) for cut in chunk.box)):
                at = 0
                for size, index in zip(shape, place, strict=True):
                    at = at * size + index
                found.append((name, at))
        assert len(found) - before == chunk.nbytes
    return found


@pytest.mark.parametrize("seed", range(8))
def test_each_byte_is_served_or_sent_once(seed: int) -> None:
    with small_leaves():
        parts = parts_of(random.Random(seed), 3)
        layout = parts[0].layout
        sent = [bytes_in(part.rest()) for part in parts]
        served = [bytes_in(part.held()) for part in parts]
        everything = sorted(itertools.chain(*sent, *served))
        assert everything == sorted(
            (placed.name, at) for placed in layout.tensors for at in range(placed.nbytes)
        )
        for part, rest, held in zip(parts, sent, served, strict=True):
            assert part.nbytes == len(rest) + len(held)
            whole: list[int] = []
            for piece in range(len(layout.pieces)):
                begin, end = layout.pieces.span(piece)
                there = sum(begin <= layout[name].start + at < end for name, at in held)
                leaves = layout.pieces.leaves_of(piece) if part.whole[piece] else ()
                assert there == sum(b - a for a, b in map(layout.pieces.leaf_span, leaves))
                whole += leaves
            assert [leaf for run in part.whole_leaves() for leaf in run] == whole


def test_columns_that_make_rows_on_a_node_are_a_run() -> None:
    spec = ("a", "U8", (4, 6))
    assert node_runs(spec, [((0, 2), (0, 3)), ((0, 2), (3, 6))]) == ((0, 12),)
    assert node_runs(spec, [((0, 2), (0, 3)), ((2, 4), (3, 6))]) is None
    assert node_runs(spec, [((0, 4), (0, 3))]) is None
    assert node_runs(spec, [((3, 4), (0, 6)), ((0, 1), (0, 6)), ((1, 2), (0, 6))]) == (
        (0, 12),
        (18, 24),
    )
    assert node_runs(("a", "U8", ()), [()]) == ((0, 1),)


def test_a_box_is_a_run_of_bytes_if_only_rows_are_cut() -> None:
    spec = ("a", "F32", (4, 3))
    assert rows_of(spec, ((1, 3), (0, 3))) == (12, 36)
    assert rows_of(spec, ((1, 3), (0, 2))) is None
    assert rows_of(spec, ((2, 3), (1, 3))) is None
    assert rows_of(("a", "F32", ()), ()) == (0, 4)


def test_blocks_are_the_runs_that_boxes_make_together() -> None:
    layout = PushLayout.plan(
        [("cols", "U8", (4, 6)), ("rows", "U8", (4, 6)), ("tiles", "U8", (4, 6))]
    )
    boxes: dict[str, list[Box]] = {
        "cols": [((0, 4), (0, 3))],
        "rows": [((0, 2), (0, 6))],
        "tiles": [((0, 2), (0, 3)), ((0, 2), (3, 6))],
    }
    shares = [
        Share([number], dict(enumerate(boxes[placed.name])))
        for number, placed in enumerate(layout.tensors)
    ]
    [part] = node_parts(layout, shares, {0: 0, 1: 0}).values()
    assert part.scattered == {"cols"}
    assert part.blocks == {"tiles": (0, 12)}
    assert [share.runs for share in part.shares] == [None, ((0, 12),), ((0, 12),)]
    assert rows_of(spec_of_placed(layout["rows"]), boxes["rows"][0]) == (0, 12)


def test_a_part_goes_to_its_node_as_it_is() -> None:
    for part in parts_of(random.Random(1), 2):
        head = {"layout": pack_layout(part.layout), "shares": part.to_json(range(200))}
        came = NodePart.from_json(json.loads(json.dumps(head)))
        assert came == part
        one = NodePart.from_json(head | {"shares": part.to_json([0])})
        assert one.boxes_of(0) == part.boxes_of(0)
        assert not any(one.boxes_of(rank) for rank in range(1, 200))
