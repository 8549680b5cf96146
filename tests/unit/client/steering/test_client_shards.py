"""Who writes which shard: each byte once, whatever the ranks have; and tensors that are alike are planned together."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client.steering.plain_tensors import Spec
from rollout_client.steering.pushing.shards.shard_plan import (
    Offer,
    Share,
    TensorPart,
    _are_disjoint,
    offer_of,
    offers_from_json,
    offers_to_json,
    share_out,
)
from rollout_client.steering.pushing.shards.tensor_boxes import Box, overlap, volume
from rollout_common.transfer.layout import ITEM_BYTES, LayoutError

SHAPE = (8, 6, 4)


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
    boxes = cut(rng, tuple((0, size) for size in SHAPE), rng.randint(2, 20))
    assert _are_disjoint(tuple(boxes))
    moved = list(boxes)
    at = rng.randrange(len(moved))
    dim = rng.randrange(3)
    begin, end = moved[at][dim]
    by = rng.choice((-1, 1))
    moved[at] = (*moved[at][:dim], (begin + by, end + by), *moved[at][dim + 1 :])
    pairs = any(overlap(one, other) for one, other in combinations(set(moved), 2))
    assert _are_disjoint(tuple(sorted(set(moved)))) is not pairs


# Random models: a few patterns of who has what, each for some tensors.

Parts = Mapping[str, TensorPart]
KINDS: tuple[tuple[str, tuple[int, ...], tuple[Box, ...]], ...] = (
    ("BF16", (4, 6), (((0, 4), (0, 6)),)),
    ("F32", (4, 6), (((0, 3), (0, 6)), ((3, 4), (0, 6)))),
    ("BF16", (4, 6), (((0, 2), (0, 6)), ((2, 4), (0, 3)), ((2, 4), (3, 6)))),
    ("U8", (), ((),)),
    ("U8", (0, 3), ()),
)


@st.composite
def models(draw: st.DrawFn) -> tuple[dict[int, Parts], frozenset[int]]:
    """By rank what it has, and the ranks of other nodes."""
    ranks = range(draw(st.integers(3, 6)))
    found: dict[int, dict[str, TensorPart]] = {rank: {} for rank in ranks}
    for pattern in range(draw(st.integers(1, 4))):
        dtype, shape, boxes = draw(st.sampled_from(KINDS))
        owners = draw(st.permutations(ranks))
        has: dict[int, Box | None] = dict(zip(owners, boxes, strict=False))
        for rank in owners[len(boxes) :]:
            at = draw(st.integers(-2, len(boxes) - 1))
            if at > -2 or not boxes:
                has[rank] = None if at < 0 else boxes[at]
        for number in draw(st.sets(st.integers(0, 9), min_size=1)):
            for rank, box in has.items():
                found[rank][f"{number} {pattern}"] = TensorPart(dtype, shape, box)
    return {**found}, frozenset(draw(st.sets(st.sampled_from(ranks[1:]))))


def offers_of(model: Mapping[int, Parts]) -> dict[int, Offer]:
    return {rank: offer_of(parts) for rank, parts in model.items()}


def written(specs: Sequence[Spec], shares: Iterable[Share]) -> dict[tuple[str, Box], int]:
    """Return the rank that writes each box of each tensor."""
    listed = [
        ((specs[number][0], box), rank)
        for share in shares
        for number in share.numbers
        for rank, box in share.boxes.items()
    ]
    assert len(dict(listed)) == len(listed), "each box is written once"
    return dict(listed)


def plain_plan(model: Mapping[int, Parts], far: Collection[int]) -> dict[tuple[str, Box], int]:
    """Plan tensor by tensor: the largest first, those that are alike by boxes, each to the rank that has least to do."""
    names = sorted({name for parts in model.values() for name in parts})
    alike: list[tuple[dict[int, TensorPart], list[str]]] = []
    for name in names:
        has = {rank: parts[name] for rank, parts in model.items() if name in parts}
        for other, group in alike:
            if other == has:
                group.append(name)
                break
        else:
            alike.append((has, [name]))
    burden = dict.fromkeys(model, 0)
    found: dict[tuple[str, Box], int] = {}
    for has, group in sorted(alike, key=lambda each: -elements(each[0])):
        for box in sorted({part.box for part in has.values() if part.box is not None}):
            ranks = [rank for rank in sorted(has) if has[rank].box == box]
            ranks = [rank for rank in ranks if rank not in far] or ranks
            chosen = []
            for _ in group:
                least = min(ranks, key=lambda rank: (burden[rank], rank))
                burden[least] += ITEM_BYTES[has[least].dtype] * volume(box)
                chosen.append(least)
            found |= {(name, box): rank for name, rank in zip(group, sorted(chosen), strict=True)}
    return found


def elements(has: Mapping[int, TensorPart]) -> int:
    """Return how many elements a tensor has."""
    shape = next(iter(has.values())).shape
    return volume(tuple((0, size) for size in shape))


@given(models())
def test_the_plan_is_that_of_each_tensor_by_itself(
    model: tuple[dict[int, Parts], frozenset[int]],
) -> None:
    parts, far = model
    specs, shares = share_out(offers_of(parts), far)
    found = written(specs, shares)
    assert found == plain_plan(parts, far)
    for (name, box), rank in found.items():
        assert parts[rank][name].box == box, "it has what it writes"
    names = {name for each in parts.values() for name in each}
    assert [spec[0] for spec in specs] == sorted(names)
    for name, _, shape in specs:
        boxes = [box for other, box in found if other == name]
        assert sum(map(volume, boxes)) == volume(tuple((0, size) for size in shape))
        assert not any(overlap(one, other) for one, other in combinations(boxes, 2))


@given(models())
def test_offers_that_came_from_elsewhere_make_the_same_plan(
    model: tuple[dict[int, Parts], frozenset[int]],
) -> None:
    parts, far = model
    offers = offers_of(parts)
    came: dict[int, Offer] = {}
    for rank in reversed(offers):  # each of them with names of its own
        head = json.loads(json.dumps(offers_to_json({rank: offers[rank]})))
        came |= offers_from_json(head, {})
    assert came == offers
    assert share_out(came, far) == share_out(offers, far)


def runs_of(size: int, *runs: tuple[int, int] | None) -> dict[int, Offer]:
    """By rank: what it has of one tensor of bytes."""
    boxes = [None if run is None else (run,) for run in runs]
    return {rank: {TensorPart("U8", (size,), box): ("a",)} for rank, box in enumerate(boxes)}


@pytest.mark.parametrize(
    "runs", [[(0, 4), (5, 8)], [(0, 5), (4, 8)], [(0, 7), None], [(1, 8)], [None], [(0, 4), (2, 6)]]
)
def test_shards_that_make_no_whole_are_refused_by_name(runs: list[tuple[int, int] | None]) -> None:
    """Also those that overlap as much as they lack."""
    with pytest.raises(LayoutError, match="'a': the ranks' shards don't make it whole"):
        share_out(runs_of(8, *runs))


def test_ranks_that_mean_different_tensors_are_refused_by_name() -> None:
    other: Offer = {TensorPart("U8", (9,), None): ("a",)}
    with pytest.raises(LayoutError, match=r"tensor 'a' is U8 \[9\] on rank 1 and U8 \[8\]"):
        share_out({**runs_of(8, (0, 8)), 1: other})


def test_a_rank_that_offers_a_tensor_twice_is_refused() -> None:
    halves = [TensorPart("U8", (8,), ((begin, begin + 4),)) for begin in (0, 4)]
    with pytest.raises(LayoutError, match="'w' is offered twice by one rank"):
        share_out({0: dict.fromkeys(halves, ("w",))})


def test_tensors_that_all_ranks_cut_alike_are_one_share() -> None:
    names = tuple(f"t{number:03}" for number in range(100))
    rows = [((64 * rank, 64 * rank + 64), (0, 64)) for rank in range(64)]
    _, [share] = share_out(
        {rank: {TensorPart("BF16", (4096, 64), row): names} for rank, row in enumerate(rows)}
    )
    assert share.boxes == dict(enumerate(rows))


def test_tensors_that_several_ranks_have_are_written_in_runs() -> None:
    """So that the small tensors of a piece lie on one node."""
    names = tuple(f"t{number}" for number in range(10))
    part = TensorPart("U8", (8,), ((0, 8),))
    _, shares = share_out({rank: {part: names} for rank in range(3)})
    assert [(share.numbers, [*share.boxes]) for share in shares] == [
        ([0, 1, 2, 3], [0]),
        ([4, 5, 6], [1]),
        ([7, 8, 9], [2]),
    ]
