"""Writes the tensors that a trainer has, or streams, as a folder of safetensors that a pool can load.

The folder is written under a temporary name next to its final path, flushed to the disk with its
manifest, and renamed at the end: if it exists, it is complete, even after a crash of this machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rollout_client.blocking_portal import calling_thread
from rollout_common.wire.root_hash import (
    TREE_SCHEME,
    HashedTensor,
    combine_leaves,
    hash_leaf,
    leaf_spans,
    root_hash_of,
)

from .checkpoint_form import state_of, whole
from .plain_tensors import check_readable, spec_of

if TYPE_CHECKING:
    import torch

    Tensors = (
        torch.nn.Module
        | Mapping[str, torch.Tensor]
        | Iterable[tuple[str, torch.Tensor]]
        | AsyncIterable[tuple[str, torch.Tensor]]
    )
    """A model, its state dict, or a plain or asynchronous stream of (name, whole parameter)."""

T = TypeVar("T")

SHARD_BYTES = 4 * 2**30
HASHING_THREADS = 2
"""Writing the file takes longer than two threads take to hash it; a trainer needs its other processors."""
INDEX, MANIFEST = "model.safetensors.index.json", "manifest.json"
READABLE, LISTABLE = 0o644, 0o755
"""Workers run as other users, so the umask of the trainer must not apply."""


def named_tensors(tensors: Tensors) -> Iterable[tuple[str, torch.Tensor]]:
    """Return the (name, tensor) of a model, a state dict or a plain iterable."""
    state = state_of(tensors)
    kind = type(tensors).__name__
    if isinstance(state, AsyncIterable):
        raise TypeError(f"{kind}: an asynchronous stream of weights needs AsyncRolloutPool")
    if not isinstance(state, Iterable):
        raise TypeError(f"weights are a model, a state dict or a generator, not a {kind}")
    items: Iterable[tuple[str, Any]] = state.items() if isinstance(state, Mapping) else state
    return ((name, whole(tensor)) for name, tensor in map(_check_pair, items))


def _check_pair(item: Any) -> tuple[str, Any]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise TypeError(
            f"weights are pairs of a name and a tensor, and a {type(item).__name__} came: give a model, its"
            " state dict, or a generator of (name, tensor)"
        )
    return item[0], item[1]


async def iterate_tensors(tensors: Tensors) -> AsyncIterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) from a model, a state dict or a stream."""
    if isinstance(tensors, AsyncIterable):
        async for item in tensors:
            name, tensor = _check_pair(item)
            yield name, whole(tensor)
    else:
        for item in named_tensors(tensors):
            yield item


async def drain_tensors(tensors: Tensors) -> None:
    """Take every tensor and keep none.

    Making a tensor is a collective operation of all ranks (FSDP gathers it): ranks that write nothing
    must take the tensors, too, or the rank that writes waits forever.
    """
    if calling_thread() is not None:
        return await run_to_end(drain_blocking, tensors)
    async for _ in iterate_tensors(tensors):
        pass
    return None


def drain_blocking(tensors: Tensors) -> None:
    """Do what `drain_tensors` does in this thread."""
    for _ in named_tensors(tensors):
        pass


@asynccontextmanager
async def drain_on_error(tensors: Tensors | None, ranks: object = None) -> AsyncIterator[None]:
    """Read tensors to their end if the block fails, since other ranks wait in them.

    The ranks of a group gather nothing before they have met.
    """
    try:
        yield
    except BaseException:
        if tensors is not None and ranks is None:
            await drain_tensors(tensors)
        raise


async def spool_tensors(tensors: Tensors, folder: Path, shard_bytes: int = SHARD_BYTES) -> str:
    """Write named tensors and return their root hash.

    At most one shard is held in memory. If writing fails, a stream is still read to its end before
    the error is raised: the other ranks wait in it.

    Raises:
        ValueError: A name came twice, or no tensor came at all.
        FileExistsError: The folder exists with other content; what was published must not change.
        ImportError: safetensors or xxhash is not installed.
    """
    if calling_thread() is not None:
        return await run_to_end(spool_blocking, tensors, folder, shard_bytes)
    source = iterate_tensors(tensors)
    writer = _ShardWriter(folder, shard_bytes)
    try:
        # In a thread: writing gigabytes would stop the generations that run in this loop.
        await run_to_end(writer.make_folder)
        async for name, tensor in source:
            await run_to_end(writer.add_tensor, name, tensor)
        return await run_to_end(writer.finish_folder)
    except BaseException:
        try:
            async for _ in source:
                pass
        finally:
            writer.remove_written()
        raise


async def run_to_end(work: Callable[..., T], *args: Any) -> T:
    """Run work in a thread and wait for its end even if cancelled: a folder can't be removed while it is written.

    The thread is the caller's if one waits for the current task. If a folder were removed while its thread
    renames it, half of it would stay under its final name.
    """
    running: asyncio.Future[T]
    if (caller := calling_thread()) is None:
        running = asyncio.get_running_loop().run_in_executor(None, partial(work, *args))
    else:
        running = asyncio.wrap_future(caller.run_work(work, *args))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise


def spool_blocking(tensors: Tensors, folder: Path, shard_bytes: int = SHARD_BYTES) -> str:
    """Do what `spool_tensors` does in this thread, which may be the only one with the right device."""
    source = iter(named_tensors(tensors))
    writer = _ShardWriter(folder, shard_bytes)
    try:
        writer.make_folder()
        for name, tensor in source:
            writer.add_tensor(name, tensor)
        return writer.finish_folder()
    except BaseException:
        try:
            for _ in source:
                pass
        finally:
            writer.remove_written()
        raise


class _ShardWriter:
    """Fills shards, and writes each one when it is full."""

    def __init__(self, final: Path, shard_bytes: int) -> None:
        self._final = final
        self._folder = final.with_name(f".{final.name}.partial")
        self._limit = shard_bytes
        self._shard: dict[str, torch.Tensor] = {}
        self._shards: list[Path] = []
        self._places: dict[str, int] = {}
        self._hashed: dict[str, HashedTensor] = {}
        self._bytes = 0
        self._total = 0

    def make_folder(self) -> None:
        """Make the folder."""
        import xxhash  # noqa: F401 - if it is missing, fail before anything is written

        self.remove_written()
        made = [self._folder, *(each for each in self._final.parents if not each.exists())]
        self._folder.mkdir(parents=True)
        for each in made:
            each.chmod(LISTABLE)
            _flush_path(each.parent)

    def remove_written(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Add a copy of a tensor, whose storage may be used again at once."""
        if name in self._places:
            raise ValueError(f"the tensor {name!r} came twice")
        spec_of(name, tensor)
        check_readable(name, tensor)
        size = tensor.numel() * tensor.element_size()
        if self._shard and self._bytes + size > self._limit:
            self._write_shard()
        self._shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._places[name] = len(self._shards)
        self._bytes += size
        self._total += size

    def _write_shard(self) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        file = self._folder / f"{len(self._shards)}.safetensors"
        try:
            save_file(self._shard, file, metadata={"format": "pt"})
        except SafetensorError as error:  # it raises this, not OSError, when the disk is full
            raise OSError(f"version {self._final} can't be written: {error}") from error
        with ThreadPoolExecutor(HASHING_THREADS, "weights-hash") as threads:
            for name, fields in _read_header(file).items():
                shape, digest = tuple(fields["shape"]), _tensor_digest(self._shard[name], threads)
                self._hashed[name] = HashedTensor(fields["dtype"], shape, digest)
        _publish_file(file)
        self._shards.append(file)
        self._shard, self._bytes = {}, 0

    def finish_folder(self) -> str:
        """Write the last shard, the index and the manifest, then rename the folder.

        Raises:
            FileExistsError: The final name exists with other content; with the same content, it stays.
        """
        if not self._places:
            raise ValueError("no tensors were given")
        self._write_shard()
        count = len(self._shards)
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        for file, name in zip(self._shards, names, strict=True):
            file.rename(self._folder / name)
        index = {
            "metadata": {"total_size": self._total},
            "weight_map": {name: names[shard] for name, shard in self._places.items()},
        }
        root = root_hash_of(self._hashed)
        digests = {name: {TREE_SCHEME: each.digest} for name, each in self._hashed.items()}
        for name, body in (INDEX, index), (MANIFEST, {"root_hash": root, "tensors": digests}):
            file = self._folder / name
            file.write_text(json.dumps(body, indent=1) + "\n")
            _publish_file(file)
        _flush_path(self._folder)
        if self._final.exists():
            if _manifest_root(self._final) != root:
                raise FileExistsError(
                    f"{self._final} exists with other content: publish under a new version"
                )
            self.remove_written()  # an earlier attempt to publish it failed after writing
            return root
        self._folder.rename(self._final)
        _flush_path(self._final.parent)
        return root


def _manifest_root(folder: Path) -> object:
    """Return the root hash in a folder's manifest, None without one."""
    try:
        return json.loads((folder / MANIFEST).read_text()).get("root_hash")
    except (OSError, ValueError, AttributeError):
        return None


def _read_header(file: Path) -> dict[str, dict[str, Any]]:
    """Return the tensors' entries of a safetensors header, whose dtype names the workers read."""
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    header.pop("__metadata__", None)
    found: dict[str, dict[str, Any]] = header
    return found


def _tensor_digest(tensor: torch.Tensor, threads: Executor) -> str:
    import torch

    content = tensor.reshape(-1).view(torch.uint8).numpy().data
    spans = list(leaf_spans(len(content)))
    share = max(1, -(-len(spans) // HASHING_THREADS))

    def hash_share(first: int) -> bytes:
        leaves = (content[begin:end] for begin, end in spans[first : first + share])
        return b"".join(map(hash_leaf, leaves))

    return combine_leaves(b"".join(threads.map(hash_share, range(0, len(spans), share))))


def _publish_file(file: Path) -> None:
    """Let other users read the file, which safetensors makes private, and flush it to the disk."""
    file.chmod(READABLE)
    _flush_path(file)


def _flush_path(path: Path) -> None:
    """Flush a file's bytes, or a folder's names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
