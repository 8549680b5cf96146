"""A worker of ours against its engine's own server: the loads, the rounds, the figures (P9).

Both servers live at once, get the same flags and cores, take and give token ids with the logprobs
of the sampled tokens, and take turns: whatever else the machine does meets both alike. Beside
rate and latency stands the CPU time of all processes of a server, which other programs blur least.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import httpx

from engine_kinds import KINDS, ROOT
from rollout_worker.observe.processes import descendants, end

from .models import TINY as TINY_MODELS
from .models import half_billion
from .results import Figure, Options

START_SECONDS = 600.0
MAX_LENGTH = 1024
CACHE_TOKENS = 20480
"""Of KV cache, enough for every load below without a preemption."""
PROMPT, ANSWER = 64, 64
GROUP = 8
VOCAB = (3, 4000)
RATE_GOAL, ADDED_MS = 0.97, 2.0
TICKS = os.sysconf("SC_CLK_TCK")

Shape = Callable[[random.Random, int], tuple[list[int], int]]


@dataclass(frozen=True, slots=True)
class Load:
    """`total` requests, `in_flight` at once; `shape(draw, index)` is a prompt and a length.

    Rounds of it go on until `seconds` are over.
    """

    label: str
    total: int
    in_flight: int
    shape: Shape
    seconds: float


def _ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(*VOCAB) for _ in range(count)]


def _alike(draw: random.Random, _: int) -> tuple[list[int], int]:
    return _ids(draw, PROMPT), ANSWER


def _short(draw: random.Random, _: int) -> tuple[list[int], int]:
    return _ids(draw, 8), 8


def _long_tailed(draw: random.Random, _: int) -> tuple[list[int], int]:
    return _ids(draw, PROMPT), min(256, max(16, int(draw.lognormvariate(4, 0.8))))


def _grouped(draw: random.Random, index: int) -> tuple[list[int], int]:
    if index % GROUP == 0:
        draw.group = _ids(draw, 4 * PROMPT)  # type: ignore[attr-defined]
    return draw.group, ANSWER  # type: ignore[attr-defined]


TINY = (
    Load("tiny, one by one", 30, 1, _alike, 20),
    Load("tiny, 8 at once", 64, 8, _alike, 20),
    Load("tiny, 32 at once", 128, 32, _alike, 20),
    Load("tiny, 32 at once, long-tailed", 96, 32, _long_tailed, 20),
    Load("tiny, 32 at once, groups of 8", 96, 32, _grouped, 20),
    Load("tiny, 1,000 short, 64 at once", 1000, 64, _short, 40),
)
BIG = (
    Load("0.5B, one by one", 1, 1, _alike, 20),
    Load("0.5B, 8 at once", 8, 8, _alike, 40),
    Load("0.5B, 32 at once", 32, 32, _alike, 90),
)


@dataclass(frozen=True, slots=True)
class Took:
    """What one round took: tokens a second, milliseconds of each request, CPU ms a request."""

    rate: float
    latencies: list[float]
    cpu: float


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


class Contenders(Protocol):
    """A module with both sides of one engine."""

    ENGINE: str
    OURS: Side
    THEIRS: Side


def worker(engine: str, flags: Sequence[str]) -> Side:
    """Our side, with the engine's own `flags`."""

    def words(model: Path, dtype: str, port: int) -> Sequence[str]:
        return [
            *("-m", "rollout_worker", "serve", "--engine", engine, "--model", str(model)),
            *("--max-length", str(MAX_LENGTH), "--max-batch-tokens", str(CACHE_TOKENS)),
            *("--dtype", dtype, "--auth", "none", "--shutdown-grace", "0"),
            *("--data-host", "127.0.0.1", "--data-port", str(port)),
            *("--control-host", "127.0.0.1", "--control-port", "0", "--log-level", "warning"),
            *(f"--engine-arg={flag}" for flag in flags),
        ]

    def body(prompt: list[int], length: int) -> Mapping[str, Any]:
        return {"token_ids": prompt, "sampling": {"max_tokens": length, "ignore_eos": True}}

    def count(answer: Any) -> int:
        return len(answer["outputs"][0]["logprobs"])

    return Side("ours", words, "/ready", "/v1/generate", body, count)


@dataclass(frozen=True, slots=True)
class _Live:
    """A running server."""

    side: Side
    url: str
    pid: int

    def cpu_seconds(self) -> float:
        """CPU time so far of all its processes."""
        pids = (self.pid, *(process.pid for process in descendants(self.pid)))
        return sum(map(_cpu_seconds, pids))


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def compare(contenders: Contenders, options: Options) -> list[Figure]:
    """Run both sides through all loads."""
    suites = (
        (TINY_MODELS.model(1), "float32", TINY),
        (half_billion(1, options.dtype), options.dtype, BIG),
    )
    figures: list[Figure] = []
    for model, dtype, loads in suites:
        with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
            both = [
                stack.enter_context(_started(contenders, side, model, dtype, Path(name)))
                for side in (contenders.OURS, contenders.THEIRS)
            ]
            for load in loads[-1:] if options.quick else loads:
                figures += _alternate(load, both, options)
    return figures


@contextmanager
def _started(
    contenders: Contenders, side: Side, model: Path, dtype: str, folder: Path
) -> Iterator[_Live]:
    """A server that answers 200 when ready; all its processes are gone afterwards."""
    port, log = _free_port(), folder / f"{side.name}.log"
    python = str(KINDS[contenders.ENGINE].python)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 2:
        cores = cores[:-1]  # the client's
    words = ["taskset", "-c", ",".join(map(str, cores)), python, *side.words(model, dtype, port)]
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out, env=_environ(), process_group=0)
    try:
        url = f"http://127.0.0.1:{port}"
        until = time.monotonic() + START_SECONDS
        while not _answers(url + side.ready):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{side.name} did not start: {log.read_text()[-2000:]}")
            time.sleep(0.5)
        yield _Live(side, url, process.pid)
    finally:
        family = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        end(family, 10)


def _environ() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _alternate(load: Load, both: Sequence[_Live], options: Options) -> list[Figure]:
    """Let both take turns, whoever was second goes first in the next; short answers warm up."""
    found: dict[str, list[Took]] = {live.side.name: [] for live in both}
    warm = replace(load, total=min(load.total, load.in_flight), shape=_short)
    for live in both:
        asyncio.run(_round(live, warm, 0))
    began, turn = time.monotonic(), 0
    while turn < (options.runs or 1) or (
        options.runs is None and not options.quick and time.monotonic() - began < load.seconds
    ):
        turn += 1
        for live in both if turn % 2 else reversed(both):
            took = asyncio.run(_round(live, load, turn))
            found[live.side.name].append(took)
            print(f"{load.label}: {live.side.name} {took.rate:.0f} tokens/s", file=sys.stderr)
    return _figures(load, *found.values())


async def _round(live: _Live, load: Load, seed: int) -> Took:
    draw, side = random.Random(seed), live.side
    todo = [load.shape(draw, index) for index in range(load.total)][::-1]
    latencies: list[float] = []
    tokens = 0

    async def work(client: aiohttp.ClientSession) -> None:
        nonlocal tokens
        while todo:
            prompt, length = todo.pop()
            began = time.perf_counter()
            async with client.post(side.path, json=side.body(prompt, length)) as response:
                answer = await response.json(content_type=None)
            latencies.append(1000 * (time.perf_counter() - began))
            assert response.status == 200, answer
            made = side.count(answer)
            assert made == length, (made, length)
            tokens += made

    limit = aiohttp.ClientTimeout(300)
    async with aiohttp.ClientSession(live.url, timeout=limit) as client:
        cpu, began = live.cpu_seconds(), time.perf_counter()
        await asyncio.gather(*(work(client) for _ in range(load.in_flight)))
        rate = tokens / (time.perf_counter() - began)
        return Took(rate, latencies, 1000 * (live.cpu_seconds() - cpu) / load.total)


def _figures(load: Load, ours: Sequence[Took], theirs: Sequence[Took]) -> list[Figure]:
    rates = [1e6 / statistics.median(t.rate for t in some) for some in (ours, theirs)]
    waits = [statistics.median(w for t in some for w in t.latencies) for some in (ours, theirs)]
    costs = [statistics.median(t.cpu for t in some) for some in (ours, theirs)]
    rounds = f"its own server ({len(ours)} rounds)"
    return [
        Figure(
            f"{load.label}: time a token", "µs", rates[0],
            baseline=rates[1], against=rounds, goal=(rates[1] / RATE_GOAL, None),
        ),
        Figure(
            f"{load.label}: latency", "ms", waits[0],
            baseline=waits[1], against=rounds, goal=(waits[1] + ADDED_MS, None),
        ),
        Figure(
            f"{load.label}: CPU a request", "ms", costs[0], baseline=costs[1], against=rounds
        ),
    ]  # fmt: skip


def notes(options: Options) -> tuple[str, ...]:
    """What belongs to the figures of either engine."""
    return (
        f"Goals (P9): at least {RATE_GOAL} times the tokens a second, at most {ADDED_MS:g} ms more "
        "at the median.",
        "Both servers live, on the same cores with the same flags, take turns; eager, one OpenMP "
        "thread, logprobs of the sampled tokens on. Tiny model in float32, 0.5B shape in "
        f"{options.dtype}; the client, always the same, competes for the same cores.",
    )
