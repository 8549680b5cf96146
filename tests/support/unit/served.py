"""A tiny worker behind the ports of a real one, in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_worker.ports.callers.auth import AllowAnyone
from rollout_worker.ports.server import HttpServers
from tests.support.unit.tiny_worker import TinyWorker, tiny_worker


@dataclass(frozen=True)
class Served:
    """A worker, its data port and its control port."""

    tiny: TinyWorker
    data: int
    control: int


@contextlib.asynccontextmanager
async def served(
    home: Path, *flags: str, ports: tuple[int, int] = (0, 0), loads: bool = True, **limits: Any
) -> AsyncIterator[Served]:
    """Serve a worker until the block ends; `limits`: arguments of `HttpServers`."""
    where = ("--data-host", "127.0.0.1", "--data-port", str(ports[0]), "--control-port")
    async with tiny_worker(home, *where, str(ports[1]), *flags, loads=loads) as tiny:
        servers = HttpServers(tiny.worker, AllowAnyone(), **limits)
        running = asyncio.create_task(servers.serve_both_ports())
        try:
            yield Served(tiny, *servers.bound_ports)
        finally:
            servers.stop()
            await asyncio.wait_for(running, 20)
