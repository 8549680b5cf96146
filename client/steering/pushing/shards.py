"""Which bytes of which tensors each rank of a trainer has, and who writes what. Pure but for `part_of`.

A shard is a box of the whole tensor, so its rank can write it in its place; along the first dimension
it is a run of bytes. What has still to be summed up is gathered, and one rank writes it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations, starmap
from typing import Any, Self

from rollout_client.steering.spool import is_sharded
from rollout_worker.transfer.layout import ITEM_BYTES, LayoutError

from .tensors import Spec, spec_of

Box = tuple[tuple[int, int], ...]
"""In each dimension of a tensor: begin and end."""

Run = tuple[int, int]
"""Begin and end in the bytes of a tensor."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank has of a tensor.

    Attributes:
        spec: Of the whole tensor.
        box: Which part of it; None: none.
        gathered: The ranks that have it make it whole together, so that one of them can write it.
    """

    spec: Spec
    box: Box | None
    gathered: bool = False

    def to_json(self) -> list[object]:
        """Return what `from_json` takes."""
        name, dtype, shape = self.spec
        return [name, dtype, list(shape), self.box, self.gathered]

    @classmethod
    def from_json(cls, row: Any) -> Self:
        """Return the part that another rank described."""
        name, dtype, shape, box, gathered = row
        return cls((name, dtype, tuple(shape)), None if box is None else box_of(box), gathered)


def box_of(rows: Any) -> Box:
    """Return the box that another rank described."""
    return tuple((int(begin), int(end)) for begin, end in rows)


def part_of(name: object, tensor: Any) -> Part:
    """Say what this rank has of a tensor.

    Raises:
        LayoutError: It is no tensor, or of a dtype that no worker takes.
    """
    spec = spec_of(name, tensor)
    whole = tuple((0, size) for size in spec[2])
    if 0 in spec[2]:
        return Part(spec, None)
    if not is_sharded(tensor):
        return Part(spec, whole)
    placements = getattr(tensor, "placements", None)
    if placements is None or not _is_cut(placements):
        return Part(spec, whole, gathered=True)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return Part(spec, None)
    box = list(whole)
    for each, at, ranks in zip(placements, coordinate, tensor.device_mesh.shape, strict=True):
        if each.is_shard():
            box[each.dim] = _chunk(box[each.dim], at, ranks)
    return Part(spec, tuple(box) if _volume(tuple(box)) else None)


def _is_cut(placements: Iterable[Any]) -> bool:
    """Whether the ranks have parts of a tensor as they are, and not what has to be summed up."""
    from torch.distributed.tensor import Replicate, Shard

    # Exactly: a strided shard is one, too, and lies in no box.
    return all(type(each) in (Replicate, Shard) for each in placements)


def _chunk(of: Run, at: int, ranks: int) -> Run:
    """Cut as torch.chunk does."""
    begin, end = of
    step = -(-(end - begin) // ranks)
    first = min(end, begin + step * at)
    return first, min(end, first + step)


def _volume(box: Box) -> int:
    return math.prod(end - begin for begin, end in box)


def run_of(spec: Spec, box: Box) -> Run | None:
    """Return a box as a run of bytes; None: it is none."""
    shape, nbytes = spec[2], _nbytes(spec)
    if not shape:
        return 0, nbytes
    if any(cut != (0, size) for cut, size in zip(box[1:], shape[1:], strict=True)):
        return None
    size = nbytes // shape[0]
    return box[0][0] * size, box[0][1] * size


@dataclass(slots=True)
class Work:
    """What one rank writes: by name of the tensor."""

    boxes: dict[str, Box] = field(default_factory=dict)
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Shares:
    """Who writes what.

    Attributes:
        specs: Of all tensors that any rank has.
        work: By rank.
    """

    specs: tuple[Spec, ...]
    work: Sequence[Work]


def share_out(offers: Sequence[Sequence[Part]]) -> Shares:
    """Have each byte written once, each rank about as much as the others.

    Args:
        offers: What each rank has, by rank.

    Raises:
        LayoutError: Ranks mean different tensors by a name, or nobody has some bytes.
    """
    specs: dict[str, Spec] = {}
    holders: dict[str, dict[Box, list[int]]] = defaultdict(dict)
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
                holders[name].setdefault(part.box, []).append(rank)
    work = [Work() for _ in offers]
    for name in sorted(specs):
        _check_whole(specs[name], holders[name])
        for box, ranks in sorted(holders[name].items()):
            least = min(ranks, key=lambda rank: (work[rank].nbytes, rank))
            work[least].boxes[name] = box
            work[least].nbytes += ITEM_BYTES[specs[name][1]] * _volume(box)
    return Shares(tuple(specs[name] for name in sorted(specs)), work)


def _check_whole(spec: Spec, boxes: Collection[Box]) -> None:
    there, due = sum(map(_volume, boxes)), math.prod(spec[2])
    if there != due or any(starmap(_overlap, combinations(boxes, 2))):
        raise LayoutError(
            f"tensor {spec[0]!r}: the ranks' shards don't make it whole ({there} of {due} elements): all"
            " ranks that have a part of it must publish together",
            tensor=spec[0],
        )


def _overlap(one: Box, other: Box) -> bool:
    return all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(one, other, strict=True))


def _nbytes(spec: Spec) -> int:
    return ITEM_BYTES[spec[1]] * math.prod(spec[2])
