"""Memory that a trainer and the workers of its machine share: two slots, written in turn; one lock, one file.

A slot is a memfd: it has no name, it can't shrink under its readers, nobody but its owner can write
it, and it is gone when the last process that has it is. Its pages are there before it is used, and it
is used again and again, since taking fresh pages costs more than the copy. A slot is written only
when every receiver has given it back; one that never does costs a fresh slot, not a wait for ever.
A receiver that is silent or whose connection broke has given nothing back: it may serve from those pages.
Its slot is written again only once the kernel says that no process has it (`nobody_has`).

Where no other process has to map it, a slot is private memory instead: fresh, it costs a quarter as much.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from typing import Any

from .holders import nobody_has, open_again
from .layout import Placed
from .locked import lock as page_lock
from .room import MARGIN_BYTES, memory_left

SLOTS = 2
"""One is read by what serves, the other one is written."""

RETURN_SECONDS = 0.25
"""How long the older slot is waited for before a fresh one is made: less than that costs."""

MOST_CONDEMNED = 4
"""How many slots may be out of use because a receiver has them that can't be asked any more."""

POPULATE_READ, POPULATE_WRITE = 22, 23
"""MADV_POPULATE_* of Linux 5.14, which Python doesn't name."""

FUTURE_WRITE = 0x10
"""F_SEAL_FUTURE_WRITE of Linux 5.1, which Python doesn't name."""

Release = Callable[[], None]
Share = Callable[[int, int], None]

Lock = Callable[[int, int], Release | None]
"""As `locked.lock`: address and size; returns what undoes it, None if it can't be done."""


class ArenaError(ValueError):
    """There is no such memory, or it is not what both ends could rely on."""


class Slot:
    """Memory for one version.

    Args:
        nbytes: Its size.
        share: Called with its descriptor and size, as long as others may still map it to write.
        hollow: Whether its pages come one by one, with what is written. Shared memory is then written by `put`
            alone until all is there: half the cost of a page is to clear it and to map it for writing.
        private: Whether it is this process's alone, and has no descriptor. Its pages are large ones, where the
            kernel has them for who asks.
        expected: How many of its bytes are written, if it is hollow; None: all.

    Raises:
        ArenaError: There is no room.
    """

    def __init__(
        self,
        nbytes: int,
        lock: Lock = page_lock,
        share: Share | None = None,
        *,
        hollow: bool = False,
        private: bool = False,
        expected: int | None = None,
    ) -> None:
        _check_room(nbytes if expected is None else expected)
        self.size = max(nbytes, 1)
        self.private = private
        self._news = threading.Condition()
        self._lent = 0
        self.doubts: set[str] = set()
        """Who was given it, and has not said that it needs it no more."""
        self._closed = False
        self._map: mmap.mmap | None = None
        self._lock, self._locking = lock, threading.Lock()
        self._asked = False
        self._unlock: Release | None = None
        self.handle = -1
        """Its descriptor; -1: it is private, or was given up."""
        try:
            self._map = (
                self._private(hollow=hollow) if private else self._shared(share, hollow=hollow)
            )
        except OSError as error:
            self.close()
            raise _no_room(nbytes, str(error)) from error
        except BaseException:
            self.close()
            raise

    def _private(self, *, hollow: bool) -> mmap.mmap:
        mapped = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        advise(mapped, mmap.MADV_HUGEPAGE)
        if not hollow:
            advise(mapped, POPULATE_WRITE)
        return mapped

    def _shared(self, share: Share | None, *, hollow: bool) -> mmap.mmap:
        self.handle = os.memfd_create("rollout-push", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.handle, self.size)
        mapped = mmap.mmap(self.handle, self.size)
        advise(mapped, mmap.MADV_HUGEPAGE)
        if not hollow:
            # By the mapping, which alone is known to want large pages. What this can't fill is told then:
            # a hole that can't be filled later would end the process, not raise.
            advise(mapped, POPULATE_WRITE)
            os.posix_fallocate(self.handle, 0, self.size)
        if share is not None:
            share(self.handle, self.size)
        _keep_size(self.handle)
        if not hollow:
            _seal(self.handle)
        return mapped

    def put(self, begin: int, content: memoryview) -> None:
        """Write a run of a hollow slot, which whoever calls keeps from being closed.

        Raises:
            ArenaError: There is no room.
        """
        done = 0
        try:
            while done < len(content):
                with content[done:] as rest:
                    done += os.pwrite(self.handle, rest, begin + done)
        except OSError as error:
            raise _no_room(self.size, str(error)) from error

    def whole(self) -> None:
        """Note that every byte of a hollow slot is there: from now on it is like any other."""
        if not self.private:
            _seal(self.handle)

    @property
    def lent(self) -> bool:
        """Whether somebody may still read or write it."""
        if not self._lent and self.doubts and nobody_has(self.handle):
            self.doubts.clear()
        return self._lent > 0 or bool(self.doubts)

    def doubt(self, reader: str) -> None:
        """Note that a reader could not say that it needs this no more; to be called before it is given back."""
        self.doubts.add(reader)

    def open_reader(self) -> int:
        """Return a descriptor to be passed to a reader, and closed: those alone `nobody_has` knows of.

        Raises:
            ArenaError: There is none.
        """
        try:
            return open_again(self.handle)
        except OSError as error:
            raise ArenaError(f"this memory can't be shared: {error}") from error

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
                last = self._closed and not self._lent
                self._news.notify_all()
            if last:
                self._unmap()

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
        mapped = self._map  # which may be given up just now, and closed
        if mapped is not None and not self._closed:
            with contextlib.suppress(ValueError):
                return memoryview(mapped)[begin:end]
        raise ArenaError("this memory was given up")

    def page_locked(self) -> bool:
        """Whether a GPU writes it at full speed: its pages are locked the first time this is asked.

        Who asks has lent it, and has a context of CUDA in this thread.
        """
        with self._locking:
            if not self._asked and self._map is not None and not self._closed:
                self._asked = True
                begin = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
                self._unlock = self._lock(begin, -(-self.size // mmap.PAGESIZE) * mmap.PAGESIZE)
            return self._unlock is not None

    def close(self) -> None:
        """Give it up; receivers keep what they have mapped.

        A device may still write what is locked and lent: that goes with who has lent it last.
        """
        with self._locking, self._news:
            self._closed = True
            written = self._unlock is not None and self._lent > 0
        if not written:
            self._unmap()
        handle, self.handle = self.handle, -1
        if handle >= 0:
            os.close(handle)

    def _unmap(self) -> None:
        with self._locking:
            unlock, self._unlock = self._unlock, None
            mapped, self._map = self._map, None
        if unlock is not None:
            unlock()
        if mapped is not None:
            # Who still has a view, as an error's frames may, keeps the pages until it is gone.
            with contextlib.suppress(BufferError):
                mapped.close()


class Arena:
    """The slots of a trainer; may be used by several threads.

    Args:
        lock: Locks their pages, for trainers whose tensors are on a GPU.
        share: As each `Slot` takes it.
    """

    def __init__(self, lock: Lock = page_lock, share: Share | None = None) -> None:
        self._page_lock, self._share = lock, share
        self._lock = threading.Lock()
        self._slots: list[Slot] = []
        self._condemned: list[Slot] = []

    def take(self, nbytes: int) -> tuple[Slot, Release]:
        """Return a slot that nobody reads, and what to call when it is written and lent on.

        Raises:
            ArenaError: There is no room.
        """
        with self._lock:
            for slot in [each for each in self._condemned if not each.lent]:
                self._condemned.remove(slot)
                slot.close()
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
                if gone.doubts:
                    self._condemn(gone)
                else:
                    gone.close()
                self._slots.remove(gone)
            slot = Slot(nbytes, self._page_lock, self._share)
            self._slots.append(slot)
            return slot, slot.lend()

    def _condemn(self, slot: Slot) -> None:
        """Use a slot no more; its pages stay until a later version finds that nobody has them.

        Raises:
            ArenaError: There are too many of them.
        """
        if len(self._condemned) >= MOST_CONDEMNED:
            names = ", ".join(sorted(set().union(*(each.doubts for each in self._condemned))))
            nbytes = sum(each.size for each in self._condemned)
            raise ArenaError(
                f"{nbytes} bytes of {len(self._condemned)} former versions are still open in replicas whose"
                f" connection ended before they gave them back ({names}): restart those that are stopped or"
                " hang, or publish from a new process"
            )
        self._condemned.append(slot)

    @property
    def handles(self) -> tuple[int, ...]:
        """Descriptors of all its slots that are still used."""
        return tuple(slot.handle for slot in self._slots)

    @property
    def nbytes(self) -> int:
        """Memory of all its slots."""
        return sum(slot.size for slot in (*self._slots, *self._condemned))

    def close(self) -> None:
        """Give up all slots; receivers keep what they have mapped."""
        with self._lock:
            slots = [*self._slots, *self._condemned]
            self._slots, self._condemned = [], []
        for slot in slots:
            slot.close()


def map_readonly(handle: int, size: int) -> mmap.mmap:
    """Map memory that another process gave this one.

    Raises:
        ArenaError: It is smaller than it said, or may shrink, which would end the reader by a signal.
    """
    _check_shared(handle, size)
    return mmap.mmap(handle, size, prot=mmap.PROT_READ)


def map_private(handle: int, size: int) -> mmap.mmap:
    """Map it for libraries that want writable memory: pages are shared until somebody writes.

    All of them are there at once. Raises what `map_readonly` raises.
    """
    _check_shared(handle, size)
    mapped = mmap.mmap(handle, size, flags=mmap.MAP_PRIVATE)
    to_be_read(mapped)
    return mapped


def advise(mapped: mmap.mmap | ctypes.Array[Any], advice: int) -> None:
    """Tell the kernel what a writable mapping is for, or have its pages there; what it can't do stays undone.

    Other threads run meanwhile: `mmap.madvise` stops them, for a tenth of a second per gigabyte.
    """
    first = ctypes.c_char.from_buffer(mapped)
    address, size = ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapped))
    ctypes.CDLL(None).madvise(address, size, advice)


def to_be_read(mapped: mmap.mmap | ctypes.Array[Any]) -> None:
    """Have all pages of a mapping of shared memory there, in large pieces where it has large pages."""
    advise(mapped, mmap.MADV_HUGEPAGE)
    advise(mapped, POPULATE_READ)


def _check_shared(handle: int, size: int) -> None:
    there = os.fstat(handle).st_size
    if not 0 < size <= there:
        raise ArenaError(f"the memory has {there} bytes, not {size} as was said")
    try:
        seals = fcntl.fcntl(handle, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ArenaError(f"this is no memory that can be sealed: {error}") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ArenaError("this memory may shrink while it is read: its owner must seal it")


def _check_room(nbytes: int) -> None:
    """Refuse what the kernel would end this process for: memfds are bounded by nothing else."""
    found = memory_left()
    if found is not None and nbytes + MARGIN_BYTES > found[0]:
        left, what = found
        raise _no_room(nbytes, f"{max(left, 0)} are left of {what}, and {MARGIN_BYTES} stay free")


def _no_room(nbytes: int, why: str) -> ArenaError:
    return ArenaError(
        f"there is no room for {nbytes} bytes of weights in memory: {why}; give this process more "
        "memory, or publish by files"
    )


def _keep_size(handle: int) -> None:
    """Let nobody shrink or grow it."""
    fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


def _seal(handle: int) -> None:
    """Let nobody but who has mapped it by now write it."""
    with contextlib.suppress(OSError):  # an older kernel
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, FUTURE_WRITE)
    fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
