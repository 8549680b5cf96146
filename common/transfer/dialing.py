"""From an address to a connection that carries frames, by TLS where that is due."""

from __future__ import annotations

import socket
import time

from .connection import Connection
from .frames import LEASE_SECONDS, Ended, TransferError
from .tls import TLS_NAME, Trust

RETRY_SECONDS = 0.005


def dial(
    host: str,
    port: int,
    seconds: float,
    *,
    silence: float = LEASE_SECONDS,
    trust: Trust | None = None,
) -> Connection:
    """Connect over TCP.

    Args:
        host: Of the other end.
        port: Of the other end.
        seconds: Deadline.
        silence: See `Connection`.
        trust: Whom TLS trusts; None: plain TCP.

    Raises:
        Ended: nobody listens there, or nobody answers in time.
        Untrusted: TLS fails; the text says why.
    """
    try:
        sock = socket.create_connection((host, port), timeout=seconds)
    except OSError as error:
        raise Ended(f"{host}:{port} can't be reached: {error.strerror or error}") from error
    connection = Connection(sock, silence=seconds)
    try:
        if trust is not None:
            connection.secure(trust.context, TLS_NAME, trust.fix)
    except BaseException as error:
        connection.close()
        if isinstance(error, TransferError):
            raise type(error)(f"{host}:{port}: {error}") from error
        raise
    connection.patience(silence)
    return connection


def dial_unix(path: str, seconds: float, *, silence: float = LEASE_SECONDS) -> Connection:
    """Connect over a Unix socket.

    Raises:
        Ended: nobody listens there, or nobody answers in time.
    """
    try:
        sock = connect_unix(path, seconds)
    except OSError as error:
        raise Ended(f"{path} can't be reached: {error.strerror or error}") from error
    return Connection(sock, silence=silence)


def connect_unix(address: str | bytes, seconds: float) -> socket.socket:
    """Connect to a Unix socket, which refuses at once whom it can't queue: other callers may fill it for a moment.

    Raises:
        OSError: nobody listens there, or nobody answers in time.
    """
    until = time.monotonic() + seconds
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        while True:
            try:
                sock.connect(address)
                sock.setblocking(True)
                return sock
            except BlockingIOError:
                if time.monotonic() > until:
                    raise
                time.sleep(RETRY_SECONDS)
    except BaseException:
        sock.close()
        raise
