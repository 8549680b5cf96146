"""Memory that holds a pushed version, with a count of its readers and writers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from typing_extensions import override

from rollout_common.transfer.memory.mapped_memory import MappingCache, SharedMemoryError
from rollout_common.transfer.memory.slot import Slot
from rollout_common.wire.root_hash import LEAF_BYTES
from rollout_worker.engine import EngineError


class TransferFailed(EngineError):
    """The bytes did not arrive; the text gives the reason and the fix."""


class Refusal(Exception):
    """What this end answers in `ERROR`: slug, detail, and the tensor at fault."""

    def __init__(self, slug: str, detail: str, tensor: str | None = None) -> None:
        super().__init__(detail)
        self.slug = slug
        self.tensor = tensor


class Memory:
    """The bytes of one version, as long as there is a hold on them: memory of this process or of the trainer.

    Args:
        size: Size in bytes.
        handle: Descriptor by which other processes map it; None: they can't map it.
        view: All of it.
    """

    own = True
    """Whether it is memory of this process."""
    by_nixl = False
    """Whether other workers may read it by NIXL."""
    held_before: str | None = None
    """Root hash of the former version, which each run holds until it is written."""

    def __init__(self, size: int, handle: int | None, view: memoryview) -> None:
        self.size, self.handle = size, handle
        self.root_hash: str | None = None
        """Root hash of the version that it holds, once that is verified."""
        self.freed = threading.Event()
        """Set once the last hold has ended."""
        self.on_freed: Callable[[], None] = lambda: None
        """Called once the last hold has ended, from any thread."""
        self._view = view
        self._lock = threading.Lock()
        self._holders = 0

    def view_bytes(self, begin: int, end: int) -> memoryview:
        """Return a view of a run of it."""
        return self._view[begin:end]

    def writable(self, begin: int, end: int) -> memoryview:
        """Return the place of a run, or a buffer for it."""
        return self.view_bytes(begin, end)

    def commit_run(self, begin: int, content: memoryview, *, in_place: bool) -> None:
        """Write a run that came, unless it is at its place already; `in_place`: whether `writable` returned its buffer.

        Raises:
            TransferFailed: There is no room for it.
        """
        if not in_place:
            with self.view_bytes(begin, begin + len(content)) as place:
                place[:] = content

    def note_verified(self, root_hash: str) -> None:
        """Note that all of it is there, and its root hash."""
        self.root_hash = root_hash

    def add_hold(self) -> Callable[[], None]:
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
            # First, since the memory is freed with its last view. Views of parts may exist in an error's frames.
            is_viewed = False
            try:
                self._view.release()
            except BufferError:
                is_viewed = True
            self._free_memory(is_viewed=is_viewed)
            self.on_freed()

        return release

    def _free_memory(self, *, is_viewed: bool) -> None:
        """Give the memory back; `is_viewed`: something still reads parts of it."""
        raise NotImplementedError


class TrainerMemory(Memory):
    """Memory of the trainer, mapped to read.

    Args:
        size: Size in bytes.
        handle: Its descriptor, which this closes.
        maps: Gives mappings, and takes them back.

    Raises:
        SharedMemoryError: It can't be relied on.
    """

    own = False

    def __init__(self, size: int, handle: int, maps: MappingCache) -> None:
        self._maps, self._descriptor = maps, handle
        try:
            self._mapped = maps.take_mapping(handle, size)
        except BaseException:
            os.close(handle)
            raise
        super().__init__(size, handle, memoryview(self._mapped))

    @override
    def _free_memory(self, *, is_viewed: bool) -> None:
        self._maps.give_mapping(self._descriptor, self._mapped)
        os.close(self._descriptor)


class OwnMemory(Memory):
    """Memory of this process.

    Args:
        slot: The memory, fresh or used before; `commit_run` writes all that is expected of a hollow one.
        recycle: Takes it once the last hold ends; None: it is freed.
    """

    def __init__(self, slot: Slot, recycle: Callable[[Slot], None] | None = None) -> None:
        handle = None if slot.private else slot.handle
        super().__init__(slot.size, handle, slot.view_bytes(0, slot.size))
        self._slot, self._recycle = slot, recycle
        self.by_nixl, self.held_before = slot.writable, slot.root_hash
        self._buffers: list[bytearray] = []

    @property
    def _goes_through_buffers(self) -> bool:
        """Whether runs are written by the kernel, which allocates the pages then, and not by a mapping."""
        return self._slot.is_hollow and not self._slot.private

    @override
    def writable(self, begin: int, end: int) -> memoryview:
        if not self._goes_through_buffers:
            return self.view_bytes(begin, end)
        # A buffer that stays in the processor's cache.
        buffer = self._buffers.pop() if self._buffers else bytearray()
        if len(buffer) < end - begin:
            buffer = bytearray(max(end - begin, LEAF_BYTES))
        return memoryview(buffer)[: end - begin]

    @override
    def commit_run(self, begin: int, content: memoryview, *, in_place: bool) -> None:
        if not self._goes_through_buffers:
            return super().commit_run(begin, content, in_place=in_place)
        try:
            self._slot.write_run(begin, content)
        except SharedMemoryError as error:
            raise TransferFailed(str(error)) from error
        if in_place and isinstance(content.obj, bytearray):
            self._buffers.append(content.obj)
        return None

    @override
    def note_verified(self, root_hash: str) -> None:
        super().note_verified(root_hash)
        self._slot.seal_contents()

    @override
    def _free_memory(self, *, is_viewed: bool) -> None:
        if self._recycle is None or self._slot.is_hollow or is_viewed:
            self._slot.close()
        else:
            self._slot.root_hash = self.root_hash
            self._recycle(self._slot)
