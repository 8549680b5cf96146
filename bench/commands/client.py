"""What the client costs per request, against httpx reading the same stream.

The workers are processes that answer at once, so that nothing but the client's own work is seen:
one request after the other, a thousand in flight, and the states of hundreds of workers at once.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from statistics import median

import httpx

from bench.figures import Options, Result, figure
from bench.rigs import answers
from rollout_client import AsyncRolloutPool
from rollout_client.discovery.pool_members import Member
from rollout_client.steering.control_ports import ControlPorts
from rollout_client.worker_control import WorkerControl

WORKERS = 4
TOKENS = 64
PROMPT = list(range(100, 612))
Call = Callable[[], Awaitable[None]]
BODY = json.dumps(
    {"token_ids": PROMPT, "sampling": {"max_tokens": TOKENS}, "request_id": "r", "stream": True}
)


@dataclass(frozen=True, slots=True)
class Amount:
    """How many requests: in turns; in rounds of a crowd."""

    single: int
    in_flight: int
    rounds: int
    crowd: int
    ports: int


WHOLE = Amount(single=2000, in_flight=1000, rounds=5, crowd=4000, ports=300)
QUICK = Amount(single=50, in_flight=25, rounds=2, crowd=50, ports=20)


@dataclass(frozen=True, slots=True)
class Crowds:
    """CPU milliseconds per request and requests per second, by round."""

    cpu: list[float]
    rate: list[float]


def run(options: Options) -> Result:
    amount = QUICK if options.quick else WHOLE
    if options.runs is not None:
        amount = replace(amount, rounds=options.runs)
    with _instant_workers(WORKERS, TOKENS) as urls:
        return asyncio.run(_measure(urls, amount))


async def _measure(urls: Sequence[str], amount: Amount) -> Result:
    async with _calls(urls, amount.in_flight) as (theirs, ours):
        await _in_turns(theirs, ours, amount.single // 10)
        single = await _in_turns(theirs, ours, amount.single)
        crowds = Crowds([], []), Crowds([], [])
        for _ in range(amount.rounds):
            for call, found in zip((theirs, ours), crowds, strict=True):
                cpu, rate = await _crowd(call, amount.crowd, amount.in_flight)
                found.cpu.append(1000 * cpu)
                found.rate.append(rate)
    asked = [await _ask_states(urls, amount.ports) for _ in range(amount.rounds)]
    return _result(single, crowds, asked, amount)


async def _ask_states(urls: Sequence[str], count: int) -> tuple[float, float]:
    """Return the CPU seconds of asking so many control ports at once: by one client of httpx, and by ours."""
    turns = itertools.cycle(urls)
    members = [Member(f"http://w{n}:8000", f"w{n}", next(turns)) for n in range(count)]
    ports = ControlPorts(lambda: members, None)
    async with httpx.AsyncClient(limits=httpx.Limits(), timeout=None, trust_env=False) as client:
        controls = [WorkerControl(each.control_url or "", _no_token, client) for each in members]
        found = []
        for ask in (
            lambda: asyncio.gather(*(each.state(timeout=600) for each in controls)),
            ports.get_states,
        ):
            began = time.process_time()
            assert len(await ask()) == count
            found.append(time.process_time() - began)
    await ports.close()
    return found[0], found[1]


async def _no_token() -> None:
    return None


@asynccontextmanager
async def _calls(urls: Sequence[str], in_flight: int) -> AsyncIterator[tuple[Call, Call]]:
    """Yield a call of httpx alone, and one of the client."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=in_flight)
    async with AsyncRolloutPool.from_urls(urls) as pool, AsyncExitStack() as stack:
        # One httpx client per worker: a single one looks at all thousand connections each time.
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(base_url=url, limits=limits, timeout=None, trust_env=False)
            )
            for url in urls
        ]
        turns = itertools.cycle(clients)

        async def theirs() -> None:
            await _read(next(turns))

        async def ours() -> None:
            result = await pool.generate(PROMPT, sampling={"max_tokens": TOKENS})
            assert len(result.token_ids) == TOKENS

        yield theirs, ours


async def _read(client: httpx.AsyncClient) -> None:
    """Send, read and parse, as a user would write it."""
    tokens: list[int] = []
    async with client.stream("POST", "/v1/generate", content=BODY) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                tokens += json.loads(line[6:]).get("token_ids", ())
    assert len(tokens) == TOKENS


@contextmanager
def _instant_workers(count: int, tokens: int) -> Iterator[list[str]]:
    """Start servers whose answers have `tokens` tokens; yield their URLs."""
    command = [sys.executable, str(answers.__file__), str(tokens)]
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
        raise RuntimeError(f"{answers.__name__} ended before it served")
    return int(line)


async def _in_turns(one: Call, other: Call, count: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each call of both, in turns, so that both meet the same load."""
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(count):
        for call, seconds in zip((one, other), found, strict=True):
            began = time.perf_counter()
            await call()
            seconds.append(time.perf_counter() - began)
    return found


async def _crowd(call: Call, count: int, in_flight: int) -> tuple[float, float]:
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


def _result(
    single: tuple[list[float], list[float]],
    crowds: tuple[Crowds, Crowds],
    asked: Sequence[tuple[float, float]],
    amount: Amount,
) -> Result:
    plain, client = ([1000 * seconds for seconds in side] for side in single)
    added = [ours - theirs for theirs, ours in zip(plain, client, strict=True)]
    alone, pool = crowds
    figures = [
        figure("one request after the other", client, "ms", baseline=plain, against="httpx"),
        figure("… added by the client", added, "ms"),
        figure(
            f"CPU per request, {amount.in_flight:,} in flight", pool.cpu, "ms",
            baseline=alone.cpu, against="httpx",
        ),
        figure(
            f"CPU to ask {amount.ports:,} workers for their state", [each for _, each in asked], "s",
            baseline=[each for each, _ in asked], against="one client of httpx",
        ),
    ]  # fmt: skip
    notes = [
        f"Answers of {TOKENS} tokens in {TOKENS // answers.PER_EVENT} events, from {WORKERS} processes that"
        f" do nothing else. With {amount.in_flight:,} in flight, rounds of {amount.crowd:,} requests:"
        f" {median(pool.rate):.0f} requests per second, httpx {median(alone.rate):.0f}.",
        "Added by the client: the differences of two neighbouring requests, one of each.",
    ]
    return Result("client", "What the client costs", figures, notes)
