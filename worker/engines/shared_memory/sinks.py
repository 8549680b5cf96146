"""Memory for one version of weights that an engine's own processes can map.

The memory is a file without a name: a descriptor of this process, which the others open through /proc. It
is gone when the last process that has it open ends. So the pod's memory bounds it, not the size of /dev/shm.
All of it is allocated at once: a lack of memory shows when the sink is opened, not as a signal while it is
filled. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import tempfile
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal

from typing_extensions import override

from rollout_common.numa_pages import interleave_pages
from rollout_worker.engine import EngineError, LentTensors, MappedWeights, Sink, TensorEntry

from .ranks import EngineRanks
from .staging_budget import StagingBudget

SLOTS_VARIABLE = "ROLLOUT_SLOTS"
"""The environment variable that names the folder of the node's slots to the engine's ranks."""

TENSOR_ALIGNMENT = 64
"""Every tensor begins at a multiple of this: what any dtype and vector load wants."""


class MappedSink(Sink):
    """The `Sink` of engines whose model is in another process; `weight_versions.open_mapped_sink` opens it in a thread.

    Args:
        entries: The tensors that it has memory for.
        folder: Where its unnamed file is; None: in memory.
        skip: Names whose values aren't needed.
        staging: What its memory is charged to until it is closed.
        slots: The gang's folder of slots, where a link named by the id leads to the open sink. Such a sink begins
            with an index (`read_index`).
        slot: That id; None: a new one.

    Raises:
        EngineError: there is not enough memory.
    """

    memory: Literal["host"] = "host"
    slot = ""
    took = False
    sealed = False
    ranks: EngineRanks | None = None
    """The processes that map it as long as it is sealed; None: they map it at the commit."""
    _ranks_notified = False
    _on_disk = False
    _map: mmap.mmap | None = None
    _link: Path | None = None

    def __init__(
        self,
        entries: Sequence[TensorEntry],
        folder: Path | None = None,
        *,
        skip: Collection[str] = (),
        staging: StagingBudget | None = None,
        slots: Path | None = None,
        slot: str | None = None,
    ) -> None:
        self._entries = [entry for entry in entries if entry.name not in skip]
        first, self._starts, size = _lay_out(self._entries, index=slots is not None)
        self._size = max(size, 1)
        self._on_disk = folder is not None
        self._give_back: Callable[[], None] = lambda: None  # a file is charged to no memory
        if folder is None:
            self._give_back = (staging or StagingBudget()).claim_memory(size)
        try:
            self._handle, self._map = self._open_file(folder)
        except OSError as error:
            self._give_back()
            raise EngineError(
                f"no room for {size} bytes of weights in {folder or 'memory'}: {error}; "
                + ("free space there or set another spill_dir" if folder else "raise its limit")
            ) from error
        self._map[: len(first)] = first
        if slots is not None:
            self._publish_slot(slots, slot or uuid.uuid4().hex)

    def _open_file(self, folder: Path | None) -> tuple[int, mmap.mmap]:
        if folder is None:
            handle = os.memfd_create("rollout-weights", os.MFD_CLOEXEC)
        else:
            handle = open_unnamed_file(folder)
        try:
            os.ftruncate(handle, self._size)
            mapped = mmap.mmap(handle, self._size)
            if folder is None:
                interleave_pages(mapped)
            # A hole that can't be filled later would end the process, not raise.
            os.posix_fallocate(handle, 0, self._size)
            return handle, mapped
        except OSError:
            os.close(handle)
            raise

    def _publish_slot(self, slots: Path, slot: str) -> None:
        link = slots / slot
        try:
            link.symlink_to(self.path)
        except OSError as error:
            self.close()
            raise EngineError(f"slot {slot} can't be opened in {slots}: {error}") from error
        self.slot, self._link = slot, link

    @property
    @override
    def nbytes(self) -> int:
        return self._size if self._handle >= 0 else 0

    @property
    def path(self) -> str:
        """Where other processes of this user find it."""
        return f"/proc/{os.getpid()}/fd/{self._handle}"

    @property
    def sink_location(self) -> dict[str, str]:
        """Where a process of the engine finds it: in a gang each on its own node."""
        return {"slot": self.slot} if self.slot else {"path": self.path}

    def make_ticket(self) -> str:
        """Return what a process needs to read the tensors (`rank_mappings`), as JSON."""
        tensors = [
            (entry.name, entry.spec.dtype, list(entry.spec.shape), self._starts[entry.name])
            for entry in self._entries
        ]
        return json.dumps({**self.sink_location, "size": self._size, "tensors": tensors})

    @override
    def allocate(self, entry: TensorEntry) -> memoryview | None:
        start = self._starts.get(entry.name)
        if start is None or self._map is None:
            return None
        return memoryview(self._map)[start : start + entry.spec.nbytes]

    @override
    def seal(self) -> None:
        self._unmap_view(flush=self._on_disk)
        self.sealed = True
        if self.ranks is not None and not self._on_disk:
            self._ranks_notified = True
            self.ranks.map_sink(self.sink_location, self._size)

    @override
    def close(self) -> None:
        if self._ranks_notified and self.ranks is not None:
            self._ranks_notified = False
            self.ranks.unmap_sink(self.sink_location)
        # The frames of an error may still have a view of it: the pages go with them then.
        with contextlib.suppress(BufferError):
            self._unmap_view(flush=False)
        self.sealed = False
        link, self._link = self._link, None
        if link is not None:
            link.unlink(missing_ok=True)
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)
        self._give_back()

    def _unmap_view(self, *, flush: bool) -> None:
        mapped, self._map = self._map, None
        if mapped is not None:
            if flush:
                mapped.flush()
            mapped.close()


class BorrowedSink(MappedSink):
    """A sink over memory that was given: it allocates nothing, and nobody writes to it.

    `given` is released when the sink is closed.
    """

    took = True

    def __init__(
        self, entries: Sequence[TensorEntry], given: MappedWeights, *, skip: Collection[str] = ()
    ) -> None:
        assert given.handle is not None, "`open_mapped_sink` checks it"
        self._entries = [entry for entry in entries if entry.name not in skip]
        self._starts = given.starts
        self._size = given.size
        self._give_back = given.release
        self._handle = os.dup(given.handle)

    @property
    @override
    def nbytes(self) -> int:
        return 0


class LentSink(MappedSink):
    """A sink whose values the ranks have already: a trainer lent them, and they were read into empty weights."""

    took = True

    def __init__(self) -> None:
        self._entries, self._starts, self._size, self._handle = [], {}, 0, -1
        self._give_back = lambda: None

    @override
    def make_ticket(self) -> str:
        return json.dumps({"loaded": True})


def make_lent_ticket(lent: LentTensors, ranks: int) -> str:
    """Return what each of an engine's processes needs to read lent tensors (`lent_reading`), as JSON."""
    layout = lent.layout
    specs = [
        {name: (spec.dtype, spec.shape) for name, spec in each.items()}
        for each in (layout.required, layout.optional)
    ]
    return json.dumps({"lent": lent.open_lanes(ranks), "specs": specs, "tied": dict(layout.tied)})


def slot_path(slot: str) -> str:
    """Return where a rank finds a slot of its node."""
    return str(Path(os.environ[SLOTS_VARIABLE]) / slot)


def _lay_out(
    entries: Sequence[TensorEntry], *, index: bool
) -> tuple[bytes, Mapping[str, int], int]:
    """Return the first bytes (none, or an index: its length, then JSON), where tensors begin, and the whole size."""
    starts, end, first = {}, 0, b""
    for entry in entries:
        starts[entry.name] = end
        end += -(-entry.spec.nbytes // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
    if index:
        text = json.dumps(starts, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % TENSOR_ALIGNMENT)
        first = len(text).to_bytes(8, "little") + text
    return first, {name: len(first) + start for name, start in starts.items()}, len(first) + end


def read_index(handle: int) -> dict[str, int]:
    """Return where each tensor begins in a sink of a gang's folder, as its own index says.

    Each node may hold other tensors of a version, so the head's ticket can't say it. A tensor that the index does
    not name is not there.
    """
    length = int.from_bytes(os.pread(handle, 8, 0), "little")
    starts: dict[str, int] = json.loads(os.pread(handle, length, 8))
    return {name: 8 + length + start for name, start in starts.items()}


def open_unnamed_file(folder: Path) -> int:
    """Return a descriptor of a new file without a name, which is gone once no process has it open."""
    handle, name = tempfile.mkstemp(prefix="rollout-spill-", dir=folder)
    os.unlink(name)
    return handle
