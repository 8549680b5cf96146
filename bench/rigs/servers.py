"""A server of one engine as a process: its command line, its requests, its CPU time."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from rollout_worker.observe.processes import find_descendants, kill_processes
from tests.support.engine.engine_kinds import KINDS, ROOT

START_SECONDS = 600.0
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two servers: how it is started, asked, and when it is ready.

    `words(model, dtype, port)`: its command line after the interpreter. `body(prompt, length)`: a
    request. `count(answer)`: how many tokens came with their logprobs.
    """

    name: str
    words: Callable[[Path, str, int], Sequence[str]]
    ready: str
    path: str
    body: Callable[[list[int], int], Mapping[str, Any]]
    count: Callable[[Any], int]


@dataclass(frozen=True, slots=True)
class Live:
    """A running server."""

    side: Side
    url: str
    pid: int

    def cpu_seconds(self) -> float:
        pids = (self.pid, *(process.pid for process in find_descendants(self.pid)))
        return sum(map(_cpu_seconds, pids))


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@contextlib.contextmanager
def started(
    engine: str, side: Side, environ: Mapping[str, str], model: Path, dtype: str, folder: Path
) -> Iterator[Live]:
    """Run a server, ready when the block begins; all its processes end with the block."""
    port, log = free_ports(), folder / f"{side.name}.log"
    words = [*_cores(), str(KINDS[engine].python), *side.words(model, dtype, port)]
    shared = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            words, stdout=out, stderr=out, env={**os.environ, **shared, **environ}, process_group=0
        )
    try:
        url = f"http://127.0.0.1:{port}"
        until = time.monotonic() + START_SECONDS
        while not answers(url + side.ready):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{side.name} did not start: {log.read_text()[-2000:]}")
            time.sleep(0.5)
        yield Live(side, url, process.pid)
    finally:
        _stop(process)


def _cores() -> Sequence[str]:
    """Return a command that keeps the server off one core, for the client, if there are three."""
    cores = sorted(os.sched_getaffinity(0))
    kept = cores[:-1] if len(cores) > 2 else cores
    return ["taskset", "-c", ",".join(map(str, kept))]


def _stop(process: subprocess.Popen[bytes]) -> None:
    family = find_descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)
    kill_processes(family, 10)


def free_ports() -> int:
    """Return a port that is free, as the one after it is."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                return port


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
