"""Writes one rank's share of a version: its shards, and the gathered tensors that rank 0 assigned to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from rollout_client.steering.checkpoint_form import Unfused, is_sharded, state_of, whole
from rollout_client.steering.plain_tensors import Spec, check_readable
from rollout_client.steering.pushing.push_tensors import cast
from rollout_client.steering.pushing.tensor_copying import Copier
from rollout_common.transfer.layout import LayoutError

from .merged_version import MergedVersion
from .shard_plan import TensorPart, offer_of, part_of
from .tensor_boxes import Box, Run, rows_of, shape_of, slices_of

if TYPE_CHECKING:
    import torch

    from rollout_client.steering.spool import Tensors
    from rollout_common.transfer.layout import PushLayout

View = Callable[[str, int, int], memoryview]
"""Takes name, begin and end of a run of a tensor's bytes; returns its place."""

ArrivedVersion = Callable[[str, int, int], None]
"""Takes name, begin and end of each run of a tensor's bytes that is there."""

Block = Callable[[str, int], None]
"""Takes the name of a tensor, and how many of its bytes came that are not one run."""


@dataclass(frozen=True, slots=True)
class InMemory:
    """The memory that the ranks of a node share, and whom to report what is there."""

    view: View
    arrived: ArrivedVersion
    block: Block
    copier: Copier

    @classmethod
    def of(cls, filling: MergedVersion, copier: Copier) -> Self:
        """Return the memory of a version that this process has made."""

        def view(name: str, begin: int, end: int) -> memoryview:
            start = filling.layout[name].start
            return filling.slot.view_bytes(start + begin, start + end)

        return cls(view, filling.arrived, filling.block, copier)

    def put(self, spec: Spec, mine: Any, box: Box) -> None:
        """Write a box of a tensor; `mine` has its values.

        Raises:
            LayoutError: It has no plain values, they don't match its placements, or its memory was freed.
        """
        name, _, shape = spec
        if tuple(mine.shape) != shape_of(box):
            raise LayoutError(
                f"tensor {name!r}: this rank's shard is {list(mine.shape)}, and by its placements it"
                f" would be {list(shape_of(box))}",
                tensor=name,
            )
        run = rows_of(spec, box)
        if run is not None:
            self._copy(name, mine, run)
        else:
            check_readable(name, mine)
            whole_bytes = self.view(name, 0, mine.element_size() * math.prod(shape))
            scatter(whole_bytes, shape, box, mine)
            self.block(name, mine.nbytes)

    def _copy(self, name: str, mine: Any, run: Run) -> None:
        reported = begin = run[0]

        def done(count: int) -> None:
            nonlocal reported
            self.arrived(name, reported, begin + count)
            reported = begin + count

        with self.view(name, *run) as place:
            self.copier.copy(name, mine, place, done)


class ShardWriting:
    """The tensors of one rank, from which it writes the boxes that rank 0 assigns.

    Raises:
        TypeError: They are a stream.
        LayoutError: One can't be published; names it.
    """

    def __init__(self, tensors: Tensors) -> None:
        state = state_of(tensors)
        if not isinstance(state, Mapping):
            raise TypeError(
                "ranks: with several ranks give a model or its state dict, not a stream"
            )
        self._state = state
        self.parts: Mapping[str, TensorPart] = {name: _part_of(name, state) for name in state}
        self.offer = offer_of(self.parts)

    def write(
        self,
        boxes: Mapping[str, Box],
        place: InMemory,
        stopped: Callable[[], bool],
        layout: PushLayout,
    ) -> None:
        """Write these boxes, in the order in which receivers take them and in the dtypes of the layout.

        A rank that failed or was `stopped` still takes part in all gathers, since other ranks wait in them.

        Raises:
            LayoutError: A tensor has no plain values, or its memory was freed.
        """
        names = iter(sorted(self._state))
        try:
            for name in names:
                tensor, box = self._made(name), boxes.get(name)
                if box is None or stopped():
                    continue
                mine = (tensor.to_local() if is_sharded(tensor) else tensor).detach()
                dtype = layout[name].dtype
                spec = name, dtype, self.parts[name].shape
                place.put(spec, cast(name, mine, {name: dtype}), box)
        except BaseException:
            for name in names:
                self._made(name)
            raise

    def _made(self, name: str) -> Any:
        """Return a tensor; gather it if the ranks make it together."""
        tensor = self._state[name]
        return whole(tensor) if self.parts[name].gathered else tensor


def _part_of(name: str, state: Mapping[str, Any]) -> TensorPart:
    """Return the part of a tensor that this rank has; a tensor made from others is whole on each rank."""
    if not isinstance(state, Unfused) or name not in state.made:
        return part_of(name, state[name])
    gathered = any(map(is_sharded, state.held.values()))
    return part_of(name, state.described[name])._replace(gathered=gathered)


def scatter(memory: memoryview, shape: Sequence[int], box: Box, values: torch.Tensor) -> None:
    """Copy the values of a box to their places in a tensor's bytes: many runs, each a row of the box.

    `memory` ([bytes], writable) and `shape` are the whole tensor's; the values have its dtype.
    """
    import torch

    there = torch.frombuffer(memory, dtype=values.dtype).view(tuple(shape))
    there[slices_of(box)].copy_(values)
