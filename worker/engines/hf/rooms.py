"""Memory for a version of the weights, all of it taken before its first byte comes.

On the model's device, where that has room beside the serving weights; else in main memory, from
which a commit copies it: so a GPU that holds one version only can be updated, and seeded again.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_worker.engine import EngineError
from rollout_worker.engines.room import Staging
from rollout_worker.transfer.locked import lock

Spec = tuple[str, Sequence[int], torch.dtype]
"""Name, shape and dtype of a tensor to come."""
Beside = Callable[[Sequence[Spec]], dict[str, Tensor]]
"""Takes memory beside the serving weights, or raises `torch.OutOfMemoryError`."""

ALIGN = 64
"""Every tensor begins at a multiple of this: what any dtype and vector load wants."""


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that was taken.

    `tensors`: one for each name, in the dtype that the model computes in. `free`: gives back what
    was charged for it. `aside`: it is main memory though the model is elsewhere.
    """

    tensors: Mapping[str, Tensor]
    free: Callable[[], None]
    aside: bool = False


def on(device: torch.device) -> Beside | None:
    """Return what takes memory on the device, None if that is main memory."""
    if device.type == "cpu":
        return None

    def take(specs: Sequence[Spec]) -> dict[str, Tensor]:
        return {
            name: torch.empty(tuple(shape), dtype=dtype, device=device)
            for name, shape, dtype in specs
        }

    return take


def in_main_memory(specs: Sequence[Spec], staging: Staging, *, aside: bool) -> Room:
    """Take main memory, charged to `staging`; `aside`: page-locked for the GPU, too.

    Raises:
        EngineError: there is no room.
    """
    sizes = [-(-math.prod(shape) * dtype.itemsize // ALIGN) * ALIGN for _, shape, dtype in specs]
    give_back = staging.claim(sum(sizes))
    try:
        # Written to, so that the pages are there: what is missing shows now, not while it is filled.
        whole = _large(torch.empty(sum(sizes), dtype=torch.uint8)).zero_()
    except RuntimeError as error:
        give_back()
        raise EngineError(
            f"there is no room for {sum(sizes)} bytes of staged weights: {error}"
        ) from error
    unlock = (lock(whole.data_ptr(), whole.numel()) if aside else None) or _nothing
    tensors: dict[str, Tensor] = {}
    for (name, shape, dtype), part in zip(specs, torch.split(whole, sizes), strict=True):
        nbytes = math.prod(shape) * dtype.itemsize
        tensors[name] = part[:nbytes].view(dtype).reshape(tuple(shape))

    def free() -> None:
        unlock()
        give_back()

    return Room(tensors, free, aside)


def _large(whole: Tensor) -> Tensor:
    """Ask for large pages, where the kernel has them: taking small ones is several times as slow."""
    first = -(-whole.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = whole.data_ptr() + whole.numel() - first
    if size > 0:
        address, count = ctypes.c_void_p(first), ctypes.c_size_t(size)
        ctypes.CDLL(None).madvise(address, count, mmap.MADV_HUGEPAGE)
    return whole


def _nothing() -> None:
    """Unlock nothing."""
