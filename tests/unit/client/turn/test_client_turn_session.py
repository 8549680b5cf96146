"""All ranks of a trainer have the turn, or none: every way in which one may fail."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Generator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from rollout_client.errors import SteeringFailed, TurnFailed
from rollout_client.turn.plan import TurnPlan
from rollout_client.turn.session import StepRunner, TurnSession

Failures = dict[tuple[int, str], type[BaseException]]


class Cancelled(BaseException):
    """Of a process, from outside."""


@types.coroutine
def cast(yes: bool) -> Generator[bool, bool, bool]:
    """Suspend until the outcome of a vote is sent."""
    return (yield yes)


class CastVotes(StepRunner):
    """Does the steps at once; each vote suspends the rank."""

    @override
    async def collect_votes(self, yes: bool) -> bool:
        return await cast(yes)


class Rank(TurnSession):
    """One rank whose steps fail as they are told."""

    def __init__(self, rank: int, world: int, failures: Failures, order: list[int]) -> None:
        plan = TurnPlan(rank=rank, world=world, agree=bool)
        super().__init__(None, plan, self.name_devices)
        self.rank, self.failures, self.order = rank, failures, order
        self.done: list[str] = []
        self.has_locks = False
        self.votes = 0
        self.ended: BaseException | None = None
        self.vote: bool | None = None
        self.caller = CastVotes(plan)
        self.acquiring = self.acquire_turn(self.caller)
        self.go_on(lambda: self.acquiring.send(None))

    async def name_devices(self) -> list[str]:
        return []

    def go_on(self, resume: Callable[[], bool]) -> None:
        """Go on until the next vote, or the end."""
        try:
            self.vote = resume()
            self.votes += 1
        except StopIteration:
            self.vote = None
        except (
            TurnFailed,
            SteeringFailed,
            Cancelled,
            RuntimeError,
            asyncio.CancelledError,
        ) as found:
            self.vote, self.ended = None, found

    def tell(self, agreed: bool) -> None:
        """Send the outcome of the vote."""
        self.go_on(lambda: self.acquiring.send(agreed))

    def do(self, step: str) -> None:
        self.done.append(step)
        failure = self.failures.get((self.rank, step))
        if failure is not None:
            raise failure(f"no {step}")

    @override
    async def find_devices(self) -> None:
        self.do("find")

    @override
    async def sleep_pool(self) -> None:
        self.do("sleep")

    @override
    async def take_locks(self) -> None:
        self.do("take")
        self.order.append(self.rank)
        self.has_locks = True

    @override
    async def undo_sleep(self) -> None:
        self.do("undo")

    @override
    def begin_block(self) -> None:
        self.do("begin")

    @override
    def give_back(self) -> None:
        self.do("give")
        self.has_locks = False


def run(world: int, failures: Failures) -> list[Rank]:
    """Let all go through their rounds; every vote takes all that are left, and nobody waits without end."""
    order: list[int] = []
    ranks = [Rank(rank, world, failures, order) for rank in range(world)]
    while any(each.vote is not None for each in ranks):
        # A collective: if one is in it, all are.
        votes = [each.vote for each in ranks]
        assert None not in votes, votes
        for each in ranks:
            each.tell(all(votes))
    assert order == sorted(order), "locks are taken in the order of ranks"
    return ranks


STEPS = ["find", "sleep", "take", "undo"]
FAILURES = st.dictionaries(
    st.tuples(st.integers(0, 4), st.sampled_from(STEPS)),
    st.sampled_from([TurnFailed, SteeringFailed, Cancelled]),
    max_size=3,
)


@given(world=st.integers(1, 5), failures=FAILURES)
def test_all_have_it_or_none(world: int, failures: Failures) -> None:
    failures = {k: v for k, v in failures.items() if k[1] != "undo" or v is not Cancelled}
    ranks = run(world, failures)
    assert len({each.votes for each in ranks}) == 1
    began = [each for each in ranks if "begin" in each.done]
    if began:
        assert began == ranks
        assert all(each.has_locks and each.ended is None for each in ranks)
        return
    for each in ranks:
        assert not each.has_locks
        assert each.ended is not None
        failed = [step for step in each.done if (each.rank, step) in failures and step != "undo"]
        if failed:
            assert isinstance(each.ended, failures[each.rank, failed[0]])
        else:
            assert isinstance(each.ended, TurnFailed)
        assert ("undo" in each.done) == (each.rank == 0)


def test_without_failures_each_does_its_part() -> None:
    first, *others = (each.done for each in run(3, {}))
    assert first == ["find", "sleep", "take", "begin"]
    assert others == [["find", "take", "begin"]] * 2


def test_who_could_not_ask_the_pool_back_says_so_beside_the_reason() -> None:
    first = run(2, {(1, "take"): TurnFailed, (0, "undo"): SteeringFailed})[0]
    assert "another process" in str(first.ended)
    assert first.ended is not None
    assert first.ended.__notes__ == ["the pool could not be asked back to what it was: no undo"]


def test_a_vote_that_breaks_gives_everything_back() -> None:
    rank = Rank(0, 1, {}, [])
    while "take" not in rank.done:
        rank.tell(True)
    rank.go_on(lambda: rank.acquiring.throw(RuntimeError("the collective timed out")))
    assert rank.done[-2:] == ["give", "undo"]
    assert "timed out" in str(rank.ended)


@pytest.mark.parametrize(
    "vote", range(4), ids=["found", "asleep", "rank 0 has its", "all have theirs"]
)
def test_a_rank_that_is_cancelled_in_a_vote_says_no_in_the_next(vote: int) -> None:
    ranks = [Rank(rank, 2, {}, []) for rank in range(2)]
    for _ in range(vote):
        for each in ranks:
            each.tell(True)
    ranks[1].caller.cancelled = asyncio.CancelledError()
    for each in ranks:
        each.tell(True)
    if vote < 3:
        assert [each.vote for each in ranks] == [True, False]
        for each in ranks:
            each.tell(False)
        assert isinstance(ranks[0].ended, TurnFailed)
        assert ranks[0].done[-2:] == ["give", "undo"]
    else:  # no vote is left: the other rank has the turn
        assert ranks[0].done[-1] == "begin"
    assert isinstance(ranks[1].ended, asyncio.CancelledError)
    assert not ranks[1].has_locks
    assert "begin" not in ranks[1].done


def test_a_cancelled_rank_ends_so_although_another_one_failed() -> None:
    rank = Rank(1, 2, {}, [])
    rank.caller.cancelled = asyncio.CancelledError()
    rank.tell(False)
    assert isinstance(rank.ended, asyncio.CancelledError)
    assert rank.done == ["find", "give"]
