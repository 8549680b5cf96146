"""Tensors of torch that are filled by their bytes: a model's first weights, and each version's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from rollout_worker.engine import Entry, WeightsRejected
from rollout_worker.engines.dtypes import TORCH_DTYPES

DTYPES = {name: dtype for name, dtype in TORCH_DTYPES.items() if not name.startswith("F8")}
"""What transformers computes with."""


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in main memory, to be read or written in place."""
    if not tensor.numel():
        return memoryview(b"")
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array).cast("B")


class Buffers:
    """The engine's `Sink`: takes tensors one after another.

    Each is turned into its compute dtype and moved to the device as soon as it is complete, so that
    reading another dtype costs one tensor more, not a second model. `dtype`: one for all floating
    tensors, None to leave them as they are, or one for each name, and then others are read for
    their hash alone.
    """

    memory: Literal["host"] = "host"
    slot = ""

    def __init__(
        self, dtype: torch.dtype | Mapping[str, torch.dtype] | None, device: torch.device
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._current: tuple[Entry, Tensor] | None = None
        self.tensors: dict[str, Tensor] = {}
        """Those that are complete, under their names."""
        self.sealed = False

    @property
    def nbytes(self) -> int:
        """See `Sink.nbytes`."""
        return sum(map(nbytes, self.tensors.values()))

    def allocate(self, entry: Entry) -> memoryview | None:
        """See `Sink.allocate`."""
        self._settle()
        if isinstance(self._dtype, Mapping) and entry.name not in self._dtype:
            return None
        if entry.spec.dtype not in DTYPES:
            raise WeightsRejected(
                f"tensor {entry.name!r} has the dtype {entry.spec.dtype}, which the hf engine "
                f"cannot compute with: publish it as one of {', '.join(DTYPES)}",
                tensor=entry.name,
            )
        raw = torch.empty(entry.spec.nbytes, dtype=torch.uint8)
        self._current = (entry, raw)
        return bytes_of(raw)

    def seal(self) -> None:
        """See `Sink.seal`."""
        self._settle()
        self.sealed = True

    def close(self) -> None:
        """See `Sink.close`; who has taken `tensors` keeps them."""
        self._current, self.tensors, self.sealed = None, {}, False

    def _settle(self) -> None:
        if self._current is None:
            return
        entry, raw = self._current
        self._current = None
        tensor = raw.view(DTYPES[entry.spec.dtype]).reshape(entry.spec.shape)
        if isinstance(self._dtype, Mapping):
            dtype = self._dtype[entry.name]
        elif self._dtype is None or not tensor.is_floating_point():
            dtype = tensor.dtype
        else:
            dtype = self._dtype
        self.tensors[entry.name] = tensor.to(self._device, dtype)


def nbytes(tensor: Tensor) -> int:
    """Return the size of a tensor's elements."""
    return tensor.numel() * tensor.element_size()
