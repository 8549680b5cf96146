"""A gang that takes turns, killed and stopped: no device ever has two, and none stays taken."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gang_process import Nursery, Pair, pair
from rollout_worker.gang.places import EXIT_GANG
from rollout_worker.turn import TurnTimeout


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.fixture
def both(nursery: Nursery, tmp_path: Path) -> Iterator[Pair]:
    with pair(nursery, tmp_path) as both:
        yield both


def taken_by_none(both: Pair) -> None:
    """A trainer gets both nodes, and nobody has memory there."""
    both.train(0, 1)
    both.train(1, 0)


def test_turns_go_back_and_forth_until_the_head_is_killed(both: Pair) -> None:
    both.start()
    assert both.head.ask("load") == "Active Held"
    for _ in range(3):
        with pytest.raises(TurnTimeout):
            both.train(1, seconds=0.05)
        assert both.head.ask("sleep") == "Asleep Released"
        taken_by_none(both)
        assert both.head.ask("wake") == "Active Held"
    both.head.signal(signal.SIGKILL)
    taken_by_none(both)
    assert both.member.wait() == EXIT_GANG


def test_a_killed_member_ends_the_gang_and_frees_both_nodes(both: Pair) -> None:
    both.start()
    assert both.head.ask("load") == "Active Held"
    both.member.signal(signal.SIGKILL)
    taken_by_none(both)
    assert both.head.wait() == EXIT_GANG
    assert both.head.answer().startswith("broken: rank 1 at 127.0.0.1")


def test_a_head_killed_asleep_takes_nothing_from_who_trains(both: Pair) -> None:
    both.start()
    assert both.head.ask("load") == "Active Held"
    assert both.head.ask("sleep") == "Asleep Released"
    for trainer in both.trainers:
        trainer.take(30)
    both.head.signal(signal.SIGKILL)
    assert both.member.wait() == EXIT_GANG
    for trainer in both.trainers:
        trainer.give()
    taken_by_none(both)


def test_a_member_that_stands_still_while_its_turn_is_wanted_keeps_nobody_waiting(
    both: Pair,
) -> None:
    both.trainers[0].take(30)
    both.start()
    assert "rank 0: waiting for the turn" in both.head.ask("wait")
    both.member.signal(signal.SIGSTOP)
    both.trainers[0].give()
    both.train(0)
    both.train(0)
    both.member.signal(signal.SIGCONT)
    assert both.head.ask("load") == "Active Held"


def test_a_head_that_stands_still_holds_its_own_device_and_no_other(both: Pair) -> None:
    """What it had, it has not any more when it goes on, and it begins anew."""
    both.trainers[1].take(30)
    both.start()
    assert "rank 1 at 127.0.0.1" in both.head.ask("wait")
    both.head.signal(signal.SIGSTOP)
    both.trainers[1].give()
    both.train(1)
    both.head.signal(signal.SIGCONT)
    assert both.head.ask("load") == "Active Held"
