"""A socket that carries frames between the ranks of a trainer, for threads that block.

Each end has a thread of its own, and every wait has a deadline: an end that is silent for longer, `PING` included, is
dead. Workers and trainers talk by `frame_stream`.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rollout_common.transfer.settings import LEASE_SECONDS, PING_SECONDS, PING_STOP_SECONDS

from .frame_sockets import closed_on_error, is_socket_ready, receive_descriptors
from .frames import (
    FIRST_BYTES,
    MAX_HEAD_BYTES,
    Ended,
    Frame,
    Kind,
    Silent,
    TransferError,
    build_frame,
    check_descriptor,
    check_kind,
    decode_first,
    encode_frame,
)


class Connection:
    """One end of a connection. One thread reads; any may send. It owns the socket.

    Args:
        sock: Connected; its timeouts are set here.
        silence: Seconds after which the other end counts as dead.
    """

    def __init__(self, sock: socket.socket, *, silence: float = LEASE_SECONDS) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self._pings_over = threading.Event()
        self._pinging: threading.Thread | None = None
        self.unix = sock.family == socket.AF_UNIX
        self.takes_memory = False
        """Whether `MEMORY` may come now: at any other time its descriptor is refused."""
        self.heard = time.monotonic()
        """When the other end last sent something, on the monotonic clock."""
        sock.setblocking(True)
        if not self.unix:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.patience(silence)

    def patience(self, silence: float) -> None:
        """Set the seconds after which the other end counts as dead, for reads and writes alike."""
        self.silence = silence
        whole = int(silence)
        pair = struct.pack("ll", whole, int((silence - whole) * 1e6))
        # By socket options: a timeout of Python's polls before each call.
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, pair)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, pair)

    @property
    def has_unread(self) -> bool:
        """Whether the other end has sent something that this end has not read yet."""
        return is_socket_ready(self._sock, select.POLLIN)

    # Sending.

    def send(
        self,
        kind: Kind,
        head: Mapping[str, Any] | None = None,
        payload: memoryview | bytes = b"",
        *,
        handle: int | None = None,
    ) -> None:
        """Send one whole frame; `handle`: a descriptor to send with it, over a Unix socket.

        Raises:
            Ended: the other end has closed the connection.
            Silent: the other end does not take it in time.
        """
        first = encode_frame(kind, head or {}, len(payload))
        with self._sending, self._as_transfer_errors(f"nobody took {kind.name}"):
            self._send_all(first, payload, handle)

    @contextlib.contextmanager
    def _as_transfer_errors(self, silent: str) -> Iterator[None]:
        """Raise the socket's errors as errors of transfers; `silent`: what the end of the patience means."""
        try:
            yield
        except BlockingIOError as error:
            raise Silent(f"{silent} for {self.silence:g} s") from error
        except OSError as error:
            raise Ended(f"the connection is closed: {error.strerror}") from error

    def _send_all(self, first: bytes, payload: memoryview | bytes, handle: int | None) -> None:
        until = time.monotonic() + self.silence
        handles = [] if handle is None else [handle]
        count = socket.send_fds(self._sock, [first, payload], handles)
        for part in first, payload:
            with memoryview(part) as view:
                while count < len(view):
                    if time.monotonic() > until:
                        raise BlockingIOError
                    with view[count:] as rest:
                        count += self._sock.send(rest)
                count -= len(view)

    def start_pinging(self) -> None:
        """Send a `PING` every `PING_SECONDS`, from a thread, until `stop_pinging` or until the other end is gone."""
        self._pings_over = threading.Event()
        self._pinging = threading.Thread(
            target=self._ping_until, args=(self._pings_over,), name="rank-beat", daemon=True
        )
        self._pinging.start()

    def stop_pinging(self) -> None:
        """Send no more pings. Idempotent."""
        self._pings_over.set()
        if self._pinging is not None:
            self._pinging.join(PING_STOP_SECONDS)

    def _ping_until(self, over: threading.Event) -> None:
        with contextlib.suppress(TransferError):  # the thread that reads finds out why
            while not over.wait(PING_SECONDS):
                self.send(Kind.PING)

    # Receiving.

    def receive(self) -> Frame:
        """Return the next frame other than `PING`; the caller reads its payload.

        Raises:
            TransferError: there is none.
        """
        while True:
            frame = self._receive()
            self.heard = time.monotonic()
            if frame.kind is not Kind.PING:
                return frame

    def poll(self, seconds: float) -> Frame | None:
        """Return the next frame other than `PING`; None: none came within these seconds.

        Raises:
            Silent: nothing came within the limit of silence, not even a ping.
            TransferError: as `receive`.
        """
        if not is_socket_ready(self._sock, select.POLLIN, seconds):
            if time.monotonic() - self.heard > self.silence:
                raise Silent(f"nothing came for {self.silence:g} s")
            return None
        frame = self._receive()
        self.heard = time.monotonic()
        return None if frame.kind is Kind.PING else frame

    def expect(self, *kinds: Kind) -> Frame:
        """Return the next frame, which must be of one of these kinds.

        Raises:
            Refused: it is an `ERROR`.
            TransferError: there is none, or it is another.
        """
        return check_kind(self.receive(), *kinds)

    def _receive(self) -> Frame:
        first = bytearray(FIRST_BYTES)
        handle = self._first(first)
        with closed_on_error(handle):
            kind, length = decode_first(first, MAX_HEAD_BYTES)
            check_descriptor(kind, handle, takes_memory=self.takes_memory)
            text = bytearray(length)
            self.read_into(memoryview(text))
            return build_frame(kind, text, handle)

    def _first(self, view: bytearray) -> int | None:
        """Read the first bytes of a frame; return the descriptor that came with them."""
        if not self.unix:
            self.read_into(memoryview(view))
            return None
        with self._as_transfer_errors("nothing came"):
            begin, handles, _ = receive_descriptors(self._sock, len(view), 1, socket.MSG_WAITALL)
        handle = handles[0] if handles else None
        with closed_on_error(handle):
            if not begin:
                raise Ended("the other end has closed the connection")
            view[: len(begin)] = begin
            self.read_into(memoryview(view)[len(begin) :])
        return handle

    def read_into(self, view: memoryview) -> None:
        """Fill a buffer with the payload, or a part of it.

        Raises:
            Ended: it ends early.
            Silent: it does not come in time.
        """
        want, count = len(view), 0
        until = time.monotonic() + self.silence
        with self._as_transfer_errors("nothing came"):
            while count < want:
                with view[count:] as rest:
                    got = self._sock.recv_into(rest, 0, socket.MSG_WAITALL)
                if not got:
                    raise Ended("the other end has closed the connection")
                count += got
                if count < want and time.monotonic() >= until:
                    raise Silent(f"{want} bytes did not come within {self.silence:g} s")

    def skip(self, frame: Frame) -> None:
        """Read the payload of a frame and forget it."""
        if frame.payload:
            self.read_into(memoryview(bytearray(frame.payload)))

    def interrupt(self) -> None:
        """End every read, write and ping, of all threads; `close` still frees it."""
        self._pings_over.set()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it; a thread that reads or sends gets `Ended`. Idempotent."""
        self.interrupt()
        self._sock.close()
