"""Says to the other end of a connection that this one lives, for as long as a publish of several ranks takes."""

from __future__ import annotations

import contextlib
import threading

from rollout_worker.transfer.connection import Connection
from rollout_worker.transfer.frames import PING_SECONDS, Kind, TransferError

STOP_SECONDS = 1.0
"""What a `PING` that nobody takes gets to be given up."""


class Beat:
    """See the module; unlike `Connection.keep_alive` it ends, for between two publishes nobody reads.

    Args:
        connection: To the other end.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights-beat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Say nothing more, however often this is called."""
        self._over.set()
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        with contextlib.suppress(TransferError):  # whoever reads finds out why
            while not self._over.wait(PING_SECONDS):
                self._connection.send(Kind.PING)
