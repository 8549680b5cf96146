"""Accepts the connections of other ranks at the rank that leads them, by a Unix socket or over TCP, and connects to it.

A caller that shows the token of this meeting is accepted, each rank once. All other callers are refused, for
any number of them and for anything that they send. One module, since all of it decides which callers it accepts.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import secrets
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self

from rollout_client.steering.pushing.options import ListenAddress
from rollout_client.steering.pushing.settings import ACCEPT_RETRY_SECONDS, CALL_SECONDS
from rollout_common.listening_sockets import EVERY_ADDRESS, open_listening_socket
from rollout_common.transfer.connections.blocking_connection import Connection
from rollout_common.transfer.connections.frame_sockets import connect_unix, first_to_go
from rollout_common.transfer.connections.frame_stream import FrameStream
from rollout_common.transfer.connections.frames import (
    Ended,
    Frame,
    Kind,
    Malformed,
    TransferError,
)
from rollout_common.transfer.connections.transfer_loop import TaskSet, run_on_loop
from rollout_common.transfer.settings import LEASE_SECONDS

from .node_addresses import offered_addresses

MAX_UNVERIFIED_CALLERS = 64
"""Most callers that have not shown a token yet; for a further one, the one that has waited longest is refused."""

CALL_TRIES = 3
"""How often a rank calls an address that closes the connection before it answers."""

_NAME = "rollout-ranks-"
_TOKEN_BYTES = 16

Address = tuple[str, int] | bytes | str
"""Host and port for TCP; else the name of a Unix socket."""


@dataclass(frozen=True, slots=True)
class RankAddresses:
    """How other ranks reach the one that leads them, as it says through their group.

    Attributes:
        local: The socket for ranks of its node.
        addresses: The addresses for ranks of other nodes to try, in that order.
        token: The caller shows it; valid for this meeting.
        answer: It answers with this, since in another network the same address may be another host.
    """

    local: bytes | str
    addresses: tuple[tuple[str, int], ...]
    token: str
    answer: str


class RankListener:
    """The listening sockets of a rank that leads others, which accept each of those that are due once."""

    def __init__(
        self, listening: Sequence[socket.socket], places: RankAddresses, due: Collection[int]
    ) -> None:
        self.places = places
        self._listening, self._due = listening, frozenset(due)
        self._found: dict[int, FrameStream] = {}
        self._unverified: list[FrameStream] = []
        """Callers that have not shown the token, the oldest first."""
        self._accepting, self._calls = TaskSet(), TaskSet()
        self._closed = False
        run_on_loop(self._start_accepting()).result()

    @classmethod
    def open(cls, due: Collection[int], reach: ListenAddress, *, afar: bool) -> Self:
        """Listen for the ranks that are to call; `afar`: some of them are on other nodes.

        Raises:
            OSError: It can't listen; the text says why.
        """
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening = [local]
        try:
            local.bind(f"\0{_NAME}{secrets.token_hex(_TOKEN_BYTES)}")
            local.listen(max(1, len(due)))
            addresses: tuple[tuple[str, int], ...] = ()
            if afar:
                listening.append(_listen_in_range(reach, len(due)))
                port = listening[-1].getsockname()[1]
                hosts = offered_addresses() if reach.host is None else [reach.host]
                addresses = tuple((host, port) for host in hosts)
            for each in listening:
                each.setblocking(False)
            token, answer = (secrets.token_hex(_TOKEN_BYTES) for _ in range(2))
            return cls(listening, RankAddresses(local.getsockname(), addresses, token, answer), due)
        except BaseException:
            for each in listening:
                each.close()
            raise

    def take_connections(self) -> dict[int, Connection]:
        """Stop listening, and return the connections of all other ranks.

        Raises:
            TransferError: A rank is missing.
        """
        run_on_loop(self._stop_listening(self._found.values())).result()
        found, self._found = self._found, {}
        connections = {
            rank: Connection(stream.detach(), silence=CALL_SECONDS)
            for rank, stream in found.items()
        }
        missing = self._due - found.keys()
        if missing:
            for connection in connections.values():
                connection.close()
            raise TransferError(f"ranks {sorted(missing)} did not call")
        return connections

    def close(self) -> None:
        """Stop listening, and close the connections that `take_connections` has not returned. Idempotent."""
        run_on_loop(self._stop_listening(())).result()

    async def _start_accepting(self) -> None:
        for listening in self._listening:
            self._accepting.start_task(self._accept_callers(listening))

    async def _stop_listening(self, accepted: Collection[FrameStream]) -> None:
        """Stop listening, and end all calls except `accepted`, whose answers may still be on the way."""
        self._closed = True
        await self._accepting.end_tasks()
        for sock in self._listening:
            sock.close()
        for stream in self._unverified:
            if stream not in accepted:
                stream.interrupt()
        await self._calls.wait_for_end()
        for stream in list(self._found.values()):
            if stream not in accepted:
                await stream.close()

    async def _accept_callers(self, listening: socket.socket) -> None:
        while True:
            try:
                sock, _ = await asyncio.get_running_loop().sock_accept(listening)
            except OSError:  # the caller is gone, or this process has too many open files
                await asyncio.sleep(ACCEPT_RETRY_SECONDS)
                continue
            try:
                stream = FrameStream(_with_keepalive(sock), silence=CALL_SECONDS)
            except OSError:  # the caller is gone
                sock.close()
                continue
            if len(self._unverified) >= MAX_UNVERIFIED_CALLERS:
                late = first_to_go(self._unverified)
                self._unverified.remove(late)  # at once, or the next caller would choose it again
                late.interrupt()
            self._unverified.append(stream)
            self._calls.start_task(self._read_caller(stream))

    async def _read_caller(self, stream: FrameStream) -> None:
        """Answer a caller, and keep its connection if it is a rank that was not accepted before."""
        kept = False
        try:
            why = self._refusal_reason(stream, await stream.receive_first())
            if why is None:
                await stream.send(Kind.READY, {"answer": self.places.answer})
            else:
                await stream.send(Kind.ERROR, {"slug": "refused", "detail": why})
            kept = why is None
        except TransferError:
            pass
        finally:
            if stream in self._unverified:
                self._unverified.remove(stream)
            if not kept:  # a rank that did not get the answer may call again
                self._found = {r: each for r, each in self._found.items() if each is not stream}
                await stream.close()

    def _refusal_reason(self, stream: FrameStream, frame: Frame) -> str | None:
        if frame.kind is not Kind.HELLO or frame.payload:
            raise Malformed(f"{frame.kind.name} came where HELLO was due")
        token = frame.text("token").encode(errors="replace")  # JSON may contain lone surrogates
        if not hmac.compare_digest(token, self.places.token.encode()):
            return "this is not the token of this meeting"
        rank = frame.integer("rank", 1)
        if rank not in self._due:
            raise Malformed(f"rank {rank} is not led from here")
        if self._closed:
            return "the ranks have met already"
        if rank in self._found:
            return f"rank {rank} is there already"
        self._found[rank] = stream
        return None


def call_leader(places: RankAddresses, rank: int, *, here: bool) -> Connection:
    """Return a connection of this rank to the one that leads it, which may be `here`, on the same node.

    Raises:
        TransferError: No address reaches it; the text gives the error of each.
    """
    addresses: Sequence[Address] = [places.local] if here else places.addresses
    if not addresses:
        raise TransferError("its node has no address but loopback")
    tried: dict[Address, Exception] = {}
    for _ in range(CALL_TRIES):
        # A crowd of strangers may displace a caller before it was heard: it calls again.
        for address in [each for each in addresses if isinstance(tried.get(each, Ended()), Ended)]:
            try:
                return _call_address(address, places, rank)
            except (OSError, UnicodeError, TransferError) as error:  # UnicodeError: no valid name
                tried[address] = error
    reasons = (
        f"{_address_text(address)}: {getattr(error, 'strerror', None) or error}"
        for address, error in tried.items()
    )
    raise TransferError("; ".join(reasons))


def _call_address(address: Address, places: RankAddresses, rank: int) -> Connection:
    if isinstance(address, tuple):
        sock = _with_keepalive(socket.create_connection(address, CALL_SECONDS))
    else:
        sock = connect_unix(address, CALL_SECONDS)
    connection = Connection(sock, silence=CALL_SECONDS)
    try:
        connection.send(Kind.HELLO, {"rank": rank, "token": places.token})
        ready = connection.expect(Kind.READY)
        if ready.text("answer", "") != places.answer:
            raise Malformed("another program answers there")
    except BaseException:
        connection.close()
        raise
    return connection


def _address_text(address: Address) -> str:
    if not isinstance(address, tuple):
        return "its socket"
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _with_keepalive(sock: socket.socket) -> socket.socket:
    """Turn on keepalive, so that the kernel notices a dead host also between two publishes."""
    if sock.family != socket.AF_UNIX:
        every = int(LEASE_SECONDS / 6)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(LEASE_SECONDS * 1000))
    return sock


def _listen_in_range(reach: ListenAddress, count: int) -> socket.socket:
    first, last = reach.ports or (0, 0)
    for port in range(first, last + 1):
        try:
            return open_listening_socket(EVERY_ADDRESS, port, count + MAX_UNVERIFIED_CALLERS)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"none of the ports {first} to {last} is free")
