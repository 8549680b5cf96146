"""Mappings of a trainer's memory that are used again, and gone with the trainer."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from rollout_common.transfer.memory.mapped_memory import (
    POPULATE_READ,
    MappingCache,
    advise_kernel,
    map_private,
)
from rollout_common.transfer.memory.slot import Slot

PAGE = 4096


@pytest.fixture
def slots() -> Iterator[list[Slot]]:
    made = [Slot(PAGE), Slot(PAGE)]
    yield made
    for slot in made:
        slot.close()


def mappings() -> int:
    """How many of shared memory this process has."""
    with open("/proc/self/maps") as file:
        return sum("memfd:rollout-push" in line for line in file)


def test_a_slot_that_is_filled_again_is_not_mapped_again(slots: list[Slot]) -> None:
    maps = MappingCache()
    with maps.keep_mapping():
        first = maps.take_mapping(slots[0].handle, PAGE)
        maps.give_mapping(slots[0].handle, first)
        slots[0].view_bytes(0, 1)[:] = b"2"
        again = os.dup(slots[0].handle)  # another descriptor of the same memory comes each time
        second = maps.take_mapping(again, PAGE)
        assert second is first
        assert second[:1] == b"2"
        maps.give_mapping(again, second)
        os.close(again)


def test_one_mapping_is_kept_and_none_without_a_sender(slots: list[Slot]) -> None:
    maps, before = MappingCache(), mappings()
    with maps.keep_mapping():
        taken = [maps.take_mapping(slot.handle, PAGE) for slot in slots]
        assert mappings() == before + 2
        for slot, mapped in zip(slots, taken, strict=True):
            maps.give_mapping(slot.handle, mapped)
        assert mappings() == before + 1
    assert mappings() == before
    late = maps.take_mapping(slots[0].handle, PAGE)
    assert mappings() == before + 1
    maps.give_mapping(slots[0].handle, late)
    assert mappings() == before


def test_other_threads_run_while_pages_are_brought(slots: list[Slot]) -> None:
    mapped, count, ended = map_private(slots[0].handle, PAGE), [0], threading.Event()

    def run() -> None:
        while not ended.is_set():
            count[0] += 1
            time.sleep(0)

    before = sys.getswitchinterval()
    sys.setswitchinterval(60)  # nobody is interrupted: who runs has given way
    other = threading.Thread(target=run)
    other.start()
    try:
        seen = count[0]
        for _ in range(1000):
            advise_kernel(mapped, POPULATE_READ)
        assert count[0] > seen
    finally:
        ended.set()
        sys.setswitchinterval(before)
        other.join(10)
        mapped.close()
