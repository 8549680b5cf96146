"""Who writes which shard: each byte once, whatever the ranks have; and a plan that many ranks don't make slow."""

from __future__ import annotations

import random
import time
from itertools import combinations

import pytest

from rollout_client.steering.pushing.shards.shard_plan import TensorPart, _are_disjoint, share_out
from rollout_client.steering.pushing.shards.tensor_boxes import Box, overlap, volume
from rollout_common.transfer.layout import LayoutError

SPEC = ("w", "BF16", (8, 6, 4))


def cut(rng: random.Random, box: Box, pieces: int) -> list[Box]:
    """Cut a box at random, again and again: parts that make it whole."""
    found = [box]
    while len(found) < pieces:
        chosen = rng.choice(found)
        dims = [dim for dim, (begin, end) in enumerate(chosen) if end - begin > 1]
        if not dims:
            continue
        dim = rng.choice(dims)
        begin, end = chosen[dim]
        at = rng.randrange(begin + 1, end)
        found.remove(chosen)
        found += [(*chosen[:dim], run, *chosen[dim + 1 :]) for run in ((begin, at), (at, end))]
    return found


@pytest.mark.parametrize("seed", range(40))
def test_boxes_overlap_as_each_pair_of_them_does(seed: int) -> None:
    rng = random.Random(seed)
    boxes = cut(rng, tuple((0, size) for size in SPEC[2]), rng.randint(2, 20))
    assert _are_disjoint(tuple(boxes))
    moved = list(boxes)
    at = rng.randrange(len(moved))
    dim = rng.randrange(3)
    begin, end = moved[at][dim]
    by = rng.choice((-1, 1))
    moved[at] = (*moved[at][:dim], (begin + by, end + by), *moved[at][dim + 1 :])
    pairs = any(overlap(one, other) for one, other in combinations(set(moved), 2))
    assert _are_disjoint(tuple(sorted(set(moved)))) is not pairs


@pytest.mark.parametrize("seed", range(10))
def test_each_byte_is_written_once(seed: int) -> None:
    """A rank gives one box of a tensor, so of each tensor every rank has another one, and some have the same."""
    rng = random.Random(seed)
    whole = tuple((0, size) for size in SPEC[2])
    offers: list[list[TensorPart]] = [[] for _ in range(8)]
    for number in range(20):
        boxes = cut(rng, whole, 4)
        for rank, box in enumerate(boxes + rng.choices(boxes, k=4)):
            offers[rank].append(TensorPart((f"w{number}", *SPEC[1:]), box))
    shares = share_out(offers)
    for number in range(20):
        boxes = [w.boxes[f"w{number}"] for w in shares.work if f"w{number}" in w.boxes]
        assert sum(map(volume, boxes)) == volume(whole)
        assert not any(overlap(one, other) for one, other in combinations(boxes, 2))
    assert sum(work.nbytes for work in shares.work) == 20 * 2 * volume(whole)


def test_shards_that_overlap_as_much_as_they_lack_are_refused() -> None:
    spec = ("w", "F32", (4, 4))
    boxes: list[Box] = [((0, 2), (0, 4)), ((1, 3), (0, 4))]
    with pytest.raises(LayoutError, match="don't make it whole"):
        share_out([[TensorPart(spec, box)] for box in boxes])


def test_a_plan_for_64_ranks_takes_no_time_by_pairs() -> None:
    """By pairs of shards it would take seconds."""
    rows = [((64 * rank, 64 * rank + 64), (0, 64)) for rank in range(64)]
    offers = [
        [TensorPart((f"t{number}", "BF16", (4096, 64)), row) for number in range(100)]
        for row in rows
    ]
    began = time.process_time()
    shares = share_out(offers)
    assert time.process_time() - began < 0.4
    assert {work.nbytes for work in shares.work} == {100 * 64 * 64 * 2}
