"""Balancing for real: conversations over four workers, one slow, one killed on the way.

The workers are processes of the Hugging Face engine with a tiny model. Each may run for a share of
the time only (`duty.py`), as many cores as these are not there, and the slow one for a fifth of
that. All policies get the same conversations; a conversation's next prompt is all that was said
in it. The client's is the whole client, which finds the dead worker by itself and goes on after the
tokens it had. The others choose as their namesakes do and send by the same client, one pool for each
worker, with two favours: a dead worker is taken from their list at its first failure, and a turn
that broke is sent again at once.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from rollout_client import AsyncRolloutPool, RequestFailed
from tinymodels import TinyModels
from waiting import until_sync
from workers import START_SECONDS, Command

from .balancer import LeastInFlight, Policy, RoundRobin, Sticky
from .results import Figure, Options, Result, quantiles

SUMMARY = "conversations over 4 real workers, one slow, one killed: makespan and tail"
DUTY = Path(__file__).with_name("duty.py")
CACHE = Path(os.environ.get("ROLLOUT_CACHE", DUTY.parents[1] / ".cache"))
WORKERS, SLOW, DYING = 4, 2, 1
SHARE, SLOW_FACTOR, PERIOD_MS = 0.4, 5.0, 50
TURNS, AT_ONCE = 200, 32
LONGEST = 1700
"""Tokens of a conversation: the model takes 2,048."""

Conversation = deque[tuple[list[int], int]]
"""Turns: what is said to the policy, and how many tokens it answers."""


class Sender(Protocol):
    """Sees one turn through."""

    async def send(self, key: str, prompt: list[int], tokens: int) -> list[int]:
        """Return the sampled tokens."""


class Ours:
    """The client over all workers."""

    def __init__(self, pool: AsyncRolloutPool) -> None:
        self._pool = pool
        self.repeated = 0

    async def send(self, key: str, prompt: list[int], tokens: int) -> list[int]:
        """Return the sampled tokens."""
        result = await self._pool.generate(prompt, session_id=key, sampling=_sampling(tokens))
        self.repeated += sum(a.tokens for a in result.attempts) - tokens
        return list(result.token_ids)


class Others:
    """A policy of `balancer.py` over pools of one worker each."""

    def __init__(self, policy: Policy, pools: dict[str, AsyncRolloutPool]) -> None:
        self._policy = policy
        self._pools = pools
        self._dead: set[str] = set()
        self.repeated = 0

    async def send(self, key: str, prompt: list[int], tokens: int) -> list[int]:
        """Return the sampled tokens."""
        while True:
            url = self._policy.choose(key, 0.0)
            try:
                result = await self._pools[url].generate(
                    prompt, session_id=key, sampling=_sampling(tokens)
                )
            except RequestFailed as error:
                self.repeated += len(error.kept.token_ids) if error.kept else 0
                if url not in self._dead:
                    self._dead.add(url)
                    self._policy.died(url, 0.0)
            else:
                return list(result.token_ids)
            finally:
                self._policy.ended(url, 0.0)


def _sampling(tokens: int) -> dict[str, object]:
    return {"max_tokens": tokens, "temperature": 1.0, "ignore_eos": True}


OURS = "the client"
POLICIES: dict[str, Callable[[list[str]], Policy] | None] = {
    OURS: None,
    "round robin": RoundRobin,
    "sticky for ever (verl)": Sticky,
    "least in-flight": LeastInFlight,
}


def conversations(turns: int, seed: int) -> list[Conversation]:
    """Return conversations whose numbers of turns are Zipf, `turns` in all."""
    rng, made, left = random.Random(seed), [], turns
    while left > 0:
        length = min(left, 16, int(rng.paretovariate(1.1)))
        conversation: Conversation = deque()
        whole = 0
        for index in range(length):
            said = rng.randint(100, 300) if index == 0 else rng.randint(10, 60)
            tokens = int(min(160, rng.lognormvariate(3.4, 0.7))) + 8
            whole += said + tokens
            if whole > LONGEST:
                break
            conversation.append(([rng.randint(300, 4000) for _ in range(said)], tokens))
        left -= len(conversation)
        made.append(conversation)
    return made


class Run:
    """One policy's way through all conversations."""

    def __init__(self, sender: Sender, work: list[Conversation], kill: Callable[[], None]) -> None:
        self._sender = sender
        self._work = iter(enumerate(work))
        self._turns = sum(len(each) for each in work)
        self._kill = kill
        self.seconds: list[float] = []

    async def run(self) -> float:
        """Return the makespan in seconds."""
        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(self._talk())
        assert len(self.seconds) == self._turns, "a turn was lost"
        return time.perf_counter() - began

    async def _talk(self) -> None:
        for index, conversation in self._work:
            context: list[int] = []
            for said, tokens in conversation:
                context += said
                began = time.perf_counter()
                sampled = await self._sender.send(str(index), context, tokens)
                assert len(sampled) == tokens
                context += sampled
                self.seconds.append(time.perf_counter() - began)
                if len(self.seconds) == self._turns // 3:
                    self._kill()


class Fleet:
    """The workers; a dead one is started again between two runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._model = TinyModels(CACHE / "models").model(1)
        self._workers: list[Command] = []

    def ready(self) -> list[str]:
        """Start who is missing; return the data URLs of all, who serve."""
        for index in range(WORKERS):
            if index == len(self._workers):
                self._workers.append(self._start(index))
            elif self._workers[index].process.poll() is not None:
                self._workers[index].close()
                self._workers[index] = self._start(index)
        for worker in self._workers:
            until_sync(worker.ready, START_SECONDS, what="a worker serves")
        return [str(worker.data.base_url).rstrip("/") for worker in self._workers]

    def _start(self, index: int) -> Command:
        return Command(self._model, self._folder / f"{index}.log", (), None)

    def kill(self) -> None:
        """Kill -9 the one that dies."""
        self._workers[DYING].process.kill()

    @contextmanager
    def on_duty(self) -> Iterator[None]:
        """Each has its share of the time for as long as the block runs."""
        shares = [
            f"{worker.process.pid}:{SHARE / (SLOW_FACTOR if index == SLOW else 1.0)}"
            for index, worker in enumerate(self._workers)
        ]
        duty = subprocess.Popen([sys.executable, DUTY, str(PERIOD_MS), *shares])
        try:
            yield
        finally:
            duty.terminate()
            duty.wait(10)

    def close(self) -> None:
        """End all."""
        for worker in self._workers:
            worker.close()
            worker.process.kill()
            worker.process.wait(30)


def run(options: Options) -> Result:
    """Measure; what is told is the median over some sets of conversations."""
    turns = TURNS // 2 if options.quick else TURNS
    seeds = range(options.count(2, 1))
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in POLICIES}
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(Path(folder))
        try:
            for seed in seeds:
                names = list(POLICIES)
                random.Random(seed).shuffle(names)  # nobody is always the first on a cold machine
                for name in names:
                    took = asyncio.run(_measure(fleet, name, turns, seed))
                    print(f"  {name}: {took[0]:.1f} s, p99 {took[1]:.2f} s", flush=True)
                    found[name].append(took)
        finally:
            fleet.close()
    return _result(found, turns, len(seeds))


async def _measure(fleet: Fleet, name: str, turns: int, seed: int) -> tuple[float, float, int]:
    """Return makespan, 99th percentile of a turn, and tokens sampled in vain."""
    urls = fleet.ready()
    async with AsyncExitStack() as stack:
        make = POLICIES[name]
        sender: Ours | Others
        if make is None:
            pool = AsyncRolloutPool.from_urls(urls)
            sender = Ours(await stack.enter_async_context(pool))
        else:
            pools = {url: AsyncRolloutPool.from_urls([url], max_failures=0) for url in urls}
            for pool in pools.values():
                await stack.enter_async_context(pool)
            sender = Others(make(urls), pools)
        with fleet.on_duty():
            measured = Run(sender, conversations(turns, seed), fleet.kill)
            makespan = await measured.run()
    return makespan, quantiles(measured.seconds)[1], sender.repeated


def _result(found: dict[str, list[tuple[float, float, int]]], turns: int, sets: int) -> Result:
    mine = found.pop(OURS)
    figures = [
        Figure(
            label, "s", _median(mine, index), baseline=_median(others, index), against=name,
            goal=(_median(others, index), None),
        )
        for name, others in found.items()
        for index, label in enumerate(("makespan", "99th percentile of a turn"))
    ]  # fmt: skip
    notes = [
        f"{turns} turns of conversations with Zipf lengths, {AT_ONCE} at once, over {WORKERS}"
        f" processes of the hf engine; sets of conversations: {sets}, told is the median. A worker"
        f" runs {SHARE:.0%} of the time, the slow one a {SLOW_FACTOR:g}th of that (SIGSTOP and SIGCONT, {PERIOD_MS} ms"
        " periods); one is killed after a third of the turns and stays away.",
        "The hf engine has no prefix cache: staying with a replica gains nothing here, so this"
        " shows load, slowness and death; the simulation charges the cache, too.",
        f"Tokens sampled in vain: {_median(mine, 2):.0f} with the client, "
        + ", ".join(f"{_median(others, 2):.0f} with {name}" for name, others in found.items())
        + ". The others are told of the death at their first failure.",
    ]
    return Result("balancing", "Balancing conversations over real workers", figures, notes)


def _median(found: Sequence[tuple[float, float, int]], index: int) -> float:
    return statistics.median(each[index] for each in found)
