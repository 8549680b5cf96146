"""The memory of one rank of vLLM: what sleep copies, gives back, and takes again."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Mapping
from typing import Any

import torch

MADV_DONTNEED = 4
PAGE_BYTES = mmap.PAGESIZE
ALWAYS_KEPT_TAGS = ("runtime", "cudagraph")
"""Tags of what a GPU's sleep always copies to main memory; at level 1 it copies the weights, too."""
WEIGHTS_TAG = "weights"


def allocator_entries() -> dict[int, Any]:
    """Return the pieces of memory that vLLM's allocator of a GPU has given out, by address."""
    from vllm.device_allocator import get_mem_allocator_instance

    allocator: Any = get_mem_allocator_instance()
    return dict(allocator.pointer_to_data)


def count_pinned_bytes(allocations: Mapping[int, Any], level: int) -> int:
    """Return the locked memory of a sleep at this level: torch rounds each piece up to a power of two.

    `allocations`: `pointer_to_data` of vLLM's `CuMemAllocator` (vLLM 0.32).
    """
    tags = (*ALWAYS_KEPT_TAGS, WEIGHTS_TAG) if level == 1 else ALWAYS_KEPT_TAGS
    sizes = (
        data.handle[1] for data in allocations.values() if data.tag in tags and not data.is_asleep
    )
    return sum(1 << (size - 1).bit_length() for size in sizes if size)


def drop_weight_backups(allocations: Mapping[int, Any], buffers: Iterable[torch.Tensor]) -> None:
    """Free the copies of the weights, except pieces with buffers: no load brings those back."""
    places = [buffer.data_ptr() for buffer in buffers if buffer.numel()]
    for start, data in allocations.items():
        end = start + data.handle[1]
        if data.tag == WEIGHTS_TAG and data.is_asleep and not any(start <= p < end for p in places):
            data.cpu_backup_tensor = None


def kv_tensors(runner: Any) -> list[torch.Tensor]:
    """Return the tensors of the KV cache, also of layers that keep a list of them."""
    found: list[torch.Tensor] = []
    for cache in runner.kv_caches:
        found += [cache] if isinstance(cache, torch.Tensor) else list(cache)
    return found


def drop_weights(model: Any) -> None:
    """Give a CPU model's weights back; only a load makes it usable again."""
    for module in model.modules():
        if hasattr(module, "cpu_linear"):
            module.cpu_linear = _raise_asleep  # the packed copy goes with the old function
    release_pages([parameter.data for parameter in model.parameters()])


def _raise_asleep(*_: object) -> torch.Tensor:
    raise RuntimeError("the weights are asleep")


def release_pages(tensors: list[torch.Tensor]) -> None:
    """Let the system take the pages of tensors; they are zero when they are touched again."""
    libc = ctypes.CDLL(None, use_errno=True)
    storages = [tensor.untyped_storage() for tensor in tensors]
    for start, size in {(storage.data_ptr(), storage.nbytes()) for storage in storages}:
        first = -(-start // PAGE_BYTES) * PAGE_BYTES
        last = (start + size) // PAGE_BYTES * PAGE_BYTES
        if last > first and libc.madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_DONTNEED
        ):
            raise OSError(ctypes.get_errno(), "madvise failed")
