"""What one of several ranks writes of a version: its own shards, and what it was given to write."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from rollout_client.steering import checkpoint_form
from rollout_client.steering.checkpoint_form import Unfused, is_sharded, whole

from .boxes import Box, Run, rows_of
from .copying import Copier
from .push_tensors import cast, check_there
from .shards import Part, part_of

if TYPE_CHECKING:
    import torch

    from rollout_common.transfer.layout import PushLayout

View = Callable[[str, int, int], memoryview]
"""Returns the place of a run of a tensor's bytes."""

Arrived = Callable[[str, int, int], None]
"""Told of each run of a tensor's bytes that is there."""

Block = Callable[[str, int], None]
"""Told how many bytes of a tensor are there that are no run."""


def state_of(tensors: Any) -> Mapping[str, Any]:
    """Return the tensors of one rank by name.

    Raises:
        TypeError: It is a stream.
    """
    state = checkpoint_form.state_of(tensors)
    if not isinstance(state, Mapping):
        raise TypeError("ranks: with several ranks give a model or its state dict, not a stream")
    return state


class Place(Protocol):
    """Where boxes are written."""

    def put(self, part: Part, mine: Any, box: Box) -> None:
        """Write what this rank has of a tensor: the values of the box.

        Raises:
            LayoutError: It has no plain values, or its memory was freed.
        """
        ...


@dataclass(frozen=True, slots=True)
class InMemory:
    """The memory that the ranks of a node share.

    Attributes:
        view: See `View`.
        arrived: See `Arrived`.
        block: See `Block`.
        copier: Copies tensors.
    """

    view: View
    arrived: Arrived
    block: Block
    copier: Copier

    def put(self, part: Part, mine: Any, box: Box) -> None:
        """See `Place.put`."""
        name = part.spec[0]
        run = rows_of(part.spec, box)
        if run is not None:
            self._copy(name, mine, run)
        else:
            check_there(name, mine)
            shape = part.spec[2]
            whole_bytes = self.view(name, 0, mine.element_size() * math.prod(shape))
            scatter(whole_bytes, shape, box, mine)
            self.block(name, mine.nbytes)

    def _copy(self, name: str, mine: Any, run: Run) -> None:
        told = begin = run[0]

        def done(count: int) -> None:
            nonlocal told
            self.arrived(name, told, begin + count)
            told = begin + count

        with self.view(name, *run) as place:
            self.copier.copy(name, mine, place, done)


class Writing:
    """See the module.

    Args:
        state: The rank's tensors.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self.parts: Mapping[str, Part] = {name: _part_of(name, state) for name in state}

    def write(
        self,
        boxes: Mapping[str, Box],
        place: Place,
        stopped: Callable[[], bool],
        layout: PushLayout,
    ) -> None:
        """Write these boxes, in the order in which receivers take them and in the dtypes of the layout.

        What has to be gathered is gathered to the end, also once this rank failed or was `stopped`: other
        ranks wait in it.

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
                part, dtype = self.parts[name], layout[name].dtype
                part = replace(part, spec=(name, dtype, part.spec[2]))
                place.put(part, cast(name, mine, {name: dtype}), box)
        except BaseException:
            for name in names:
                self._made(name)
            raise

    def _made(self, name: str) -> Any:
        """Return a tensor, whole if it has to be gathered."""
        tensor = self._state[name]
        return whole(tensor) if self.parts[name].gathered else tensor


def _part_of(name: str, state: Mapping[str, Any]) -> Part:
    """Say what this rank has of a tensor; what is first made of others is whole on each."""
    if not isinstance(state, Unfused) or name not in state.made:
        return part_of(name, state[name])
    gathered = any(map(is_sharded, state.held.values()))
    return replace(part_of(name, state.described[name]), gathered=gathered)


def scatter(memory: memoryview, shape: Sequence[int], box: Box, values: torch.Tensor) -> None:
    """Copy the values of a box to their places in a tensor's bytes: many runs, each a row of the box.

    Args:
        memory: [bytes] of the whole tensor, writable.
        shape: Of the whole tensor.
        box: Which part of it.
        values: Of the box, in the tensor's dtype.
    """
    import torch

    there = torch.frombuffer(memory, dtype=values.dtype).view(tuple(shape))
    there[tuple(slice(begin, end) for begin, end in box)].copy_(values)
