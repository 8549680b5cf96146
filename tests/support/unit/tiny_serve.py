"""A program: a whole worker with all its ports over the tiny engine, which tells what it was asked.

    python tiny_serve.py COUNTS FLAGS…

Each request of the control port adds the right that it needs to the file COUNTS, as a line: `get` to
look, `create` to stage, `update` for the rest.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import cast

from rollout_worker.engine import Engine
from rollout_worker.ports.access import Authorizer, Right
from rollout_worker.ports.auth import Anyone
from rollout_worker.ports.server import Servers
from rollout_worker.service import Worker
from tiny_engine import TinyEngine
from tiny_worker import settings


class Counting:
    """Lets everybody in, and takes note."""

    def __init__(self, counts: str) -> None:
        self._inner: Authorizer = Anyone()
        self._file = os.open(counts, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    async def check(self, authorization: str | None, right: Right, address: str = "") -> str:
        os.write(self._file, f"{right.verb}\n".encode())
        return await self._inner.check(authorization, right, address)

    async def close(self) -> None:
        os.close(self._file)


async def work(counts: str, flags: list[str]) -> None:
    known = settings(*flags)
    worker = Worker(known, lambda: cast(Engine, TinyEngine(Path(known.model))))
    servers = Servers(worker, Counting(counts))
    running = asyncio.create_task(worker.run())
    try:
        await servers.run()
    finally:
        running.cancel()
        await asyncio.wait({running}, timeout=10)
        await worker.supervisor.end()


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], sys.argv[2:]))
