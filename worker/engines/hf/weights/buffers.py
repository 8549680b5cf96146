"""Tensors of torch that are filled by their bytes: a model's first weights, and each version's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash
from torch import Tensor
from typing_extensions import override

from rollout_worker.engine import Sink, TensorEntry, WeightsRejected
from rollout_worker.engines.shared_memory.sinks import open_unnamed_file
from rollout_worker.engines.shared_memory.tensor_views import TORCH_DTYPES

from .allocations import TensorAllocation

COMPUTE_TORCH_DTYPES = {
    name: dtype for name, dtype in TORCH_DTYPES.items() if not name.startswith("F8")
}
"""What transformers computes with."""
BOUNCE_NAME = "bounce"
"""The one tensor of an allocation that others only come through."""


SPILL_CHUNK_BYTES = 8 << 20
"""What is written to the file at once."""


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in main memory, to be read or written in place."""
    if not tensor.numel():
        return memoryview(b"")
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array).cast("B")


class TensorSink(Sink):
    """The engine's `Sink`: takes tensors one after another.

    Each is turned into its compute dtype and moved to the device as soon as it is complete, so that
    reading another dtype costs one tensor more, not a second model.

    Args:
        dtype: One for all floating tensors, None to leave them as they are.
        device: Where they go.
        allocation: Where they go instead; tensors that it lacks are read for their hash alone.
        bounce: What they come through if they can't be read to where they go, with room for
            `bounced` bytes; None if that is 0.
    """

    memory: Literal["host"] = "host"
    slot = ""
    took = False

    def __init__(
        self,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        allocation: TensorAllocation | None = None,
        bounce: TensorAllocation | None = None,
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._allocation = allocation
        self._bounce = bounce
        self._current: tuple[TensorEntry, Tensor] | None = None
        self.tensors: dict[str, Tensor] = {}
        """Those that are complete, under their names."""
        self.sealed = False

    @property
    def off_device(self) -> bool:
        """Whether it is main memory though the model is elsewhere."""
        return self._allocation is not None and self._allocation.off_device

    @property
    @override
    def nbytes(self) -> int:
        held = self.tensors if self._allocation is None else self._allocation.tensors
        return sum(map(tensor_nbytes, held.values()))

    @override
    def allocate(self, entry: TensorEntry) -> memoryview | None:
        self._finish_tensor()
        if self._allocation is not None and entry.name not in self._allocation.tensors:
            return None
        if entry.spec.dtype not in COMPUTE_TORCH_DTYPES:
            raise WeightsRejected(
                f"tensor {entry.name!r} has the dtype {entry.spec.dtype}, which the hf engine "
                f"cannot compute with: publish it as one of {', '.join(COMPUTE_TORCH_DTYPES)}",
                tensor=entry.name,
            )
        raw = self._raw_memory(entry)
        self._current = (entry, raw)
        return tensor_bytes(raw)

    def _raw_memory(self, entry: TensorEntry) -> Tensor:
        """Return memory for the bytes of a tensor as the checkpoint has it."""
        size = entry.spec.nbytes
        if self._allocation is None:
            return torch.empty(size, dtype=torch.uint8)
        home = self._allocation.tensors[entry.name]
        if _is_direct(entry, home):
            return home.reshape(-1).view(torch.uint8)
        assert self._bounce is not None, "taken with the allocation"
        return self._bounce.tensors[BOUNCE_NAME][:size]

    @override
    def seal(self) -> None:
        self._finish_tensor()
        self._free_bounce()
        self.sealed = True

    @override
    def close(self) -> None:
        """Who has taken `tensors` keeps them."""
        self._current, self.tensors, self.sealed = None, {}, False
        self._free_bounce()
        allocation, self._allocation = self._allocation, None
        if allocation is not None:
            allocation.free()

    def _free_bounce(self) -> None:
        bounce, self._bounce = self._bounce, None
        if bounce is not None:
            bounce.free()

    def _finish_tensor(self) -> None:
        if self._current is None:
            return
        entry, raw = self._current
        self._current = None
        tensor = raw.view(COMPUTE_TORCH_DTYPES[entry.spec.dtype]).reshape(entry.spec.shape)
        if self._allocation is not None:
            home = self._allocation.tensors[entry.name]
            if home.data_ptr() != tensor.data_ptr():
                home.copy_(tensor)
            self.tensors[entry.name] = home
        else:
            floating = self._dtype is not None and tensor.is_floating_point()
            self.tensors[entry.name] = tensor.to(self._device, self._dtype if floating else None)


def bounce_bytes(entries: Sequence[TensorEntry], allocation: TensorAllocation) -> int:
    """Return the bytes of the largest tensor that can't be read to where it goes; 0: all can."""
    homes = ((each, allocation.tensors.get(each.name)) for each in entries)
    return max(
        (
            each.spec.nbytes
            for each, home in homes
            if home is not None and not _is_direct(each, home)
        ),
        default=0,
    )


def _is_direct(entry: TensorEntry, home: Tensor) -> bool:
    """Whether a tensor's bytes can be read to where they go."""
    return home.device.type == "cpu" and home.dtype == COMPUTE_TORCH_DTYPES.get(entry.spec.dtype)


def tensor_nbytes(tensor: Tensor) -> int:
    """Return the size of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


class SpillFile:
    """An unnamed temporary file with the bytes of tensors; it goes with the process."""

    def __init__(self, folder: Path, tensors: list[Tensor]) -> None:
        self._specs = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        self._digests: list[bytes] = []
        self._file = os.fdopen(open_unnamed_file(folder), "r+b", buffering=0)
        try:
            for tensor in tensors:
                self._write_tensor(tensor)
        except OSError:
            self._file.close()
            raise

    def _write_tensor(self, tensor: Tensor) -> None:
        view = tensor_bytes(tensor.detach().cpu().contiguous())
        digest = xxhash.xxh3_128()
        while view:
            count = self._file.write(view[:SPILL_CHUNK_BYTES])
            digest.update(view[:count])
            view = view[count:]
        self._digests.append(digest.digest())

    def read_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors again, on their devices."""
        self._file.seek(0)
        for (shape, dtype, device), want in zip(self._specs, self._digests, strict=True):
            tensor = torch.empty(shape, dtype=dtype)
            view, digest = tensor_bytes(tensor), xxhash.xxh3_128()
            while view:
                count = self._file.readinto(view[:SPILL_CHUNK_BYTES])
                if not count:
                    raise OSError("it ends early")
                digest.update(view[:count])
                view = view[count:]
            if digest.digest() != want:
                raise OSError("its content changed")
            yield tensor.to(device)

    def close(self) -> None:
        """Remove the file."""
        self._file.close()
