"""Memory for a version of the weights, all of it taken before its first byte comes.

On the model's device, where that has room next to the serving weights; else in main memory, from
which a commit copies it: so a GPU that holds one version only can be updated, and seeded again.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_common.transfer.arena import POPULATE_WRITE, advise
from rollout_common.transfer.locked import lock
from rollout_worker.engine import EngineError
from rollout_worker.engines.shared_memory.staging_budget import StagingBudget

NamedSpec = tuple[str, Sequence[int], torch.dtype]
"""Name, shape and dtype of a tensor to come."""
DeviceAllocator = Callable[[Sequence[NamedSpec]], dict[str, Tensor]]
"""Takes memory next to the serving weights, or raises `torch.OutOfMemoryError`."""

POPULATE_CHUNK_BYTES = 32 << 20
"""What a thread takes of pages at once."""

TENSOR_ALIGNMENT = 64
"""Every tensor begins at a multiple of this: what any dtype and vector load wants."""


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
    """Take main memory, charged to `staging`; `off_device`: page-locked for the GPU, too.

    Raises:
        EngineError: there is no room.
    """
    sizes = [
        -(-math.prod(shape) * dtype.itemsize // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
        for _, shape, dtype in specs
    ]
    give_back = staging.claim_memory(sum(sizes))
    try:
        whole = torch.empty(sum(sizes), dtype=torch.uint8)
    except RuntimeError as error:
        give_back()
        raise EngineError(
            f"there is no room for {sum(sizes)} bytes of staged weights: {error}"
        ) from error
    _populate_in_thread(whole)
    unlock = (lock(whole.data_ptr(), whole.numel()) if off_device else None) or _unlock_nothing
    tensors: dict[str, Tensor] = {}
    for (name, shape, dtype), part in zip(specs, torch.split(whole, sizes), strict=True):
        nbytes = math.prod(shape) * dtype.itemsize
        tensors[name] = part[:nbytes].view(dtype).reshape(tuple(shape))

    def free() -> None:
        unlock()
        give_back()

    return TensorAllocation(tensors, free, off_device)


def _populate_in_thread(whole: Tensor) -> None:
    """Have pages there before they are filled, large ones where the kernel has them, which are several times as fast.

    A thread takes them, ahead of whoever fills them: to take and clear them costs half as much as to read a file.
    """
    first = -(-whole.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (whole.data_ptr() + whole.numel()) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < end:
        advise(_bytes_at(first, end), mmap.MADV_HUGEPAGE)
        args = (whole, first, end)
        threading.Thread(
            target=_populate_pages, args=args, name="weights-pages", daemon=True
        ).start()


def _populate_pages(whole: Tensor, first: int, end: int) -> None:  # whole: so that it stays
    """Take the pages of a tensor's memory, piece by piece, so that others can map theirs in between."""
    for begin in range(first, end, POPULATE_CHUNK_BYTES):
        advise(_bytes_at(begin, min(begin + POPULATE_CHUNK_BYTES, end)), POPULATE_WRITE)


def _bytes_at(begin: int, end: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * (end - begin)).from_address(begin)


def _unlock_nothing() -> None:
    """Unlock nothing."""
