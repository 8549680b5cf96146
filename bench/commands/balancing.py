"""Real conversations over four workers, one slow, one killed: the client against other policies.

The workers are processes of the Hugging Face engine with a tiny model. There are not as many cores
as workers, so each runs for a share of the time only (`duty.py`), the slow one for a fifth of that.
All policies get the same conversations; the next prompt of a conversation is all that was said in
it. Ours is the whole client, which finds the dead worker by itself and goes on after the tokens it
had. The others choose as their namesakes do and send through the same client, one pool for each
worker, with two favours: a dead worker is taken off their list at its first failure, and a turn
that broke off is sent again at once.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Protocol

from bench.baselines.policies import OTHERS, Policy
from bench.options import Options
from bench.reporting.figures import Figure, Goal, Result, figure, p99
from bench.rigs.conversations import AT_ONCE, Conversations, conversations
from bench.rigs.workers_on_duty import PERIOD_MS, SHARE, SLOW_FACTOR, WORKERS, Workers
from rollout_client import AsyncRolloutPool, RequestFailed

OURS = "the client"
TURNS = 200


@dataclass(frozen=True, slots=True)
class Took:
    """One policy's way through all conversations: seconds, and tokens sampled in vain."""

    makespan: float
    tail: float
    wasted: int


class Sender(Protocol):
    """Sees one turn through; `wasted` counts the tokens that had to be sampled twice."""

    wasted: int

    async def send(self, key: str, prompt: list[int], tokens: int) -> list[int]:
        """Return the sampled tokens."""


class Ours:
    """The client over all workers."""

    def __init__(self, pool: AsyncRolloutPool) -> None:
        self._pool = pool
        self.wasted = 0

    async def send(self, key: str, prompt: list[int], tokens: int) -> list[int]:
        """See `Sender.send`."""
        result = await self._pool.generate(prompt, session_id=key, sampling=_sampling(tokens))
        self.wasted += sum(a.tokens for a in result.attempts) - tokens
        return list(result.token_ids)


class Other:
    """Another policy over pools of one worker each."""

    def __init__(self, policy: Policy, pools: dict[str, AsyncRolloutPool]) -> None:
        self._policy = policy
        self._pools = pools
        self._dead: set[str] = set()
        self.wasted = 0

    async def send(self, key: str, prompt: list[int], tokens: int) -> list[int]:
        """See `Sender.send`."""
        while True:
            url = self._policy.choose(key, 0.0)
            try:
                result = await self._pools[url].generate(
                    prompt, session_id=key, sampling=_sampling(tokens)
                )
            except RequestFailed as error:
                self.wasted += len(error.kept.token_ids) if error.kept else 0
                if url not in self._dead:
                    self._dead.add(url)
                    self._policy.died(url, 0.0)
            else:
                return list(result.token_ids)
            finally:
                self._policy.ended(url, 0.0)


def _sampling(tokens: int) -> dict[str, object]:
    return {"max_tokens": tokens, "temperature": 1.0, "ignore_eos": True}


def run(options: Options) -> Result:
    """Measure several sets of conversations; each is a round."""
    turns = TURNS // 2 if options.quick else TURNS
    rounds = options.count(5, 1)
    names = [OURS, *OTHERS]
    found: dict[str, list[Took]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder, Workers(Path(folder)) as workers:
        for seed in range(rounds):
            random.Random(seed).shuffle(names)  # nobody is always the first on a cold machine
            for name in names:
                took = asyncio.run(_measure(workers, name, turns, seed))
                print(f"  {name}: {took.makespan:.1f} s, p99 {took.tail:.2f} s", flush=True)
                found[name].append(took)
    return _result(found, turns)


async def _measure(workers: Workers, name: str, turns: int, seed: int) -> Took:
    urls = workers.ready()
    async with AsyncExitStack() as stack:
        sender: Sender
        if name == OURS:
            pool = AsyncRolloutPool.from_urls(urls)
            sender = Ours(await stack.enter_async_context(pool))
        else:
            pools = {url: AsyncRolloutPool.from_urls([url], max_failures=0) for url in urls}
            for pool in pools.values():
                await stack.enter_async_context(pool)
            sender = Other(OTHERS[name](urls), pools)
        with workers.on_duty():
            talk = Conversations(sender.send, conversations(turns, seed), workers.kill)
            makespan = await talk.run()
    return Took(makespan, p99(talk.seconds), sender.wasted)


def _result(found: dict[str, list[Took]], turns: int) -> Result:
    mine = found[OURS]
    figures = [each for name in OTHERS for each in _against(name, mine, found[name])]
    wasted = ", ".join(
        f"{median(each.wasted for each in some):.0f} with {name}" for name, some in found.items()
    )
    notes = [
        f"{turns} turns of conversations with Zipf lengths, {AT_ONCE} conversations at once, over"
        f" {WORKERS} processes of the hf engine; each sample is one set of conversations. A worker runs {SHARE:.0%} of the time (SIGSTOP and SIGCONT, periods of"
        f" {PERIOD_MS} ms), the slow one 1/{SLOW_FACTOR:g} of that; one is killed after a third of"
        " the turns and stays dead.",
        "The hf engine has no prefix cache, so staying with a worker gains nothing here: this shows"
        " load, slowness and death. The simulation charges for the cache as well.",
        f"Tokens sampled in vain, medians: {wasted}.",
    ]
    return Result("balancing", "Balancing conversations over real workers", figures, notes)


def _against(name: str, mine: Sequence[Took], other: Sequence[Took]) -> list[Figure]:
    pairs = (
        ("makespan", [t.makespan for t in mine], [t.makespan for t in other]),
        ("99th percentile of a turn", [t.tail for t in mine], [t.tail for t in other]),
    )
    return [
        figure(label, ours, baseline=theirs, against=name, goal=Goal(median(theirs)))
        for label, ours, theirs in pairs
    ]
