"""What a sleeping GPU rank keeps in locked main memory: how much it will be, and giving it up.

Works on the books of vLLM's allocator (`pointer_to_data` of its `CuMemAllocator`, vLLM 0.32).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

ALWAYS_KEPT_TAGS = ("runtime", "cudagraph")
"""Tags of what every sleep keeps; at level 1 it keeps the weights, too."""
WEIGHTS_TAG = "weights"


def count_pinned_bytes(allocations: Mapping[int, Any], level: int) -> int:
    """Return what a sleep at this level takes: torch rounds each locked piece up to a power of two."""
    tags = (*ALWAYS_KEPT_TAGS, WEIGHTS_TAG) if level == 1 else ALWAYS_KEPT_TAGS
    sizes = (
        data.handle[1] for data in allocations.values() if data.tag in tags and not data.is_asleep
    )
    return sum(1 << (size - 1).bit_length() for size in sizes if size)


def drop_weight_backups(allocations: Mapping[int, Any], buffers: Iterable[Tensor]) -> None:
    """Give up what sleep at level 1 kept of the weights, but for pieces with buffers: no load brings those back."""
    places = [buffer.data_ptr() for buffer in buffers if buffer.numel()]
    for start, data in allocations.items():
        end = start + data.handle[1]
        if data.tag == WEIGHTS_TAG and data.is_asleep and not any(start <= p < end for p in places):
            data.cpu_backup_tensor = None
