"""What measurements are set up with measures what it says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3]))

from bench.baselines.policies import LeastInFlight, RoundRobin, Sticky
from bench.rigs.instant_workers import in_turns
from bench.rigs.phases import quantile
from bench.rigs.streams import Streams

Buckets = dict[tuple[str, ...], float]
WORKERS = ["a", "b", "c"]


def test_a_pause_is_the_longest_time_in_which_no_stream_got_anything() -> None:
    streams = Streams()
    for arrivals in ([1.0, 2.0, 3.0, 7.5], [1.5, 2.5, 3.5, 7.0]):
        streams.open().extend(arrivals)
    assert streams.longest(3.2, 8.0) == pytest.approx(3.5)
    assert streams.longest(3.2, 4.5) == pytest.approx(1.0), "it may last until the end"
    assert streams.usual(5.0) == pytest.approx([1.0] * 4)
    assert len(streams.seen(7.2)) == 1, "the second has got nothing since"


async def test_two_calls_take_turns() -> None:
    order: list[str] = []

    async def one() -> None:
        order.append("one")

    async def other() -> None:
        order.append("other")

    found = await in_turns(one, other, 3)
    assert order == ["one", "other"] * 3
    assert [len(side) for side in found] == [3, 3]


def test_a_quantile_of_a_histogram_counts_only_what_it_gained() -> None:
    before: Buckets = {("1",): 100.0, ("2",): 100.0, ("+Inf",): 100.0}
    after: Buckets = {("1",): 100.0, ("2",): 110.0, ("+Inf",): 110.0}
    assert quantile(before, after, 0.5) == pytest.approx(1.5)
    assert quantile({}, after, 0.5) == pytest.approx(0.55)


def test_round_robin_takes_one_after_the_other_and_skips_the_dead() -> None:
    policy = RoundRobin(WORKERS)
    assert [policy.choose("k", 0) for _ in range(4)] == ["a", "b", "c", "a"]
    policy.died("b", 0)
    assert "b" not in {policy.choose("k", 0) for _ in range(4)}


def test_least_in_flight_takes_the_idlest() -> None:
    policy = LeastInFlight(WORKERS)
    assert [policy.choose(key, 0) for key in "wxyz"] == ["a", "b", "c", "a"]
    policy.ended("b", 0)
    assert policy.choose("k", 0) == "b"


def test_sticky_stays_where_a_conversation_began_until_that_one_dies() -> None:
    policy = Sticky(WORKERS)
    assert [policy.choose("k", 0) for _ in range(3)] == ["a", "a", "a"]
    assert policy.choose("other", 0) == "b"
    policy.died("a", 0)
    assert policy.choose("k", 0) == "c"
