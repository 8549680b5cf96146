"""A socket that carries frames; whole, for sending, receiving and TLS share its deadlines and locks.

Sockets block, each end has a thread of its own, and every wait has a deadline: an end that is silent for longer, `PING`
included, is dead. Standard library only: the client uses it, too.
"""

from __future__ import annotations

import array
import contextlib
import json
import math
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .frames import (
    HELLO_BYTES,
    LEASE_SECONDS,
    MAX_HEAD_BYTES,
    MAX_ITEMS,
    MAX_NESTED,
    MAX_PAYLOAD_BYTES,
    PING_SECONDS,
    PROTOCOL,
    Ended,
    Frame,
    Kind,
    Malformed,
    Refused,
    Silent,
    Slow,
    TransferError,
    Untrusted,
)
from .pace import SLOW_RATE, Haste, Pace
from .tls import Session, TlsEnded, TlsFailed

_FIRST = struct.Struct(">BI")


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
        self._tls: Session | None = None
        self._until = math.inf
        """When whatever is being read must be there; beside the bound of silence."""
        self._haste = Haste()
        self.unix = sock.family == socket.AF_UNIX
        self.takes_memory = False
        """Whether `MEMORY` is due: at any other time its descriptor is refused."""
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

    def secure(self, context: ssl.SSLContext, name: str | None = None, fix: str = "") -> None:
        """Speak TLS from here on, within the seconds that the other end may be silent.

        Args:
            context: Of this end.
            name: What the other end's certificate must be for; None: the other end has called.
            fix: What to do about a certificate that isn't trusted.

        Raises:
            Untrusted: The other end can't, or is another one.
            Silent: It says nothing.
            Ended: It is gone.
        """
        session = Session(self._sock, context, name)
        try:
            session.shake_hands(self.silence, fix)
        except TlsFailed as error:
            raise Untrusted(str(error)) from error
        except BlockingIOError as error:
            raise Silent(f"nothing came for {self.silence:g} s while TLS began") from error
        except OSError as error:
            raise Ended(f"the connection is closed: {error.strerror}") from error
        self._tls = session

    @property
    def unheard(self) -> bool:
        """Whether something of the other end's waits to be read, so that its thread has yet to look at it."""
        waiting = select.poll()
        try:
            waiting.register(self._sock, select.POLLIN)
        except ValueError:  # it was closed just now
            return False
        return bool(waiting.poll(0))

    def first_byte(self) -> int:
        """Return what the other end begins with, which stays there to be read.

        Raises:
            TransferError: It begins with nothing.
        """
        try:
            found = self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError as error:
            raise Silent(f"nothing came for {self.silence:g} s") from error
        except OSError as error:
            raise Ended(f"the connection is closed: {error.strerror}") from error
        if not found:
            raise Ended("the other end has closed the connection")
        return found[0]

    def pause(self, seconds: float) -> None:
        """Send nothing for these seconds, unless it is closed meanwhile."""
        if seconds > 0:
            self._closed.wait(seconds)

    # Sending.

    def wait_for(self, pace: Pace | None, nbytes: int) -> None:
        """Return when so many bytes may be sent at this pace, at once if there is none, or once it is closed."""
        if pace is not None:
            self.pause(pace.wait_for(nbytes))

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

    def hurry(self, kind: Kind, head: Mapping[str, Any], payload: memoryview) -> None:
        """Send a payload to who others wait for.

        Raises:
            Slow: it takes less than `SLOW_RATE`.
            TransferError: as `send`.
        """
        began = time.monotonic()
        self.send(kind, head, payload)
        if not self._haste.took(len(payload), time.monotonic() - began):
            raise Slow(
                f"it takes less than {SLOW_RATE >> 20} MiB/s, and others wait behind it: see its network"
            )

    def _send_all(self, first: bytes, payload: memoryview | bytes, handle: int | None) -> None:
        until = time.monotonic() + self.silence
        if self._tls is not None:
            for cipher in self._tls.encrypted(first, payload):
                self._put(until, cipher)
            return
        along = []
        if handle is not None:
            along = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [handle]))]
        self._put(until, first, payload, along=along)

    def _put(
        self,
        until: float,
        *parts: memoryview | bytes,
        along: Iterable[tuple[int, int, array.array[int]]] = (),
    ) -> None:
        count = self._sock.sendmsg(parts, along)
        for part in parts:
            with memoryview(part) as view:
                while count < len(view):
                    if time.monotonic() > until:
                        raise BlockingIOError
                    with view[count:] as rest:
                        count += self._sock.send(rest)
                count -= len(view)

    def introduce(self, ticket: str, about: Mapping[str, Any]) -> None:
        """Show the ticket, and then say what is to come. Raises what `send` raises."""
        self.send(Kind.HELLO, {"protocol": PROTOCOL, "ticket": ticket})
        self.send(Kind.LAYOUT, about)

    def keep_alive(self) -> None:
        """Say every `PING_SECONDS` that this end is there, from a thread, until it is closed."""
        if self._beat is None:
            args = (self._closed,)
            self._beat = threading.Thread(
                target=self.ping_until, args=args, name="weights-ping", daemon=True
            )
            self._beat.start()

    def ping_until(self, over: threading.Event) -> None:
        """Say every `PING_SECONDS` that this end is there, until that is over or the other end is gone."""
        with contextlib.suppress(TransferError):  # whoever reads finds out why
            while not over.wait(PING_SECONDS):
                self.send(Kind.PING)

    # Receiving.

    def receive(self) -> Frame:
        """Return the next frame that is no `PING`; its payload is read by whoever called.

        Raises:
            TransferError: there is none.
        """
        while True:
            frame = self._receive(MAX_HEAD_BYTES)
            self.tally.heard = time.monotonic()
            if frame.kind is not Kind.PING:
                return frame

    def receive_first(self) -> Frame:
        """Return the first frame of who has shown no ticket yet: it is small, and pings win no time for it.

        Raises:
            TransferError: there is none.
        """
        self._until = time.monotonic() + self.silence
        try:
            while (frame := self._receive(HELLO_BYTES)).kind is Kind.PING:
                if time.monotonic() > self._until:
                    raise Silent(f"nothing but pings came for {self.silence:g} s")
            self.tally.heard = time.monotonic()
            return frame
        finally:
            self._until = math.inf

    def poll(self, seconds: float) -> Frame | None:
        """Return the next frame if one comes within these seconds and is no `PING`.

        Raises:
            Silent: nothing has come for as long as that may be, pings included.
            TransferError: as `receive`.
        """
        if not self._readable(seconds):
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
        return self.checked(self.receive(), *kinds)

    def checked(self, frame: Frame, *kinds: Kind) -> Frame:
        """Return a frame that came, which must be of one of these kinds. Raises what `expect` raises."""
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
            if handle is not None and not (kind is Kind.MEMORY and self.takes_memory):
                raise Malformed(
                    f"{kind.name} came with a descriptor: only MEMORY brings one, when it is due"
                )
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
        if text.count(b"[") + text.count(b"{") > MAX_NESTED or text.count(b",") > MAX_ITEMS:
            raise Malformed(f"the head of {kind.name} has more parts than any layout")
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
        until = min(time.monotonic() + self.silence, self._until)
        while count < want:
            try:
                with view[count:] as rest:
                    got = self._take(rest)
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

    def _take(self, view: memoryview) -> int:
        """Read what there is, at least a byte; 0: there is no more."""
        if self._tls is None:
            return self._sock.recv_into(view, 0, socket.MSG_WAITALL)
        try:
            return self._tls.read(view)
        except TlsEnded:
            return 0

    def _readable(self, seconds: float) -> bool:
        """Whether something can be read within these seconds, if only that it has ended."""
        waiting, until = select.poll(), time.monotonic() + seconds
        waiting.register(self._sock, select.POLLIN)
        try:
            while self._tls is None or not self._tls.ready:
                if not waiting.poll(max(0.0, until - time.monotonic()) * 1000):
                    return False
                if self._tls is None or not self._tls.pull(socket.MSG_DONTWAIT):
                    return True
        except (TlsEnded, OSError):
            pass  # whoever reads is told
        return True

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


def first_to_go(strangers: Sequence[Connection]) -> Connection:
    """Return which of them, oldest first, goes for another one: not who has spoken and was not listened to yet."""
    return next((each for each in strangers if not each.unheard), strangers[0])
