"""Tensors in memory that was mapped from another descriptor, without a copy; runs in any process with torch."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from rollout_worker.transfer.arena import to_be_read

from .dtypes import TORCH_DTYPES

Place = tuple[str, str, Sequence[int], int]
"""Name, dtype as safetensors call it, shape, and where its bytes begin."""


def private(handle: int, size: int) -> mmap.mmap:
    """Map memory so that torch may take it for its own: pages are shared until somebody writes."""
    mapped = mmap.mmap(handle, size, flags=mmap.MAP_PRIVATE)
    to_be_read(mapped)
    return mapped


def tensors_in(
    memory: mmap.mmap | memoryview, places: Iterable[Place]
) -> Iterator[tuple[str, Tensor]]:
    """Yield views by name; the mapping lives as long as any of them."""
    return views(torch.frombuffer(memory, dtype=torch.uint8), places)


def views(whole: Tensor, places: Iterable[Place]) -> Iterator[tuple[str, Tensor]]:
    """Yield parts of bytes ([n] uint8) by name; one that doesn't lie as its dtype wants is a copy."""
    for name, dtype, shape, start in places:
        kind = TORCH_DTYPES[dtype]
        part = whole[start : start + math.prod(shape) * kind.itemsize]
        if start % kind.itemsize:
            part = part.clone()
        yield name, part.view(kind).reshape(tuple(shape))
