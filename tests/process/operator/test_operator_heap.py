"""The frozen heap: what lives long is left alone, what ends in a cycle is still collected."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from rollout_common.garbage_collection import freeze_heap
from rollout_operator.heap_freezing import keep_heap_frozen, thaw_if_grown


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """The other tests find the collector as it was."""
    yield
    gc.unfreeze()


class Ring:
    """Refers to itself."""

    def __init__(self) -> None:
        self.me = self


def test_what_is_known_is_frozen_and_what_is_new_is_collected() -> None:
    gc.unfreeze()
    freeze_heap()
    known = gc.get_freeze_count()
    assert known > 1000
    assert len(gc.get_objects()) < known / 10, "the collector goes through what is new only"
    gone = weakref.ref(Ring())
    freeze_heap()
    assert gone() is None


def test_a_heap_that_grew_is_collected_whole_and_one_that_did_not_is_left_alone() -> None:
    freeze_heap()
    settled = thaw_if_grown(0)
    rings = [Ring() for _ in range(1000)]
    gone = weakref.ref(rings[0])
    freeze_heap()
    del rings
    assert thaw_if_grown(settled) == settled
    assert gone() is not None, "a thousand are little"
    kept = [Ring() for _ in range(settled // 2)]
    freeze_heap()
    assert thaw_if_grown(settled) > settled
    assert gone() is None
    del kept


async def test_the_collector_is_as_before_when_the_process_ends() -> None:
    before = gc.get_threshold()
    running = asyncio.create_task(keep_heap_frozen())
    await asyncio.sleep(0)
    assert gc.get_threshold()[0] > before[0]
    freeze_heap()
    running.cancel()
    await asyncio.wait({running})
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)
