"""Which bytes of which tensors each rank of a trainer has, and which rank writes what. Pure but for `part_of`.

A shard is a box of the whole tensor, so its rank can write it to its place; a shard along the first dimension
is a run of bytes. A tensor that still has to be summed is gathered, and one rank writes it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations, pairwise, starmap
from typing import Any, Self

from rollout_client.steering.checkpoint_form import is_sharded
from rollout_client.steering.pushing.push_tensors import Spec, spec_of
from rollout_common.transfer.layout import LayoutError

from .tensor_boxes import Box, Run, box_of, nbytes_of, overlap, volume


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The part of a tensor that one rank has.

    Attributes:
        spec: Of the whole tensor.
        box: The part that this rank has; None: it has none.
        gathered: Whether the ranks that have it gather it, so that one of them can write it.
    """

    spec: Spec
    box: Box | None
    gathered: bool = False

    def to_json(self) -> list[object]:
        """Return the part in the form that `from_json` takes."""
        name, dtype, shape = self.spec
        return [name, dtype, list(shape), self.box, self.gathered]

    @classmethod
    def from_json(cls, row: Any) -> Self:
        """Return the part that another rank described."""
        name, dtype, shape, box, gathered = row
        return cls((name, dtype, tuple(shape)), None if box is None else box_of(box), gathered)


def part_of(name: object, tensor: Any) -> TensorPart:
    """Return the part of a tensor that this rank has.

    Raises:
        LayoutError: It is not a tensor, or has a dtype that no worker takes.
    """
    spec = spec_of(name, tensor)
    whole = tuple((0, size) for size in spec[2])
    if 0 in spec[2]:
        return TensorPart(spec, None)
    if not is_sharded(tensor):
        return TensorPart(spec, whole)
    placements = getattr(tensor, "placements", None)
    if placements is None or not _is_cut(placements):
        return TensorPart(spec, whole, gathered=True)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return TensorPart(spec, None)
    box = list(whole)
    for each, at, ranks in zip(placements, coordinate, tensor.device_mesh.shape, strict=True):
        if each.is_shard():
            box[each.dim] = _chunk(box[each.dim], at, ranks)
    return TensorPart(spec, tuple(box) if volume(tuple(box)) else None)


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


@dataclass(slots=True)
class RankWork:
    """What one rank writes, by name of the tensor."""

    boxes: dict[str, Box] = field(default_factory=dict)
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Which rank writes what.

    Attributes:
        specs: Of all tensors of all ranks.
        work: By rank: what it writes.
    """

    specs: tuple[Spec, ...]
    work: Sequence[RankWork]


def share_out(offers: Sequence[Sequence[TensorPart]], far: Collection[int] = ()) -> ShardPlan:
    """Share the work so that one rank writes each byte, and all ranks write about as much.

    Args:
        offers: By rank: the parts that it has.
        far: Ranks of other nodes than rank 0's: they write only what no other rank has.

    Raises:
        LayoutError: Two ranks have different tensors of the same name, or some bytes are missing on all ranks.
    """
    specs: dict[str, Spec] = {}
    holders: dict[str, dict[Box, list[int]]] = defaultdict(dict)
    checked: set[tuple[tuple[int, ...], Box]] = set()
    for rank, parts in enumerate(offers):
        for part in parts:
            name = part.spec[0]
            if specs.setdefault(name, part.spec) != part.spec:
                _, dtype, shape = part.spec
                raise LayoutError(
                    f"tensor {name!r} is {dtype} {list(shape)} on rank {rank} and"
                    f" {specs[name][1]} {list(specs[name][2])} on another one: all ranks give the"
                    " same model",
                    tensor=name,
                )
            if part.box is not None:
                if (known := (part.spec[2], part.box)) not in checked:  # most tensors share a few
                    _check_within(part.spec, part.box, rank)
                    checked.add(known)
                holders[name].setdefault(part.box, []).append(rank)
    work = [RankWork() for _ in offers]

    def burden(rank: int) -> tuple[bool, int, int]:
        return rank in far, work[rank].nbytes, rank

    for name in sorted(specs):
        _check_whole(specs[name], holders[name])
        for box, ranks in sorted(holders[name].items()):
            least = ranks[0] if len(ranks) == 1 else min(ranks, key=burden)
            work[least].boxes[name] = box
            work[least].nbytes += nbytes_of(specs[name], box)
    return ShardPlan(tuple(specs[name] for name in sorted(specs)), work)


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


@lru_cache(maxsize=1024)
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
