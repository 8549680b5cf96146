"""Writes the tensors that a trainer streams as a folder of safetensors that a pool can load.

The folder is written beside its final place and renamed at the end: if it exists, it is complete.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 4 * 2**30
INDEX = "model.safetensors.index.json"


async def each(tensors: object) -> AsyncIterator[tuple[str, torch.Tensor]]:
    """Yield from a plain or an asynchronous iterable."""
    if isinstance(tensors, AsyncIterable):
        async for item in tensors:
            yield item
    elif isinstance(tensors, Iterable):
        for item in tensors:
            yield item
    else:
        raise TypeError(f"weights are a generator of (name, tensor), not {type(tensors).__name__}")


async def drain(tensors: object) -> int:
    """Take every tensor and keep none; return how many came.

    Making a tensor is a collective operation of all ranks (FSDP gathers it): ranks that write nothing
    must take the tensors all the same, or the one that writes waits for ever.
    """
    count = 0
    async for _ in each(tensors):
        count += 1
    return count


async def spool(tensors: object, folder: Path, shard_bytes: int = SHARD_BYTES) -> int:
    """Write a stream of named tensors and return their number.

    At most one shard is held in memory. If writing fails, the stream is still taken to its end before
    the error is raised: the other ranks are waiting in it.

    Raises:
        ValueError: A name came twice, or none came at all.
        FileExistsError: The folder exists; what was published must not change.
    """
    source = each(tensors)
    writer = _Writer(folder, shard_bytes)
    try:
        # In a thread: gigabytes are written while generations run in this loop.
        await asyncio.to_thread(writer.begin)
        async for name, tensor in source:
            await asyncio.to_thread(writer.take, name, tensor)
        await asyncio.to_thread(writer.end)
    except BaseException:
        async for _ in source:
            pass
        writer.give_up()
        raise
    return len(writer.places)


class _Writer:
    """Fills shards, and writes each one when it is full."""

    def __init__(self, final: Path, shard_bytes: int) -> None:
        self.places: dict[str, int] = {}
        self._final = final
        self._folder = final.with_name(f".{final.name}.partial")
        self._limit = shard_bytes
        self._shard: dict[str, torch.Tensor] = {}
        self._bytes = 0
        self._total = 0
        self._written = 0

    def begin(self) -> None:
        """Make the folder."""
        if self._final.exists():
            raise FileExistsError(f"{self._final} exists: publish under a new version")
        self.give_up()
        self._folder.mkdir(parents=True)

    def give_up(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor; it is copied, since its storage may be used again at once."""
        if name in self.places:
            raise ValueError(f"the tensor {name!r} came twice")
        size = tensor.numel() * tensor.element_size()
        if self._shard and self._bytes + size > self._limit:
            self._write()
        self._shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self.places[name] = self._written
        self._bytes += size
        self._total += size

    def _write(self) -> None:
        from safetensors.torch import save_file

        file = self._folder / f"{self._written}.safetensors"
        save_file(self._shard, file, metadata={"format": "pt"})
        file.chmod(0o644)  # safetensors makes it private, but workers run as other users
        self._shard, self._bytes = {}, 0
        self._written += 1

    def end(self) -> None:
        """Write the last shard and the index; the folder gets its name."""
        if not self.places:
            raise ValueError("there was no tensor")
        self._write()
        count = self._written
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        for i, name in enumerate(names):
            (self._folder / f"{i}.safetensors").rename(self._folder / name)
        index = {
            "metadata": {"total_size": self._total},
            "weight_map": {name: names[shard] for name, shard in self.places.items()},
        }
        (self._folder / INDEX).write_text(json.dumps(index, indent=1))
        self._folder.rename(self._final)
