"""All processes of a trainer have the turn, or none: the rounds, over every way to fail."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client.errors import SteeringFailed, TurnFailed
from rollout_client.turn.rounds import Step, Vote, taking

Failures = dict[tuple[int, str], type[BaseException]]


class Cancelled(BaseException):
    """Of a process, from outside."""


@dataclass
class Process:
    """One rank: follows its rounds and fails as it is told."""

    rank: int
    world: int
    failures: Failures
    order: list[int]
    done: list[str] = field(default_factory=list)
    votes: int = 0
    held: bool = False
    ended: BaseException | None = None
    step: Step | None = None

    def __post_init__(self) -> None:
        self.steps = taking(self.rank, self.world)
        self._next(None)

    def _next(self, answer: bool | None) -> None:
        """Go on until the next vote, or the end."""
        error: BaseException | None = None
        try:
            while True:
                self.step = self.steps.throw(error) if error else self.steps.send(answer)  # type: ignore[arg-type]
                if isinstance(self.step, Vote):
                    self.votes += 1
                    return
                error, answer = self._do(self.step), True
        except StopIteration:
            self.step = None
        except (TurnFailed, SteeringFailed, Cancelled) as found:
            self.step, self.ended = None, found

    def _do(self, deed: str) -> BaseException | None:
        self.done.append(deed)
        failure = self.failures.get((self.rank, deed))
        if failure is not None:
            return failure(f"no {deed}")
        if deed == "take":
            self.order.append(self.rank)
        self.held = {"take": True, "give": False}.get(deed, self.held)
        return None

    def vote(self, together: bool) -> None:
        """Tell the outcome."""
        self._next(together)


def run(world: int, failures: Failures) -> list[Process]:
    """Let all go through their rounds; every vote takes all that are left, and nobody waits for ever."""
    order: list[int] = []
    processes = [Process(rank, world, failures, order) for rank in range(world)]
    while any(each.step for each in processes):
        # A collective: if one is in it, all are.
        votes = [each.step for each in processes]
        assert all(isinstance(vote, Vote) for vote in votes), votes
        together = all(isinstance(vote, Vote) and vote.yes for vote in votes)
        for each in processes:
            each.vote(together)
    assert order == sorted(order), "locks are taken in the order of ranks"
    return processes


DEEDS = ["find", "sleep", "take", "undo"]
FAILURES = st.dictionaries(
    st.tuples(st.integers(0, 4), st.sampled_from(DEEDS)),
    st.sampled_from([TurnFailed, SteeringFailed, Cancelled]),
    max_size=3,
)


@given(world=st.integers(1, 5), failures=FAILURES)
def test_all_have_it_or_none(world: int, failures: Failures) -> None:
    failures = {k: v for k, v in failures.items() if k[1] != "undo" or v is not Cancelled}
    processes = run(world, failures)
    assert len({each.votes for each in processes}) == 1
    began = [each for each in processes if "begin" in each.done]
    if began:
        assert began == processes
        assert all(each.held and each.ended is None for each in processes)
        return
    for each in processes:
        assert not each.held
        assert each.ended is not None
        failed = [deed for deed in each.done if (each.rank, deed) in failures and deed != "undo"]
        if failed:
            assert isinstance(each.ended, failures[each.rank, failed[0]])
        else:
            assert isinstance(each.ended, TurnFailed)
        assert ("undo" in each.done) == (each.rank == 0)


@pytest.mark.parametrize("rank", range(3))
def test_without_failures_each_does_its_part(rank: int) -> None:
    done = run(3, {})[rank].done
    assert done == ["find", *(["sleep"] if rank == 0 else []), "take", "begin"]


def test_who_could_not_ask_the_pool_back_says_so_beside_the_reason() -> None:
    first = run(2, {(1, "take"): TurnFailed, (0, "undo"): SteeringFailed})[0]
    assert "another process" in str(first.ended)
    assert first.ended is not None
    assert first.ended.__notes__ == ["the pool could not be asked back to what it was: no undo"]


def test_a_vote_that_breaks_gives_everything_back() -> None:
    steps = taking(0, 1)
    asked = [next(steps)]
    while not (isinstance(asked[-1], Vote) and "take" in asked):
        asked.append(steps.send(True))
    asked.append(steps.throw(RuntimeError("the collective timed out")))
    asked.append(steps.send(True))
    assert asked[-2:] == ["give", "undo"]
    with pytest.raises(RuntimeError, match="timed out"):
        steps.send(True)
