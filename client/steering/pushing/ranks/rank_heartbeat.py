"""Pings the other end of a connection while a publish of several ranks runs."""

from __future__ import annotations

import threading

from rollout_client.steering.pushing.settings import PING_STOP_SECONDS
from rollout_common.transfer.connections.blocking_connection import Connection


class RankHeartbeat:
    """A thread that pings until it is stopped, since the other end does not read between two publishes.

    Args:
        connection: The connection to the other end.
    """

    def __init__(self, connection: Connection) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=connection.ping_until, args=(self._over,), name="weights-beat", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop the pings. Idempotent."""
        self._over.set()
        self._thread.join(PING_STOP_SECONDS)
