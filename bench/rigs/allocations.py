"""Bytes that Python has allocated and not freed, counted by tracemalloc.

Resident size can't show a small leak: freed pages stay with the process and hide it for hours.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Awaitable, Callable


async def growth(work: Callable[[int], Awaitable[object]], pieces: int, size: int) -> list[float]:
    """Return the bytes per request that each piece leaves allocated.

    `work(size)` sees `size` requests through; it is run once before anything is counted, and then
    `pieces` times. Tracing makes Python about twice as slow: don't time anything meanwhile.
    """
    tracemalloc.start()
    try:
        await work(size)
        found, before = [], _allocated()
        for _ in range(pieces):
            await work(size)
            now = _allocated()
            found.append((now - before) / size)
            before = now
    finally:
        tracemalloc.stop()
    return found


def _allocated() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]
