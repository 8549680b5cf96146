"""Lets others read memory of this process with NIXL, as long as a connection to them is open."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from .agent_handle import NixlEnded, NixlProcess

_numbers = itertools.count()


@dataclass(slots=True)
class _Served:
    """Registered memory, and how many connections it is registered for."""

    region: int
    head: dict[str, Any]
    users: int = 0


class MemoryServer:
    """The process from which others read memory of this one, and what is registered there."""

    def __init__(self) -> None:
        self.process: NixlProcess | None = None
        self._served: dict[int, _Served] = {}
        """By the file of the memory."""
        self._changing, self._starting = asyncio.Lock(), asyncio.Lock()

    @contextlib.asynccontextmanager
    async def serve_memory(self, handle: int, size: int) -> AsyncIterator[dict[str, Any]]:
        """Register the memory of a descriptor for the block; it is registered once for all connections.

        Yields:
            What a fetcher needs to read it: the head of a `MEMORY` frame.

        Raises:
            NixlFailed: NIXL is missing, does not start, or can't register it.
        """
        file = os.fstat(handle).st_ino
        async with self._changing:
            try:
                process, served = await self._register(file, handle, size)
            except NixlEnded:  # it was about to: one that goes on after a stop ends by an assertion
                process, served = await self._register(file, handle, size)
            served.users += 1
        try:
            yield served.head
        finally:
            served.users -= 1
            if not served.users and self._served.get(file) is served:
                del self._served[file]
                process.post("unmap", region=served.region)

    async def start_process(self) -> NixlProcess:
        """Return the process; start it if there is none.

        Raises:
            NixlFailed: It does not start.
        """
        async with self._starting:
            if self.process is None or self.process.ended is not None:
                self._served = {}
                process = NixlProcess()
                await process.start()
                self.process = process
            return self.process

    async def _register(self, file: int, handle: int, size: int) -> tuple[NixlProcess, _Served]:
        process = await self.start_process()
        served = self._served.get(file)
        if served is None:
            region = next(_numbers)
            try:
                told = await process.call("map", handle, region=region, size=size, write=False)
            except asyncio.CancelledError:
                # It maps the memory nevertheless, and takes one request at a time.
                process.post("unmap", region=region)
                raise
            served = _Served(region, {**told, "size": size})
            self._served[file] = served
        return process, served


_servers: dict[asyncio.AbstractEventLoop, MemoryServer] = {}


def memory_server() -> MemoryServer:
    """Return the one of the running loop; there is one in a process."""
    return _servers.setdefault(asyncio.get_running_loop(), MemoryServer())
