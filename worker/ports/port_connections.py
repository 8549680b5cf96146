"""The connections of an HTTP port: bounded in number, and in the time they take to send a request.

All parts of a process share its descriptors. So each port has a quota of its own, and a connection without
a request is closed when the next one needs its place. No error of one connection ends the listening.
uvicorn bounds neither the number of connections nor the time that a header takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import resource
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from rollout_common.listening_sockets import open_listening_socket
from rollout_common.wire.problems import ProblemError
from rollout_worker.settings import InvalidSettings

from .port_app import problem_response
from .serving_certificate import ServingCertificate
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
"""For everything else in the process: files, the engine's sockets, the API server, the weights port."""
MIN_CONNECTIONS = 64
PROBE_ALLOWANCE = 32
"""Connections of the data port that requests leave to probes and scrapes."""
BACKLOG = 2048
"""Connections that may wait to be accepted, as many as with uvicorn."""

READ_BYTES = 2**14
"""Read at once: in tiny chunks, a body costs microseconds a byte, and the loop waits for all of them."""


def raise_descriptor_limit() -> None:
    """Raise the soft limit of descriptors, which is low by default, to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def shut_down_socket(sock: socket.socket | None) -> None:
    """Shut a socket down: a close alone would leave it open in children that were forked while it was open."""
    if sock is not None:
        with contextlib.suppress(OSError):  # the other end was faster
            sock.shutdown(socket.SHUT_RDWR)


def bind_port(host: str, port: int, flag: str) -> socket.socket:
    """Open a listening socket; `flag` names its address in errors.

    Raises:
        InvalidSettings: The port is taken, or the address is not ours.
    """
    try:
        sock = open_listening_socket(host, port, BACKLOG)
    except OSError as error:
        name = f"[{host}]" if ":" in host else host
        raise InvalidSettings(f"{flag} {name}:{port} can't be used: {error.strerror}") from error
    sock.setblocking(False)
    return sock


@dataclass(frozen=True, slots=True)
class ConnectionQuota:
    """How many connections each port takes at once."""

    data: int
    control: int = MAX_CONTROL_CONNECTIONS


def connection_quota() -> ConnectionQuota:
    """The connections that the present limit of descriptors allows."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    left = most - MAX_CONTROL_CONNECTIONS - OTHER_DESCRIPTORS
    return ConnectionQuota(data=max(MIN_CONNECTIONS, min(MAX_DATA_CONNECTIONS, left)))


class HttpProtocol(H11Protocol):
    """HTTP/1.1 by h11 in the environment of every engine.

    httptools, which uvicorn prefers where an engine brings it, drops the body of a request that offers HTTP/2, as
    Java's client does, and sends chunks to clients of HTTP/1.0.
    """

    @override
    def _should_upgrade(self) -> bool:
        return False  # uvicorn would log two warnings for each such request


class HttpConnection(asyncio.Protocol):
    """Wraps the server's protocol, and knows whether the client has sent a request."""

    def __init__(self, inner: asyncio.Protocol, pool: ConnectionPool) -> None:
        self._inner = inner
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._socket: socket.socket | None = None
        self.waits_since: float | None = None
        """When the header that has not ended began, or None."""
        self._tls = False
        self._unread, self._unread_since = 0, 0.0
        self.stuck = False
        """Whether the client reads nothing of what it was sent, as of the last `note_progress`."""

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered."""
        cycle: Any = getattr(self._inner, "cycle", None)
        return cycle is not None and not cycle.response_complete

    @property
    def is_ending(self) -> bool:
        """Whether it ends as soon as the client has read the rest."""
        return self._transport is not None and self._transport.is_closing()

    def note_progress(self, now: float) -> None:
        """Note whether the client has read anything since the last call."""
        unread, transport = 0, self._transport
        # With TLS, asyncio itself bounds the end, and the transport may be gone by then.
        if transport is not None and not (self._tls and self.is_ending):
            unread = transport.get_write_buffer_size()
        if not unread or unread != self._unread:
            self._unread, self._unread_since = unread, now
        self.stuck = now - self._unread_since > UNREAD_ANSWER_SECONDS

    def abort_connection(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # of asyncio's own transports
        self._transport = transport
        self._socket = transport.get_extra_info("socket")  # at the end TLS no longer has it
        self._tls = transport.get_extra_info("ssl_object") is not None
        self.waits_since = time.monotonic()
        self._pool.connections[self] = None
        self._inner.connection_made(transport)

    @override
    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)
        if self.is_busy:
            self.waits_since = None
        elif self.waits_since is None:
            self.waits_since = time.monotonic()

    @override
    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    @override
    def pause_writing(self) -> None:
        self._inner.pause_writing()

    @override
    def resume_writing(self) -> None:
        self._inner.resume_writing()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        shut_down_socket(self._socket)
        self._pool.connections.pop(self, None)
        self._inner.connection_lost(exc)


class ConnectionPool:
    """The connections of one port, oldest first."""

    def __init__(self, most: int, header_seconds: float = HEADER_TIMEOUT_SECONDS) -> None:
        self._most = most
        self.header_seconds = header_seconds
        self.connections: dict[HttpConnection, None] = {}
        self.greetings: dict[asyncio.Task[None], float] = {}
        """Connections that are accepted but not in `connections` yet, for TLS takes a while: since when."""

    def make_room(self) -> bool:
        """Whether one more may come; the oldest connection without a request is closed for it."""
        if len(self.connections) + len(self.greetings) < self._most:
            return True
        return self.close_one()

    def close_one(self) -> bool:
        """Close a slow handshake, else the oldest connection without a request or a reader; False: there is none."""
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
        """Until cancelled, close connections that take too long to send a header or to read an answer's end."""
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
    """Accepts connections on one socket until it is closed; to uvicorn it looks like an asyncio server."""

    def __init__(
        self,
        sock: socket.socket,
        make: Callable[[], asyncio.Protocol],
        pool: ConnectionPool,
        certificate: ServingCertificate | None = None,
    ) -> None:
        self._sock = sock
        self._make = make
        self._pool = pool
        self._certificate = certificate
        self._tasks = [
            asyncio.create_task(self._accept_connections()),
            asyncio.create_task(pool.close_slow_connections()),
        ]

    async def _accept_connections(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._sock)
            except OSError as error:
                # No descriptor or memory is left, or the client is gone again.
                logger.warning("no connection could be accepted: %s", error.strerror)
                self._pool.close_one()
                await asyncio.sleep(ACCEPT_RETRY_SECONDS)
                continue
            if not self._pool.make_room():
                sock.close()
                continue
            greeting = asyncio.create_task(self._begin_connection(sock))
            self._pool.greetings[greeting] = time.monotonic()
            greeting.add_done_callback(functools.partial(self._connection_begun, sock))
            # Many new connections must not delay the answers to others.
            await asyncio.sleep(0)

    async def _begin_connection(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        tls: dict[str, Any] = {}
        try:
            if self._certificate is not None:
                context = self._certificate.context
                tls = {"ssl": context, "ssl_handshake_timeout": self._pool.header_seconds}
            await loop.connect_accepted_socket(self._make_connection, sock, **tls)
        except OSError as error:  # of the handshake, too
            logger.debug("a connection ended before it began: %s", error)
            sock.close()

    def _connection_begun(self, sock: socket.socket, done: asyncio.Task[None]) -> None:
        self._pool.greetings.pop(done, None)
        if done.cancelled():  # perhaps before it had begun
            sock.close()

    def _make_connection(self) -> HttpConnection:
        return HttpConnection(self._make(), self._pool)

    def close(self) -> None:
        """Stop accepting."""
        # Before the socket is closed: a new one may have its number by the time the task ends.
        asyncio.get_running_loop().remove_reader(self._sock)
        for task in (*self._tasks, *self._pool.greetings):
            task.cancel()
        shut_down_socket(self._sock)
        self._sock.close()

    async def wait_closed(self) -> None:
        """Wait until the tasks have ended."""
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([*self._tasks, *self._pool.greetings])


class AnyRequestForm:
    """Answers HEAD like GET, and takes the whole URL as a target, which clients send to what they think is a proxy."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on in the form that routes know; the server sends no body to HEAD."""
        if scope["type"] == "http":
            if scope["method"] == "HEAD":
                scope = {**scope, "method": "GET"}
            before, is_url, rest = scope["path"].partition("://")
            if is_url and "/" not in before:
                scope = {**scope, "path": "/" + rest.partition("/")[2]}
        await self._app(scope, receive, send)


class ConcurrencyLimit:
    """Refuses requests beyond a number of them at once; probes and scrapes are always answered."""

    def __init__(self, app: ASGIApp, most: int, refused: Callable[[str], object]) -> None:
        """`refused` gets the slug of each refusal."""
        self._app = app
        self._most = most
        self._refused = refused
        self._now = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 429."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._now >= self._most:
            detail = f"{self._now} requests are open: try again, or use another replica"
            refusal = ProblemError("queue-full", detail, retry_after=1)
            self._refused(refusal.slug)
            await problem_response(refusal, scope)(scope, receive, send)
            return
        self._now += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._now -= 1
