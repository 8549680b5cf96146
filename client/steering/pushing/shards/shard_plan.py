"""Which bytes of which tensors each rank of a trainer has, and which rank writes what. Pure but for `part_of`.

A shard is a box of the whole tensor, so its rank can write it to its place; a shard along the first dimension
is a run of bytes. A tensor that still has to be summed is gathered, and one rank writes it. Ranks have tens of thousands
of tensors, but few kinds of them: what is alike on all ranks is offered, checked and shared out together.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, combinations, pairwise, starmap
from operator import itemgetter
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from rollout_client.steering.checkpoint_form import is_sharded
from rollout_client.steering.plain_tensors import Spec, spec_of
from rollout_common.transfer.layout import LayoutError

from .tensor_boxes import Box, Run, nbytes_of, overlap, volume


class TensorPart(NamedTuple):
    """The part that one rank has of a tensor, or of several that are alike.

    Attributes:
        dtype: As safetensors call it.
        shape: Of the whole tensor.
        box: The part that this rank has; None: it has none.
        gathered: Whether the ranks that have it gather it, so that one of them can write it.
    """

    dtype: str
    shape: tuple[int, ...]
    box: Box | None
    gathered: bool = False


Names = tuple[str, ...]

Offer = Mapping[TensorPart, Names]
"""What one rank has: the names of the tensors of which it has such a part, in order."""


_OFFERS = TypeAdapter(dict[int, list[tuple[int, TensorPart]]])
"""By rank: the number of some names, and its part of the tensors that are called so."""


def offer_of(parts: Mapping[str, TensorPart]) -> Offer:
    """Return what a rank has, of its part of each tensor."""
    found: dict[TensorPart, list[str]] = defaultdict(list)
    for name in sorted(parts):
        found[parts[name]].append(name)
    return {part: tuple(names) for part, names in found.items()}


def offers_to_json(offers: Mapping[int, Offer]) -> dict[str, Any]:
    """Return the offers of some ranks in the form that `offers_from_json` takes; ranks with the same names share them."""
    numbers: dict[Names, int] = {}
    rows = {
        str(rank): [
            [numbers.setdefault(names, len(numbers)), part] for part, names in offer.items()
        ]
        for rank, offer in offers.items()
    }
    return {"names": list(numbers), "offers": rows}


def offers_from_json(head: Mapping[str, Any], known: dict[Names, Names]) -> dict[int, Offer]:
    """Return the offers that another rank described, by rank.

    Args:
        head: What `offers_to_json` returned.
        known: Names that other offers have; new ones are added, so that equal ones are the same object.
    """
    listed = [known.setdefault(names, names) for names in map(tuple, head["names"])]
    return {
        rank: {part: listed[number] for number, part in rows}
        for rank, rows in _OFFERS.validate_python(head["offers"]).items()
    }


def part_of(name: object, tensor: Any) -> TensorPart:
    """Return the part of a tensor that this rank has.

    Raises:
        LayoutError: It is not a tensor, or has a dtype that no worker takes.
    """
    _, dtype, shape = spec_of(name, tensor)
    whole = tuple((0, size) for size in shape)
    if 0 in shape:
        return TensorPart(dtype, shape, None)
    if not is_sharded(tensor):
        return TensorPart(dtype, shape, whole)
    placements = getattr(tensor, "placements", None)
    if placements is None or not _is_cut(placements):
        return TensorPart(dtype, shape, whole, gathered=True)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return TensorPart(dtype, shape, None)
    box = list(whole)
    for each, at, ranks in zip(placements, coordinate, tensor.device_mesh.shape, strict=True):
        if each.is_shard():
            box[each.dim] = _chunk(box[each.dim], at, ranks)
    return TensorPart(dtype, shape, tuple(box) if volume(tuple(box)) else None)


def _is_cut(placements: Iterable[Any]) -> bool:
    """Whether each rank's part is final, so that nothing has to be summed or gathered."""
    from torch.distributed.tensor import Replicate, Shard

    # The exact type: a strided shard is a subclass, and is not a box.
    return all(type(each) in (Replicate, Shard) for each in placements)


def _chunk(of: Run, at: int, ranks: int) -> Run:
    """Return one chunk of a run, cut as `torch.chunk` cuts."""
    begin, end = of
    step = -(-(end - begin) // ranks)
    first = min(end, begin + step * at)
    return first, min(end, first + step)


class Share(NamedTuple):
    """Tensors that are alike on all ranks, and who writes which part of each.

    Attributes:
        numbers: Of the tensors, by the order of their names.
        boxes: By rank: what it writes of each of them.
    """

    numbers: Sequence[int]
    boxes: Mapping[int, Box]


def share_out(
    offers: Mapping[int, Offer], far: Collection[int] = ()
) -> tuple[tuple[Spec, ...], list[Share]]:
    """Share the work so that one rank writes each byte, and all ranks write about as much.

    Return the specs of all tensors of all ranks, by name, and shares that have each tensor once.

    Args:
        offers: By rank: the parts that it has.
        far: Ranks of other nodes than rank 0's: they write only what no other rank has.

    Raises:
        LayoutError: Two ranks have different tensors of the same name, or some bytes are missing on all ranks.
    """
    names, groups = _group_alike(offers)
    specs: dict[int, Spec] = {}
    for numbers, parts in groups:
        _check_parts(names[numbers[0]], parts)
        _, kind = parts[0]
        specs |= {number: (names[number], kind.dtype, kind.shape) for number in numbers}
    burden = dict.fromkeys(sorted(offers), 0)
    shares: list[Share] = []
    # The largest first, so that the small ones can even it out.
    for numbers, parts in sorted(groups, key=lambda group: -math.prod(group[1][0][1].shape)):
        shares += _share_group(specs[numbers[0]], numbers, parts, burden, far)
    return tuple(specs[number] for number in range(len(names))), shares


Parts = Sequence[tuple[int, TensorPart]]
"""Ranks in order, and what each of them has of a tensor."""


def _group_alike(offers: Mapping[int, Offer]) -> tuple[list[str], list[tuple[list[int], Parts]]]:
    """Return all names in order, and the numbers of those of which each rank has the same part, with these parts."""
    listed: dict[int, tuple[Names, list[tuple[int, TensorPart]]]] = {}
    for rank in sorted(offers):
        for part, names in offers[rank].items():
            # By identity, which costs nothing; equal names that are another object are right, too.
            listed.setdefault(id(names), (names, []))[1].append((rank, part))
    keys: dict[str, list[int]] = defaultdict(list)
    for key, (names, _) in listed.items():
        for name in names:
            keys[name].append(key)
    ordered = sorted(keys)
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, name in enumerate(ordered):
        alike[tuple(keys[name])].append(number)
    groups: list[tuple[list[int], Parts]] = [
        (numbers, sorted((part for key in each for part in listed[key][1]), key=itemgetter(0)))
        for each, numbers in alike.items()
    ]
    return ordered, groups


def _check_parts(name: str, parts: Parts) -> None:
    """Refuse parts of different tensors, and those that don't make it whole.

    Raises:
        LayoutError: As `share_out`.
    """
    first, (dtype, shape, *_) = parts[0]
    boxes = set()
    if len({rank for rank, _ in parts}) < len(parts):
        raise LayoutError(
            f"tensor {name!r} is offered twice by one rank: all ranks need the same release of the client",
            tensor=name,
        )
    for rank, part in parts:
        if (part.dtype, part.shape) != (dtype, shape):
            raise LayoutError(
                f"tensor {name!r} is {part.dtype} {list(part.shape)} on rank {rank} and"
                f" {dtype} {list(shape)} on rank {first}: all ranks give the same model",
                tensor=name,
            )
        if part.box is not None:
            _check_within((name, dtype, shape), part.box, rank)
            boxes.add(part.box)
    _check_whole((name, dtype, shape), boxes)


def _share_group(
    spec: Spec, numbers: Sequence[int], parts: Parts, burden: dict[int, int], far: Collection[int]
) -> list[Share]:
    """Share out tensors that are alike: of those that several ranks have, each writes some that follow each other."""
    holders: dict[Box, list[int]] = defaultdict(list)
    for rank, part in parts:
        if part.box is not None:
            holders[part.box].append(rank)
    writers: dict[Box, tuple[list[int], list[int]]] = {}
    for box, ranks in sorted(holders.items()):
        near = [rank for rank in ranks if rank not in far] or ranks
        counts = _spread_evenly(len(numbers), nbytes_of(spec, box), near, burden)
        writers[box] = near, list(accumulate(counts))
    cuts = sorted({0, len(numbers)}.union(*(ends for _, ends in writers.values())))
    return [
        Share(
            numbers[begin:end],
            {ranks[bisect_right(ends, begin)]: box for box, (ranks, ends) in writers.items()},
        )
        for begin, end in pairwise(cuts)
    ]


def _spread_evenly(
    count: int, nbytes: int, ranks: Sequence[int], burden: dict[int, int]
) -> list[int]:
    """Return how many of some equal tasks each rank gets: one after the other, the one that has least to do."""
    if len(ranks) == 1:
        counts = {ranks[0]: count}
    else:
        counts = dict.fromkeys(ranks, 0)
        heap = [(burden[rank], rank) for rank in ranks]
        heapq.heapify(heap)
        for _ in range(count):
            least, rank = heap[0]
            heapq.heapreplace(heap, (least + nbytes, rank))
            counts[rank] += 1
    for rank, more in counts.items():
        burden[rank] += more * nbytes
    return list(counts.values())


def _check_within(spec: Spec, box: Box, rank: int) -> None:
    name, _, shape = spec
    if len(box) != len(shape) or not all(
        0 <= begin < end <= size for (begin, end), size in zip(box, shape, strict=True)
    ):
        raise LayoutError(
            f"tensor {name!r}: rank {rank} says its shard is {list(box)}, which is not a part of"
            f" {list(shape)}: all ranks need the same release of the client",
            tensor=name,
        )


def _check_whole(spec: Spec, boxes: Collection[Box]) -> None:
    there, due = sum(map(volume, boxes)), math.prod(spec[2])
    if there != due or not _are_disjoint(tuple(sorted(boxes))):
        raise LayoutError(
            f"tensor {spec[0]!r}: the ranks' shards don't make it whole ({there} of {due} elements): all"
            " ranks that have a part of it must publish together",
            tensor=spec[0],
        )


def _are_disjoint(boxes: tuple[Box, ...], dim: int = 0) -> bool:
    """Whether no two of these different boxes have an element in common.

    Shards are cut dimension by dimension, so boxes with the same run in one dimension are compared in the next one.
    Sorting replaces the comparison of all pairs, except for boxes whose runs overlap but differ.
    """
    if len(boxes) < 2 or dim == len(boxes[0]):
        return len(boxes) < 2
    by_run: dict[Run, list[Box]] = defaultdict(list)
    for box in boxes:
        by_run[box[dim]].append(box)
    if any(before[1] > after[0] for before, after in pairwise(sorted(by_run))):
        return not any(starmap(overlap, combinations(boxes, 2)))
    return all(_are_disjoint(tuple(group), dim + 1) for group in by_run.values())
