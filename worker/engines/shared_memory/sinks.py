"""Memory for a version of weights that an engine's own processes can map; one life, one file.

It has no name in any file system: it is a descriptor of this process, opened by the others through
/proc, and gone when the last process that has it open is. So it is bounded by the pod's memory, not
by the size of /dev/shm, and outlives nobody. All of its room is taken at once: what is not there is told
when it is asked for, not by a signal when it is filled. `torch` is not needed here.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import tempfile
import uuid
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from rollout_worker.engine import EngineError, GivenWeights, MappedWeights, Sink, TensorEntry
from rollout_worker.threads import open_in_thread

from .ranks import EngineRanks
from .staging_budget import StagingBudget

SLOTS_VARIABLE = "ROLLOUT_SLOTS"
"""Tells the ranks of an engine where the slots of their node are."""

TENSOR_ALIGNMENT = 64
"""Every tensor begins at a multiple of this: what any dtype and vector load wants."""


class MappedSink(Sink):
    """The `Sink` of engines whose model is in another process.

    Taking its room may take its time: see `open_mapped_sink`.

    Args:
        entries: What it has room for.
        folder: Where its unnamed file is to be; None: in memory.
        header: Begin with a header of safetensors, so that it can be read as such a file.
            Without one, in a gang's folder, it begins with an index of its own (`read_index`).
        skip: Names whose values aren't needed.
        staging: What it is charged to if it is in memory, until it is closed.
        slots: The gang's folder of slots: the sink is found there by its id as long as it is open.
        slot: That id; None: a new one.

    Raises:
        EngineError: there is no room.
    """

    memory: Literal["host"] = "host"
    slot = ""
    took = False
    borrowed = False
    ranks: EngineRanks | None = None
    """The processes that map it as long as it is sealed; None: none has to before the commit."""
    _ranks_notified = False

    def __init__(
        self,
        entries: Sequence[TensorEntry],
        folder: Path | None = None,
        *,
        header: bool = False,
        skip: Collection[str] = (),
        staging: StagingBudget | None = None,
        slots: Path | None = None,
        slot: str | None = None,
    ) -> None:
        kept = [entry for entry in entries if entry.name not in skip]
        laid = (
            _safetensors_layout if header else _aligned_layout if slots is None else _indexed_layout
        )
        first, self._starts, size = laid(kept)
        self._entries = kept
        self._size = max(size, 1)
        self._on_disk = folder is not None
        self._map: mmap.mmap | None = None
        self.sealed = False
        self._give_back = (
            _free_nothing if folder else (staging or StagingBudget()).claim_memory(size)
        )
        try:
            self._handle = _open_file(folder)
            try:
                self._map = self._map_file()
            except OSError:
                os.close(self._handle)
                raise
        except OSError as error:
            self._give_back()
            raise EngineError(
                f"there is no room for {size} bytes of weights in {folder or 'memory'}: {error}; "
                + ("free space there or set another spill_dir" if folder else "raise its limit")
            ) from error
        self._map[: len(first)] = first
        self.slot = ""
        self._link: Path | None = None
        if slots is not None:
            self._publish_slot(slots, slot or uuid.uuid4().hex)

    def _publish_slot(self, slots: Path, slot: str) -> None:
        """Let the ranks of this node find it."""
        link = slots / slot
        try:
            link.symlink_to(self.path)
        except OSError as error:
            self.close()
            raise EngineError(f"slot {slot} can't be opened in {slots}: {error}") from error
        self.slot, self._link = slot, link

    def _map_file(self) -> mmap.mmap:
        # A hole that can't be filled later would end the process, not raise.
        os.posix_fallocate(self._handle, 0, self._size)
        return mmap.mmap(self._handle, self._size)

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
        """Return what a process needs to read the tensors without a header (`rank_mappings`)."""
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
        """Gives up this process's own view, and has the ranks take theirs."""
        self._unmap_view(flush=self._on_disk)
        self.sealed = True
        if self.ranks is not None and not self._on_disk:
            self._ranks_notified = True
            self.ranks.map_sink(self.sink_location, self._size, borrowed=self.borrowed)

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
    """The same over memory that was given: none is taken, nothing is written.

    Args:
        entries: What it has.
        given: Where they are; released when it is closed.
        skip: Names whose values aren't needed.
    """

    took = True
    borrowed = True

    def __init__(
        self, entries: Sequence[TensorEntry], given: MappedWeights, *, skip: Collection[str] = ()
    ) -> None:
        self._entries = [entry for entry in entries if entry.name not in skip]
        self._starts = given.starts
        self._size = given.size
        self._on_disk = False
        self._map = None
        self.sealed = False
        self._give_back = given.release
        assert given.handle is not None, "whoever made it has looked"
        self._handle = os.dup(given.handle)
        self._ticket_file = -1
        self.slot, self._link = "", None

    @property
    @override
    def nbytes(self) -> int:
        """None of its own."""
        return 0

    def ticket_path(self) -> str:
        """Return the path of a file without a name that holds the ticket, open as long as this is."""
        if self._ticket_file < 0:
            self._ticket_file = os.memfd_create("rollout-ticket", os.MFD_CLOEXEC)
            with open(self._ticket_file, "wb", closefd=False) as file:
                file.write(self.make_ticket().encode())
        return f"/proc/{os.getpid()}/fd/{self._ticket_file}"

    @override
    def close(self) -> None:
        ticket, self._ticket_file = self._ticket_file, -1
        if ticket >= 0:
            os.close(ticket)
        super().close()


async def open_mapped_sink(
    entries: Sequence[TensorEntry],
    folder: Path | None = None,
    *,
    header: bool = False,
    skip: Collection[str] = (),
    staging: StagingBudget | None = None,
    slots: Path | None = None,
    slot: str | None = None,
    given: GivenWeights | None = None,
    ranks: EngineRanks | None = None,
) -> MappedSink:
    """Make a `MappedSink` in a thread, of which `ranks` are told; a cancelled caller gets none, and none stays.

    With mapped memory `given` that others can read it is a `BorrowedSink`, unless it is to be on disk or in
    a gang's folder.

    Raises:
        EngineError: there is no room.
    """
    if (
        isinstance(given, MappedWeights)
        and given.handle is not None
        and folder is None
        and slots is None
    ):
        sink: MappedSink = BorrowedSink(entries, given, skip=skip)
    else:
        sink = await open_in_thread(
            lambda: MappedSink(
                entries, folder, header=header, skip=skip, slots=slots, slot=slot, staging=staging
            )
        )
    sink.ranks = ranks
    return sink


def slot_path(slot: str) -> str:
    """Return where a rank finds a slot of its node."""
    return str(Path(os.environ[SLOTS_VARIABLE]) / slot)


def _aligned_layout(entries: Sequence[TensorEntry]) -> tuple[bytes, Mapping[str, int], int]:
    """Return what comes first, where each tensor begins, and the size of all."""
    starts, end = {}, 0
    for entry in entries:
        starts[entry.name] = end
        end += -(-entry.spec.nbytes // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
    return b"", starts, end


def _indexed_layout(entries: Sequence[TensorEntry]) -> tuple[bytes, Mapping[str, int], int]:
    """Return the same for memory that begins with its index."""
    _, starts, size = _aligned_layout(entries)
    first = _encode_header(starts)
    return first, {name: len(first) + start for name, start in starts.items()}, len(first) + size


def read_index(handle: int) -> dict[str, int]:
    """Return where each tensor begins in what lies in a gang's folder, by its own word.

    Each node may hold others of a version's tensors, so the head's ticket can't say it. What is not named is not there.
    """
    length = int.from_bytes(os.pread(handle, 8, 0), "little")
    starts: dict[str, int] = json.loads(os.pread(handle, length, 8))
    return {name: 8 + length + start for name, start in starts.items()}


def _encode_header(fields: Mapping[str, Any]) -> bytes:
    """Return a header as safetensors begin with: its length, and what is where behind it."""
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % TENSOR_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _safetensors_layout(entries: Sequence[TensorEntry]) -> tuple[bytes, Mapping[str, int], int]:
    """Return the same for a file of safetensors, which knows no gaps."""
    fields: dict[str, Any] = {}
    end = 0
    for entry in entries:
        begin, end = end, end + entry.spec.nbytes
        fields[entry.name] = {
            "dtype": entry.spec.dtype,
            "shape": list(entry.spec.shape),
            "data_offsets": [begin, end],
        }
    first = _encode_header(fields)
    starts = {name: len(first) + field["data_offsets"][0] for name, field in fields.items()}
    return first, starts, len(first) + end


def _free_nothing() -> None:
    """Give nothing back: a file is charged to no budget of memory."""


def _open_file(folder: Path | None) -> int:
    return (
        os.memfd_create("rollout-weights", os.MFD_CLOEXEC)
        if folder is None
        else open_unnamed_file(folder)
    )


def open_unnamed_file(folder: Path) -> int:
    """Return a descriptor of a new file without a name, which can't outlive who has it open."""
    handle, name = tempfile.mkstemp(prefix="rollout-spill-", dir=folder)
    os.unlink(name)
    return handle
