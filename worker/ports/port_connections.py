"""The connections of a port: bounded in number, and in the time they take to ask for something.

Descriptors are what all parts of a process share. So each port has its places, the control port's
kept apart from those of the data port, and a connection that asks for nothing gives its place to the
next one. Nothing that goes wrong with one connection ends the listening.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import resource
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .settings import (
    ACCEPT_RETRY_SECONDS,
    HEADER_TIMEOUT_SECONDS,
    IDLE_GRACE_SECONDS,
    SWEEP_INTERVAL_SECONDS,
    UNREAD_ANSWER_SECONDS,
)

logger = logging.getLogger(__name__)

MAX_DESCRIPTORS = 2**16
MAX_DATA_CONNECTIONS = 2**14
MAX_CONTROL_CONNECTIONS = 128
OTHER_DESCRIPTORS = 640
"""For everything else in the process: files, the engine's own sockets, the API server, the port for weights."""
MIN_CONNECTIONS = 64

HEADER_BYTES = 2**17
"""What the header of a request may have; httptools, unlike h11, keeps as much as comes."""
READ_BYTES = 2**14
"""Read at once: in tiny chunks, a body costs microseconds a byte, and the loop waits for all of them."""


def raise_descriptor_limit() -> None:
    """Let this process have as many descriptors as it may, which by default it has not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def shut_down_socket(sock: socket.socket | None) -> None:
    """End a socket for children that were forked meanwhile, too: their copies would keep it open beyond a close."""
    if sock is not None:
        with contextlib.suppress(OSError):  # its other end has done so
            sock.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True, slots=True)
class ConnectionQuota:
    """How many connections each port takes at once."""

    data: int
    control: int = MAX_CONTROL_CONNECTIONS


def connection_quota() -> ConnectionQuota:
    """The places that the present limit of descriptors allows."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    left = most - MAX_CONTROL_CONNECTIONS - OTHER_DESCRIPTORS
    return ConnectionQuota(data=max(MIN_CONNECTIONS, min(MAX_DATA_CONNECTIONS, left)))


class HttpConnection(asyncio.Protocol):
    """Stands between a transport and the server's protocol, and knows whether something is asked."""

    def __init__(self, inner: asyncio.Protocol, room: ConnectionPool) -> None:
        self._inner = inner
        self._room = room
        self._transport: asyncio.Transport | None = None
        self._socket: socket.socket | None = None
        self.waits_since: float | None = None
        """When the header that has not ended began; None while there is none."""
        self._tls = False
        self._header = 0
        """Bytes of a header that has not ended."""
        self._unread, self._unread_since = 0, 0.0
        self.stuck = False
        """Whether the client takes nothing of what it was sent; as `note_progress` has seen it."""

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered."""
        cycle: Any = getattr(self._inner, "cycle", None)
        return cycle is not None and not cycle.response_complete

    @property
    def is_ending(self) -> bool:
        """Whether it ends as soon as the client has taken the rest."""
        return self._transport is not None and self._transport.is_closing()

    def note_progress(self, now: float) -> None:
        """See whether the client has taken anything since the last look."""
        unread, transport = 0, self._transport
        # With TLS, asyncio itself bounds the end, and may have let go of what could tell.
        if transport is not None and not (self._tls and self.is_ending):
            unread = transport.get_write_buffer_size()
        if not unread or unread != self._unread:
            self._unread, self._unread_since = unread, now
        self.stuck = now - self._unread_since > UNREAD_ANSWER_SECONDS

    def abort_connection(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for a header."""
        assert isinstance(transport, asyncio.Transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # of asyncio's own transports
        self._transport = transport
        self._socket = transport.get_extra_info("socket")  # in the end, TLS has let go of it
        self._tls = transport.get_extra_info("ssl_object") is not None
        self.waits_since = time.monotonic()
        self._room.connections[self] = None
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Note whether a header began or ended."""
        self._inner.data_received(data)
        if self.is_busy:
            self.waits_since, self._header = None, 0
            return
        if self.waits_since is None:
            self.waits_since = time.monotonic()
        cycle: Any = getattr(self._inner, "cycle", None)
        # Bytes of a body that nobody wants any more count for nothing.
        if not getattr(cycle, "more_body", False):
            self._header += len(data)
            if self._header > HEADER_BYTES:
                self.abort_connection()

    def eof_received(self) -> bool | None:
        """Pass it on."""
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        """Pass it on."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Pass it on."""
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Give the place back."""
        shut_down_socket(self._socket)
        self._room.connections.pop(self, None)
        self._inner.connection_lost(exc)


class ConnectionPool:
    """The connections of one port, oldest first."""

    def __init__(self, most: int, header_seconds: float = HEADER_TIMEOUT_SECONDS) -> None:
        self._most = most
        self.header_seconds = header_seconds
        self.connections: dict[HttpConnection, None] = {}
        self.greetings: dict[asyncio.Task[None], float] = {}
        """Of those that are accepted and not in `connections` yet: since when. With TLS they may dally."""

    def make_room(self) -> bool:
        """Whether one more may come; the oldest that asks for nothing leaves for it."""
        if len(self.connections) + len(self.greetings) < self._most:
            return True
        return self.close_one()

    def close_one(self) -> bool:
        """Close who dallies, else the oldest that asks for nothing or reads nothing, if there is one."""
        greeting, since = next(iter(self.greetings.items()), (None, 0.0))
        if greeting is None or since > time.monotonic() - IDLE_GRACE_SECONDS:
            for each in self.connections:
                if each.stuck or not each.is_busy:
                    del self.connections[each]
                    each.abort_connection()
                    return True
        if greeting is None:
            return False
        del self.greetings[greeting]
        greeting.cancel()
        return True

    async def close_slow_connections(self) -> None:
        """Close, until cancelled, who takes too long for a header, or for the end of an answer."""
        while True:
            await asyncio.sleep(min(SWEEP_INTERVAL_SECONDS, self.header_seconds))
            now = time.monotonic()
            late = now - self.header_seconds
            for each in list(self.connections):
                each.note_progress(now)
                asks = each.waits_since is None or each.waits_since > late or each.is_busy
                if not asks or (each.stuck and each.is_ending):
                    each.abort_connection()


class Listener:
    """Accepts connections on one socket until it is closed; uvicorn takes it for one of its servers."""

    def __init__(
        self,
        sock: socket.socket,
        make: Callable[[], asyncio.Protocol],
        room: ConnectionPool,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self._sock = sock
        self._make = make
        self._room = room
        self._tls = tls
        self._tasks = [
            asyncio.create_task(self._accept_connections()),
            asyncio.create_task(room.close_slow_connections()),
        ]

    async def _accept_connections(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._sock)
            except OSError as error:
                # No descriptor or memory is left, or the client has gone again.
                logger.warning("no connection could be accepted: %s", error.strerror)
                self._room.close_one()
                await asyncio.sleep(ACCEPT_RETRY_SECONDS)
                continue
            if not self._room.make_room():
                sock.close()
                continue
            greeting = asyncio.create_task(self._begin_connection(sock))
            self._room.greetings[greeting] = time.monotonic()
            greeting.add_done_callback(functools.partial(self._connection_begun, sock))
            # Many at once must not keep those who wait for an answer waiting.
            await asyncio.sleep(0)

    async def _begin_connection(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        tls: dict[str, Any] = {}
        try:
            if self._tls is not None:
                tls = {"ssl": self._tls(), "ssl_handshake_timeout": self._room.header_seconds}
            await loop.connect_accepted_socket(self._make_connection, sock, **tls)
        except OSError as error:  # of the handshake, too
            logger.debug("a connection ended before it began: %s", error)
            sock.close()

    def _connection_begun(self, sock: socket.socket, done: asyncio.Task[None]) -> None:
        self._room.greetings.pop(done, None)
        if done.cancelled():  # perhaps before it had begun
            sock.close()

    def _make_connection(self) -> HttpConnection:
        return HttpConnection(self._make(), self._room)

    def close(self) -> None:
        """Accept no more."""
        # Before the socket is closed: another one may have its number by the time the task ends.
        asyncio.get_running_loop().remove_reader(self._sock)
        for task in (*self._tasks, *self._room.greetings):
            task.cancel()
        shut_down_socket(self._sock)
        self._sock.close()

    async def wait_closed(self) -> None:
        """Wait until nothing is accepted any more."""
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([*self._tasks, *self._room.greetings])
