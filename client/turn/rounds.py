"""In which order the processes of a trainer take the turn: all of them have it, or none. Pure.

Each of them follows the same rounds, and each round ends with a vote: who fails votes no, and then
all leave. They take their locks one after the other, so that two trainers can't hold half each and
wait for the other half: the second waits where the first one began.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal

from rollout_client.errors import RolloutError, TurnFailed

Deed = Literal["find", "sleep", "take", "begin", "give", "undo"]
"""`find` the devices, put the pool to `sleep`, `take` the locks, `begin` with them; after a failure
`give` back what is held and `undo` the sleep."""


@dataclass(frozen=True, slots=True)
class Vote:
    """To be answered with whether every process voted yes."""

    yes: bool


Step = Deed | Vote
Steps = Generator[Step, bool, None]


def taking(rank: int, world: int) -> Steps:
    """Yield what a process does until it has the turn; throw into it what failed.

    Raises:
        TurnFailed: Another process failed; what failed here is raised as it is.
    """
    rounds: list[list[Deed]] = [["find"], ["sleep"] if rank == 0 else []]
    rounds += [["take"] if each == rank else [] for each in range(world)]
    try:
        for deeds in rounds:
            yield from _round(deeds)
        yield "begin"
    except GeneratorExit:
        raise
    except BaseException as error:
        yield "give"
        if rank == 0:
            try:
                yield "undo"
            except RolloutError as second:
                error.add_note(f"the pool could not be asked back to what it was: {second}")
        raise


def _round(deeds: list[Deed]) -> Steps:
    failure: BaseException | None = None
    try:
        for deed in deeds:  # noqa: UP028  # a list takes no answers
            yield deed
    except GeneratorExit:
        raise
    except BaseException as error:  # noqa: BLE001  # whatever it is, the others must hear of it
        failure = error
    together = yield Vote(failure is None)
    if failure is not None:
        raise failure
    if not together:
        raise TurnFailed(
            "another process of this trainer did not get the turn, so this one gave up its own: see there"
        )
