"""Balancing conversations: the client's balancer against round robin, stickiness, least in-flight.

Simulated: 10,000 turns of conversations with Zipf lengths over 16 replicas, one five times slower,
one that dies on the way. A replica runs so many turns at once and queues the others; a turn costs
the prefill of what its replica has not cached, then its tokens. All policies see the same
conversations. The client's is the real `Balancer`; the others do what their namesakes do, with one
favour: a dead replica is taken from their list at once (verl's never is).
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import Protocol

from rollout_client.discovery.members import Member
from rollout_client.routing.balancer import Balancer

from .results import Figure, Options, Result, quantiles

SUMMARY = "10,000 turns over 16 replicas, one slow, one dying: makespan and tail (simulated)"

REPLICAS, SLOTS = 16, 24
SLOW, SLOW_FACTOR = 3, 5.0
DYING, DIES_AT = 7, 40.0
TURNS = 10_000
AT_ONCE = 480
"""Conversations under way."""

PREFILL_RATE, TOKEN_SECONDS = 8000.0, 0.02
"""Tokens per second of prefill, and seconds per sampled token: an 8B model on one accelerator."""


@dataclass(slots=True)
class Turn:
    """One request of a conversation; what is not cached must be prefilled."""

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
    alive: bool = True
    running: dict[int, tuple[Turn, float]] = field(default_factory=dict)
    queue: deque[Turn] = field(default_factory=deque)
    cached: dict[int, int] = field(default_factory=dict)

    def seconds(self, turn: Turn) -> float:
        """What a turn takes here."""
        whole = turn.context + turn.kept
        fresh = whole - min(whole, self.cached.get(turn.conversation, 0))
        return self.factor * (fresh / PREFILL_RATE + (turn.tokens - turn.kept) * TOKEN_SECONDS)


class Policy(Protocol):
    """Chooses replicas."""

    continues: bool

    def choose(self, key: str, now: float) -> str:
        """Return the URL for a turn."""

    def ended(self, url: str, now: float, pace: float | None = None) -> None:
        """A turn ended there, at this pace."""

    def died(self, url: str, now: float) -> None:
        """It answers no more."""


class Ours:
    """The client's balancer."""

    continues = True

    def __init__(self, urls: list[str], max_imbalance: int = 8) -> None:
        self._balancer = Balancer(max_imbalance=max_imbalance)
        self._balancer.set_members([Member(url, url) for url in urls], 0.0)

    def choose(self, key: str, now: float) -> str:
        """Return the URL for a turn."""
        member = self._balancer.choose(key, now)
        assert member is not None
        return member.url

    def ended(self, url: str, now: float, pace: float | None = None) -> None:
        """A turn ended there, at this pace."""
        self._balancer.release(url)
        if pace is not None:
            self._balancer.saw_pace(url, pace, now)

    def died(self, url: str, now: float) -> None:
        """It answers no more."""
        self._balancer.exclude(url, "dead", now)


class RoundRobin:
    """One after the other."""

    continues = False

    def __init__(self, urls: list[str]) -> None:
        self.urls = list(urls)
        self._turn = count()

    def choose(self, key: str, now: float) -> str:
        """Return the URL for a turn."""
        return self.urls[next(self._turn) % len(self.urls)]

    def ended(self, url: str, now: float, pace: float | None = None) -> None:
        """A turn ended there, at this pace."""

    def died(self, url: str, now: float) -> None:
        """It answers no more."""
        self.urls.remove(url)


class LeastInFlight(RoundRobin):
    """Whoever has least; of equals the first."""

    def __init__(self, urls: list[str]) -> None:
        super().__init__(urls)
        self.load = dict.fromkeys(urls, 0)

    def choose(self, key: str, now: float) -> str:
        """Return the URL for a turn."""
        url = min(self.urls, key=self.load.__getitem__)
        self.load[url] += 1
        return url

    def ended(self, url: str, now: float, pace: float | None = None) -> None:
        """A turn ended there, at this pace."""
        self.load[url] = max(0, self.load[url] - 1)


class Sticky(LeastInFlight):
    """verl's: a conversation stays where it began, whatever the load there."""

    def __init__(self, urls: list[str]) -> None:
        super().__init__(urls)
        self._home: dict[str, str] = {}

    def choose(self, key: str, now: float) -> str:
        """Return the URL for a turn."""
        home = self._home.get(key)
        if home in self.urls and home is not None:
            self.load[home] += 1
            return home
        self._home[key] = super().choose(key, now)
        return self._home[key]


OURS = "the client's balancer"
POLICIES: dict[str, Callable[[list[str]], Policy]] = {
    OURS: Ours,
    "round robin": RoundRobin,
    "sticky for ever (verl)": Sticky,
    "least in-flight": LeastInFlight,
}


class Simulation:
    """Events in order of time until every turn has its answer."""

    def __init__(self, make: Callable[[list[str]], Policy], turns: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._replicas = {f"http://r{i}": Replica(f"http://r{i}") for i in range(REPLICAS)}
        self._replicas[f"http://r{SLOW}"].factor = SLOW_FACTOR
        self._policy = make(list(self._replicas))
        self._conversations = list(conversations(turns, random.Random(seed)))
        self._next = iter(range(len(self._conversations)))
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._tickets = count()
        self.latencies: list[float] = []
        self._last = 0.0
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
    """Conversations of (context, tokens) per turn, `turns` in all; how many turns one has is Zipf."""
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


def run(options: Options) -> Result:
    """Simulate with several sets of conversations; what is told is the median over them."""
    seeds = range(options.count(9, 3))
    found: dict[str, tuple[list[float], list[float], list[int]]] = {}
    for name, make in POLICIES.items():
        makespans: list[float] = []
        tails: list[float] = []
        wasted: list[int] = []
        for seed in seeds:
            simulation = Simulation(make, TURNS, seed)
            makespans.append(simulation.run())
            assert len(simulation.latencies) == TURNS
            tails.append(quantiles(simulation.latencies)[1])
            wasted.append(simulation.wasted)
        found[name] = (makespans, tails, wasted)
    mine = found.pop(OURS)
    figures = []
    for name, others in found.items():
        for label, ours, theirs in (
            ("makespan", mine[0], others[0]),
            ("99th percentile of a turn", mine[1], others[1]),
        ):
            baseline = median(theirs)
            figures.append(
                Figure(
                    label, "s", median(ours), baseline=baseline, against=name, goal=(baseline, None)
                )
            )
    notes = [
        f"{TURNS:,} turns of conversations with Zipf lengths, {AT_ONCE} at once, {SLOTS} turns at"
        f" once per replica, the others wait; medians of {len(seeds)} sets of conversations."
        f" Replica {SLOW} is {SLOW_FACTOR:g} times slower, replica {DYING} dies after"
        f" {DIES_AT:g} s.",
        f"Tokens sampled in vain when it died: {median(mine[2]):.0f} with the client,"
        f" {median(found['least in-flight'][2]):.0f} with least in-flight and no continuation.",
    ]
    return Result("balancer", "Balancing conversations (simulated)", figures, notes)
