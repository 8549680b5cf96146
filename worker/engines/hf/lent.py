"""Weights that serve from memory that somebody else filled: views of a mapping, not a byte is copied."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

from torch import Tensor

from rollout_worker.engine import Entry, Mapped
from rollout_worker.engines.mappings import tensors_in

from .buffers import DTYPES, Buffers


class Lent(Buffers):
    """The `Sink` that mapped memory becomes.

    The memory is released once the last view of it is gone: of outputs that are pinned to it, too.

    Args:
        entries: What is there.
        given: Where.
        targets: What the model has.
    """

    took = True

    def __init__(
        self, entries: Sequence[Entry], given: Mapped, targets: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        memory = given.view[:]
        weakref.finalize(memory, given.release)
        places = [
            (each.name, each.spec.dtype, each.spec.shape, given.starts[each.name])
            for each in entries
            if each.name in targets
        ]
        self._views = dict(tensors_in(memory, places))

    def allocate(self, entry: Entry) -> memoryview | None:
        """See `Sink.allocate`: every value is there already."""
        return None

    def seal(self) -> None:
        """See `Sink.seal`."""
        self.tensors, self._views = self._views, {}
        self.sealed = True

    def close(self) -> None:
        """See `Sink.close`; who has taken `tensors` keeps them."""
        self._views = {}
        super().close()


def serves_from(entries: Sequence[Entry], targets: Mapping[str, Tensor]) -> bool:
    """Whether a model can compute with these bytes as they are: in main memory and of its dtypes."""
    return all(
        targets[each.name].device.type == "cpu"
        and targets[each.name].dtype == DTYPES.get(each.spec.dtype)
        for each in entries
        if each.name in targets
    )
