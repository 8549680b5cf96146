"""Reads pieces from the memory of their holders with NIXL, into a ring, from which the caller copies them.

NIXL never has the memory of a version, so a transfer that was given up can't write there. A part of the ring is used
again once its transfer is over; if one does not end, the process that reads is killed and its ring dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import mmap
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from rollout_common.transfer.connections.frames import Frame, Malformed
from rollout_common.transfer.pieces import MOST_LEAVES
from rollout_common.transfer.settings import HOP_SECONDS
from rollout_common.wire.root_hash import LEAF_BYTES

from .agent_handle import NixlEnded, NixlFailed, NixlProcess

PIECE_BYTES = MOST_LEAVES * LEAF_BYTES
"""Most bytes of a piece."""

RING_PIECES = 32
"""Pieces that are read at once, from all holders: at 50 GB/s as many come in 2.7 ms."""

READS_AT_ONCE = 8
"""Pieces that are read from one holder at once: one that brings less than 6.7 MB/s counts as stopped."""

TRIES = 2
"""How often a piece is read if the process with NIXL ends, which may be because of another holder."""

_numbers = itertools.count()


@dataclass(eq=False)
class RemoteMemory:
    """Registered memory of a holder, as its `MEMORY` frame describes it.

    Attributes:
        agent: What NIXL needs to reach its process, in hexadecimal digits.
        address: Where it is mapped there.
        size: In bytes.
    """

    agent: str
    address: int
    size: int
    number: int = field(default_factory=_numbers.__next__)
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(READS_AT_ONCE))
    broken: str | None = None
    """Why nothing is read from it any more."""

    @classmethod
    def from_frame(cls, frame: Frame) -> RemoteMemory:
        """Return what a `MEMORY` frame describes.

        Raises:
            Malformed: It does not.
        """
        agent = frame.text("agent", most=1 << 16)
        try:
            bytes.fromhex(agent)
        except ValueError as error:
            raise Malformed("MEMORY.agent must be hexadecimal digits") from error
        return cls(agent, frame.integer("address", 1, (1 << 64) - 1), frame.integer("size"))


class PieceRing:
    """A process that reads, and the memory that it reads to."""

    def __init__(self) -> None:
        self.process = NixlProcess()
        self._memory = mmap.mmap(-1, 1)
        self._free: asyncio.Queue[int] = asyncio.Queue()
        self._left = RING_PIECES
        """Parts that may still be used: one whose transfer failed is not."""
        self._known: set[int] = set()
        """Holders that the process knows."""

    async def start(self) -> None:
        """Start the process, and give it the ring.

        Raises:
            NixlFailed: It does not start, or can't have so much memory; it ends then.
        """
        await self.process.start()
        try:
            await self._map_ring()
        except BaseException:
            self.process.end("its ring could not be made")
            raise

    async def _map_ring(self) -> None:
        size = RING_PIECES * PIECE_BYTES
        handle = os.memfd_create("rollout-nixl", os.MFD_CLOEXEC)
        try:
            os.ftruncate(handle, size)
            self._memory = mmap.mmap(handle, size)
            await self.process.call("map", handle, region=0, size=size, write=True)
        finally:
            os.close(handle)
        for part in range(RING_PIECES):
            self._free.put_nowait(part)

    @contextlib.asynccontextmanager
    async def read(self, remote: RemoteMemory, begin: int, size: int) -> AsyncIterator[memoryview]:
        """Read a run of a holder's memory, and yield it for the block.

        Raises:
            NixlFailed: It can't be read.
            NixlEnded: The process has ended.
        """
        if remote.number not in self._known:
            await self.process.call("add", peer=remote.number, agent=remote.agent)
            self._known.add(remote.number)
        part = await self._free.get()
        to = part * PIECE_BYTES
        where = {"from": remote.address + begin, "to": to, "size": size}
        answer = self.process.post("read", peer=remote.number, region=0, **where)
        try:
            limit = asyncio.get_running_loop().call_later(HOP_SECONDS, self._give_up, answer)
            answer.add_done_callback(lambda _: limit.cancel())
            await asyncio.shield(answer)
            yield memoryview(self._memory)[to : to + size]
        finally:  # a transfer that nobody waits for any more still writes to its part
            answer.add_done_callback(lambda done: self._give_back(part, done))

    def _give_up(self, answer: asyncio.Future[Any]) -> None:
        if not answer.done():
            answer.set_exception(NixlFailed(f"nothing came for {HOP_SECONDS:g} s"))
            self.process.end("a transfer did not end")

    def _give_back(self, part: int, answer: asyncio.Future[Any]) -> None:
        failed = answer.exception() is not None
        self._left -= failed
        if self._left < RING_PIECES // 2:
            self.process.end("too many transfers have failed")
        if not failed or self.process.ended is not None:  # then it is for those who wait for a part
            self._free.put_nowait(part)

    def drop_remote(self, remote: RemoteMemory) -> None:
        """Forget a holder."""
        if remote.number in self._known:
            self._known.discard(remote.number)
            self.process.post("drop", peer=remote.number)


class PieceReader:
    """Reads pieces for this process, by a process that it starts when there is none."""

    def __init__(self) -> None:
        self._ring: PieceRing | None = None
        self._starting = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def read_piece(
        self, remote: RemoteMemory, begin: int, size: int
    ) -> AsyncIterator[memoryview]:
        """Read a run of a holder's memory, and yield it for the block.

        Raises:
            NixlFailed: It can't be read; nor is anything from this holder any more.
        """
        async with remote.turns, contextlib.AsyncExitStack() as stack:
            try:
                found = await self._try_to_read(stack, remote, begin, size)
            except NixlFailed as error:
                remote.broken = remote.broken or str(error)
                raise
            yield found

    async def _try_to_read(
        self, stack: contextlib.AsyncExitStack, remote: RemoteMemory, begin: int, size: int
    ) -> memoryview:
        if begin + size > remote.size or size > PIECE_BYTES:
            raise NixlFailed(f"the holder has {remote.size} bytes of memory")
        for left in reversed(range(TRIES)):
            if remote.broken is not None:
                raise NixlFailed(remote.broken)
            try:
                ring = await self.start_ring()
                return await stack.enter_async_context(ring.read(remote, begin, size))
            except NixlEnded:
                if not left:
                    raise
        raise AssertionError("the last try returns or raises")

    async def start_ring(self) -> PieceRing:
        """Return the ring; start its process if there is none.

        Raises:
            NixlFailed: It does not start.
        """
        async with self._starting:
            if self._ring is None or self._ring.process.ended is not None:
                ring = PieceRing()
                await ring.start()
                self._ring = ring
            return self._ring

    @property
    def process(self) -> NixlProcess | None:
        """The process that reads; None: none was needed so far."""
        return None if self._ring is None else self._ring.process

    def drop_remote(self, remote: RemoteMemory) -> None:
        """Forget a holder from which nothing is read any more."""
        if self._ring is not None:
            self._ring.drop_remote(remote)


_readers: dict[asyncio.AbstractEventLoop, PieceReader] = {}


def piece_reader() -> PieceReader:
    """Return the one of the running loop; there is one in a process."""
    return _readers.setdefault(asyncio.get_running_loop(), PieceReader())
