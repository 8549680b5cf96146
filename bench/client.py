"""What the client adds to a request, over httpx alone that reads the same stream.

The worker is a process that answers at once, so that nothing but the client's own work is seen:
one request after the other, a thousand in flight, and memory over many.
"""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import httpx

from rollout_client import AsyncRolloutPool

from .results import Figure, Options, Result, figure

SUMMARY = "the client's own time per request, 1,000 in flight, memory over many (over httpx)"
SERVER = Path(__file__).with_name("answers.py")
PORTS = (8095, 8096, 8097, 8098)
TOKENS = 64
PROMPT = list(range(100, 612))
IN_FLIGHT = 1000
PIECES = 20
"""Points between which memory is looked at."""

BODY = json.dumps(
    {"token_ids": PROMPT, "sampling": {"max_tokens": TOKENS}, "request_id": "r", "stream": True}
)


def run(options: Options) -> Result:
    """Measure."""
    servers = [subprocess.Popen([sys.executable, SERVER, str(port), str(TOKENS)]) for port in PORTS]
    try:
        return asyncio.run(_measure(options))
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait(timeout=10)


async def _measure(options: Options) -> Result:
    single = options.count(2000, 300)
    many = 100_000 if not options.quick and options.runs is None else 10 * single
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=IN_FLIGHT)
    urls = [f"http://127.0.0.1:{port}" for port in PORTS]
    async with AsyncRolloutPool.from_urls(urls) as pool, AsyncExitStack() as stack:
        # One client per worker: a single one looks at all thousand connections each time.
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(base_url=url, limits=limits, timeout=None, trust_env=False)
            )
            for url in urls
        ]
        turn = iter(range(10**9))

        async def ours() -> None:
            result = await pool.generate(PROMPT, sampling={"max_tokens": TOKENS})
            assert len(result.token_ids) == TOKENS

        async def theirs() -> None:
            await _read(clients[next(turn) % len(clients)])

        await _until_up(theirs)
        await _in_turns(theirs, ours, single // 10)
        plain, client = await _in_turns(theirs, ours, single)
        theirs_cpu, theirs_rate = await _crowd(theirs, 4 * single)
        ours_cpu, ours_rate = await _crowd(ours, 4 * single)
        await _crowd(ours, many // 10)
        resident = [_resident()]
        for _ in range(PIECES):
            await _crowd(ours, many // PIECES)
            resident.append(_resident())
    scale = 1e3
    low, high = figure("httpx", plain), figure("client", client)
    assert low.p99 is not None
    assert high.p99 is not None
    figures = [
        figure(
            "one request after the other",
            [s * scale for s in client],
            "ms",
            baseline=low.p50 * scale,
            against="httpx reading the stream",
        ),
        Figure(
            "added by the client",
            "ms",
            (high.p50 - low.p50) * scale,
            (high.p99 - low.p99) * scale,
        ),
        Figure(
            f"CPU per request with {IN_FLIGHT} in flight",
            "ms",
            ours_cpu * scale,
            baseline=theirs_cpu * scale,
            against="httpx",
        ),
        Figure(
            f"memory grown per request, over {many:,}",
            "bytes",
            _slope(resident, many // PIECES),
            goal=(100, None),
        ),
    ]
    notes = [
        f"Answers of {TOKENS} tokens in {TOKENS // 8} events from {len(PORTS)} processes that do"
        f" nothing else; with {IN_FLIGHT} in flight {ours_rate:.0f} requests per second, httpx"
        f" {theirs_rate:.0f}. The 99th percentile of httpx alone is {low.p99 * scale:.1f} ms.",
        f"Memory: the slope of the resident size at {PIECES + 1} points, after {many // 10:,} requests;"
        f" from {resident[0] / 2**20:.1f} to {resident[-1] / 2**20:.1f} MiB.",
    ]
    return Result("client", "What the client costs", figures, notes)


async def _read(client: httpx.AsyncClient) -> None:
    """What anybody would write: send, read, parse."""
    tokens: list[int] = []
    async with client.stream("POST", "/v1/generate", content=BODY) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                tokens += json.loads(line[6:]).get("token_ids", ())
    assert len(tokens) == TOKENS


async def _until_up(call: Callable[[], Awaitable[None]]) -> None:
    for _ in range(len(PORTS)):
        until = time.monotonic() + 30
        while True:
            try:
                await call()
                break
            except httpx.ConnectError:
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(0.1)


async def _in_turns(
    one: Callable[[], Awaitable[None]], other: Callable[[], Awaitable[None]], count: int
) -> tuple[list[float], list[float]]:
    """Seconds of each call of both, which take turns: what else the machine does meets both."""
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(count):
        for call, seconds in zip((one, other), found, strict=True):
            began = time.perf_counter()
            await call()
            seconds.append(time.perf_counter() - began)
    return found


async def _crowd(call: Callable[[], Awaitable[None]], count: int) -> tuple[float, float]:
    """CPU seconds per call and calls per second with many in flight."""
    limit = asyncio.Semaphore(IN_FLIGHT)
    began, cpu = time.perf_counter(), time.process_time()

    async def one() -> None:
        try:
            await call()
        finally:
            limit.release()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(count):
            await limit.acquire()
            tasks.create_task(one())
    return (time.process_time() - cpu) / count, count / (time.perf_counter() - began)


def _resident() -> int:
    """Resident bytes now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _slope(resident: Sequence[int], step: int) -> float:
    """Bytes per request: the line of least squares through sizes `step` requests apart."""
    return statistics.linear_regression(range(0, step * len(resident), step), resident).slope
