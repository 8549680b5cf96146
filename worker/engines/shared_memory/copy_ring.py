"""Copies from a version's memory to a GPU through two page-locked buffers, which a rank has for as long as it lives.

A GPU reads memory at the speed of the bus only where its pages are locked, and locking takes as long as three
copies, holds up other processes of the node, and is needed of all that a version has, however little a rank
reads of it. So each rank locks two buffers once. Threads gather the parts that are to be copied into one of them,
strided parts too, while the GPU reads the other one. This runs in the processes of vLLM and SGLang.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rollout_worker.engine import EngineError
from rollout_worker.engines.settings import (
    MAX_GATHER_THREADS,
    MIN_GATHER_THREADS,
    RING_BUFFER_BYTES,
    RING_PIECE_BYTES,
)

from .staging_budget import check_memory_left

logger = logging.getLogger(__name__)

BUFFERS = 2
PART_ALIGNMENT = 64
"""Each part begins at a multiple of this in a buffer: what any dtype and vector copy wants."""


class TensorCopy(NamedTuple):
    """A copy to be made.

    Attributes:
        name: Of the tensor that is read, for errors.
        target: What is written.
        source: What is read, of any strides, in main memory.
    """

    name: str
    target: Tensor
    source: Tensor


class CopyEvent(Protocol):
    """As `torch.cuda.Event`."""

    def record(self) -> None:
        """Note the copies that were begun so far."""
        ...

    def synchronize(self) -> None:
        """Wait until the copies that were noted last are done; return at once if none were."""
        ...


class CopyRing:
    """Two or more buffers, and the threads that fill them; used by one thread at a time.

    Copies are begun in the calling thread's stream, one after the other. In a stream of its own the ring would have to
    wait for the memory that an engine has just made, and the engine for the ring before it processes a layer.

    Args:
        buffers: Page-locked memory, each [n] uint8 of one size.
        events: One for each buffer.
        begin_copies: Begins to copy sources to targets, in the order of calls.
        threads: How many threads gather.
    """

    def __init__(
        self,
        buffers: Sequence[Tensor],
        events: Sequence[CopyEvent],
        begin_copies: Callable[[list[Tensor], list[Tensor]], object],
        threads: int = MIN_GATHER_THREADS,
    ) -> None:
        self._buffers, self._events, self._begin_copies = buffers, events, begin_copies
        self._size = buffers[0].numel()
        self._current = self._used = 0
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="rollout-gather")
        self._thread_count = threads

    def copy_tensors(self, copies: Iterable[TensorCopy]) -> None:
        """Begin copies; all sources are read when this returns or raises, and no thread writes any more.

        The device may still copy from the buffers, which later calls heed: a caller that needs the
        targets synchronises with its stream.

        Raises:
            RuntimeError: A tensor could not be read; targets may have been written.
        """
        batch: list[tuple[TensorCopy, Tensor]] = []
        for copy in copies:
            for part in cut_copy(copy, min(self._size, RING_PIECE_BYTES)):
                if self._used + part.source.nbytes > self._size:
                    self._send(batch)
                    batch = []
                    self._current = (self._current + 1) % len(self._buffers)
                    self._events[self._current].synchronize()
                    self._used = 0
                batch.append((part, self._take_room(part.source)))
        self._send(batch)

    def _take_room(self, source: Tensor) -> Tensor:
        """Return memory of the current buffer for a tensor like this, contiguous."""
        begin, end = self._used, self._used + source.nbytes
        self._used = -(-end // PART_ALIGNMENT) * PART_ALIGNMENT
        room = self._buffers[self._current][begin:end]
        return room.view(source.dtype).view_as(source)

    def _send(self, batch: list[tuple[TensorCopy, Tensor]]) -> None:
        """Gather parts in the current buffer, and have the device copy them from there."""
        if not batch:
            return
        # Each part goes to one thread: under the GIL, `next` of a list's iterator is one step.
        shared = iter(batch)
        if len(batch) == 1:
            _gather_parts(shared)
        else:
            jobs: list[Future[None]] = []
            try:
                jobs.extend(
                    self._threads.submit(_gather_parts, shared)
                    for _ in range(min(self._thread_count, len(batch)))
                )
            finally:
                # Without a deadline: a thread that copies can't be stopped, and must not write after this.
                wait(jobs)
            for job in jobs:
                job.result()
        try:
            self._begin_copies([part.target for part, _ in batch], [room for _, room in batch])
        finally:
            self._events[self._current].record()


@torch.inference_mode()  # as engines load: else torch refuses to write to views that they make
def _gather_parts(batch: Iterator[tuple[TensorCopy, Tensor]]) -> None:
    for part, room in batch:
        try:
            room.copy_(part.source)
        except Exception as error:
            raise RuntimeError(f"tensor {part.name!r} can't be read: {error}") from error


def cut_copy(copy: TensorCopy, most: int) -> Iterator[TensorCopy]:
    """Yield the parts of a copy, none larger than `most` bytes (16 or more), none empty.

    It is cut along its first dimension, anywhere if both of its ends are contiguous.
    """
    name, target, source = copy
    if source.shape != target.shape:
        source = source.expand_as(target)
    if source.nbytes <= most:
        if source.numel():
            yield TensorCopy(name, target, source)
        return
    if target.is_contiguous() and source.is_contiguous():
        target, source = target.view(-1), source.view(-1)
    rows = most * len(source) // source.nbytes
    if rows:
        for ends in zip(torch.split(target, rows), torch.split(source, rows), strict=True):
            yield TensorCopy(name, *ends)
        return
    for ends in zip(target, source, strict=True):
        yield from cut_copy(TensorCopy(name, *ends), most)


_rings: dict[torch.device, CopyRing | None] = {}


def open_ring(device: torch.device, nbytes: int) -> CopyRing | None:
    """Return this process's ring for a device, which the first call makes.

    None: what is copied there needs none, or no memory can be locked for it.

    Args:
        device: Of the targets.
        nbytes: Size of a version: a smaller ring does for a small one.
    """
    if device.type != "cuda":
        return None
    if device not in _rings:
        _rings[device] = _make_ring(max(min(nbytes, RING_BUFFER_BYTES), PART_ALIGNMENT))
    return _rings[device]


def _make_ring(size: int) -> CopyRing | None:
    try:
        check_memory_left(BUFFERS * size)
        buffers = [
            torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            for _ in range(BUFFERS)
        ]
        events = [torch.cuda.Event() for _ in buffers]  # type: ignore[no-untyped-call]
    except (EngineError, RuntimeError) as error:
        logger.warning(
            "%d bytes can't be page-locked, so commits copy weights to the GPU more slowly: %s",
            BUFFERS * size,
            error,
        )
        return None
    threads = gather_thread_count(len(os.sched_getaffinity(0)), torch.cuda.device_count())
    return CopyRing(buffers, events, partial(torch._foreach_copy_, non_blocking=True), threads)


def gather_thread_count(processors: int, gpus: int) -> int:
    """Return how many threads gather for one GPU: its share of the processors, within bounds."""
    return max(MIN_GATHER_THREADS, min(MAX_GATHER_THREADS, processors // max(1, gpus)))
