"""Memory that holds a pushed version, counted by who reads or writes it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from rollout_worker.engine import EngineError
from rollout_worker.transfer.arena import Slot
from rollout_worker.transfer.maps import Maps
from rollout_worker.transfer.spare import Used


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
    ) -> None:
        self.size = size
        self.held_before = None if used is None else used.root_hash
        """Root hash of the version that a run of it holds until it is written."""
        self.root_hash: str | None = None
        """Of what it holds, once that is verified."""
        self.own = handle is None
        self.freed = threading.Event()
        """Set once nobody holds it."""
        self._lock = threading.Lock()
        self._holders = 0
        if handle is None:
            slot = Slot(size) if used is None else used.slot
            self.handle, self._view = slot.handle, slot.bytes(0, slot.size)

            def done() -> None:
                viewed = self._viewed()  # first: memory goes with its last view
                if recycle is None or viewed:
                    slot.close()
                else:
                    recycle(Used(slot, self.root_hash))

            self._close = done
            return
        maps = maps or Maps()
        try:
            mapped = maps.take(handle, size)
        except BaseException:
            os.close(handle)
            raise
        self.handle, self._view = handle, memoryview(mapped)

        def close() -> None:
            self._viewed()
            maps.give(handle, mapped)
            os.close(handle)

        self._close = close

    def bytes(self, begin: int, end: int) -> memoryview:
        """Return a run of it."""
        return self._view[begin:end]

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
