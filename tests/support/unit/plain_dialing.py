"""Connections of blocking sockets to the ports of workers and trainers, for tests that script every frame."""

from __future__ import annotations

import socket
import threading

from rollout_common.transfer.connections.blocking_connection import Connection
from rollout_common.transfer.connections.dialing import connect_unix
from rollout_common.transfer.settings import LEASE_SECONDS


def dial(host: str, port: int, seconds: float, *, silence: float = LEASE_SECONDS) -> Connection:
    """Connect over TCP, in the clear, within these seconds."""
    return Connection(socket.create_connection((host, port), timeout=seconds), silence=silence)


def dial_unix(path: str, seconds: float, *, silence: float = LEASE_SECONDS) -> Connection:
    """Connect over a Unix socket within these seconds."""
    return Connection(connect_unix(path, seconds), silence=silence)


def keep_alive(connection: Connection) -> None:
    """Ping from a thread until the connection is closed."""
    over = threading.Event()  # a send fails once the connection is closed, which ends the thread
    threading.Thread(target=connection.ping_until, args=[over], name="pings", daemon=True).start()
