"""Tensors of this process as a source of weights: names, describes and hashes them, leaf by leaf.

The bytes are those that a safetensors file would hold, so the same values have the same root hash. Tensors
on a device are copied to main memory leaf by leaf, never as a whole. torch is imported inside functions,
since not every worker has it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from rollout_common.transfer.layout import TORCH_NAMES
from rollout_worker.engine import (
    Sink,
    TensorEntry,
    TensorSpec,
    TrainerTensors,
    WeightsRejected,
)
from rollout_worker.threads import run_in_thread
from rollout_worker.weights import check_layout

from .source_reading import ReadableSource, ReadLeaf, copy_leaf, read_source
from .tensor_filling import SinkFilling

if TYPE_CHECKING:
    from torch import Tensor

_DTYPES = {f"torch.{name}": dtype for dtype, name in TORCH_NAMES.items()}


@dataclass(frozen=True)
class TensorSource(ReadableSource):
    """Tensors of this process, which come without hashes."""

    tensors: Mapping[str, Tensor]

    @cached_property
    @override
    def entries(self) -> tuple[TensorEntry, ...]:
        """Its tensors, in the order of their names.

        Raises:
            WeightsRejected: safetensors has no such dtype.
        """
        return entries_of(self.tensors)

    @override
    def open_tensor(
        self, entry: TensorEntry, cancelled: Callable[[], bool]
    ) -> AbstractContextManager[ReadLeaf]:
        return nullcontext(_leaf_reader(self.tensors[entry.name]))


def named(given: Any) -> dict[str, Tensor]:
    """Return the tensors of a module, a mapping or (name, tensor) pairs by name, without copies.

    Raises:
        WeightsRejected: a name comes twice, or a value is not a plain tensor.
    """
    from torch.nn import Module

    if isinstance(given, Module):
        given = given.state_dict(keep_vars=True)
    pairs: Iterable[tuple[str, Any]] = given.items() if isinstance(given, Mapping) else given
    found: dict[str, Tensor] = {}
    for name, tensor in pairs:
        if name in found:
            raise WeightsRejected(f"tensor {name!r} is handed over twice: keep one", tensor=name)
        found[name] = _plain(name, tensor)
    return found


def _plain(name: str, tensor: Any) -> Tensor:
    import torch

    if not isinstance(tensor, torch.Tensor):
        kind = type(tensor).__name__
        raise WeightsRejected(f"{name!r} is a {kind}: hand over torch tensors", tensor=name)
    if hasattr(tensor, "full_tensor"):
        raise WeightsRejected(
            f"tensor {name!r} is a shard of several ranks: hand over its full_tensor()", tensor=name
        )
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise WeightsRejected(
            f"tensor {name!r} has no dense values here: hand over strided tensors", tensor=name
        )
    return tensor.detach()


def entries_of(tensors: Mapping[str, Tensor]) -> tuple[TensorEntry, ...]:
    """Describe tensors as their checkpoint's file would, ordered by name.

    Raises:
        WeightsRejected: safetensors has no such dtype.
    """
    found = []
    for name, tensor in sorted(tensors.items()):
        dtype = _DTYPES.get(str(tensor.dtype))
        if dtype is None:
            raise WeightsRejected(
                f"tensor {name!r} has the dtype {tensor.dtype}, which safetensors does not support",
                tensor=name,
            )
        found.append(TensorEntry(name, TensorSpec(dtype, tuple(tensor.shape))))
    return tuple(found)


def _leaf_reader(tensor: Tensor) -> ReadLeaf:
    """Return a function that reads the leaves of a tensor."""
    import torch

    # For a tensor with gaps this is a copy, on the tensor's device.
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)

    def read_leaf(begin: int, end: int, part: memoryview | None) -> memoryview:
        array: Any = flat[begin:end].cpu().numpy()
        content = memoryview(array).cast("B")
        return content if part is None else copy_leaf(content, part)

    return read_leaf


def settled(tensors: Mapping[str, Tensor]) -> None:
    """Wait until what the caller's streams still write to these tensors is written."""
    import torch

    for device in {each.device for each in tensors.values() if each.device.type == "cuda"}:
        torch.cuda.synchronize(device)


async def fill(filling: SinkFilling, given: TrainerTensors) -> Sink:
    """Return a sealed sink with the trainer's tensors: the tensors themselves, or a copy of them.

    A sink that copies the tensors releases them. A failure leaves them unchanged.

    Raises:
        WeightsRejected: a missing, unexpected or ill-shaped tensor, or one that changed while it was read.
        EngineError: the engine has no room.
    """
    source = TensorSource(given.tensors)
    check_layout(filling.layout, source.entries, "what was handed over")
    return await filling.fill_from_source(source, given)


async def content_of(given: TrainerTensors, expected: str | None = None) -> str:
    """Return the root hash of the trainer's tensors, in the scheme of `expected`.

    Raises:
        WeightsRejected: safetensors has no such dtype.
    """
    source = TensorSource(given.tensors)
    return await run_in_thread(
        lambda cancelled: read_source(source, {}, cancelled=cancelled, expected=expected),
        threading.Event(),
    )
