"""Frames of the connections that carry weights: trainer to worker, worker to worker.

A frame is one byte of kind, the length of a JSON object in four bytes (big-endian), that object (its
head), and as many raw bytes as `head["payload"]` says. Over a Unix socket a frame may bring a
descriptor along. Sockets block, each end has a thread of its own, and every wait has a deadline: an
end that is silent for longer, `PING` included, is dead. Standard library only: the client uses it, too.

    sender -> receiver   HELLO {protocol, ticket, layout, hops, name}; then over a Unix socket
                         MEMORY {size} with the descriptor and FILLED {upto} as bytes become final,
                         over TCP DATA {offset, payload, hash}; then END {root_hash, digests}
    receiver -> sender   READY {have} or ERROR {slug, detail}; PROGRESS {name, bytes_done};
                         STAGED {name, root_hash} or FAILED {name, detail}; over a Unix socket
                         RELEASED {} once it reads the memory no more
    fetching             FETCH {ticket} -> LAYOUT {layout, root_hash, digests}; GET {ranges} -> DATA
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

PROTOCOL = 1
CHUNK_BYTES = 1 << 20
"""What `DATA` carries: whole multiples of this begin a chunk, and only the last one is shorter."""
LEASE_SECONDS = 30.0
"""Silence after which the other end counts as dead, and what was begun for it is undone."""
HOP_SECONDS = 5.0
"""Silence after which a hop of a chain is skipped."""
PING_SECONDS = 1.0
"""How often an end that has nothing to say says so: well within `HOP_SECONDS`."""
MAX_HEAD_BYTES = 64 << 20
MAX_PAYLOAD_BYTES = 4 << 20

_FIRST = struct.Struct(">BI")


class Kind(IntEnum):
    """What a frame says."""

    HELLO = 1
    READY = 2
    ERROR = 3
    MEMORY = 4
    FILLED = 5
    DATA = 6
    END = 7
    PROGRESS = 8
    STAGED = 9
    FAILED = 10
    RELEASED = 11
    PING = 12
    FETCH = 13
    LAYOUT = 14
    GET = 15


class TransferError(Exception):
    """Base of what ends a connection."""


class Ended(TransferError):
    """The other end has closed the connection, or its host has."""


class Silent(TransferError):
    """The other end said nothing, or took nothing, for longer than it may."""


class Malformed(TransferError):
    """The other end sent what is no frame, or not the one that is due."""


class Refused(TransferError):
    """The other end answered `ERROR`: `slug` says which, `head` has the rest."""

    def __init__(self, head: Mapping[str, Any]) -> None:
        super().__init__(str(head.get("detail") or head.get("slug") or "it gave no reason"))
        self.slug = str(head.get("slug") or "")
        self.head = head


@dataclass(frozen=True, slots=True)
class Frame:
    """What came: `payload` bytes are still to be read (`Connection.read_into`, `skip`).

    `handle`: the descriptor that came along; who receives the frame closes it.
    """

    kind: Kind
    head: Mapping[str, Any]
    payload: int = 0
    handle: int | None = None

    def integer(self, name: str, least: int = 0, most: int = (1 << 63) - 1) -> int:
        """Return a number of the head.

        Raises:
            Malformed: it is missing, none, or out of bounds.
        """
        value = self.head.get(name)
        if type(value) is not int or not least <= value <= most:
            raise Malformed(f"{self.kind.name}.{name} must be a number from {least} to {most}")
        return value

    def text(self, name: str, default: str | None = None, most: int = 4096) -> str:
        """Return a text of the head, or the default if it has none.

        Raises:
            Malformed: it is missing, none, or too long.
        """
        value = self.head.get(name, default)
        if not isinstance(value, str) or len(value) > most:
            raise Malformed(f"{self.kind.name}.{name} must be a text of at most {most} characters")
        return value


@dataclass(slots=True)
class Tally:
    """When the other end was last heard, and what came and went, in bytes of payload."""

    heard: float = field(default_factory=time.monotonic)
    received: int = 0
    sent: int = 0


class Connection:
    """One end of a connection. One thread reads; any may send. It owns the socket.

    Args:
        sock: Connected; its timeouts are set here.
        silence: Seconds after which the other end counts as dead.
    """

    def __init__(self, sock: socket.socket, *, silence: float = LEASE_SECONDS) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self._closed = threading.Event()
        self._beat: threading.Thread | None = None
        self.unix = sock.family == socket.AF_UNIX
        self.tally = Tally()
        sock.setblocking(True)
        if not self.unix:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.patience(silence)

    def patience(self, silence: float) -> None:
        """Set the seconds after which the other end counts as dead, for reads and writes alike."""
        self.silence = silence
        whole = int(silence)
        pair = struct.pack("ll", whole, int((silence - whole) * 1e6))
        # Unlike a timeout of Python's, which polls before each call.
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, pair)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, pair)

    # Sending.

    def send(
        self,
        kind: Kind,
        head: Mapping[str, Any] | None = None,
        payload: memoryview | bytes = b"",
        *,
        handle: int | None = None,
    ) -> None:
        """Send one frame, whole; `handle`: a descriptor to go along, over a Unix socket.

        Raises:
            Ended: nobody is there.
            Silent: nobody takes it.
        """
        size = len(payload)
        if size:
            head = {**(head or {}), "payload": size}
        text = json.dumps(head or {}, separators=(",", ":")).encode()
        if len(text) > MAX_HEAD_BYTES or size > MAX_PAYLOAD_BYTES:
            raise ValueError(f"a {kind.name} of {len(text)} + {size} bytes is above the bounds")
        first = _FIRST.pack(kind, len(text)) + text
        with self._sending:
            try:
                self._send_all(first, payload, handle)
            except BlockingIOError as error:
                raise Silent(f"nobody took {kind.name} for {self.silence:g} s") from error
            except OSError as error:
                raise Ended(f"the connection is closed: {error.strerror}") from error
        self.tally.sent += size

    def _send_all(self, first: bytes, payload: memoryview | bytes, handle: int | None) -> None:
        along = []
        if handle is not None:
            along = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [handle]))]
        until = time.monotonic() + self.silence
        count = self._sock.sendmsg([first, payload], along)
        for part in (first, payload):
            with memoryview(part) as view:
                while count < len(view):
                    if time.monotonic() > until:
                        raise BlockingIOError
                    with view[count:] as rest:
                        count += self._sock.send(rest)
                count -= len(view)

    def keep_alive(self) -> None:
        """Say every `PING_SECONDS` that this end is there, from a thread, until it is closed."""
        if self._beat is None:
            self._beat = threading.Thread(target=self._ping, name="weights-ping", daemon=True)
            self._beat.start()

    def _ping(self) -> None:
        with contextlib.suppress(TransferError):
            while not self._closed.wait(PING_SECONDS):
                self.send(Kind.PING)

    # Receiving.

    def receive(self, most: int = MAX_HEAD_BYTES) -> Frame:
        """Return the next frame that is no `PING`; its payload is read by whoever called.

        Args:
            most: Bytes that the head may have.

        Raises:
            TransferError: there is none.
        """
        while True:
            frame = self._receive(most)
            self.tally.heard = time.monotonic()
            if frame.kind is not Kind.PING:
                return frame

    def poll(self, seconds: float) -> Frame | None:
        """Return the next frame if one comes within these seconds and is no `PING`.

        Raises:
            Silent: nothing has come for as long as that may be, pings included.
            TransferError: as `receive`.
        """
        waiting = select.poll()
        waiting.register(self._sock, select.POLLIN)
        if not waiting.poll(seconds * 1000):
            if time.monotonic() - self.tally.heard > self.silence:
                raise Silent(f"nothing came for {self.silence:g} s")
            return None
        frame = self._receive(MAX_HEAD_BYTES)
        self.tally.heard = time.monotonic()
        return None if frame.kind is Kind.PING else frame

    def expect(self, *kinds: Kind) -> Frame:
        """Return the next frame, which must be of one of these kinds.

        Raises:
            Refused: it is an `ERROR`.
            TransferError: there is none, or it is another.
        """
        frame = self.receive()
        if frame.kind in kinds:
            return frame
        if frame.handle is not None:
            os.close(frame.handle)
        if frame.kind is Kind.ERROR:
            raise Refused(frame.head)
        due = " or ".join(kind.name for kind in kinds)
        raise Malformed(f"{frame.kind.name} came where {due} was due")

    def _receive(self, most: int) -> Frame:
        first = bytearray(_FIRST.size)
        handle = self._first(first)
        try:
            number, length = _FIRST.unpack(first)
            if number not in Kind.__members__.values():
                raise Malformed(f"there is no frame of kind {number}")
            kind = Kind(number)
            if handle is not None and kind is not Kind.MEMORY:
                raise Malformed(f"{kind.name} came with a descriptor: only MEMORY brings one")
            if length > most:
                raise Malformed(f"{kind.name} has a head of {length} bytes: {most} are the most")
            head = self._head(kind, length)
            frame = Frame(kind, head, 0, handle)
            size = frame.integer("payload", 0, MAX_PAYLOAD_BYTES) if "payload" in head else 0
            return Frame(kind, head, size, handle)
        except BaseException:
            if handle is not None:
                os.close(handle)
            raise

    def _first(self, view: bytearray) -> int | None:
        """Read how a frame begins; returns the descriptor that came along."""
        if not self.unix:
            self.read_into(memoryview(view))
            return None
        room = socket.CMSG_LEN(struct.calcsize("i"))
        flags = socket.MSG_WAITALL | socket.MSG_CMSG_CLOEXEC
        try:
            count, along, _, _ = self._sock.recvmsg_into([view], room, flags)
        except BlockingIOError as error:
            raise Silent(f"nothing came for {self.silence:g} s") from error
        except OSError as error:
            raise Ended(f"the connection is closed: {error.strerror}") from error
        handles = array.array("i")
        for level, kind, data in along:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                handles.frombytes(data[: len(data) - len(data) % handles.itemsize])
        handle = handles[0] if handles else None
        try:
            if not count:
                raise Ended("the other end has closed the connection")
            if count < len(view):
                self.read_into(memoryview(view)[count:])
        except BaseException:
            if handle is not None:
                os.close(handle)
            raise
        return handle

    def _head(self, kind: Kind, length: int) -> Mapping[str, Any]:
        text = bytearray(length)
        self.read_into(memoryview(text))
        try:
            head = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Malformed(f"the head of {kind.name} is not JSON") from error
        if not isinstance(head, dict):
            raise Malformed(f"the head of {kind.name} is no JSON object")
        return head

    def read_into(self, view: memoryview) -> None:
        """Fill a buffer with the payload, or a part of it.

        Raises:
            Ended: it ends early.
            Silent: it does not come in time.
        """
        want, count = len(view), 0
        until = time.monotonic() + self.silence
        while count < want:
            try:
                with view[count:] as rest:
                    got = self._sock.recv_into(rest, 0, socket.MSG_WAITALL)
            except BlockingIOError as error:
                raise Silent(f"nothing came for {self.silence:g} s") from error
            except OSError as error:
                raise Ended(f"the connection is closed: {error.strerror}") from error
            if not got:
                raise Ended("the other end has closed the connection")
            count += got
            if count < want and time.monotonic() >= until:
                raise Silent(f"{want} bytes did not come within {self.silence:g} s")
        self.tally.received += want

    def skip(self, frame: Frame) -> None:
        """Read the payload of a frame and forget it."""
        if frame.payload:
            self.read_into(memoryview(bytearray(frame.payload)))

    def leave(self, seconds: float) -> None:
        """Close it once the other end has, or has had these seconds to read what it was told last.

        A socket that is closed with bytes unread takes back what was sent before.
        """
        until = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            self._sock.settimeout(seconds)
            waste = bytearray(1 << 16)
            while self._sock.recv_into(waste) and time.monotonic() < until:
                pass
        self.close()

    def interrupt(self) -> None:
        """End every read and write of whatever thread; `close` still frees it."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it, however often; a thread that reads or sends gets `Ended`."""
        self.interrupt()
        self._sock.close()


def dial(host: str, port: int, seconds: float, *, silence: float = LEASE_SECONDS) -> Connection:
    """Connect over TCP.

    Raises:
        Ended: nobody listens there, or nobody answers in time.
    """
    try:
        sock = socket.create_connection((host, port), timeout=seconds)
    except OSError as error:
        raise Ended(f"{host}:{port} can't be reached: {error.strerror or error}") from error
    return Connection(sock, silence=silence)


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
