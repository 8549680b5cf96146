"""The processes of an engine, as they are told of staged memory: to hold it before the commit, to let go of it.

Sinks are sealed and closed in threads; what they say goes through the loop to all ranks, by the
engine's own means. A rank that can't be told maps the memory at the commit: slower, but not wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future, wait
from typing import Any

from .settings import MIN_MAPPING_SECONDS, RANK_CALL_SECONDS, STOP_POLL_SECONDS, TALLY_POLL_SECONDS

logger = logging.getLogger(__name__)

LOCKED_BYTES_PER_SECOND = 1 << 30
"""Bytes: slower than any machine locks them."""

LOCKED, MAPPED = b"L", b"M"
"""How a rank that is done holds the memory: what it adds to the tally."""

CallRanks = Callable[[str, Mapping[str, Any]], Awaitable[object]]
"""Runs `rollout_map` or `rollout_unmap` with these arguments in all ranks; awaited in the loop."""


class EngineRanks:
    """The ranks of one engine; made in the loop.

    Args:
        call: Reaches them.
        count: How many of them run on this node.
    """

    def __init__(self, call: CallRanks, count: int) -> None:
        self._call, self._count = call, count
        self._loop = asyncio.get_running_loop()
        self._ended = threading.Event()
        self._tasks: set[Future[None]] = set()

    def stop_calling(self) -> None:
        """Ask them for nothing any more, and wait for nobody."""
        self._ended.set()

    def map_sink(self, where: Mapping[str, str], size: int, *, borrowed: bool) -> None:
        """Have all hold a sink, and return once those of this node do, or it takes too long; blocks.

        Args:
            where: As in its ticket.
            size: Its bytes.
            borrowed: It is somebody else's, to be read only.
        """
        with _MappingTally() as tally:
            args = {
                "where": dict(where),
                "size": size,
                "tally": tally.path_and_words,
                "borrowed": borrowed,
            }
            if not self._call_all("rollout_map", args):
                return
            seconds = MIN_MAPPING_SECONDS + size / LOCKED_BYTES_PER_SECOND
            until = time.monotonic() + seconds
            while len(tally.marks) < self._count and not self._ended.wait(TALLY_POLL_SECONDS):
                if time.monotonic() > until:
                    logger.warning(
                        "%d of %d ranks have mapped the staged weights after %.0f s: the others map them"
                        " at the commit",
                        len(tally.marks),
                        self._count,
                        seconds,
                    )
                    return
            done = tally.marks
        logger.info(
            "staged weights of %d bytes are mapped by %d of %d ranks, page-locked by %d",
            size,
            len(done),
            self._count,
            done.count(LOCKED),
        )

    def unmap_sink(self, where: Mapping[str, str]) -> None:
        """Have all let go of a sink; blocks, but in the loop's own thread."""
        self._call_all("rollout_unmap", {"where": dict(where)})

    def _call_all(self, method: str, args: Mapping[str, Any]) -> bool:
        """Whether all were reached."""
        if self._ended.is_set() or self._loop.is_closed():
            return False
        asked = asyncio.run_coroutine_threadsafe(self._call_coroutine(method, args), self._loop)
        with contextlib.suppress(RuntimeError):
            if asyncio.get_running_loop() is self._loop:  # which can't wait for itself
                self._tasks.add(asked)
                asked.add_done_callback(self._tasks.discard)
                return False
        return self._wait_for_call(method, asked)

    def _wait_for_call(self, method: str, asked: Future[None]) -> bool:
        until = time.monotonic() + RANK_CALL_SECONDS
        while not asked.done() and not self._ended.is_set() and time.monotonic() < until:
            wait([asked], STOP_POLL_SECONDS)
        if not asked.done():
            asked.cancel()
            return False
        error = None if asked.cancelled() else asked.exception()
        if error is not None:
            logger.warning("the engine's ranks could not be told of %s: %s", method, error)
        return not asked.cancelled() and error is None

    def _call_coroutine(self, method: str, args: Mapping[str, Any]) -> Coroutine[Any, Any, None]:
        async def ask() -> None:
            await self._call(method, args)

        return ask()


class _MappingTally:
    """A file without a name in which each rank that is done leaves a byte."""

    def __init__(self) -> None:
        self._words = uuid.uuid4().hex
        self._handle = os.memfd_create("rollout-tally", os.MFD_CLOEXEC)
        os.write(self._handle, self._words.encode())

    def __enter__(self) -> _MappingTally:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    @property
    def path_and_words(self) -> tuple[str, str]:
        """What a rank has to know of it."""
        return f"/proc/{os.getpid()}/fd/{self._handle}", self._words

    @property
    def marks(self) -> bytes:
        """What those that are done have left."""
        return os.pread(self._handle, 1 << 16, len(self._words))
