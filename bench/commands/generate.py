"""Generation by our worker over vLLM and SGLang, against the engine's own server.

Both servers run at once on the same cores with the same flags, and exchange token ids with the logprobs of the sampled
tokens. They take turns, so that other load on the machine affects both equally. In addition to rate and
latency, the CPU time of all processes of a server is measured, which other programs disturb least.
`ROLLOUT_ENGINES=vllm` restricts the engines; each has a table of its own.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import aiohttp

from bench.figures import ROUNDS_FOR_A_VERDICT, Figure, Goal, Options, Result, figure
from bench.rigs.servers import SGLANG, VLLM, Contenders, Live, started
from bench.rigs.worker import TINY
from tests.support.engine.engine_kinds import KINDS, left_out

PROMPT, ANSWER = 64, 64
GROUP = 8
VOCAB = (3, 4000)

Shape = Callable[[random.Random, int], tuple[list[int], int]]
RATE_GOAL, ADDED_MS = 0.97, 2.0
ANSWER_SECONDS = 300
NOTES = (
    f"Goals: at least {RATE_GOAL} times the tokens per second, and at most {ADDED_MS:g} ms more"
    " latency. The latency of a round is the median of its requests.",
    "Both servers run at once, on the same cores with the same flags, and take turns; eager, one"
    " OpenMP thread, with the logprobs of the sampled tokens. The model is tiny, in float32: a larger one keeps"
    " these cores busy and hides what a server adds. The client, the same for both, competes for the same cores.",
)


@dataclass(frozen=True, slots=True)
class Load:
    """`total` requests, `in_flight` at once; `shape(draw, index)` is a prompt and a length.

    Rounds of it go on until there are enough of them and `seconds` are over.
    """

    label: str
    total: int
    in_flight: int
    shape: Shape
    seconds: float


def _short(draw: random.Random, _: int) -> tuple[list[int], int]:
    return _ids(draw, 8), 8


def _ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(*VOCAB) for _ in range(count)]


def _alike(draw: random.Random, _: int) -> tuple[list[int], int]:
    return _ids(draw, PROMPT), ANSWER


def _long_tailed(draw: random.Random, _: int) -> tuple[list[int], int]:
    return _ids(draw, PROMPT), min(256, max(16, int(draw.lognormvariate(4, 0.8))))


def _grouped(draw: random.Random, index: int) -> tuple[list[int], int]:
    if index % GROUP == 0:
        draw.group = _ids(draw, 4 * PROMPT)  # type: ignore[attr-defined]
    return draw.group, ANSWER  # type: ignore[attr-defined]


TINY_LOADS = (
    Load("tiny, one by one", 30, 1, _alike, 20),
    Load("tiny, 8 at once", 64, 8, _alike, 20),
    Load("tiny, 32 at once", 128, 32, _alike, 20),
    Load("tiny, 32 at once, long-tailed", 96, 32, _long_tailed, 20),
    Load("tiny, 32 at once, groups of 8", 96, 32, _grouped, 20),
    Load("tiny, 1,000 short, 64 at once", 1000, 64, _short, 40),
)


@dataclass(frozen=True, slots=True)
class Took:
    """What one round took: tokens a second, median latency in ms, CPU ms a request."""

    rate: float
    latency: float
    cpu: float


def run(options: Options) -> Iterator[Result]:
    for contenders in (VLLM, SGLANG):
        if left_out(KINDS[contenders.engine]) is None:
            title = f"Our worker over {contenders.name} against {contenders.name}'s own server"
            figures = _compare(contenders, options)
            yield Result("generate", title, figures, NOTES, part=contenders.engine)


def _compare(contenders: Contenders, options: Options) -> list[Figure]:
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        live = [
            stack.enter_context(
                started(
                    contenders.engine,
                    side,
                    contenders.environ,
                    TINY.model(1),
                    "float32",
                    Path(name),
                )
            )
            for side in (contenders.ours, contenders.theirs)
        ]
        for load in TINY_LOADS[:1] if options.quick else TINY_LOADS:
            figures += _figures(load, *_take_turns(load, live, options))
    return figures


def _take_turns(load: Load, both: Sequence[Live], options: Options) -> list[list[Took]]:
    """Measure both in turns; the second of a round goes first in the next. Short answers warm up."""
    found: dict[str, list[Took]] = {live.side.name: [] for live in both}
    warm = replace(load, total=min(load.total, load.in_flight), shape=_short)
    for live in both:
        asyncio.run(_round(live, warm, 0))
    rounds = options.count(ROUNDS_FOR_A_VERDICT, 1)
    seconds = 0 if options.quick or options.runs is not None else load.seconds
    began, turn = time.monotonic(), 0
    while turn < rounds or time.monotonic() - began < seconds:
        turn += 1
        for live in both if turn % 2 else reversed(both):
            took = asyncio.run(_round(live, load, turn))
            found[live.side.name].append(took)
            print(f"{load.label}: {live.side.name} {took.rate:.0f} tokens/s", file=sys.stderr)
    return list(found.values())


async def _round(live: Live, load: Load, seed: int) -> Took:
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

    limit = aiohttp.ClientTimeout(ANSWER_SECONDS)
    async with aiohttp.ClientSession(live.url, timeout=limit) as client:
        cpu, began = live.cpu_seconds(), time.perf_counter()
        await asyncio.gather(*(work(client) for _ in range(load.in_flight)))
        rate = tokens / (time.perf_counter() - began)
        used = 1000 * (live.cpu_seconds() - cpu) / load.total
        return Took(rate, median(latencies), used)


def _figures(load: Load, ours: Sequence[Took], theirs: Sequence[Took]) -> list[Figure]:
    per_token, their_token = ([1e6 / took.rate for took in some] for some in (ours, theirs))
    latency, their_latency = ([took.latency for took in some] for some in (ours, theirs))
    cpu, their_cpu = ([took.cpu for took in some] for some in (ours, theirs))
    server = "its own server"
    return [
        figure(
            f"{load.label}: time per token", per_token, "µs", baseline=their_token,
            against=server, goal=Goal(median(their_token) / RATE_GOAL),
        ),
        figure(
            f"{load.label}: latency", latency, "ms", baseline=their_latency,
            against=server, goal=Goal(median(their_latency) + ADDED_MS),
        ),
        figure(f"{load.label}: CPU per request", cpu, "ms", baseline=their_cpu, against=server),
    ]  # fmt: skip
