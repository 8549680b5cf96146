"""Data ports that answer at once, in processes of their own, and the calls that are timed on them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SERVER = Path(__file__).with_name("answers.py")

Call = Callable[[], Awaitable[None]]


@contextmanager
def instant_workers(count: int, tokens: int) -> Iterator[list[str]]:
    """Start servers whose answers have `tokens` tokens; yield their URLs."""
    command = [sys.executable, str(SERVER), str(tokens)]
    servers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        yield [f"http://127.0.0.1:{_port(server)}" for server in servers]
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.communicate(timeout=10)


def _port(server: subprocess.Popen[str]) -> int:
    assert server.stdout is not None
    line = server.stdout.readline()
    if not line.strip():
        raise RuntimeError(f"{SERVER.name} ended before it served")
    return int(line)


async def in_turns(one: Call, other: Call, count: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each call of both, in turns, so that both meet the same load."""
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(count):
        for call, seconds in zip((one, other), found, strict=True):
            began = time.perf_counter()
            await call()
            seconds.append(time.perf_counter() - began)
    return found


async def crowd(call: Call, count: int, in_flight: int) -> tuple[float, float]:
    """Make `count` calls, `in_flight` at once; return CPU seconds per call and calls per second."""
    limit = asyncio.Semaphore(in_flight)
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
