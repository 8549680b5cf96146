"""Memory that a trainer shares: who may write it, when it is used again, and that none stays."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_common.transfer.layout import PushLayout
from rollout_common.transfer.memory import arena as arenas
from rollout_common.transfer.memory.arena import SLOTS, Arena
from rollout_common.transfer.memory.mapped_memory import SharedMemoryError
from rollout_common.transfer.memory.memory_limits import memory_left
from rollout_common.transfer.memory.slot import Slot
from tests.support.unit.pushing import no_file_above

PAGE = mmap.PAGESIZE
MIB = 1 << 20


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_receiver_sees_what_the_owner_writes_and_can_write_nothing() -> None:
    slot = Slot(3 * PAGE)
    layout = PushLayout.plan([("a", "U8", (5,)), ("b", "U8", (7,)), ("z", "F32", (0, 2))])
    there = mmap.mmap(slot.handle, slot.size, prot=mmap.PROT_READ)
    for placed in layout.tensors:
        slot.view_tensor(placed)[:] = placed.name.encode() * placed.nbytes
    assert [there[p.start : p.end] for p in layout.tensors] == [b"a" * 5, b"b" * 7, b""]
    with pytest.raises(TypeError):
        there[0] = 1
    with pytest.raises(PermissionError):
        mmap.mmap(slot.handle, slot.size)
    for size in (0, slot.size + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(slot.handle, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(slot.handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    # A reader of its own pages may write them: the owner's stay.
    private = mmap.mmap(slot.handle, slot.size, flags=mmap.MAP_PRIVATE)
    private[0:1] = b"!"
    assert there[0:1] == b"a"
    slot.close()
    assert there[0:5] == b"aaaaa"


def test_no_room_is_said_with_the_fix() -> None:
    before = descriptors()
    with no_file_above(1), pytest.raises(SharedMemoryError, match="more memory"):
        Slot(PAGE)
    assert descriptors() == before


@pytest.mark.parametrize(("module", "call"), [(os, "memfd_create"), (fcntl, "fcntl")], ids=str)
def test_a_sandbox_that_refuses_shared_memory_is_not_taken_for_a_lack_of_room(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, call: str
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(module, call, refused)
    with pytest.raises(
        SharedMemoryError, match=r"Operation not permitted.* sandbox allow memfd_cr"
    ):
        Slot(4096)


def test_a_hollow_slot_is_filled_run_by_run_and_sealed_once_it_is_whole() -> None:
    slot = Slot(2 * PAGE, expected=2 * PAGE)
    assert os.stat(slot.handle).st_blocks == 0, "no page is there yet"
    for begin in (PAGE, 0):
        slot.write_run(begin, memoryview(bytes([begin % 251 + 1]) * PAGE))
    assert bytes(slot.view_bytes(PAGE, 2 * PAGE)) == bytes([PAGE % 251 + 1]) * PAGE
    with pytest.raises(PermissionError):
        os.ftruncate(slot.handle, PAGE)
    slot.seal_contents()
    with pytest.raises(PermissionError):
        os.pwrite(slot.handle, b"x", 0)
    slot.close()


@pytest.mark.parametrize("hollow", [True, False])
def test_private_memory_has_no_descriptor_and_is_given_back(hollow: bool) -> None:
    before = descriptors()
    slot = Slot(8 * MIB, expected=8 * MIB if hollow else None, private=True)
    assert (slot.handle, descriptors()) == (-1, before)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(slot.view_bytes(0, 1)))
    asked, here = mapping_at(begin)
    assert ("hg" in asked, here) == (True, 0 if hollow else 8 * MIB)
    slot.view_bytes(0, 5)[:] = b"fresh"
    slot.seal_contents()
    assert bytes(slot.view_bytes(0, 8)) == b"fresh\0\0\0"
    slot.close()
    with pytest.raises(SharedMemoryError, match="given up"):
        slot.view_bytes(0, 1)
    assert mapping_at(begin) == ([], 0)


def mapping_at(address: int) -> tuple[list[str], int]:
    """Return what was asked of the kernel for the mapping around an address, and its bytes in memory."""
    inside, here = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *words = line.split()
        if "-" in first and not first.endswith(":"):
            begin, end = (int(each, 16) for each in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "Rss:":
            here = int(words[0]) * 1024
        elif inside and first == "VmFlags:":
            return words, here
    return [], 0


def test_a_page_that_the_kernel_refuses_later_is_no_room_either() -> None:
    slot = Slot(2 * PAGE, expected=2 * PAGE)
    with no_file_above(PAGE), pytest.raises(SharedMemoryError, match="more memory"):
        slot.write_run(PAGE - 8, memoryview(bytes(16)))
    slot.close()


def test_more_than_there_is_is_refused_before_any_of_it_is_taken() -> None:
    found = memory_left()
    assert found is not None
    with pytest.raises(SharedMemoryError, match=r"are left of .*, and \d+ stay free"):
        Slot(found[0] * 2)
    Slot(4 * PAGE, private=True, expected=0).close()
    with pytest.raises(SharedMemoryError, match="there is no room"):
        Slot(4 * PAGE, private=True, expected=found[0] * 2)


@pytest.mark.parametrize("just_now", [False, True])
def test_a_slot_that_was_given_up_is_not_written(just_now: bool) -> None:
    slot = Slot(PAGE)
    if just_now:
        assert slot._map is not None
        slot._map.close()
    else:
        slot.close()
    with pytest.raises(SharedMemoryError, match="given up"):
        slot.view_bytes(0, 1)
    slot.close()


def test_two_slots_take_turns_and_grow() -> None:
    arena = Arena()
    used = []
    for nbytes in (10, 20, 10, 20, 10):
        slot, give_back = arena.take_slot(nbytes)
        used.append(slot)
        give_back()
    assert used[0] is used[2] is used[4]
    assert used[1] is used[3]
    assert arena.nbytes == 30
    arena.close()
    assert arena.nbytes == 0


def can_write(slot: Slot) -> bool:
    """Whether another mapping of it can be written."""
    try:
        mmap.mmap(slot.handle, slot.size).close()
    except PermissionError:
        return False
    return True


def test_an_arena_gives_slots_that_others_may_write_only_if_that_is_asked_for() -> None:
    arena = Arena()
    for writable in (False, True, True, False, True):
        arena.writable = writable
        slot, give_back = arena.take_slot(PAGE)
        assert can_write(slot) == writable
        give_back()
    arena.close()


@pytest.mark.parametrize("writable", [False, True])
def test_hollow_memory_is_sealed_once_it_is_whole_unless_others_may_write_it(
    *, writable: bool
) -> None:
    slot = Slot(PAGE, expected=PAGE, writable=writable)
    slot.write_run(0, memoryview(bytes(PAGE)))
    slot.seal_contents()
    assert can_write(slot) == writable
    slot.close()


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 3), st.lists(st.integers(0, 5))), max_size=8))
def test_what_somebody_reads_is_never_handed_out(steps: list[tuple[int, list[int]]]) -> None:
    arena, before = Arena(), descriptors()
    lent: list[tuple[Slot, list[bool]]] = []
    for pages, returns in steps:
        with pytest.MonkeyPatch.context() as impatient:
            impatient.setattr(arenas, "RETURN_SECONDS", 0.001)
            slot, give_back = arena.take_slot(pages * PAGE)
        assert slot.size >= pages * PAGE
        assert all(other is not slot for other, held in lent if held[0])
        assert len(arena._slots) <= SLOTS
        held = [True]
        lent.append((slot, held))
        kept = slot.lend_slot()
        give_back()
        give_back()
        assert slot.is_lent
        for index in returns:
            if index == 0:
                kept()
                held[0] = False
    arena.close()
    assert descriptors() == before


def test_a_slot_that_comes_back_a_moment_late_is_used_again() -> None:
    arena = Arena()
    first, back = arena.take_slot(PAGE)
    arena.take_slot(PAGE)
    timer = threading.Timer(0.05, back)
    timer.start()
    assert arena.take_slot(PAGE)[0] is first
    timer.join()
    arena.close()


def test_a_reader_that_keeps_its_slot_costs_a_fresh_one() -> None:
    arena = Arena()
    stuck, _ = arena.take_slot(PAGE)
    stuck.view_bytes(0, 1)[:] = b"x"
    there = mmap.mmap(stuck.handle, PAGE, prot=mmap.PROT_READ)
    for _ in range(4):
        slot, give_back = arena.take_slot(PAGE)
        assert slot is not stuck
        slot.view_bytes(0, 1)[:] = b"y"
        give_back()
    assert there[0:1] == b"x"
    arena.close()
