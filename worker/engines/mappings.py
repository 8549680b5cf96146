"""Tensors in memory that was mapped from another descriptor, without a copy; runs in any process with torch."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from .dtypes import TORCH_DTYPES
from .mapped import located

POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14, which Python doesn't name."""

Place = tuple[str, str, Sequence[int], int]
"""Name, dtype as safetensors call it, shape, and where its bytes begin."""


def private(handle: int, size: int) -> mmap.mmap:
    """Map memory so that torch may take it for its own: pages are shared until somebody writes."""
    mapped = mmap.mmap(handle, size, flags=mmap.MAP_PRIVATE)
    with contextlib.suppress(OSError):  # an older kernel: pages come as they are read
        mapped.madvise(POPULATE_READ)
    return mapped


def tensors_in(memory: mmap.mmap, places: Iterable[Place]) -> Iterator[tuple[str, Tensor]]:
    """Yield views by name; the mapping lives as long as any of them."""
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    for name, dtype, shape, start in places:
        kind = TORCH_DTYPES[dtype]
        size = math.prod(shape) * kind.itemsize
        yield name, whole[start : start + size].view(kind).reshape(tuple(shape))


def tensors_of(ticket: str) -> Iterator[tuple[str, Tensor]]:
    """Yield what a sink holds, named by its `MappedSink.ticket`."""
    sink = json.loads(ticket)
    path = located(sink["slot"]) if "slot" in sink else sink["path"]
    handle = os.open(path, os.O_RDONLY)
    try:
        memory = mmap.mmap(handle, sink["size"], flags=mmap.MAP_PRIVATE)
    finally:
        os.close(handle)
    return tensors_in(memory, sink["tensors"])


def tensors_told(path: str) -> Iterator[tuple[str, Tensor]]:
    """The same, with the ticket in a file (`MappedSink.told`)."""
    return tensors_of(Path(path).read_text())
