"""What one poll of a worker costs the operator, against the same poll over httpx.

The workers are addresses on loopback behind one real HTTP server; all connections stay open. What
counts is the CPU time of this process, not the waiting.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from bench import ROOT
from bench.options import Options
from bench.reporting.figures import Figure, Result, figure
from bench.rigs.ports import answers, free_port
from rollout_client.control import Send, WorkerControl
from rollout_operator.workers.connections import Connections

SERVER = ROOT / "hack/cluster/processless.py"
START_SECONDS = 30.0
PATIENCE_SECONDS = 120.0
IN_FLIGHT = 64


def run(options: Options) -> Result:
    """Measure with growing numbers of workers."""
    sizes = (100, 400) if options.quick else (100, 400, 800)
    rounds = options.count(5, 2)
    with _server() as port:
        figures = [asyncio.run(_compare(port, workers, rounds)) for workers in sizes]
    note = (
        f"A round polls every worker once, {IN_FLIGHT} at a time, over connections kept open; the two"
        " ways take turns."
    )
    return Result("polling", "Polling the workers", figures, [note])


@contextmanager
def _server() -> Iterator[int]:
    port = free_port()
    server = subprocess.Popen([sys.executable, SERVER, "--port", str(port)])
    try:
        end = time.monotonic() + START_SECONDS
        while not answers(f"http://127.0.0.1:{port}/counts"):
            if server.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{SERVER.name} does not serve")
            time.sleep(0.05)
        yield port
    finally:
        server.terminate()
        server.wait(timeout=10)


async def _compare(port: int, workers: int, rounds: int) -> Figure:
    connections = Connections()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, trust_env=False) as client:
        sides = [_controls(port, workers, send) for send in (connections.send, client)]
        found: tuple[list[float], list[float]] = ([], [])
        for side in sides:
            await _milliseconds(side)  # opens the connections
        for _ in range(rounds):
            for side, samples in zip(sides, found, strict=True):
                samples.append(await _milliseconds(side))
    await connections.close()
    ours, theirs = found
    return figure(f"CPU of a poll, {workers} workers", ours, "ms", baseline=theirs, against="httpx")


def _controls(port: int, workers: int, send: httpx.AsyncClient | Send) -> list[WorkerControl]:
    return [
        WorkerControl(f"http://127.3.{i // 250}.{1 + i % 250}:{port}", _no_token, send)
        for i in range(workers)
    ]


async def _milliseconds(controls: list[WorkerControl]) -> float:
    """Poll every worker once; return the CPU milliseconds of one poll."""
    limit = asyncio.Semaphore(IN_FLIGHT)

    async def poll(control: WorkerControl) -> None:
        async with limit:
            await control.state(timeout=PATIENCE_SECONDS)

    began = time.process_time()
    await asyncio.gather(*map(poll, controls))
    return (time.process_time() - began) / len(controls) * 1000


async def _no_token() -> str | None:
    return None
