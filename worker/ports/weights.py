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
from rollout_worker.sources.pushed import Address, Desk
from rollout_worker.transfer.frames import LEASE_SECONDS, Connection, Kind, TransferError
from rollout_worker.transfer.node import node_of

logger = logging.getLogger(__name__)

MOST = 64
"""Connections at once: hops, peers that fetch, and a few that are about to be turned away."""
GREETING_SECONDS = 10.0
"""What a connection gets to say what it has come for."""
BACKLOG = 128
STOP_SECONDS = 5.0


class WeightsPort:
    """Listens from the beginning, serves from `start` to `stop`.

    Args:
        settings: Of the worker: which of the two it has.
        desk: Knows the tickets; told where they can be used.

    Raises:
        BadSettings: The port is taken, or the socket can't be made.
    """

    def __init__(self, settings: Settings, desk: Desk) -> None:
        self._desk = desk
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
        desk.address = Address(port, None if self._path is None else str(self._path), node)

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
            if self._desk.idle:
                detail = "no ticket is out: stage first"
                connection.send(Kind.ERROR, {"slug": "bad-ticket", "detail": detail})
                connection.leave(1.0)
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
