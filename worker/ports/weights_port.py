"""The weights port, over TCP and over a Unix socket: transfers only, by ticket.

Each connection has a thread, since bytes that pass the event loop would keep it from everything else.
A connection without a ticket is a stranger: little is read of it, and the other ones don't wait for it. The number of
strangers is bounded, in all and for each address; the oldest is closed for the next one.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time

from rollout_common.transfer.connection import Connection, first_to_go
from rollout_common.transfer.frames import (
    LEASE_SECONDS,
    PROTOCOL,
    Kind,
    Malformed,
    TransferError,
    Untrusted,
)
from rollout_common.transfer.node import node_of
from rollout_common.transfer.tls import HANDSHAKE
from rollout_worker.settings import WorkerSettings
from rollout_worker.sources.incoming import Refusal
from rollout_worker.sources.outward import Outward
from rollout_worker.sources.pushed import Address, Desk, Work, no_ticket

from .port_connections import BACKLOG, bind_port
from .serving_certificate import ServingCertificate
from .settings import (
    FAREWELL_SECONDS,
    GREETING_TIMEOUT_SECONDS,
    THREAD_STOP_SECONDS,
    WEIGHTS_ACCEPT_RETRY_SECONDS,
)
from .unix_socket import listen_at_path, remove_socket, socket_identity

logger = logging.getLogger(__name__)

MAX_STRANGERS = 64
"""Connections without a ticket, over TCP and over the Unix socket each."""
MAX_STRANGERS_PER_ADDRESS = 32
"""The most of them from one address, or one process."""


class WeightsPort:
    """Listens from the beginning, serves from `start` to `stop`.

    Args:
        settings: Of the worker; they name the TCP port, the Unix socket, or both.
        desk: Knows the tickets; it learns here where they can be used, and how to reach other workers.
        certificate: The control port's, shown here as well; None: this port speaks no TLS.

    Raises:
        InvalidSettings: The port is taken, or the socket can't be made.
    """

    def __init__(
        self, settings: WorkerSettings, desk: Desk, certificate: ServingCertificate | None = None
    ) -> None:
        self._desk, self._certificate = desk, certificate
        self._required = settings.weights_tls == "required"
        self._listening: list[socket.socket] = []
        self._path = settings.weights_socket
        self._lock = threading.Lock()
        self._strangers: dict[Connection, str] = {}
        """Connections without a ticket and their addresses, oldest first."""
        self._admitted: set[Connection] = set()
        self._threads: list[threading.Thread] = []
        self._stopped = False
        port = node = None
        if settings.weights_port is not None:
            port = self._listen_on(
                bind_port(settings.data_host, settings.weights_port, "--weights-port")
            )
        if self._path is not None:
            self._listen_on(listen_at_path(self._path, BACKLOG))
            self._made = socket_identity(self._path)
            node = node_of(str(self._path))
        path = None if self._path is None else str(self._path)
        desk.address = Address(port, path, node, self._required)
        desk.outward = Outward.of(settings)

    def _listen_on(self, sock: socket.socket) -> int:
        sock.setblocking(True)  # it is a thread that accepts
        self._listening.append(sock)
        name = sock.getsockname()
        return int(name[1]) if sock.family != socket.AF_UNIX else 0

    def start(self) -> None:
        """Accept connections, in threads."""
        for sock in self._listening:
            thread = threading.Thread(
                target=self._accept_connections, args=(sock,), name="weights-port", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Accept nothing more and end the open connections; blocks until their threads have ended."""
        self._stopped = True
        for sock in self._listening:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        if self._path is not None:
            remove_socket(self._path, self._made)
        with self._lock:
            connections = [*self._strangers, *self._admitted]
            threads = list(self._threads)
        for connection in connections:
            connection.interrupt()
        for thread in threads:
            thread.join(THREAD_STOP_SECONDS)
        for sock in self._listening:
            sock.close()

    def _accept_connections(self, sock: socket.socket) -> None:
        while not self._stopped:
            try:
                connected, address = sock.accept()
            except OSError as error:
                if self._stopped:
                    return
                logger.warning("a connection for weights could not be taken: %s", error)
                with self._lock:  # perhaps no descriptor was left
                    if self._strangers:
                        first_to_go(list(self._strangers)).interrupt()
                time.sleep(WEIGHTS_ACCEPT_RETRY_SECONDS)
                continue
            try:
                self._take_connection(connected, address)
            except (OSError, RuntimeError) as error:  # it is gone again, or no thread can start
                logger.warning("a connection for weights could not be taken: %s", error)
                connected.close()

    def _take_connection(self, connected: socket.socket, address: object) -> None:
        place, connection = _caller_address(connected, address), Connection(connected)
        connection.patience(GREETING_TIMEOUT_SECONDS)
        thread = threading.Thread(
            target=self._serve_connection, args=(connection,), name="weights", daemon=True
        )
        with self._lock:
            if self._stopped:
                return connection.close()
            late = self._stranger_to_drop(connection, place)
            if late is not None:
                del self._strangers[late]
                late.interrupt()
            self._strangers[connection] = place
            self._threads = [each for each in self._threads if each.is_alive()]
            try:
                thread.start()
            except RuntimeError:
                del self._strangers[connection]
                raise
            self._threads.append(thread)
        return None

    def _stranger_to_drop(self, connection: Connection, place: str) -> Connection | None:
        """The stranger that has to go for another one, if one has to."""
        kin = [each for each in self._strangers if each.unix == connection.unix]
        near = [each for each in kin if self._strangers[each] == place]
        if len(near) >= MAX_STRANGERS_PER_ADDRESS:
            return first_to_go(near)
        return first_to_go(kin) if len(kin) >= MAX_STRANGERS else None

    def _serve_connection(self, connection: Connection) -> None:
        try:
            work = self._read_greeting(connection)
            if work is not None:
                connection.patience(LEASE_SECONDS)
                work(connection)
        except TransferError as error:
            known = connection in self._admitted
            logger.log(
                logging.INFO if known else logging.DEBUG,
                "a connection for weights ended: %s",
                error,
            )
        except Exception:
            logger.exception("a connection for weights failed")
        finally:
            connection.close()
            with self._lock:
                self._strangers.pop(connection, None)
                self._admitted.discard(connection)

    def _read_greeting(self, connection: Connection) -> Work | None:
        """Return the work that a stranger's ticket admits it to; None: it was refused.

        Raises:
            TransferError: It is gone, said nothing in time, or TLS fails.
        """
        if not self._begin_tls(connection):
            return None
        try:
            if self._desk.idle:
                raise no_ticket()
            work = self._desk.work_for(connection.receive_first())
        except Refusal as refusal:
            _send_refusal(connection, refusal.slug, str(refusal))
            return None
        except Malformed as error:
            fix = f"use the same release at both ends, this worker speaks protocol {PROTOCOL}"
            _send_refusal(connection, "malformed", f"{error}: {fix}")
            return None
        with self._lock:
            self._strangers.pop(connection, None)
            self._admitted.add(connection)
        return work

    def _begin_tls(self, connection: Connection) -> bool:
        """Begin TLS if the other end does; False: the other end was refused.

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
                self._refuse_stranger(connection, "tls-required", detail, "it spoke no TLS")
            return not self._required
        if held is None:
            detail = (
                "this port speaks no TLS: call it without, or start it with --weights-tls required"
            )
            self._refuse_stranger(
                connection, "no-tls", detail, "it spoke TLS, which this port does not"
            )
            return False
        try:
            connection.secure(held.context)
        except Untrusted as error:
            self._desk.turned_away(str(error))
            raise
        return True

    def _refuse_stranger(self, connection: Connection, slug: str, detail: str, why: str) -> None:
        self._desk.turned_away(why)
        _send_refusal(connection, slug, detail)


def _send_refusal(connection: Connection, slug: str, detail: str) -> None:
    connection.send(Kind.ERROR, {"slug": slug, "detail": detail})
    connection.leave(FAREWELL_SECONDS)


def _caller_address(connected: socket.socket, address: object) -> str:
    """The address of a caller, or its process."""
    if isinstance(address, tuple):
        return str(address[0])
    size = struct.calcsize("3i")
    pid, *_ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return f"process {pid}"
