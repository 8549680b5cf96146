"""Buffers of torch for weights that are being read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rollout_worker.engine import WeightsRejected
from rollout_worker.sources.files import Entry

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in main memory, to be read or written in place."""
    if not tensor.numel():
        return memoryview(b"")
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array).cast("B")


class Buffers:
    """Takes tensors one after another as `weights.read` reads them.

    Each is turned into its compute dtype and moved to the device as soon as it is complete, so that
    reading another dtype costs one tensor more, not a second model. `dtype`: one for all floating
    tensors, None to leave them as they are, or one for each name, and then others are read for
    their hash alone.
    """

    def __init__(
        self, dtype: torch.dtype | Mapping[str, torch.dtype] | None, device: torch.device
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._current: tuple[Entry, Tensor] | None = None
        self._tensors: dict[str, Tensor] = {}

    def allocate(self, entry: Entry) -> memoryview | None:
        """Return where the bytes of `entry` go; what came before is complete."""
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

    def finish(self) -> dict[str, Tensor]:
        """Return all tensors under their names."""
        self._settle()
        return self._tensors

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
        self._tensors[entry.name] = tensor.to(self._device, dtype)
