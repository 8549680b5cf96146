"""What a worker and its engine's ranks say to each other about staged weights.

The worker has the ranks map a sink before the commit, and let go of it (`EngineRanks`). Sinks are sealed and
closed in threads; the calls go through the loop to all ranks, by the engine's own means. A rank that can't be
reached maps the memory at the commit: slower, but not wrong.

Each rank reports which tensors it did not read (`note_unread`). Its report holds for exactly the tensors that it
was loaded from: with one more, or another order, its loader might read others. Unless all ranks of the node have
reported on exactly these tensors, all are needed. This module does not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import xxhash

from rollout_worker.engine import TensorEntry
from rollout_worker.engines.settings import (
    MIN_MAPPING_SECONDS,
    RANK_CALL_SECONDS,
    TALLY_POLL_SECONDS,
)

logger = logging.getLogger(__name__)

MAPPED_BYTES_PER_SECOND = 1 << 30
"""Every machine maps pages faster than this."""

CallRanks = Callable[[str, Mapping[str, Any]], Awaitable[object]]
"""Runs `rollout_map` or `rollout_unmap` with these arguments in all ranks; awaited in the loop."""

TensorDescription = tuple[str, str, Sequence[int]]
"""Name, dtype as safetensors call it, and shape."""


class EngineRanks:
    """The ranks of one engine, of which `count` run on this node; made in the loop."""

    def __init__(self, call: CallRanks, count: int) -> None:
        self._call, self._count = call, count
        self._loop = asyncio.get_running_loop()
        self._ended = threading.Event()
        self._calls: set[Future[None]] = set()

    def stop_calling(self) -> None:
        """Make no more calls, and stop waiting for those under way."""
        self._ended.set()
        for asked in list(self._calls):
            asked.cancel()

    def map_sink(self, where: Mapping[str, str], size: int) -> None:
        """Have all ranks map a sink of `size` bytes; blocks until those of this node have, or it takes too long.

        `where`: as in its ticket.
        """
        with _open_tally() as (tally, count_marks):
            args = {"where": dict(where), "size": size, "tally": tally}
            if not self._call_all("rollout_map", args):
                return
            seconds = MIN_MAPPING_SECONDS + size / MAPPED_BYTES_PER_SECOND
            until = time.monotonic() + seconds
            while len(done := count_marks()) < self._count:
                if self._ended.wait(TALLY_POLL_SECONDS):
                    break
                if time.monotonic() > until:
                    logger.warning(
                        "%d of %d ranks have mapped the staged weights after %.0f s: the others map them"
                        " at the commit",
                        len(done),
                        self._count,
                        seconds,
                    )
                    return
        logger.info(
            "staged weights of %d bytes are mapped by %d of %d ranks",
            size,
            len(done),
            self._count,
        )

    def unmap_sink(self, where: Mapping[str, str]) -> None:
        """Have all ranks let go of a sink; blocks, except in the loop's own thread."""
        self._call_all("rollout_unmap", {"where": dict(where)})

    def _call_all(self, method: str, args: Mapping[str, Any]) -> bool:
        """Return whether all ranks are known to have been reached."""
        if self._ended.is_set() or self._loop.is_closed():
            return False

        async def ask() -> None:
            await self._call(method, args)

        asked = asyncio.run_coroutine_threadsafe(ask(), self._loop)
        self._calls.add(asked)
        asked.add_done_callback(self._calls.discard)
        with contextlib.suppress(RuntimeError):
            if asyncio.get_running_loop() is self._loop:  # which can't wait for itself
                return False
        if self._ended.is_set():  # since the call was made
            asked.cancel()
        try:
            error = asked.exception(RANK_CALL_SECONDS)
        except (CancelledError, TimeoutError):
            asked.cancel()
            return False
        if error is not None:
            logger.warning("%s could not be called in the engine's ranks: %s", method, error)
        return error is None


@contextlib.contextmanager
def _open_tally() -> Iterator[tuple[tuple[str, str], Callable[[], bytes]]]:
    """Open a file without a name to which each rank that is done adds a byte.

    Yields what a rank has to know of it, its path and first words, and what returns the bytes so far.
    """
    words = uuid.uuid4().hex
    handle = os.memfd_create("rollout-tally", os.MFD_CLOEXEC)
    try:
        os.write(handle, words.encode())
        tally = f"/proc/{os.getpid()}/fd/{handle}", words
        yield tally, lambda: os.pread(handle, 1 << 16, len(words))
    finally:
        os.close(handle)


def hash_tensors(tensors: Iterable[TensorDescription]) -> str:
    """Return a hash of these tensors in this order, without their values."""
    rows = [[name, dtype, list(shape)] for name, dtype, shape in tensors]
    return xxhash.xxh3_128_hexdigest(json.dumps(rows).encode())


def note_unread(
    folder: Path, tensors: Sequence[TensorDescription], unread: Collection[str]
) -> None:
    """Report to the worker of this node which tensors this rank, which is this process, did not read.

    The weights that it has loaded are sound even if the report can't be written: then the next version comes whole.

    `folder`: the gang's, of slots. `tensors`: all that the rank was loaded from. `unread`: the names of those on
    whose values nothing of the rank depends.
    """
    report = {"mark": hash_tensors(tensors), "unread": sorted(unread)}
    file = _report_path(folder, os.getpid())
    partial = file.with_suffix(".partial")
    try:
        partial.write_text(json.dumps(report))
        partial.replace(file)
    except OSError as error:
        logger.warning("which tensors this rank reads can't be noted: %s", error)
        with contextlib.suppress(OSError):
            partial.unlink()


def unread_by_all(
    folder: Path, ranks: Collection[int], entries: Iterable[TensorEntry]
) -> frozenset[str]:
    """Return the names of those of `entries`, in their order of loading, that none of these ranks reads.

    `folder`: the gang's, of slots. `ranks`: the process ids of all ranks of this node.
    """
    mark = hash_tensors((entry.name, entry.spec.dtype, entry.spec.shape) for entry in entries)
    found: frozenset[str] | None = None
    for rank in ranks:
        try:
            report = json.loads(_report_path(folder, rank).read_text())
            names, same = frozenset(report["unread"]), report["mark"] == mark
        except (OSError, ValueError, KeyError):  # no report, or not a whole one
            return frozenset()
        if not same:
            return frozenset()
        found = names if found is None else found & names
    return found or frozenset()


def _report_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"  # no slot has such a name
