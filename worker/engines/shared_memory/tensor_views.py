"""Tensors of torch as views of memory that was mapped; runs in any process with torch."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from rollout_common.transfer.layout import TORCH_NAMES

TensorPlace = tuple[str, str, Sequence[int], int]
"""Name, dtype as safetensors call it, shape, and where its bytes begin."""

TORCH_DTYPES: dict[str, torch.dtype] = {
    dtype: getattr(torch, name) for dtype, name in TORCH_NAMES.items() if hasattr(torch, name)
}
"""Safetensors' names of dtypes as those of torch."""


def view_memory(
    memory: mmap.mmap | memoryview, places: Iterable[TensorPlace]
) -> Iterator[tuple[str, Tensor]]:
    """Yield views by name; the mapping lives as long as any of them."""
    return view_tensors(torch.frombuffer(memory, dtype=torch.uint8), places)


def view_tensors(whole: Tensor, places: Iterable[TensorPlace]) -> Iterator[tuple[str, Tensor]]:
    """Yield parts of bytes ([n] uint8) by name; one that doesn't lie as its dtype wants is a copy."""
    for name, dtype, shape, start in places:
        kind = TORCH_DTYPES[dtype]
        part = whole[start : start + math.prod(shape) * kind.itemsize]
        if start % kind.itemsize:
            part = part.clone()
        yield name, part.view(kind).reshape(tuple(shape))
