"""Memory for a whole set of weights that vLLM's worker processes can map.

A blob has no name in any file system: it is a descriptor of this process, opened by the workers
through /proc, and gone when the last process that has it open is. `torch` is not needed here.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from rollout_worker.sources.files import Entry

ALIGN = 64
"""Every tensor begins at a multiple of this: what any dtype and vector load wants."""


class Blob:
    """Bytes of tensors, one after another."""

    def __init__(self, entries: Iterable[Entry], folder: Path | None) -> None:
        """Make room for `entries`, in memory, or in a file without a name in `folder`.

        Raises:
            OSError: there is no room.
        """
        self._places: dict[str, tuple[Entry, int]] = {}
        size = 0
        for entry in entries:
            self._places[entry.name] = (entry, size)
            size += -(-entry.spec.nbytes // ALIGN) * ALIGN
        self.nbytes = size
        self.in_memory = folder is None
        self._handle = _open(folder)
        try:
            if folder is None:
                os.ftruncate(self._handle, max(size, 1))
            else:  # a hole that can't be filled later would end the process, not raise
                os.posix_fallocate(self._handle, 0, max(size, 1))
            self._map: mmap.mmap | None = mmap.mmap(self._handle, max(size, 1))
        except OSError:
            os.close(self._handle)
            raise

    def buffer(self, entry: Entry) -> memoryview:
        """Return where the bytes of a tensor go."""
        assert self._map is not None
        start = self._places[entry.name][1]
        return memoryview(self._map)[start : start + entry.spec.nbytes]

    def seal(self) -> None:
        """Give up this process's own view once everything is written."""
        mapped, self._map = self._map, None
        if mapped is not None:
            if not self.in_memory:
                mapped.flush()
            mapped.close()

    def ticket(self) -> str:
        """Return what a worker process needs to read it (`extension.py`)."""
        tensors = [
            (name, entry.spec.dtype, list(entry.spec.shape), start)
            for name, (entry, start) in self._places.items()
        ]
        path = f"/proc/{os.getpid()}/fd/{self._handle}"
        return json.dumps({"path": path, "size": max(self.nbytes, 1), "tensors": tensors})

    def close(self) -> None:
        """Give the memory back; idempotent."""
        self.seal()
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


def _open(folder: Path | None) -> int:
    if folder is None:
        return os.memfd_create("rollout-weights", os.MFD_CLOEXEC)
    handle, name = tempfile.mkstemp(prefix="rollout-spill-", dir=folder)
    os.unlink(name)  # without a name it cannot outlive the process
    return handle
