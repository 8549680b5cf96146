"""The weights port, over TCP and over a Unix socket: transfers only, by ticket.

Its connections are tasks of the transfer loop, since bytes that pass the loop of the control port would keep it from
everything else. A connection without a ticket is a stranger: little is read of it, and the other ones don't wait for it. The number of
strangers is bounded, in all and for each address; the oldest is closed for the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from concurrent.futures import Future

from rollout_common.transfer.connections.frame_sockets import first_to_go
from rollout_common.transfer.connections.frame_stream import FrameStream
from rollout_common.transfer.connections.frames import (
    PROTOCOL,
    Kind,
    Malformed,
    TransferError,
    Untrusted,
)
from rollout_common.transfer.connections.node_identity import node_of
from rollout_common.transfer.connections.tls_session import HANDSHAKE
from rollout_common.transfer.connections.transfer_loop import TaskSet, run_on_loop
from rollout_common.transfer.settings import LEASE_SECONDS
from rollout_common.wire import Transfer
from rollout_worker.settings import WorkerSettings
from rollout_worker.sources.pushed.peer_route import PeerRoute
from rollout_worker.sources.pushed.pushed_memory import Refusal
from rollout_worker.sources.pushed.pushed_source import PushedSource, RankWork, no_ticket

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

    `pushed_source` knows the tickets; it learns here where they can be used, and how to reach other workers. The control port's
    certificate is shown here as well; without one, this port speaks no TLS.

    Raises:
        InvalidSettings: The port is taken, or the socket can't be made.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        pushed_source: PushedSource,
        certificate: ServingCertificate | None = None,
    ) -> None:
        self._pushed_source, self._certificate = pushed_source, certificate
        self._required = settings.weights_tls == "required"
        self._listening: list[socket.socket] = []
        self._path = settings.weights_socket
        self._strangers: dict[FrameStream, str] = {}
        """Connections without a ticket and their addresses, oldest first."""
        self._tasks = TaskSet()
        self._serving: Future[None] | None = None
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
        pushed_source.address = Transfer(
            ticket="", port=port, tls=self._required, socket=path, node=node
        )
        pushed_source.peer_route = PeerRoute.of(settings)

    def _listen_on(self, sock: socket.socket) -> int:
        sock.setblocking(False)
        self._listening.append(sock)
        name = sock.getsockname()
        return int(name[1]) if sock.family != socket.AF_UNIX else 0

    def start(self) -> None:
        """Accept connections, on the transfer loop."""
        self._serving = run_on_loop(self._serve())

    def stop(self) -> None:
        """Accept nothing more and end the open connections; blocks until their tasks have ended."""
        if self._path is not None:
            remove_socket(self._path, self._made)
        if self._serving is not None:
            self._serving.cancel()
            with contextlib.suppress(TimeoutError):
                run_on_loop(self._tasks.end_tasks()).result(THREAD_STOP_SECONDS)
        for sock in self._listening:
            sock.close()

    async def _serve(self) -> None:
        for sock in self._listening:
            self._tasks.start_task(self._accept_connections(sock))
        await asyncio.Event().wait()  # until it is cancelled

    async def _accept_connections(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connected, address = await loop.sock_accept(sock)
            except OSError as error:
                logger.warning("a connection for weights could not be taken: %s", error)
                if self._strangers:  # perhaps no descriptor was left
                    first_to_go(list(self._strangers)).interrupt()
                await asyncio.sleep(WEIGHTS_ACCEPT_RETRY_SECONDS)
                continue
            try:
                self._take_connection(connected, address)
            except OSError as error:  # it is gone again
                logger.warning("a connection for weights could not be taken: %s", error)
                connected.close()

    def _take_connection(self, connected: socket.socket, address: object) -> None:
        place = _caller_address(connected, address)
        stream = FrameStream(connected, silence=GREETING_TIMEOUT_SECONDS)
        late = self._stranger_to_drop(stream, place)
        if late is not None:
            del self._strangers[late]
            late.interrupt()
        self._strangers[stream] = place
        self._tasks.start_task(self._serve_connection(stream))

    def _stranger_to_drop(self, stream: FrameStream, place: str) -> FrameStream | None:
        """The stranger that has to go for another one, if one has to."""
        kin = [each for each in self._strangers if each.unix == stream.unix]
        near = [each for each in kin if self._strangers[each] == place]
        if len(near) >= MAX_STRANGERS_PER_ADDRESS:
            return first_to_go(near)
        return first_to_go(kin) if len(kin) >= MAX_STRANGERS else None

    async def _serve_connection(self, stream: FrameStream) -> None:
        admitted = False
        try:
            work = await self._read_greeting(stream)
            if work is not None:
                admitted = True
                stream.silence = LEASE_SECONDS
                await work(stream)
        except TransferError as error:
            level = logging.INFO if admitted else logging.DEBUG
            logger.log(level, "a connection for weights ended: %s", error)
        except Exception:
            logger.exception("a connection for weights failed")
        finally:
            self._strangers.pop(stream, None)
            await stream.close()

    async def _read_greeting(self, stream: FrameStream) -> RankWork | None:
        """Return the work that a stranger's ticket admits it to; None: it was refused.

        Raises:
            TransferError: It is gone, said nothing in time, or TLS fails.
        """
        if not await self._begin_tls(stream):
            return None
        try:
            if self._pushed_source.idle:
                raise no_ticket()
            work = self._pushed_source.work_for(await stream.receive_first())
        except Refusal as refusal:
            await _send_refusal(stream, refusal.slug, str(refusal))
            return None
        except Malformed as error:
            fix = f"use the same release at both ends, this worker speaks protocol {PROTOCOL}"
            await _send_refusal(stream, "malformed", f"{error}: {fix}")
            return None
        self._strangers.pop(stream, None)
        return work

    async def _begin_tls(self, stream: FrameStream) -> bool:
        """Begin TLS if the other end does; False: the other end was refused.

        Raises:
            TransferError: The other end is gone, or TLS fails.
        """
        held = self._certificate
        if stream.unix or (held is None and self._pushed_source.idle):
            return True
        if await stream.peek_byte() != HANDSHAKE:
            if self._required:
                detail = (
                    "this port takes weights over TLS alone: call it so, and trust the workers' CA"
                )
                await self._refuse_stranger(stream, "tls-required", detail, "it spoke no TLS")
            return not self._required
        if held is None:
            detail = (
                "this port speaks no TLS: call it without, or start it with --weights-tls required"
            )
            await self._refuse_stranger(
                stream, "no-tls", detail, "it spoke TLS, which this port does not"
            )
            return False
        try:
            await stream.secure(held.context)
        except Untrusted as error:
            self._pushed_source.turned_away(str(error))
            raise
        return True

    async def _refuse_stranger(self, stream: FrameStream, slug: str, detail: str, why: str) -> None:
        self._pushed_source.turned_away(why)
        await _send_refusal(stream, slug, detail)


async def _send_refusal(stream: FrameStream, slug: str, detail: str) -> None:
    await stream.send(Kind.ERROR, {"slug": slug, "detail": detail})
    await stream.leave(FAREWELL_SECONDS)


def _caller_address(connected: socket.socket, address: object) -> str:
    """The address of a caller, or its process."""
    if isinstance(address, tuple):
        return str(address[0])
    size = struct.calcsize("3i")
    pid, *_ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return f"process {pid}"
