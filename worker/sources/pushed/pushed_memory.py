"""Memory that holds a pushed version, with a count of its readers and writers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from rollout_common.transfer.memory.mapped_memory import SharedMemoryError
from rollout_common.transfer.memory.mapping_cache import MappingCache
from rollout_common.transfer.memory.slot import Slot
from rollout_common.transfer.memory.spare_memory import Used
from rollout_common.wire.root_hash import LEAF_BYTES
from rollout_worker.engine import EngineError


class TransferFailed(EngineError):
    """The bytes did not arrive; the text gives the reason and the fix."""


class Memory:
    """The bytes of one version: memory of this process or of the trainer, as long as there is a hold on it.

    Args:
        size: Size in bytes.
        handle: Descriptor of the trainer's memory, which this closes; None: memory of this process.
        maps: Gives mappings of the trainer's memory, and takes them back.
        used: Memory of this process and of this size to use again.
        recycle: Takes memory of this process once the last hold ends; None: it is freed.
        hollow: Whether `commit_run` writes every byte, which halves the cost of fresh memory of this process.
        private: Whether memory of this process has no descriptor, so that no other process can map it.
        expected: How many bytes of hollow memory of this process are written; None: all.
        by_nixl: Whether other workers may read memory of this process by NIXL.

    Raises:
        SharedMemoryError: There is no room, or the trainer's memory can't be relied on.
    """

    def __init__(
        self,
        size: int,
        handle: int | None = None,
        maps: MappingCache | None = None,
        *,
        used: Used | None = None,
        recycle: Callable[[Used], None] | None = None,
        hollow: bool = False,
        private: bool = False,
        expected: int | None = None,
        by_nixl: bool = False,
    ) -> None:
        self.size, self.by_nixl = size, by_nixl
        self.held_before = None if used is None else used.root_hash
        """Root hash of the former version, which each run holds until it is written."""
        self.root_hash: str | None = None
        """Root hash of the version that it holds, once that is verified."""
        self.own = handle is None
        self.handle = handle
        """Descriptor by which other processes map it; None: they can't map it."""
        self.freed = threading.Event()
        """Set once the last hold has ended."""
        self.on_freed: Callable[[], None] = lambda: None
        """Called once the last hold has ended, from any thread."""
        self._lock = threading.Lock()
        self._buffers: list[bytearray] = []
        self._holders = 0
        if handle is None:
            slot = (
                Slot(size, hollow=hollow, private=private, expected=expected, writable=by_nixl)
                if used is None
                else used.slot
            )
            self._hollow = slot if hollow and used is None else None
            self.handle = None if slot.private else slot.handle
            self._view = slot.view_bytes(0, slot.size)

            def done() -> None:
                viewed = self._viewed()  # first, since the memory is freed with its last view
                if recycle is None or self._hollow is not None or viewed:
                    slot.close()
                else:
                    recycle(Used(slot, self.root_hash))

            self._close = done
            return
        self._hollow = None
        maps = maps or MappingCache()
        try:
            mapped = maps.take_mapping(handle, size)
        except BaseException:
            os.close(handle)
            raise
        self._view = memoryview(mapped)

        def close() -> None:
            self._viewed()
            maps.give_mapping(handle, mapped)
            os.close(handle)

        self._close = close

    def bytes(self, begin: int, end: int) -> memoryview:
        """Return a view of a run of it."""
        return self._view[begin:end]

    def writable(self, begin: int, end: int) -> memoryview:
        """Return the place of a run, or for hollow shared memory a buffer that stays in the processor's cache."""
        if self._hollow is None or self._hollow.private:
            return self.bytes(begin, end)
        buffer = self._buffers.pop() if self._buffers else bytearray()
        if len(buffer) < end - begin:
            buffer = bytearray(max(end - begin, LEAF_BYTES))
        return memoryview(buffer)[: end - begin]

    def commit_run(self, begin: int, content: memoryview, *, in_place: bool) -> None:
        """Write a run that came, unless it is at its place already; `in_place`: whether `writable` returned its buffer.

        Raises:
            TransferFailed: There is no room for it.
        """
        if self._hollow is not None and not self._hollow.private:
            try:
                self._hollow.write_run(begin, content)
            except SharedMemoryError as error:
                raise TransferFailed(str(error)) from error
            if in_place and isinstance(content.obj, bytearray):
                self._buffers.append(content.obj)
        elif not in_place:
            with self.bytes(begin, begin + len(content)) as place:
                place[:] = content

    def verified(self, root_hash: str) -> None:
        """Note that all of it is there, and its root hash."""
        self.root_hash = root_hash
        hollow, self._hollow = self._hollow, None
        if hollow is not None:
            hollow.seal_contents()

    def hold(self) -> Callable[[], None]:
        """Hold it; return what ends the hold, which is idempotent and may be called from any thread."""
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
            self.on_freed()

        return release

    def _viewed(self) -> bool:
        """Release the view; return whether views of parts still exist, as in an error's frames."""
        try:
            self._view.release()
        except BufferError:
            return True
        return False
