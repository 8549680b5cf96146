"""Memory for one version of weights, which the processes of a machine may share.

A slot is a memfd: it has no name, it can't shrink under its readers, only its owner can write it, and the
kernel frees it when the last process that has it ends. Its pages are allocated before use, since fresh pages cost more
than the copy. Where no other process has to map it, a slot is private memory: fresh, it costs a quarter as much.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable

from rollout_common.numa_pages import interleave_pages
from rollout_common.transfer.layout import Placed

from .mapped_memory import POPULATE_WRITE, SharedMemoryError, advise_kernel
from .memory_limits import MARGIN_BYTES, memory_left
from .memory_users import nobody_has, open_again
from .page_locking import lock_pages as page_lock

FUTURE_WRITE = 0x10
"""F_SEAL_FUTURE_WRITE of Linux 5.1, which Python doesn't name."""

Release = Callable[[], None]
Share = Callable[[int, int], None]

Lock = Callable[[int, int], Release | None]
"""As `page_locking.lock_pages`: takes address and size; returns what unlocks them, None if they can't be locked."""


class Slot:
    """Memory for one version.

    Args:
        nbytes: Its size.
        share: Called with its descriptor and size, as long as others may still map it to write.
        private: Whether only this process has it, without a descriptor. Its pages are large ones, where the
            kernel gives them on request.
        expected: How many of its bytes will be written: it is hollow, so that its pages are allocated one by one, as they
            are written. `write_run` alone then writes shared memory until all of it is there: half the cost of a page is
            to clear it and to map it for writing. None: all of its pages are allocated now.
        writable: Whether other processes may map it to write, too: RDMA can't register memory that they can't.

    Raises:
        SharedMemoryError: There is no room, or the kernel refuses such memory.
    """

    def __init__(
        self,
        nbytes: int,
        lock: Lock = page_lock,
        share: Share | None = None,
        *,
        private: bool = False,
        expected: int | None = None,
        writable: bool = False,
    ) -> None:
        _check_room(nbytes if expected is None else expected)
        self.size = max(nbytes, 1)
        self.private, self.writable = private, writable
        self.is_hollow = expected is not None
        """Whether bytes of it are still to be written."""
        self._news = threading.Condition()
        self._lent = 0
        self.doubts: set[str] = set()
        """The readers that got it and have not said that they are done with it."""
        self.root_hash: str | None = None
        """Of the version that it held when its owner kept it for a later one; None: it may hold anything."""
        self._closed = False
        self._map: mmap.mmap | None = None
        self._lock, self._locking = lock, threading.Lock()
        self._asked = False
        self._unlock: Release | None = None
        self.handle = -1
        """Its descriptor; -1: it is private, or was closed."""
        try:
            self._map = self._map_private() if private else self._map_shared(share)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise _allocation_error(nbytes, error) from error
            raise

    def _map_private(self) -> mmap.mmap:
        mapped = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        advise_kernel(mapped, mmap.MADV_HUGEPAGE)
        interleave_pages(mapped)
        if not self.is_hollow:
            advise_kernel(mapped, POPULATE_WRITE)
        return mapped

    def _map_shared(self, share: Share | None) -> mmap.mmap:
        self.handle = os.memfd_create("rollout-push", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.handle, self.size)
        mapped = mmap.mmap(self.handle, self.size)
        advise_kernel(mapped, mmap.MADV_HUGEPAGE)
        interleave_pages(mapped)
        if not self.is_hollow:
            # Through the mapping, since only the mapping asks for large pages. `posix_fallocate` then raises if
            # pages are missing: a page that the kernel can't allocate later would end the process.
            advise_kernel(mapped, POPULATE_WRITE)
            os.posix_fallocate(self.handle, 0, self.size)
        if share is not None:
            share(self.handle, self.size)
        fcntl.fcntl(self.handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        if not self.is_hollow and not self.writable:
            _seal_memory(self.handle)
        return mapped

    def write_run(self, begin: int, content: memoryview) -> None:
        """Write a run of a hollow slot; the caller must keep the slot from being closed.

        Raises:
            SharedMemoryError: There is no room.
        """
        done = 0
        try:
            while done < len(content):
                with content[done:] as rest:
                    done += os.pwrite(self.handle, rest, begin + done)
        except OSError as error:
            raise _no_room(self.size, str(error)) from error

    def seal_contents(self) -> None:
        """Note that every byte of a hollow slot is written: from now on it is like any other. Idempotent."""
        if self.is_hollow and not self.private and not self.writable:
            _seal_memory(self.handle)
        self.is_hollow = False

    @property
    def is_lent(self) -> bool:
        """Whether a process may still read or write it."""
        if not self._lent and self.doubts and nobody_has(self.handle):
            self.doubts.clear()
        return self._lent > 0 or bool(self.doubts)

    def note_doubt(self, reader: str) -> None:
        """Note that a reader could not say that it is done with this; call it before the slot is returned."""
        self.doubts.add(reader)

    def open_reader(self) -> int:
        """Return a descriptor to pass to a reader and then close: `nobody_has` knows only of these.

        Raises:
            SharedMemoryError: The kernel does not give one.
        """
        try:
            return open_again(self.handle)
        except OSError as error:
            raise SharedMemoryError(f"this memory can't be shared: {error}") from error

    def lend_slot(self) -> Release:
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

    def view_tensor(self, placed: Placed) -> memoryview:
        """Return a tensor's place, writable."""
        return self.view_bytes(placed.start, placed.end)

    def view_bytes(self, begin: int, end: int) -> memoryview:
        """Return a run of it, writable."""
        mapped = self._map  # another thread may close it at this moment
        if mapped is not None and not self._closed:
            with contextlib.suppress(ValueError):
                return memoryview(mapped)[begin:end]
        raise SharedMemoryError("this memory was given up")

    def lock_pages(self) -> bool:
        """Lock its pages at the first call; return whether a GPU writes it at full speed.

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

        A device may still write pages that are locked and lent: the last `lend_slot` to end frees those.
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


def _check_room(nbytes: int) -> None:
    """Refuse a size for which the kernel would end this process: nothing else limits memfds."""
    found = memory_left()
    if found is not None and nbytes + MARGIN_BYTES > found[0]:
        left, what = found
        raise _no_room(nbytes, f"{max(left, 0)} are left of {what}, and {MARGIN_BYTES} stay free")


def _allocation_error(nbytes: int, error: OSError) -> SharedMemoryError:
    if error.errno in (errno.ENOMEM, errno.ENOSPC, errno.EFBIG):
        return _no_room(nbytes, str(error))
    return SharedMemoryError(
        f"this process may not make memory that others share ({error}): let its sandbox allow memfd_create and"
        " seals of files, or publish by files"
    )


def _no_room(nbytes: int, why: str) -> SharedMemoryError:
    return SharedMemoryError(
        f"there is no room for {nbytes} bytes of weights in memory: {why}; give this process more "
        "memory, or publish by files"
    )


def _seal_memory(handle: int) -> None:
    """Seal it against writing, except by mappings that exist already."""
    with contextlib.suppress(OSError):  # an older kernel
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, FUTURE_WRITE)
    fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
