"""Why a process can't have the turn.

Errors::

    TurnError              the locks can't be used
    ├── TurnReplaced       processes that share an old lock file must end first
    └── TurnTimeout        another process has the turn
"""

from __future__ import annotations

from collections.abc import Mapping


class TurnError(Exception):
    """The locks can't be used; the message says what to mount or to change."""


class TurnReplaced(TurnError):
    """Processes share a lock file that was replaced: they must end before the next turn."""


class TurnTimeout(TurnError):
    """Other processes kept the turn for longer than the caller wanted to wait.

    Attributes:
        waiting_for: the holder of each device that was waited for when the time was up.
    """

    def __init__(self, timeout: float, waiting_for: Mapping[str, str]) -> None:
        held = ", ".join(f"{device} is held by {holder}" for device, holder in waiting_for.items())
        why = (
            f"{held}; wait longer, or end the holder"
            if held
            else "the lock files did not open in time"
        )
        super().__init__(f"no turn within {timeout:g} s: {why}")
        self.waiting_for = dict(waiting_for)
