"""The file in which sleeping weights are kept; it has no name, so it is gone with its process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from .sinks import open_unnamed_file

SPILL_CHUNK_BYTES = 8 << 20
"""How much is written or read at once."""


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in main memory, to be read or written in place."""
    if not tensor.numel():
        return memoryview(b"")
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array).cast("B")


class SpillFile:
    """The bytes of tensors in an unnamed temporary file; `OSError` if the folder has no room for them."""

    def __init__(self, folder: Path, tensors: Sequence[Tensor]) -> None:
        self._specs = [(tensor.shape, tensor.dtype) for tensor in tensors]
        self._digests: list[bytes] = []
        self._file = os.fdopen(open_unnamed_file(folder), "r+b", buffering=0)
        try:
            os.posix_fallocate(self._file.fileno(), 0, max(sum(t.nbytes for t in tensors), 1))
            for tensor in tensors:
                self._write_tensor(tensor)
        except OSError:
            self._file.close()
            raise

    def _write_tensor(self, tensor: Tensor) -> None:
        view = tensor_bytes(tensor.detach().cpu().contiguous())
        digest = xxhash.xxh3_128()
        while view:
            count = self._file.write(view[:SPILL_CHUNK_BYTES])
            digest.update(view[:count])
            view = view[count:]
        self._digests.append(digest.digest())

    def read_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors again, in main memory; `OSError` if they are not what was written."""
        self._file.seek(0)
        for (shape, dtype), want in zip(self._specs, self._digests, strict=True):
            tensor = torch.empty(shape, dtype=dtype)
            view, digest = tensor_bytes(tensor), xxhash.xxh3_128()
            while view:
                count = self._file.readinto(view[:SPILL_CHUNK_BYTES])
                if not count:
                    raise OSError("it ends early")
                digest.update(view[:count])
                view = view[count:]
            if digest.digest() != want:
                raise OSError("its content changed")
            yield tensor

    def close(self) -> None:
        """Remove the file."""
        self._file.close()
