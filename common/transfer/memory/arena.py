"""Memory that a trainer and the workers of its machine share: two slots, written in turn; one lock, one file.

A slot is a memfd: it has no name, it can't shrink under its readers, only its owner can write it, and the
kernel frees it when the last process that has it ends. Its pages are allocated before use, and the slot is
reused, since fresh pages cost more than the copy. A slot is written only when every receiver has returned it;
a receiver that never does costs a fresh slot, not a wait without a limit. A receiver that is silent or whose
connection broke has returned nothing: it may serve from those pages. Its slot is written again only once the
kernel says that no process has it (`nobody_has`).
Where no other process has to map it, a slot is private memory: fresh, it costs a quarter as much.
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

from rollout_common.numa_pages import interleave_pages
from rollout_common.transfer.layout import Placed
from rollout_common.transfer.settings import RETURN_SECONDS

from .memory_limits import MARGIN_BYTES, memory_left
from .memory_users import nobody_has, open_again
from .page_locking import lock_pages as page_lock

SLOTS = 2
"""The engines read one while the trainer writes the other."""

MOST_CONDEMNED = 4
"""How many slots may be out of use because a receiver that can't be asked any more still has them."""

POPULATE_READ, POPULATE_WRITE = 22, 23
"""MADV_POPULATE_* of Linux 5.14, which Python doesn't name."""

FUTURE_WRITE = 0x10
"""F_SEAL_FUTURE_WRITE of Linux 5.1, which Python doesn't name."""

Release = Callable[[], None]
Share = Callable[[int, int], None]

Lock = Callable[[int, int], Release | None]
"""As `locked.lock_pages`: takes address and size; returns what unlocks them, None if they can't be locked."""


class ArenaError(ValueError):
    """The memory does not exist, or one end can't rely on it."""


class Slot:
    """Memory for one version.

    Args:
        nbytes: Its size.
        share: Called with its descriptor and size, as long as others may still map it to write.
        hollow: Whether its pages are allocated one by one, as they are written. `put` alone then writes shared
            memory until all of it is there: half the cost of a page is to clear it and to map it for writing.
        private: Whether only this process has it, without a descriptor. Its pages are large ones, where the
            kernel gives them on request.
        expected: How many of its bytes are written, if it is hollow; None: all.
        writable: Whether other processes may map it to write, too: RDMA can't register memory that they can't.

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
        writable: bool = False,
    ) -> None:
        _check_room(nbytes if expected is None else expected)
        self.size = max(nbytes, 1)
        self.private, self.writable = private, writable
        self._news = threading.Condition()
        self._lent = 0
        self.doubts: set[str] = set()
        """The readers that got it and have not said that they are done with it."""
        self._closed = False
        self._map: mmap.mmap | None = None
        self._lock, self._locking = lock, threading.Lock()
        self._asked = False
        self._unlock: Release | None = None
        self.handle = -1
        """Its descriptor; -1: it is private, or was closed."""
        try:
            self._map = (
                self._map_private(hollow=hollow)
                if private
                else self._map_shared(share, hollow=hollow)
            )
        except OSError as error:
            self.close()
            raise _no_room(nbytes, str(error)) from error
        except BaseException:
            self.close()
            raise

    def _map_private(self, *, hollow: bool) -> mmap.mmap:
        mapped = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        advise_kernel(mapped, mmap.MADV_HUGEPAGE)
        interleave_pages(mapped)
        if not hollow:
            advise_kernel(mapped, POPULATE_WRITE)
        return mapped

    def _map_shared(self, share: Share | None, *, hollow: bool) -> mmap.mmap:
        self.handle = os.memfd_create("rollout-push", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.handle, self.size)
        mapped = mmap.mmap(self.handle, self.size)
        advise_kernel(mapped, mmap.MADV_HUGEPAGE)
        interleave_pages(mapped)
        if not hollow:
            # Through the mapping, since only the mapping asks for large pages. `posix_fallocate` then raises if
            # pages are missing: a page that the kernel can't allocate later would end the process.
            advise_kernel(mapped, POPULATE_WRITE)
            os.posix_fallocate(self.handle, 0, self.size)
        if share is not None:
            share(self.handle, self.size)
        _keep_size(self.handle)
        if not hollow and not self.writable:
            _seal_memory(self.handle)
        return mapped

    def put(self, begin: int, content: memoryview) -> None:
        """Write a run of a hollow slot; the caller must keep the slot from being closed.

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
        """Note that every byte of a hollow slot is written: from now on it is like any other."""
        if not self.private and not self.writable:
            _seal_memory(self.handle)

    @property
    def lent(self) -> bool:
        """Whether a process may still read or write it."""
        if not self._lent and self.doubts and nobody_has(self.handle):
            self.doubts.clear()
        return self._lent > 0 or bool(self.doubts)

    def doubt(self, reader: str) -> None:
        """Note that a reader could not say that it is done with this; call it before the slot is returned."""
        self.doubts.add(reader)

    def open_reader(self) -> int:
        """Return a descriptor to pass to a reader and then close: `nobody_has` knows only of these.

        Raises:
            ArenaError: The kernel does not give one.
        """
        try:
            return open_again(self.handle)
        except OSError as error:
            raise ArenaError(f"this memory can't be shared: {error}") from error

    def lend(self) -> Release:
        """Note a use of it; return what ends the use, which may be called more than once."""
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
                self._unmap_memory()

        return give_back

    def wait_free(self, seconds: float) -> bool:
        """Wait until nothing uses it; return whether that came within these seconds."""
        with self._news:
            return self._news.wait_for(lambda: not self._lent, seconds)

    def view(self, placed: Placed) -> memoryview:
        """Return a tensor's place, writable."""
        return self.bytes(placed.start, placed.end)

    def bytes(self, begin: int, end: int) -> memoryview:
        """Return a run of it, writable."""
        mapped = self._map  # another thread may close it at this moment
        if mapped is not None and not self._closed:
            with contextlib.suppress(ValueError):
                return memoryview(mapped)[begin:end]
        raise ArenaError("this memory was given up")

    def page_locked(self) -> bool:
        """Whether a GPU writes it at full speed: the first call locks its pages.

        The caller has lent it, and has a CUDA context in this thread.
        """
        with self._locking:
            if not self._asked and self._map is not None and not self._closed:
                self._asked = True
                begin = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
                self._unlock = self._lock(begin, -(-self.size // mmap.PAGESIZE) * mmap.PAGESIZE)
            return self._unlock is not None

    def close(self) -> None:
        """Free it; receivers keep what they have mapped.

        A device may still write pages that are locked and lent: the last `lend` to end frees those.
        """
        with self._locking, self._news:
            self._closed = True
            written = self._unlock is not None and self._lent > 0
        if not written:
            self._unmap_memory()
        handle, self.handle = self.handle, -1
        if handle >= 0:
            os.close(handle)

    def _unmap_memory(self) -> None:
        with self._locking:
            unlock, self._unlock = self._unlock, None
            mapped, self._map = self._map, None
        if unlock is not None:
            unlock()
        if mapped is not None:
            # A view that still exists, as in an error's frames, keeps the pages until it is gone.
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
        self.writable = False
        """Whether the slots that it gives are those that other processes may map to write."""
        self._lock = threading.Lock()
        self._slots: list[Slot] = []
        self._condemned: list[Slot] = []

    def take(self, nbytes: int, expected: int | None = None) -> tuple[Slot, Release]:
        """Return a slot that nothing reads, and what to call once it is written and lent to its readers.

        Args:
            nbytes: Its size.
            expected: How many of its bytes will be written, if it is for this machine's processes alone: only their
                pages are allocated. None: all.

        Raises:
            ArenaError: There is no room.
        """
        with self._lock:
            for slot in [each for each in self._condemned if not each.lent]:
                self._condemned.remove(slot)
                slot.close()
            if len(self._slots) >= SLOTS and all(slot.lent for slot in self._slots):
                # A receiver that has just switched to the newer slot is about to return this one.
                self._slots[0].wait_free(RETURN_SECONDS)
            for slot in self._slots:
                fits = slot.size >= max(nbytes, 1) and slot.writable == self.writable
                if fits and not slot.lent:
                    self._slots.remove(slot)
                    self._slots.append(slot)  # the one used longest ago comes first
                    return slot, slot.lend()
            if len(self._slots) >= SLOTS:
                # A free slot that does not fit, else the one whose reader doesn't return it.
                gone = next((each for each in self._slots if not each.lent), self._slots[0])
                if gone.doubts:
                    self._condemn_slot(gone)
                else:
                    gone.close()
                self._slots.remove(gone)
            slot = Slot(
                nbytes,
                self._page_lock,
                self._share,
                hollow=expected is not None,
                expected=expected,
                writable=self.writable,
            )
            self._slots.append(slot)
            return slot, slot.lend()

    def _condemn_slot(self, slot: Slot) -> None:
        """Take a slot out of use; its pages stay until a later version finds that no process has them.

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
        """Free all slots; receivers keep what they have mapped."""
        with self._lock:
            slots = [*self._slots, *self._condemned]
            self._slots, self._condemned = [], []
        for slot in slots:
            slot.close()


def map_readonly(handle: int, size: int) -> mmap.mmap:
    """Map memory that another process gave this one.

    Raises:
        ArenaError: It is smaller than its sender said, or may shrink, which would end the reader by a signal.
    """
    _check_shared(handle, size)
    return mmap.mmap(handle, size, prot=mmap.PROT_READ)


def map_private(handle: int, size: int) -> mmap.mmap:
    """Map it for libraries that want writable memory: pages are shared until this process writes them.

    All pages are mapped at once. Raises what `map_readonly` raises.
    """
    _check_shared(handle, size)
    mapped = mmap.mmap(handle, size, flags=mmap.MAP_PRIVATE)
    to_be_read(mapped)
    return mapped


def advise_kernel(mapped: mmap.mmap | ctypes.Array[Any], advice: int) -> None:
    """Advise the kernel about a writable mapping; ignore advice that it does not support.

    By ctypes, so that other threads run: `mmap.madvise` stops them for a tenth of a second per gigabyte.
    """
    first = ctypes.c_char.from_buffer(mapped)
    address, size = ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapped))
    ctypes.CDLL(None).madvise(address, size, advice)


def to_be_read(mapped: mmap.mmap | ctypes.Array[Any]) -> None:
    """Map all pages of shared memory at once, as large pages where the memory has them."""
    advise_kernel(mapped, mmap.MADV_HUGEPAGE)
    advise_kernel(mapped, POPULATE_READ)


def _check_shared(handle: int, size: int) -> None:
    there = os.fstat(handle).st_size
    if not 0 < size <= there:
        raise ArenaError(f"the memory has {there} bytes, not {size} as was said")
    try:
        seals = fcntl.fcntl(handle, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ArenaError(f"this memory can't be sealed: {error}") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ArenaError("this memory may shrink while it is read: its owner must seal it")


def _check_room(nbytes: int) -> None:
    """Refuse a size for which the kernel would end this process: nothing else limits memfds."""
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
    """Seal its size: no process can shrink or grow it."""
    fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


def _seal_memory(handle: int) -> None:
    """Seal it against writing, except by mappings that exist already."""
    with contextlib.suppress(OSError):  # an older kernel
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, FUTURE_WRITE)
    fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
