"""A gang that takes turns, killed and stopped: no device ever has two, and none stays taken."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

import pytest

from rollout_common.turn import TurnTimeout
from rollout_worker.gang.gang_addresses import EXIT_GANG_BROKEN
from tests.support.unit.gang_process import Nursery, Pair, pair
from tests.support.waiting import until_sync


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
    assert both.member.wait() == EXIT_GANG_BROKEN


def test_a_killed_member_ends_the_gang_and_frees_both_nodes(both: Pair) -> None:
    both.start()
    assert both.head.ask("load") == "Active Held"
    both.member.signal(signal.SIGKILL)
    taken_by_none(both)
    assert both.head.wait() == EXIT_GANG_BROKEN
    assert both.head.answer().startswith("broken: rank 1 at 127.0.0.1")


def test_a_head_killed_asleep_takes_nothing_from_who_trains(both: Pair) -> None:
    both.start()
    assert both.head.ask("load") == "Active Held"
    assert both.head.ask("sleep") == "Asleep Released"
    for trainer in both.trainers:
        trainer.take(30)
    both.head.signal(signal.SIGKILL)
    assert both.member.wait() == EXIT_GANG_BROKEN
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


class Training:
    """A trainer that wants both nodes again and again, in an order that is drawn each time."""

    def __init__(self, both: Pair, random: Random) -> None:
        self.turns = 0
        self.failure: BaseException | None = None
        self._both, self._random = both, random
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._ends.is_set():
                self._both.train(*self._random.sample((0, 1), 2), seconds=60)
                self.turns += 1
        except BaseException as error:  # noqa: BLE001  # whoever ends it raises it
            self.failure = error

    def goes_on(self, turns: int = 2) -> None:
        """Wait until it has had so many more turns."""
        wanted = self.turns + turns
        until_sync(lambda: self.failure or self.turns >= wanted, 60, what="turns of the trainer")

    def end(self) -> None:
        """Let it finish, and raise what went wrong."""
        self._ends.set()
        self._thread.join(90)
        assert not self._thread.is_alive()
        if self.failure is not None:
            raise self.failure


@contextmanager
def training(both: Pair, random: Random) -> Iterator[Training]:
    made = Training(both, random)
    try:
        yield made
    finally:
        made.end()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_killed_or_stopped_no_device_has_two_and_none_stays_taken(
    nursery: Nursery, tmp_path: Path, seed: int
) -> None:
    random = Random(seed)
    with pair(nursery, tmp_path) as both, training(both, random) as trainer:
        both.start()
        orders = ["load", *(["sleep", "wake"] * 4)]
        done = random.randrange(len(orders))
        for order in orders[:done]:
            assert both.head.ask(order)
        with suppress(BrokenPipeError):
            both.head.tell(orders[done])  # and in the midst of it:
        time.sleep(random.uniform(0, 0.3))
        victim = random.choice((both.head, both.member))
        if random.random() < 0.5:
            victim.signal(signal.SIGSTOP)
            time.sleep(random.uniform(0, 4))
            victim.signal(signal.SIGCONT)
            time.sleep(random.uniform(0, 1))
        victim.signal(signal.SIGKILL)
        trainer.goes_on()
