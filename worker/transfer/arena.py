"""Memory that a trainer and the workers of its machine share: two slots, written in turn.

A slot is a memfd: it has no name, it can't shrink under its readers, nobody but its owner can write
it, and it is gone when the last process that has it is. Its pages are there before it is used, and it
is used again and again, since taking fresh pages costs more than the copy. A slot is written only
when every receiver has given it back; one that never does costs a fresh slot, not a wait for ever.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from collections.abc import Callable

from .layout import Placed
from .room import MARGIN_BYTES, memory_left

SLOTS = 2
"""One is read by what serves, the other one is written."""

RETURN_SECONDS = 0.25
"""How long the older slot is waited for before a fresh one is made: less than that costs."""

POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14, which Python doesn't name."""

FUTURE_WRITE = 0x10
"""F_SEAL_FUTURE_WRITE of Linux 5.1, which Python doesn't name."""

Release = Callable[[], None]


class ArenaError(ValueError):
    """There is no such memory, or it is not what both ends could rely on."""


class Slot:
    """Shared memory for one version.

    Args:
        nbytes: Its size.

    Raises:
        ArenaError: There is no room.
    """

    def __init__(self, nbytes: int) -> None:
        _check_room(nbytes)
        self.size = max(nbytes, 1)
        self._news = threading.Condition()
        self._lent = 0
        self._map: mmap.mmap | None = None
        self.handle = os.memfd_create("rollout-push", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # A hole that can't be filled later would end the process, not raise.
            os.posix_fallocate(self.handle, 0, self.size)
            self._map = mmap.mmap(self.handle, self.size)
            _seal(self.handle)
        except OSError as error:
            self.close()
            raise _no_room(nbytes, str(error)) from error
        with contextlib.suppress(OSError):  # an older kernel: pages come as they are written
            self._map.madvise(POPULATE_WRITE)

    @property
    def lent(self) -> bool:
        """Whether somebody may still read or write it."""
        return self._lent > 0

    def lend(self) -> Release:
        """Note that somebody uses it; return what to call, once or more often, at the end."""
        with self._news:
            self._lent += 1
        returned = False

        def give_back() -> None:
            nonlocal returned
            with self._news:
                self._lent -= not returned
                returned = True
                self._news.notify_all()

        return give_back

    def wait_free(self, seconds: float) -> bool:
        """Whether nobody uses it any more within these seconds."""
        with self._news:
            return self._news.wait_for(lambda: not self._lent, seconds)

    def view(self, placed: Placed) -> memoryview:
        """Return a tensor's place, writable."""
        return self.bytes(placed.start, placed.end)

    def bytes(self, begin: int, end: int) -> memoryview:
        """Return a run of it, writable."""
        if self._map is None:
            raise ArenaError("this memory was given up")
        return memoryview(self._map)[begin:end]

    def close(self) -> None:
        """Give it up; receivers keep what they have mapped."""
        mapped, self._map = self._map, None
        if mapped is not None:
            # Who still has a view, as an error's frames may, keeps the pages until it is gone.
            with contextlib.suppress(BufferError):
                mapped.close()
        handle, self.handle = self.handle, -1
        if handle >= 0:
            os.close(handle)


class Arena:
    """The slots of a trainer; may be used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: list[Slot] = []

    def take(self, nbytes: int) -> tuple[Slot, Release]:
        """Return a slot that nobody reads, and what to call when it is written and lent on.

        Raises:
            ArenaError: There is no room.
        """
        with self._lock:
            if len(self._slots) >= SLOTS and all(slot.lent for slot in self._slots):
                # Who has just gone over to the newer one is about to give this one back.
                self._slots[0].wait_free(RETURN_SECONDS)
            for slot in self._slots:
                if not slot.lent and slot.size >= max(nbytes, 1):
                    self._slots.remove(slot)
                    self._slots.append(slot)  # the one used longest ago comes first
                    return slot, slot.lend()
            if len(self._slots) >= SLOTS:
                # One that is too small and free, else the one whose reader doesn't give it back.
                gone = next((each for each in self._slots if not each.lent), self._slots[0])
                self._slots.remove(gone)
                gone.close()
            slot = Slot(nbytes)
            self._slots.append(slot)
            return slot, slot.lend()

    @property
    def nbytes(self) -> int:
        """Memory of all its slots."""
        return sum(slot.size for slot in self._slots)

    def close(self) -> None:
        """Give up all slots."""
        with self._lock:
            slots, self._slots = self._slots, []
        for slot in slots:
            slot.close()


def map_readonly(handle: int, size: int) -> mmap.mmap:
    """Map memory that another process gave this one.

    Raises:
        ArenaError: It is smaller than it said, or may shrink, which would end the reader by a signal.
    """
    there = os.fstat(handle).st_size
    if not 0 < size <= there:
        raise ArenaError(f"the memory has {there} bytes, not {size} as was said")
    try:
        seals = fcntl.fcntl(handle, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ArenaError(f"this is no memory that can be sealed: {error}") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ArenaError("this memory may shrink while it is read: its owner must seal it")
    return mmap.mmap(handle, size, prot=mmap.PROT_READ)


def _check_room(nbytes: int) -> None:
    """Refuse what the kernel would end this process for: memfds are bounded by nothing else."""
    found = memory_left()
    if found is not None and nbytes + MARGIN_BYTES > found[0]:
        left, what = found
        raise _no_room(nbytes, f"{max(left, 0)} are left of {what}, and {MARGIN_BYTES} stay free")


def _no_room(nbytes: int, why: str) -> ArenaError:
    return ArenaError(
        f"there is no room for {nbytes} bytes of weights in memory: {why}; give the trainer more "
        "memory, or publish by files"
    )


def _seal(handle: int) -> None:
    """Let nobody shrink or grow it, and nobody but who has mapped it by now write it."""
    sizes = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    fcntl.fcntl(handle, fcntl.F_ADD_SEALS, sizes)
    with contextlib.suppress(OSError):  # an older kernel
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, FUTURE_WRITE)
    fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
