"""Tensors in a file without a name, for as long as their memory is given back."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from .buffers import bytes_of

CHUNK_BYTES = 8 << 20
"""What is written to the file at once."""


class Spill:
    """An unnamed temporary file with the bytes of tensors; it goes with the process."""

    def __init__(self, folder: Path, tensors: list[Tensor]) -> None:
        self._specs = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        self._digests: list[bytes] = []
        handle, name = tempfile.mkstemp(prefix="rollout-spill-", dir=folder)
        os.unlink(name)  # without a name it cannot outlive the process
        self._file = os.fdopen(handle, "r+b", buffering=0)
        try:
            for tensor in tensors:
                self._write(tensor)
        except OSError:
            self._file.close()
            raise

    def _write(self, tensor: Tensor) -> None:
        view = bytes_of(tensor.detach().cpu().contiguous())
        digest = xxhash.xxh3_128()
        while view:
            count = self._file.write(view[:CHUNK_BYTES])
            digest.update(view[:count])
            view = view[count:]
        self._digests.append(digest.digest())

    def read(self) -> Iterator[Tensor]:
        """Yield the tensors anew, on their devices."""
        self._file.seek(0)
        for (shape, dtype, device), want in zip(self._specs, self._digests, strict=True):
            tensor = torch.empty(shape, dtype=dtype)
            view, digest = bytes_of(tensor), xxhash.xxh3_128()
            while view:
                count = self._file.readinto(view[:CHUNK_BYTES])
                if not count:
                    raise OSError("it ends early")
                digest.update(view[:count])
                view = view[count:]
            if digest.digest() != want:
                raise OSError("its content changed")
            yield tensor.to(device)

    def close(self) -> None:
        """Remove the file."""
        self._file.close()
