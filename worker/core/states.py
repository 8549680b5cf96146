"""States of a worker and the one table of moves between them.

`Tracker.move()` is the only way to change the state. Fencing (a floor of weights that is not met)
and a commit are no states: a worker that commits stays Active, its new requests wait.
Imports nothing of ours but the wire names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic
from typing import Final

from rollout_worker.schemas import Lifecycle

S = Lifecycle

MOVES: Final[Mapping[Lifecycle, frozenset[Lifecycle]]] = {
    S.STARTING: frozenset({S.LOADING, S.FAILED}),
    # A hold that outlived a crash of the engine leads from Loading straight to its state.
    S.LOADING: frozenset({S.ACTIVE, S.PAUSING, S.DRAINING, S.FAILED}),
    S.ACTIVE: frozenset({S.PAUSING, S.DRAINING, S.FAILED}),
    # A hold may fall, or a stronger one arrive, while the running requests end.
    S.PAUSING: frozenset({S.PAUSED, S.DRAINING, S.ACTIVE, S.FAILED}),
    S.PAUSED: frozenset({S.ACTIVE, S.DRAINING, S.FAILED}),
    S.DRAINING: frozenset({S.ASLEEP, S.PAUSED, S.PAUSING, S.ACTIVE, S.FAILED}),
    # Waking may bring back a part of the memory only, or fail and fall asleep again.
    S.ASLEEP: frozenset({S.WAKING, S.FAILED}),
    S.WAKING: frozenset({S.ACTIVE, S.PAUSED, S.ASLEEP, S.FAILED}),
    S.FAILED: frozenset({S.LOADING}),
}
"""Allowed moves; a crash of the engine leads from every state to Failed."""

WITHOUT_ENGINE: Final = frozenset({S.STARTING, S.LOADING, S.FAILED})
"""States in which no engine answers."""


class IllegalMove(RuntimeError):
    """A move that `MOVES` does not have: a defect of this program."""


class Tracker:
    """The state of one worker; `on_move(old, new)` is told of every move."""

    def __init__(self, on_move: Callable[[Lifecycle, Lifecycle], None]) -> None:
        self._state = Lifecycle.STARTING
        self._on_move = on_move
        self._since = monotonic()

    @property
    def state(self) -> Lifecycle:
        """The current state."""
        return self._state

    @property
    def since(self) -> float:
        """Monotonic time of the last move."""
        return self._since

    @property
    def has_engine(self) -> bool:
        """Whether an engine is loaded and answers."""
        return self._state not in WITHOUT_ENGINE

    def move(self, to: Lifecycle) -> None:
        """Change the state.

        Raises:
            IllegalMove: the table has no such move.
        """
        if to not in MOVES[self._state]:
            raise IllegalMove(f"no move from {self._state.value} to {to.value}")
        old, self._state, self._since = self._state, to, monotonic()
        self._on_move(old, to)
