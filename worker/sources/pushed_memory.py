"""Memory that holds a pushed version, counted by who reads or writes it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import xxhash

from rollout_common.transfer.arena import ArenaError, Slot
from rollout_common.transfer.maps import Maps
from rollout_common.transfer.spare import Used
from rollout_worker.engine import EngineError

_own = threading.local()


class TransferFailed(EngineError):
    """The bytes did not arrive; the text says why and what to do."""


class Memory:
    """The bytes of one version: memory of this process, or the trainer's, as long as anybody holds it.

    Args:
        size: Bytes.
        handle: Descriptor of the trainer's, closed here; None: memory of our own.
        maps: Where a mapping of the trainer's comes from, and goes.
        used: Memory to use again as our own, of this size.
        recycle: Takes our own once nobody holds it; None: it is given up.
        hollow: Whether every byte comes by `take`, which spares fresh memory of our own a half of what it costs.
        private: Whether our own is for this process alone, and has no descriptor.
        expected: How many bytes of hollow memory of our own are written; None: all.

    Raises:
        ArenaError: There is no room, or the trainer's memory can't be relied on.
    """

    def __init__(
        self,
        size: int,
        handle: int | None = None,
        maps: Maps | None = None,
        *,
        used: Used | None = None,
        recycle: Callable[[Used], None] | None = None,
        hollow: bool = False,
        private: bool = False,
        expected: int | None = None,
    ) -> None:
        self.size = size
        self.held_before = None if used is None else used.root_hash
        """Root hash of the version that a run of it holds until it is written."""
        self.root_hash: str | None = None
        """Of what it holds, once that is verified."""
        self.own = handle is None
        self.handle = handle
        """Descriptor by which other processes map it; None: they can't."""
        self.freed = threading.Event()
        """Set once nobody holds it."""
        self._lock = threading.Lock()
        self._holders = 0
        if handle is None:
            slot = (
                Slot(size, hollow=hollow, private=private, expected=expected)
                if used is None
                else used.slot
            )
            self._hollow = slot if hollow and used is None else None
            self.handle = None if slot.private else slot.handle
            self._view = slot.bytes(0, slot.size)

            def done() -> None:
                viewed = self._viewed()  # first: memory goes with its last view
                if recycle is None or self._hollow is not None or viewed:
                    slot.close()
                else:
                    recycle(Used(slot, self.root_hash))

            self._close = done
            return
        self._hollow = None
        maps = maps or Maps()
        try:
            mapped = maps.take(handle, size)
        except BaseException:
            os.close(handle)
            raise
        self._view = memoryview(mapped)

        def close() -> None:
            self._viewed()
            maps.give(handle, mapped)
            os.close(handle)

        self._close = close

    def bytes(self, begin: int, end: int) -> memoryview:
        """Return a run of it."""
        return self._view[begin:end]

    def take(self, begin: int, end: int, read: Callable[[memoryview], None]) -> str:
        """Fill a run with what `read` reads into a buffer; returns the hash of what came.

        Whoever calls holds it. In hollow shared memory that is a buffer which stays in the processor's cache.

        Raises:
            TransferFailed: There is no room for it.
        """
        if self._hollow is None or self._hollow.private:
            with self.bytes(begin, end) as place:
                read(place)
                return xxhash.xxh3_128_hexdigest(place)
        with _buffer(end - begin) as came:
            read(came)
            digest = xxhash.xxh3_128_hexdigest(came)
            try:
                self._hollow.put(begin, came)
            except ArenaError as error:
                raise TransferFailed(str(error)) from error
        return digest

    def verified(self, root_hash: str) -> None:
        """Note that all of it is there and what it hashes to."""
        self.root_hash = root_hash
        hollow, self._hollow = self._hollow, None
        if hollow is not None:
            hollow.whole()

    def hold(self) -> Callable[[], None]:
        """Keep it until what is returned is called; that is idempotent, from any thread."""
        with self._lock:
            if self.freed.is_set():
                raise TransferFailed("the bytes are gone: stage again")
            self._holders += 1
        held = [True]

        def release() -> None:
            with self._lock:
                if not held:
                    return
                held.clear()
                self._holders -= 1
                if self._holders:
                    return
                self.freed.set()
            self._close()

        return release

    def _viewed(self) -> bool:
        """Give up the view; whether somebody still has a part of it, as an error's frames may."""
        try:
            self._view.release()
        except BufferError:
            return True
        return False


def _buffer(size: int) -> memoryview:
    """Return memory of this thread, used again and again."""
    there: bytearray | None = getattr(_own, "buffer", None)
    if there is None or len(there) < size:
        there = _own.buffer = bytearray(size)
    return memoryview(there)[:size]
