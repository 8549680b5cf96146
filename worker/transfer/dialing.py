"""From an address to a connection that carries frames, by TLS where that is due."""

from __future__ import annotations

import socket

from .connection import Connection
from .frames import LEASE_SECONDS, Ended, TransferError
from .tls import TLS_NAME, Trust


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
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(seconds)
        sock.connect(path)
    except OSError as error:
        sock.close()
        raise Ended(f"{path} can't be reached: {error.strerror or error}") from error
    return Connection(sock, silence=silence)
