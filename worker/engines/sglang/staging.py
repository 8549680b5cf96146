"""Weights on their way: read and verified into memory without a name, as one safetensors file.

The file (`memfd`) belongs to the worker; the child opens it by the worker's `/proc/<pid>/fd`. It is
bounded by the pod's memory, not by the size of /dev/shm, and goes with the worker.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rollout_worker import weights
from rollout_worker.engine import StageProgress
from rollout_worker.sources.files import Entry, Source, open_source


class Staged:
    """A verified version beside the serving one."""

    def __init__(self, source: Source, layout: weights.Layout) -> None:
        kept = [entry for entry in source.entries if entry.name not in layout.tied]
        header, self._at = _header(kept)
        size = len(header) + sum(entry.spec.nbytes for entry in kept)
        self.bytes_total = source.bytes_total
        self.nbytes = size
        self.root_hash = ""
        self._fd = os.memfd_create("rollout-weights")
        try:
            os.ftruncate(self._fd, size)
            self._map = mmap.mmap(self._fd, size)
            self._map[: len(header)] = header
        except BaseException:
            os.close(self._fd)
            raise
        self._view = memoryview(self._map)

    @property
    def path(self) -> str:
        """Where other processes of this user find it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def allocate(self, entry: Entry) -> memoryview | None:
        """Return where the bytes of a tensor go; None for a tied one, which is only hashed."""
        begin = self._at.get(entry.name)
        return None if begin is None else self._view[begin : begin + entry.spec.nbytes]

    def close(self) -> None:
        """Give the memory back."""
        if self._fd >= 0:
            self._view.release()
            self._map.close()
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Staged:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self.close()


def _header(entries: list[Entry]) -> tuple[bytes, Mapping[str, int]]:
    """Return the file's header and where each tensor begins in the file."""
    fields: dict[str, Any] = {}
    end = 0
    for entry in entries:
        begin, end = end, end + entry.spec.nbytes
        fields[entry.name] = {
            "dtype": entry.spec.dtype,
            "shape": list(entry.spec.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + f["data_offsets"][0] for name, f in fields.items()}


def stage(
    path: Path,
    roots: tuple[Path, ...],
    layout: weights.Layout,
    progress: StageProgress,
    cancelled: Callable[[], bool],
) -> Staged:
    """Read and verify a version; blocks, and touches nothing that serves.

    Raises:
        WeightsRejected: a missing, unexpected or ill-shaped tensor, or a wrong hash.
    """
    source = open_source(path, roots=roots)
    layout.check(source)
    staged = Staged(source, layout)
    try:
        staged.root_hash = weights.read(source, layout, staged.allocate, progress, cancelled)
    except BaseException:
        staged.close()
        raise
    return staged
