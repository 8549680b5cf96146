"""Weights that serve from memory that is not the engine's: memory of the worker, or the trainer's own tensors.

A trainer's tensor of the model's device and dtype serves as it is: no byte is copied, and the trainer must not
change it in place while it serves. torch counts writes to a tensor, so `WriteWatch` detects a change: before a
commit, before the engine steps again, and before tokens of a step are delivered. It misses only
writes that torch doesn't count: those through `tensor.data`, or by other libraries.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from rollout_worker.engine import (
    EngineError,
    MappedWeights,
    TensorEntry,
    TrainerTensors,
    WeightsRejected,
)
from rollout_worker.engines.shared_memory.tensor_views import view_tensors

from .buffers import COMPUTE_TORCH_DTYPES, NamedSpec, TensorAllocation, TensorSink, tensor_nbytes


class WriteWatch:
    """The trainer's tensors, and how often each had been written to when they were handed over.

    `release`: called once nothing computes with them any more.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], release: Callable[[], None] = lambda: None
    ) -> None:
        self._seen = [(name, tensor, tensor._version) for name, tensor in tensors.items()]
        self._release = release
        self.serving = False

    @property
    def names(self) -> frozenset[str]:
        """The names of the tensors."""
        return frozenset(name for name, _, _ in self._seen)

    def changed_tensor(self) -> str | None:
        """Return the name of a tensor that was written to since, None if all are as they were."""
        return next((name for name, t, version in self._seen if t._version != version), None)

    def check_unchanged(self) -> None:
        """Raise `EngineError` with a name and the fix if a tensor was changed."""
        name = self.changed_tensor()
        if name is not None:
            raise EngineError(
                f"tensor {name!r} was changed in place after it was handed over: pause or sleep the "
                "worker before the trainer's step and hand the new values over before it goes on, or "
                "hand over with copy=True"
            )

    def release_tensors(self) -> None:
        """Drop the tensors. Idempotent."""
        self._seen, self.serving = [], False
        self._release()


class TrainerTensorSink(TensorSink):
    """The `Sink` over the trainer's tensors; the worker writes nothing to it.

    `targets`: the model's tensors by name. `take` takes memory for tensors that can't serve as they are.
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
        """Watches the tensors that serve as they are."""
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
        owned = {} if self._allocation is None else self._allocation.tensors
        return sum(map(tensor_nbytes, owned.values()))

    @override
    def allocate(self, entry: TensorEntry) -> memoryview | None:
        return None  # every value is here already

    @override
    def seal(self) -> None:
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
        if not self.watch.serving:
            self._read.release_tensors()
        self._source = {}
        super().close()


def _write_counted(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose writes torch counts: all but those made in inference mode."""
    return {name: tensor for name, tensor in tensors.items() if not tensor.is_inference()}


def _can_serve_as(tensor: Tensor, target: Tensor) -> bool:
    return (
        tensor.device == target.device
        and tensor.dtype == target.dtype
        and tensor.is_contiguous()
        and not tensor.is_inference()
    )


class MappedTensorSink(TensorSink):
    """The `Sink` over mapped memory, released once its last view is gone, those of pinned outputs included.

    `targets`: the model's tensors by name.
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
        self.tensors = dict(view_tensors(torch.frombuffer(memory, dtype=torch.uint8), places))

    @override
    def allocate(self, entry: TensorEntry) -> memoryview | None:
        return None  # every value is there already


def can_serve_from(entries: Sequence[TensorEntry], targets: Mapping[str, Tensor]) -> bool:
    """Return whether a model can compute with these bytes as they are: in main memory and of its dtypes."""
    return all(
        targets[each.name].device.type == "cpu"
        and targets[each.name].dtype == COMPUTE_TORCH_DTYPES.get(each.spec.dtype)
        for each in entries
        if each.name in targets
    )
