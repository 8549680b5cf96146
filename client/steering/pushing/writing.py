"""What one of several ranks writes of a version: its own shards, and what it was given to write."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from rollout_client.steering.spool import is_sharded, whole

from .copying import Copier
from .shards import Box, Part, Run, part_of, run_of

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
    state = tensors.state_dict() if hasattr(tensors, "state_dict") else tensors
    if not isinstance(state, Mapping):
        raise TypeError("ranks: with several ranks give a model or its state dict, no stream")
    return state


class Writing:
    """See the module.

    Args:
        state: The rank's tensors.
        copier: Copies them.
    """

    def __init__(self, state: Mapping[str, Any], copier: Copier) -> None:
        self._state, self._copier = state, copier
        self.parts: Mapping[str, Part] = {name: part_of(name, state[name]) for name in state}

    def write(
        self,
        boxes: Mapping[str, Box],
        view: View,
        arrived: Arrived,
        block: Block,
        stopped: Callable[[], bool],
    ) -> None:
        """Write these boxes, in the order in which receivers take them.

        What has to be gathered is gathered to the end, also once this rank failed or was `stopped`: other
        ranks wait in it.

        Raises:
            LayoutError: A tensor has no plain values.
        """
        names = iter(sorted(self._state))
        try:
            for name in names:
                tensor, box = self._made(name), boxes.get(name)
                if box is None or stopped():
                    continue
                mine = (tensor.to_local() if is_sharded(tensor) else tensor).detach()
                run = run_of(self.parts[name].spec, box)
                if run is not None:
                    self._copy(name, mine, run, view, arrived)
                else:
                    _copy_block(name, mine, self.parts[name], box, view)
                    block(name, mine.nbytes)
        except BaseException:
            for name in names:
                self._made(name)
            raise

    def _made(self, name: str) -> Any:
        """Return a tensor, whole if it has to be gathered."""
        tensor = self._state[name]
        return whole(tensor) if self.parts[name].gathered else tensor

    def _copy(self, name: str, mine: Any, run: Run, view: View, arrived: Arrived) -> None:
        told = begin = run[0]

        def done(count: int) -> None:
            nonlocal told
            arrived(name, told, begin + count)
            told = begin + count

        with view(name, *run) as place:
            self._copier.copy(name, mine, place, done)


def _copy_block(name: str, mine: Any, part: Part, box: Box, view: View) -> None:
    """Copy what lies in many runs, each a row of the box."""
    import torch

    shape = part.spec[2]
    size = mine.element_size() * math.prod(shape)
    there = torch.frombuffer(view(name, 0, size), dtype=mine.dtype).view(shape)
    there[tuple(slice(begin, end) for begin, end in box)].copy_(mine)
