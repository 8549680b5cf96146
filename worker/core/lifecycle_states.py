"""States of a worker and the one table of moves between them.

`LifecycleTracker.move_to()` is the only way to change the state. Being fenced (below the weights floor) and
committing are not states: a worker stays Active during a commit, while new requests wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from rollout_common.wire import Lifecycle

S = Lifecycle

MOVES: Final[Mapping[Lifecycle, frozenset[Lifecycle]]] = {
    S.STARTING: frozenset({S.LOADING, S.FAILED}),
    # A hold that outlived an engine crash leads from Loading straight to its state.
    S.LOADING: frozenset({S.ACTIVE, S.PAUSING, S.DRAINING, S.FAILED}),
    S.ACTIVE: frozenset({S.PAUSING, S.DRAINING, S.FAILED}),
    # A hold may end, or a more restrictive one arrive, while running requests finish.
    S.PAUSING: frozenset({S.PAUSED, S.DRAINING, S.ACTIVE, S.FAILED}),
    S.PAUSED: frozenset({S.ACTIVE, S.DRAINING, S.FAILED}),
    S.DRAINING: frozenset({S.ASLEEP, S.PAUSED, S.PAUSING, S.ACTIVE, S.FAILED}),
    # Loading: an engine that died asleep loads again to wake, if its devices are used by turns.
    S.ASLEEP: frozenset({S.WAKING, S.LOADING, S.FAILED}),
    # Waking may restore only part of the memory, or fail and go back to sleep. An engine that has all resumes from Paused.
    S.WAKING: frozenset({S.PAUSED, S.ASLEEP, S.FAILED}),
    S.FAILED: frozenset({S.LOADING, S.ASLEEP}),
}
"""Allowed moves; an engine crash leads from every state to Failed."""

WITHOUT_ENGINE: Final = frozenset({S.STARTING, S.LOADING, S.FAILED})
"""States without a usable engine."""


class IllegalMove(RuntimeError):
    """A move that is not in `MOVES`: a bug in this program."""


class LifecycleTracker:
    """The state of one worker; calls `on_move(old, new)` on every move."""

    def __init__(self, on_move: Callable[[Lifecycle, Lifecycle], None]) -> None:
        self._state = Lifecycle.STARTING
        self._on_move = on_move

    @property
    def current_state(self) -> Lifecycle:
        """The current state."""
        return self._state

    @property
    def has_engine(self) -> bool:
        """Whether an engine is loaded and usable."""
        return self._state not in WITHOUT_ENGINE

    def move_to(self, to: Lifecycle) -> None:
        """Change the state.

        Raises:
            IllegalMove: the table has no such move.
        """
        if to not in MOVES[self._state]:
            raise IllegalMove(f"no move from {self._state.value} to {to.value}")
        old, self._state = self._state, to
        self._on_move(old, to)
