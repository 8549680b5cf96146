"""Says to the other end of a connection that this one lives, for as long as a publish of several ranks takes."""

from __future__ import annotations

import threading

from rollout_common.transfer.connection import Connection

STOP_SECONDS = 1.0
"""What a `PING` that nobody takes gets to be given up."""


class Beat:
    """See the module; unlike `Connection.keep_alive` it ends, for between two publishes nobody reads.

    Args:
        connection: To the other end.
    """

    def __init__(self, connection: Connection) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=connection.ping_until, args=(self._over,), name="weights-beat", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Say nothing more, however often this is called."""
        self._over.set()
        self._thread.join(STOP_SECONDS)
