"""The port that weights come through, over TCP and over a Unix socket: transfers only, by ticket.

Each connection has a thread, for bytes that pass an event loop would keep it from everything else.
Who has no ticket is turned away before anything large is read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import threading
from pathlib import Path

from rollout_worker.settings import BadSettings, Settings
from rollout_worker.sources.outward import Outward
from rollout_worker.sources.pushed import Address, Desk
from rollout_worker.transfer.connection import Connection
from rollout_worker.transfer.frames import LEASE_SECONDS, Kind, TransferError, Untrusted
from rollout_worker.transfer.node import node_of
from rollout_worker.transfer.tls import HANDSHAKE

from .tls import Certificate

logger = logging.getLogger(__name__)

MOST = 64
"""Connections at once: hops, peers that fetch, and a few that are about to be turned away."""
GREETING_SECONDS = 10.0
"""What a connection gets to say what it has come for."""
BACKLOG = 128
STOP_SECONDS = 5.0
LEAVE_SECONDS = 1.0
"""What who is turned away gets to read why."""


class WeightsPort:
    """Listens from the beginning, serves from `start` to `stop`.

    Args:
        settings: Of the worker: which of the two it has.
        desk: Knows the tickets; told where they can be used, and how other workers are reached.
        certificate: Of the control port, shown here as well; None: this port speaks no TLS.

    Raises:
        BadSettings: The port is taken, or the socket can't be made.
    """

    def __init__(
        self, settings: Settings, desk: Desk, certificate: Certificate | None = None
    ) -> None:
        self._desk, self._certificate = desk, certificate
        self._required = settings.weights_tls == "required"
        self._listening: list[socket.socket] = []
        self._path = settings.weights_socket
        self._lock = threading.Lock()
        self._open: set[Connection] = set()
        self._threads: list[threading.Thread] = []
        self._stopped = False
        port = node = None
        if settings.weights_port is not None:
            port = self._listen(_tcp(settings.data_host, settings.weights_port))
        if self._path is not None:
            self._listen(_unix(self._path))
            node = node_of(str(self._path))
        path = None if self._path is None else str(self._path)
        desk.address = Address(port, path, node, self._required)
        desk.outward = Outward.of(settings)

    def _listen(self, sock: socket.socket) -> int:
        self._listening.append(sock)
        name = sock.getsockname()
        return int(name[1]) if sock.family != socket.AF_UNIX else 0

    def start(self) -> None:
        """Take connections, in threads."""
        for sock in self._listening:
            thread = threading.Thread(
                target=self._accept, args=(sock,), name="weights-port", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Take none any more and end those that are open; blocks until their threads have ended."""
        self._stopped = True
        for sock in self._listening:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        with self._lock:
            connections, threads = list(self._open), list(self._threads)
        for connection in connections:
            connection.interrupt()
        for thread in threads:
            thread.join(STOP_SECONDS)
        for sock in self._listening:
            sock.close()

    def _accept(self, sock: socket.socket) -> None:
        while not self._stopped:
            try:
                connected, _ = sock.accept()
            except OSError as error:
                if self._stopped:
                    return
                logger.warning("a connection for weights could not be taken: %s", error)
                continue
            self._take(connected)

    def _take(self, connected: socket.socket) -> None:
        with self._lock:
            full = len(self._open) >= MOST or self._stopped
            if not full:
                connection = Connection(connected, silence=GREETING_SECONDS)
                self._open.add(connection)
        if full:
            connected.close()
            return
        thread = threading.Thread(
            target=self._serve, args=(connection,), name="weights", daemon=True
        )
        self._threads = [each for each in self._threads if each.is_alive()] + [thread]
        thread.start()

    def _serve(self, connection: Connection) -> None:
        try:
            if not self._meets(connection):
                return
            if self._desk.idle:
                detail = "no ticket is out: stage first"
                connection.send(Kind.ERROR, {"slug": "bad-ticket", "detail": detail})
                connection.leave(LEAVE_SECONDS)
                return
            first = connection.receive()
            connection.patience(LEASE_SECONDS)
            self._desk.serve(connection, first)
        except TransferError as error:
            logger.info("a connection for weights has ended: %s", error)
        except Exception:
            logger.exception("a connection for weights failed")
        finally:
            connection.close()
            with self._lock:
                self._open.discard(connection)

    def _meets(self, connection: Connection) -> bool:
        """Begin TLS if the other end does; False: it had to, and was turned away.

        Raises:
            TransferError: The other end is gone, or TLS fails.
        """
        held = self._certificate
        if connection.unix or (held is None and self._desk.idle):
            return True
        if connection.first_byte() != HANDSHAKE:
            if self._required:
                detail = (
                    "this port takes weights over TLS alone: call it so, and trust the workers' CA"
                )
                self._turn_away(connection, "tls-required", detail, "it spoke no TLS")
            return not self._required
        if held is None:
            detail = (
                "this port speaks no TLS: call it without, or start it with --weights-tls required"
            )
            self._turn_away(connection, "no-tls", detail, "it spoke TLS, which this port does not")
            return False
        try:
            connection.secure(held.context)
        except Untrusted as error:
            self._desk.turned_away(str(error))
            raise
        return True

    def _turn_away(self, connection: Connection, slug: str, detail: str, why: str) -> None:
        self._desk.turned_away(why)
        connection.send(Kind.ERROR, {"slug": slug, "detail": detail})
        connection.leave(LEAVE_SECONDS)


def _tcp(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise BadSettings(
            f"--weights-port {host}:{port} can't be used: {error.strerror}"
        ) from error
    return sock


def _unix(path: Path) -> socket.socket:
    """Listen at a path where nobody else does; what a former process left is replaced."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                path.unlink()
        sock.bind(str(path))
        # The trainer's user may be another one: the ticket says who may use it.
        path.chmod(0o666)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise BadSettings(f"--weights-socket {path} can't be used: {error.strerror}") from error
    return sock
