"""Memory for a version of the weights, and the sinks that its bytes go to.

All memory is taken before the first byte comes: on the model's device, if that has room next to the serving
weights; else in main memory, from which a commit copies it. So a GPU that holds only one version can be updated,
and seeded again.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from rollout_common.transfer.memory.mapped_memory import POPULATE_WRITE, advise_kernel
from rollout_common.transfer.memory.page_locking import lock_pages
from rollout_worker.engine import EngineError, Sink, TensorEntry, WeightsRejected
from rollout_worker.engines.shared_memory.sinks import TENSOR_ALIGNMENT
from rollout_worker.engines.shared_memory.spill_file import tensor_bytes
from rollout_worker.engines.shared_memory.staging_budget import StagingBudget
from rollout_worker.engines.shared_memory.tensor_views import TORCH_DTYPES

NamedSpec = tuple[str, Sequence[int], torch.dtype]
"""Name, shape and dtype of a tensor to come."""
DeviceAllocator = Callable[[Sequence[NamedSpec]], dict[str, Tensor]]
"""Takes memory next to the serving weights, or raises `torch.OutOfMemoryError`."""

COMPUTE_TORCH_DTYPES = {
    name: dtype for name, dtype in TORCH_DTYPES.items() if not name.startswith("F8")
}
"""The dtypes that transformers computes with."""

BOUNCE_NAME = "bounce"
"""The only tensor of a bounce allocation: other tensors pass through it."""

POPULATE_CHUNK_BYTES = 32 << 20
"""How much memory a thread populates at once."""


@dataclass(frozen=True, slots=True)
class TensorAllocation:
    """Memory that was taken.

    `tensors`: one for each name, in the dtype that the model computes in. `free`: gives back what
    was charged for it. `off_device`: it is main memory though the model is elsewhere.
    """

    tensors: Mapping[str, Tensor]
    free: Callable[[], None]
    off_device: bool = False


def device_allocator(device: torch.device) -> DeviceAllocator | None:
    """Return what takes memory on the device, None if that is main memory."""
    if device.type == "cpu":
        return None

    def take(specs: Sequence[NamedSpec]) -> dict[str, Tensor]:
        return {
            name: torch.empty(tuple(shape), dtype=dtype, device=device)
            for name, shape, dtype in specs
        }

    return take


def allocate_host(
    specs: Sequence[NamedSpec], staging: StagingBudget, *, off_device: bool
) -> TensorAllocation:
    """Take main memory, charged to `staging`, or raise `EngineError`; `off_device`: also page-lock it for the GPU."""
    sizes = [
        -(-math.prod(shape) * dtype.itemsize // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
        for _, shape, dtype in specs
    ]
    give_back = staging.claim_memory(sum(sizes))
    try:
        whole = torch.empty(sum(sizes), dtype=torch.uint8)
    except RuntimeError as error:
        give_back()
        raise EngineError(f"no room for {sum(sizes)} bytes of staged weights: {error}") from error
    _populate_in_thread(whole)
    unlock = lock_pages(whole.data_ptr(), whole.numel()) if off_device else None
    tensors: dict[str, Tensor] = {}
    for (name, shape, dtype), part in zip(specs, torch.split(whole, sizes), strict=True):
        nbytes = math.prod(shape) * dtype.itemsize
        tensors[name] = part[:nbytes].view(dtype).reshape(tuple(shape))

    def free() -> None:
        if unlock is not None:
            unlock()
        give_back()

    return TensorAllocation(tensors, free, off_device)


def _populate_in_thread(whole: Tensor) -> None:
    """Have a thread populate memory with pages, ahead of the bytes that fill it.

    Taking and clearing pages costs half as much as reading a file. Huge pages, where the kernel has them, are
    several times as fast.
    """
    first = -(-whole.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (whole.data_ptr() + whole.numel()) // mmap.PAGESIZE * mmap.PAGESIZE

    def populate(_: Tensor) -> None:  # which keeps the memory as long as this runs
        # In chunks: between two of them other threads can map memory.
        for begin in range(first, end, POPULATE_CHUNK_BYTES):
            chunk = _bytes_at(begin, min(begin + POPULATE_CHUNK_BYTES, end))
            advise_kernel(chunk, POPULATE_WRITE)

    if first < end:
        advise_kernel(_bytes_at(first, end), mmap.MADV_HUGEPAGE)
        threading.Thread(target=populate, args=(whole,), name="weights-pages", daemon=True).start()


def _bytes_at(begin: int, end: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * (end - begin)).from_address(begin)


class TensorSink(Sink):
    """The engine's `Sink`: it is filled tensor by tensor.

    Each tensor is converted to its compute dtype and moved to the device as soon as it is complete, so that
    reading another dtype costs memory for one more tensor, not for a second model.

    Tensors go to main memory, floating ones as `dtype` unless that is None; or else to `allocation`: tensors that it
    lacks are read only to be hashed. `bounce`: main memory of `bounce_bytes` for tensors that can't be read to where
    they go; None if there are none.
    """

    memory: Literal["host"] = "host"
    slot = ""
    took = False

    def __init__(
        self,
        dtype: torch.dtype | None = None,
        allocation: TensorAllocation | None = None,
        bounce: TensorAllocation | None = None,
    ) -> None:
        self._dtype = dtype
        self._allocation = allocation
        self._bounce = bounce
        self._current: tuple[TensorEntry, Tensor] | None = None
        self.tensors: dict[str, Tensor] = {}
        """Those that are complete, by name; the model that takes them keeps them when the sink is closed."""
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
            dtype = self._dtype if tensor.is_floating_point() else None
            self.tensors[entry.name] = tensor if dtype is None else tensor.to(dtype)


def bounce_bytes(entries: Sequence[TensorEntry], allocation: TensorAllocation) -> int:
    """Return the size of the largest tensor that can't be read to where it goes; 0: all can."""
    homes = ((each, allocation.tensors.get(each.name)) for each in entries)
    return max(
        (e.spec.nbytes for e, home in homes if home is not None and not _is_direct(e, home)),
        default=0,
    )


def _is_direct(entry: TensorEntry, home: Tensor) -> bool:
    """Return whether a tensor's bytes can be read to where they go."""
    return home.device.type == "cpu" and home.dtype == COMPUTE_TORCH_DTYPES.get(entry.spec.dtype)


def tensor_nbytes(tensor: Tensor) -> int:
    """Return the size of a tensor's elements."""
    return tensor.numel() * tensor.element_size()
