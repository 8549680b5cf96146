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

from rollout_common import tracing
from rollout_worker.engine import Engine
from rollout_worker.ports.callers.auth import AccessRight, AllowAnyone, Authorizer
from rollout_worker.ports.server import HttpServers
from rollout_worker.service import WorkerService
from tests.support.unit.tiny_engine import TinyEngine
from tests.support.unit.tiny_worker import settings

STEP_SECONDS = 0.05


class Counting(Authorizer):
    """Lets everybody in, and takes note."""

    def __init__(self, counts: str) -> None:
        self._inner: Authorizer = AllowAnyone()
        self._file = os.open(counts, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    async def check_caller(
        self, authorization: str | None, right: AccessRight, address: str = ""
    ) -> str:
        os.write(self._file, f"{right.verb}\n".encode())
        return await self._inner.check_caller(authorization, right, address)

    async def close(self) -> None:
        os.close(self._file)


async def _step(engine: TinyEngine) -> None:
    """Make a token for each request that runs, now and then."""
    while True:
        await asyncio.sleep(STEP_SECONDS)
        if engine.is_generating:
            engine.step()


async def work(counts: str, flags: list[str]) -> None:
    known = settings(*flags)
    engine = TinyEngine(Path(known.model))
    worker = WorkerService(known, lambda: cast(Engine, engine))
    servers = HttpServers(worker, Counting(counts))
    running = {asyncio.create_task(each) for each in (worker.run_until_cancelled(), _step(engine))}
    try:
        await servers.serve_both_ports()
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=10)
        await worker.supervisor.end_engine()


if __name__ == "__main__":
    tracing.start_tracing("rollout-worker")
    asyncio.run(work(sys.argv[1], sys.argv[2:]))
