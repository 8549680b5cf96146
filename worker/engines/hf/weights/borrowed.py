"""Weights that serve from memory that somebody else filled: of the worker, or the trainer's own tensors.

A trainer's tensor of the model's device and dtype serves as it is: no byte is copied, and the trainer must not
change it in place while it serves. torch counts writes to a tensor, so one that was changed is noticed
(`Watch`): before a commit, before the engine steps again, and before tokens of a step are told. Only
writes that torch doesn't count escape: those through `tensor.data`, or by other libraries.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor
from typing_extensions import override

from rollout_worker.engine import (
    EngineError,
    MappedWeights,
    TensorEntry,
    TrainerTensors,
    WeightsRejected,
)
from rollout_worker.engines.shared_memory.tensor_views import view_memory

from .allocations import NamedSpec, TensorAllocation
from .buffers import COMPUTE_TORCH_DTYPES, TensorSink, tensor_nbytes


def _release_nothing() -> None:
    """Give nothing back."""


class WriteWatch:
    """Tensors of somebody else, and how often each had been written to when they were given.

    `release`: called once nobody computes with them any more.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], release: Callable[[], None] = _release_nothing
    ) -> None:
        self._seen = [(name, tensor, tensor._version) for name, tensor in tensors.items()]
        self._release = release
        self.serving = False

    @property
    def names(self) -> frozenset[str]:
        """Their names."""
        return frozenset(name for name, _, _ in self._seen)

    def changed_tensor(self) -> str | None:
        """Return a tensor that was written to since, None if all are as they were."""
        for name, tensor, version in self._seen:
            if tensor._version != version:
                return name
        return None

    def check_unchanged(self) -> None:
        """Refuse to compute with changed tensors.

        Raises:
            EngineError: names one, and the fix.
        """
        name = self.changed_tensor()
        if name is not None:
            raise EngineError(
                f"tensor {name!r} was changed in place after it was handed over: pause or sleep the "
                "worker before the trainer's step and hand the new values over before it goes on, or "
                "hand over with copy=True"
            )

    def release_tensors(self) -> None:
        """Let go of them. Idempotent."""
        self._seen, self.serving = [], False
        self._release()


class TrainerTensorSink(TensorSink):
    """The `Sink` that tensors of this process become; the worker writes nothing to it.

    Args:
        entries: What is handed over.
        given: The tensors.
        targets: Where the model has them.
        take: Takes memory for tensors that can't serve as they are.
    """

    took = True

    def __init__(
        self,
        entries: Sequence[TensorEntry],
        given: TrainerTensors,
        targets: Mapping[str, Tensor],
        take: Callable[[Sequence[NamedSpec]], TensorAllocation],
    ) -> None:
        super().__init__()
        self._source = {e.name: given.tensors[e.name] for e in entries if e.name in targets}
        self._read = WriteWatch(_write_counted(self._source), given.release)
        views = {
            name: tensor
            for name, tensor in self._source.items()
            if not given.copy and _can_serve_as(tensor, targets[name])
        }
        self.watch = WriteWatch(views, given.release)
        """The tensors that serve as they are, to look at as long as they do."""
        self.tensors = {name: each.detach() for name, each in views.items()}
        missing: list[NamedSpec] = [
            (name, tensor.shape, targets[name].dtype)
            for name, tensor in self._source.items()
            if name not in views
        ]
        self._allocation = take(missing) if missing else None

    @property
    @override
    def nbytes(self) -> int:
        """What it holds itself."""
        return (
            0
            if self._allocation is None
            else sum(map(tensor_nbytes, self._allocation.tensors.values()))
        )

    @override
    def allocate(self, entry: TensorEntry) -> memoryview | None:
        """Every value is here already."""
        return None

    @override
    def seal(self) -> None:
        """Copies what has to be copied.

        Raises:
            WeightsRejected: what was hashed is not what is here now.
        """
        if self._allocation is not None:
            for name, home in self._allocation.tensors.items():
                home.copy_(self._source[name])
                self.tensors[name] = home
        changed = self._read.changed_tensor()
        if changed is not None:
            raise WeightsRejected(
                f"tensor {changed!r} was changed while it was handed over: hand over once the"
                " trainer's step is done",
                tensor=changed,
            )
        self._source = {}
        if not self.watch.names:
            self._read.release_tensors()
        self.sealed = True

    @override
    def close(self) -> None:
        """Who has taken `tensors` keeps them."""
        if not self.watch.serving:
            self._read.release_tensors()
        self._source = {}
        super().close()


def _write_counted(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those whose writes torch counts: not those made in inference mode."""
    return {name: tensor for name, tensor in tensors.items() if not tensor.is_inference()}


def _can_serve_as(tensor: Tensor, target: Tensor) -> bool:
    """Whether a tensor may stand where the model has `target`."""
    return (
        tensor.device == target.device
        and tensor.dtype == target.dtype
        and tensor.is_contiguous()
        and not tensor.is_inference()
    )


class MappedTensorSink(TensorSink):
    """The `Sink` that mapped memory becomes.

    The memory is released once the last view of it is gone: of outputs that are pinned to it, too.

    Args:
        entries: What is there.
        given: Where.
        targets: What the model has.
    """

    took = True

    def __init__(
        self, entries: Sequence[TensorEntry], given: MappedWeights, targets: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        memory = given.view[:]
        weakref.finalize(memory, given.release)
        places = [
            (each.name, each.spec.dtype, each.spec.shape, given.starts[each.name])
            for each in entries
            if each.name in targets
        ]
        self._views = dict(view_memory(memory, places))

    @override
    def allocate(self, entry: TensorEntry) -> memoryview | None:
        """Every value is there already."""
        return None

    @override
    def seal(self) -> None:
        self.tensors, self._views = self._views, {}
        self.sealed = True

    @override
    def close(self) -> None:
        """Who has taken `tensors` keeps them."""
        self._views = {}
        super().close()


def can_serve_from(entries: Sequence[TensorEntry], targets: Mapping[str, Tensor]) -> bool:
    """Whether a model can compute with these bytes as they are: in main memory and of its dtypes."""
    return all(
        targets[each.name].device.type == "cpu"
        and targets[each.name].dtype == COMPUTE_TORCH_DTYPES.get(each.spec.dtype)
        for each in entries
        if each.name in targets
    )
