"""Keeps the garbage collector off what lives long: the objects of the store, most of the heap.

Python's collector goes through the whole heap again whenever it has grown by a quarter. With 1,000 pools
of 8 pods that took two fifths of the operator's CPU (one profile). Here the heap is frozen at intervals:
the collector then sees only what was made since. Cycles that end while they are frozen wait until the
heap is thawed, which holds the event loop (0.6 s for a million objects) and happens only if it has grown.
"""

from __future__ import annotations

import asyncio
import gc

from rollout_common.garbage_collection import freeze_heap

from .settings import FREEZE_SECONDS, FREEZES_PER_THAW

YOUNG_OBJECTS = 10_000
"""Objects until the youngest generation is collected: an event of a pod makes hundreds."""

YOUNG_COLLECTIONS, OLD_COLLECTIONS = 20, 100
"""Collections of one generation until the next one is: the last, after 20 million objects, is ours to start."""


THAW_GROWTH = 1.5
"""A heap that has grown to so many times its size may have grown by cycles."""


async def keep_heap_frozen() -> None:
    """Collect and freeze what is new at intervals, and now and then all of it if it has grown, until cancelled."""
    before, settled = gc.get_threshold(), 0
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_COLLECTIONS, OLD_COLLECTIONS)
    try:
        while True:
            for _ in range(FREEZES_PER_THAW):
                await asyncio.sleep(FREEZE_SECONDS)
                freeze_heap()
            settled = thaw_if_grown(settled) if settled else gc.get_freeze_count()
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


def thaw_if_grown(settled: int) -> int:
    """Collect all of the heap if half as much again is frozen as after the last time; return what to compare with next."""
    frozen = gc.get_freeze_count()  # it counts them one by one
    if frozen > THAW_GROWTH * settled:
        gc.unfreeze()
        freeze_heap()
        return gc.get_freeze_count()
    return min(settled, frozen)  # a store that shrank may grow by cycles again
