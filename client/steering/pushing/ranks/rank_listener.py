"""Accepts the connections of other ranks at the rank that leads them, by a Unix socket or over TCP, and connects to it.

A caller that shows the token of this meeting is accepted, each rank once. All other callers are refused, for
any number of them and for anything that they send. One module, since all of it decides which callers it accepts.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import socket
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self

from rollout_client.steering.pushing.options import ListenAddress
from rollout_client.steering.pushing.settings import CALL_SECONDS
from rollout_common.listening_sockets import EVERY_ADDRESS, open_listening_socket
from rollout_common.transfer.connections.blocking_connection import Connection
from rollout_common.transfer.connections.frame_sockets import connect_unix, first_to_go
from rollout_common.transfer.connections.frames import Frame, Kind, Malformed, TransferError
from rollout_common.transfer.settings import LEASE_SECONDS

from .node_addresses import offered_addresses

MAX_UNVERIFIED_CALLERS = 64
"""Most callers that have not shown a token yet; for a further one, the one that has waited longest is refused."""

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
    """The listening sockets of a rank that leads others, which accept each of those once.

    Args:
        listening: The listening sockets.
        places: How the others reach them.
        due: The ranks that are to call.
    """

    def __init__(
        self, listening: Sequence[socket.socket], places: RankAddresses, due: Collection[int]
    ) -> None:
        self.places = places
        self._listening, self._due = listening, frozenset(due)
        self._found: dict[int, Connection] = {}
        self._unverified: dict[Connection, threading.Thread] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._accept_callers, args=(each,), name="rank-listener", daemon=True
            )
            for each in listening
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def open(cls, due: Collection[int], reach: ListenAddress, *, afar: bool) -> Self:
        """Listen for other ranks.

        Args:
            due: The ranks that are to call.
            reach: How other nodes reach this one.
            afar: Whether the group has ranks of other nodes.

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
        self._stop_listening(self._found.values())
        found, self._found = self._found, {}
        missing = self._due - found.keys()
        if missing:
            for connection in found.values():
                connection.close()
            raise TransferError(f"ranks {sorted(missing)} did not call")
        return found

    def close(self) -> None:
        """Stop listening, and close the connections that `take_connections` has not returned. Idempotent."""
        self._stop_listening(())
        for connection in self._found.values():
            connection.close()
        self._found = {}

    def _stop_listening(self, accepted: Collection[Connection]) -> None:
        """Stop listening, and end all calls except `accepted`, whose answers may still be on the way."""
        self._closed.set()
        for sock in self._listening:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        for thread in self._threads:
            thread.join()
        for sock in self._listening:
            sock.close()
        with self._lock:
            unverified = dict(self._unverified)
        for connection, thread in unverified.items():
            if connection not in accepted:
                connection.interrupt()
            thread.join()

    def _accept_callers(self, listening: socket.socket) -> None:
        while True:
            try:
                sock, _ = listening.accept()
            except OSError:
                if self._closed.wait(0.1):
                    return
                continue  # the caller is gone, or this process has too many open files
            try:
                self._start_reading(Connection(_with_keepalive(sock), silence=CALL_SECONDS))
            except OSError:  # the caller is gone
                sock.close()

    def _start_reading(self, connection: Connection) -> None:
        """Read the first frame of a caller in a separate thread, so that it doesn't delay other callers."""
        thread = threading.Thread(
            target=self._read_caller, args=(connection,), name="rank-caller", daemon=True
        )
        with self._lock:
            if len(self._unverified) >= MAX_UNVERIFIED_CALLERS:
                late = first_to_go(list(self._unverified))
                del self._unverified[late]  # at once, or the next caller would choose it again
                late.interrupt()
            self._unverified[connection] = thread
            thread.start()

    def _read_caller(self, connection: Connection) -> None:
        kept = False
        try:
            kept = self._answer_caller(connection, connection.receive_first())
        except TransferError:
            pass
        finally:
            if not kept:
                connection.close()
            with self._lock:
                self._unverified.pop(connection, None)
                if not kept:  # a rank that did not get the answer may call again
                    self._found = {
                        r: each for r, each in self._found.items() if each is not connection
                    }

    def _answer_caller(self, connection: Connection, frame: Frame) -> bool:
        """Answer a caller; return whether it is a rank that was not accepted before."""
        if frame.handle is not None:
            os.close(frame.handle)
        why = self._refusal_reason(connection, frame)
        if why is None:
            connection.send(Kind.READY, {"answer": self.places.answer})
        else:
            connection.send(Kind.ERROR, {"slug": "refused", "detail": why})
        return why is None

    def _refusal_reason(self, connection: Connection, frame: Frame) -> str | None:
        if frame.kind is not Kind.HELLO or frame.payload:
            raise Malformed(f"{frame.kind.name} came where HELLO was due")
        token = frame.text("token").encode(errors="replace")  # JSON may contain lone surrogates
        if not hmac.compare_digest(token, self.places.token.encode()):
            return "this is not the token of this meeting"
        rank = frame.integer("rank", 1)
        if rank not in self._due:
            raise Malformed(f"rank {rank} is not led from here")
        with self._lock:
            if self._closed.is_set():
                return "the ranks have met already"
            if rank in self._found:
                return f"rank {rank} is there already"
            self._found[rank] = connection
        return None


def call_leader(places: RankAddresses, rank: int, *, here: bool) -> Connection:
    """Return a connection to the rank that leads the calling one.

    Args:
        places: How it is reached.
        rank: The number of the calling rank.
        here: Whether it is on the caller's node.

    Raises:
        TransferError: No address reaches it; the text gives the error of each.
    """
    addresses: Sequence[Address] = [places.local] if here else places.addresses
    if not addresses:
        raise TransferError("its node has no address but loopback")
    tried = []
    for address in addresses:
        try:
            return _call_address(address, places, rank)
        except (OSError, UnicodeError, TransferError) as error:  # UnicodeError: not a valid name
            why = getattr(error, "strerror", None) or str(error)
            tried.append(f"{_address_text(address)}: {why}")
    raise TransferError("; ".join(tried))


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
