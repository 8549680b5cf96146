"""A tiny worker behind the ports of a real one, in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from rollout_worker.ports.auth import AllowAnyone
from rollout_worker.ports.server import HttpServers
from tests.support.unit.tiny_worker import tiny_worker


@contextlib.asynccontextmanager
async def served(home: Path, *flags: str) -> AsyncIterator[tuple[int, int]]:
    """The data and the control port of a worker."""
    ports = ["--data-host", "127.0.0.1", "--data-port", "0", "--control-port", "0"]
    async with tiny_worker(home, *ports, *flags) as tiny:
        servers = HttpServers(tiny.worker, AllowAnyone())
        running = asyncio.create_task(servers.serve_both_ports())
        try:
            yield servers.bound_ports
        finally:
            servers.stop()
            await asyncio.wait_for(running, 20)
