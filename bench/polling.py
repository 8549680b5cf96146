"""What one poll of a head costs the operator, and what it cost over httpx.

The heads are real HTTP servers' addresses on loopback, all kept open; CPU seconds of this process
are counted, not the waiting.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx

from rollout_client.control import ControlUnreachable, Send, WorkerControl
from rollout_operator.workers.connections import AT_ONCE, Connections

from .results import Figure, Options, Result

SUMMARY = "CPU of one poll with 100, 400 and 800 heads, against httpx"
SERVER = Path(__file__).resolve().parents[1] / "hack/cluster/processless.py"
PORT = 8091
ROUNDS = 3
PATIENCE_SECONDS = 120.0
IN_FLIGHT = 64


def run(options: Options) -> Result:
    """Measure."""
    sizes = (100, 400) if options.quick else (100, 400, 800)
    server = subprocess.Popen([sys.executable, SERVER, "--port", str(PORT)])
    try:
        figures = asyncio.run(_compare(sizes))
    finally:
        server.terminate()
        server.wait(timeout=10)
    note = f"{ROUNDS} rounds over all heads, {IN_FLIGHT} polls in flight, connections kept open."
    return Result("polling", "Polling the workers", figures, [note])


async def _compare(sizes: tuple[int, ...]) -> list[Figure]:
    figures = []
    for heads in sizes:
        connections = Connections()
        ours = await _cost(connections.send, heads)
        await connections.close()
        limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=AT_ONCE)
        async with httpx.AsyncClient(limits=limits, trust_env=False) as client:
            theirs = await _cost(client, heads)
        label = f"CPU of a poll with {heads} heads"
        figures.append(Figure(label, "ms", ours, baseline=theirs, against="over httpx"))
    return figures


async def _cost(send: httpx.AsyncClient | Send, heads: int) -> float:
    """CPU milliseconds of one poll."""
    limit = asyncio.Semaphore(IN_FLIGHT)
    controls = [
        WorkerControl(f"http://127.3.{i // 250}.{1 + i % 250}:{PORT}", _no_token, send)
        for i in range(heads)
    ]

    async def poll(control: WorkerControl) -> None:
        async with limit:
            await control.state(timeout=PATIENCE_SECONDS)

    await _until_up(lambda: controls[0].state())
    await asyncio.gather(*map(poll, controls))
    began = time.process_time()
    for _ in range(ROUNDS):
        await asyncio.gather(*map(poll, controls))
    return (time.process_time() - began) / ROUNDS / heads * 1000


async def _no_token() -> str | None:
    return None


async def _until_up(ask: Callable[[], Awaitable[object]]) -> None:
    end = time.monotonic() + 30
    while True:
        try:
            await ask()
            return
        except ControlUnreachable:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(0.05)
