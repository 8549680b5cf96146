"""Simulated conversations: our balancer against round robin, stickiness and least in flight.

10,000 turns over 16 replicas, one five times slower, one that dies on the way. All policies see the
same conversations. Ours is the client's real `LoadBalancer`; the others do what their namesakes do,
with one favour: a dead replica is taken off their list at once (verl never does that).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from typing_extensions import override

from bench.baselines.policies import OTHERS, Policy
from bench.options import Options
from bench.reporting.figures import Figure, Goal, Result, figure, p99
from bench.rigs.simulation import AT_ONCE, DIES_AT, DYING, SLOTS, SLOW, SLOW_FACTOR, Simulation
from rollout_client.discovery.pool_members import Member
from rollout_client.routing.balancer import LoadBalancer

TURNS = 10_000


class Ours(Policy):
    """The client's balancer."""

    continues = True

    def __init__(self, urls: list[str], max_imbalance: int = 8) -> None:
        self._balancer = LoadBalancer(max_imbalance=max_imbalance)
        self._balancer.set_members([Member(url, url) for url in urls], 0.0)

    @override
    def choose(self, key: str, now: float) -> str:
        member = self._balancer.choose_member(key, now)
        assert member is not None
        return member.url

    @override
    def ended(self, url: str, now: float, pace: float | None = None) -> None:
        self._balancer.release_member(url)
        if pace is not None:
            self._balancer.note_pace(url, pace, now)

    @override
    def died(self, url: str, now: float) -> None:
        self._balancer.exclude_member(url, "dead", now)


@dataclass(slots=True)
class Outcome:
    """How one policy fared with each set of conversations."""

    makespans: list[float] = field(default_factory=list)
    tails: list[float] = field(default_factory=list)
    wasted: list[int] = field(default_factory=list)


def run(options: Options) -> Result:
    """Simulate several sets of conversations; each is a round."""
    rounds = options.count(9, 3)
    mine = _outcome(Ours, rounds)
    others = {name: _outcome(make, rounds) for name, make in OTHERS.items()}
    figures = [each for name, other in others.items() for each in _against(name, mine, other)]
    lost = f"{median(others['least in flight'].wasted):.0f}"
    notes = [
        f"{TURNS:,} turns of conversations with Zipf lengths, {AT_ONCE} conversations at once; a"
        f" replica runs {SLOTS} turns at once and queues the rest. Replica {SLOW} is"
        f" {SLOW_FACTOR:g} times slower, replica {DYING} dies after {DIES_AT:g} s.",
        "Each sample is one set of conversations. Time is simulated: the load of the machine does not"
        " touch these figures.",
        f"Tokens sampled in vain when the replica died: {median(mine.wasted):.0f} with ours, which"
        f" keeps what a turn had; {lost} with least in flight, which starts it again.",
    ]
    return Result("balancer", "Balancing conversations (simulated)", figures, notes)


def _outcome(make: Callable[[list[str]], Policy], rounds: int) -> Outcome:
    outcome = Outcome()
    for seed in range(rounds):
        simulation = Simulation(make, TURNS, seed)
        outcome.makespans.append(simulation.run())
        assert len(simulation.latencies) == TURNS
        outcome.tails.append(p99(simulation.latencies))
        outcome.wasted.append(simulation.wasted)
    return outcome


def _against(name: str, mine: Outcome, other: Outcome) -> list[Figure]:
    pairs = (
        ("makespan", mine.makespans, other.makespans),
        ("99th percentile of a turn", mine.tails, other.tails),
    )
    return [
        figure(label, ours, baseline=theirs, against=name, goal=Goal(median(theirs)))
        for label, ours, theirs in pairs
    ]
