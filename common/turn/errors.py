"""Why a turn can't be had.

Errors::

    TurnError              the locks can't be used
    ├── TurnReplaced       not before processes that share an old lock file have ended
    └── TurnTimeout        somebody else has the turn
"""

from __future__ import annotations

from collections.abc import Mapping


class TurnError(Exception):
    """The locks can't be used; the message says what to mount or to change."""


class TurnReplaced(TurnError):
    """Processes share a lock file that isn't the one any more: they must end before the next turn."""


class TurnTimeout(TurnError):
    """Others kept the turn for longer than the caller wanted to wait.

    Attributes:
        waiting_for: who held which device when the time was up.
    """

    def __init__(self, timeout: float, waiting_for: Mapping[str, str]) -> None:
        who = ", ".join(f"{device} is held by {who}" for device, who in waiting_for.items())
        why = (
            f"{who}; wait longer, or end who holds it"
            if who
            else "the lock files did not open in time"
        )
        super().__init__(f"no turn within {timeout:g} s: {why}")
        self.waiting_for = dict(waiting_for)
