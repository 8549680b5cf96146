"""Simulated replicas that a policy shares conversations among, one of them slow, one dying.

A replica runs so many turns at once and queues the others. A turn costs the prefill of what its
replica has not cached, then its tokens.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from bench.baselines.policies import Policy

REPLICAS, SLOTS = 16, 24
SLOW, SLOW_FACTOR = 3, 5.0
DYING, DIES_AT = 7, 40.0
AT_ONCE = 480
"""Conversations under way."""

PREFILL_RATE, TOKEN_SECONDS = 8000.0, 0.02
"""Tokens of prefill per second, and seconds per sampled token: an 8B model on one accelerator."""


@dataclass(slots=True)
class Turn:
    """One request of a conversation; whatever is not cached must be prefilled."""

    conversation: int
    context: int
    tokens: int
    began: float = 0.0
    kept: int = 0
    """Tokens that a dead replica had made and the client kept."""


@dataclass(slots=True)
class Replica:
    """Runs `SLOTS` turns at once."""

    url: str
    factor: float = 1.0
    running: dict[int, tuple[Turn, float]] = field(default_factory=dict)
    queue: deque[Turn] = field(default_factory=deque)
    cached: dict[int, int] = field(default_factory=dict)

    def seconds(self, turn: Turn) -> float:
        whole = turn.context + turn.kept
        fresh = whole - min(whole, self.cached.get(turn.conversation, 0))
        return self.factor * (fresh / PREFILL_RATE + (turn.tokens - turn.kept) * TOKEN_SECONDS)


class Simulation:
    """Events in the order of time, until every turn has its answer.

    `latencies`: seconds of each turn. `wasted`: tokens sampled in vain by the replica that died.
    """

    def __init__(self, make: Callable[[list[str]], Policy], turns: int, seed: int) -> None:
        self._replicas = {f"http://r{i}": Replica(f"http://r{i}") for i in range(REPLICAS)}
        self._replicas[f"http://r{SLOW}"].factor = SLOW_FACTOR
        self._policy = make(list(self._replicas))
        self._conversations = list(conversations(turns, random.Random(seed)))
        self._next = iter(range(len(self._conversations)))
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._tickets = count()
        self._last = 0.0
        self.latencies: list[float] = []
        self.wasted = 0

    def run(self) -> float:
        """Return the makespan in seconds."""
        for _ in range(AT_ONCE):
            self._open(0.0)
        self._at(DIES_AT, self._die)
        while self._events:
            at, _, event = heapq.heappop(self._events)
            event(at)
        return self._last

    def _at(self, when: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _open(self, now: float) -> None:
        index = next(self._next, None)
        if index is not None:
            self._send(Turn(index, *self._conversations[index].popleft(), began=now), now)

    def _send(self, turn: Turn, now: float) -> None:
        replica = self._replicas[self._policy.choose(str(turn.conversation), now)]
        if len(replica.running) < SLOTS:
            self._start(replica, turn, now)
        else:
            replica.queue.append(turn)

    def _start(self, replica: Replica, turn: Turn, now: float) -> None:
        ticket = next(self._tickets)
        ends = now + replica.seconds(turn)
        replica.running[ticket] = (turn, ends)
        self._at(ends, lambda at: self._end(replica, ticket, at))

    def _end(self, replica: Replica, ticket: int, now: float) -> None:
        if ticket not in replica.running:
            return
        turn, _ = replica.running.pop(ticket)
        self._last = now
        replica.cached[turn.conversation] = turn.context + turn.tokens
        self._policy.ended(replica.url, now, replica.factor * TOKEN_SECONDS)
        self.latencies.append(now - turn.began)
        if replica.queue:
            self._start(replica, replica.queue.popleft(), now)
        rest = self._conversations[turn.conversation]
        if rest:
            self._send(Turn(turn.conversation, *rest.popleft(), began=now), now)
        else:
            self._open(now)

    def _die(self, now: float) -> None:
        replica = self._replicas[f"http://r{DYING}"]
        lost = [(turn, ends) for turn, ends in replica.running.values()]
        waiting = list(replica.queue)
        replica.running.clear()
        replica.queue.clear()
        replica.cached.clear()
        self._policy.died(replica.url, now)
        for turn, ends in lost:
            left = min(turn.tokens, int((ends - now) / TOKEN_SECONDS) + 1)
            made = max(turn.kept, turn.tokens - left)
            turn.kept = made if self._policy.continues else 0
            self.wasted += made - turn.kept
        for turn in [*(turn for turn, _ in lost), *waiting]:
            self._policy.ended(replica.url, now)
            self._send(turn, now)


def conversations(turns: int, rng: random.Random) -> Iterator[deque[tuple[int, int]]]:
    """Yield conversations of (context, tokens) per turn; their lengths are Zipf, `turns` in all."""
    left = turns
    while left > 0:
        length = min(left, 64, int(rng.paretovariate(1.1)))
        left -= length
        context, made = rng.randint(500, 4000), deque[tuple[int, int]]()
        for _ in range(length):
            tokens = int(min(2048, rng.lognormvariate(5.2, 0.8))) + 1
            made.append((context, tokens))
            context += tokens + rng.randint(50, 600)
        yield made
