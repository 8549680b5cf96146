"""A socket that carries frames, for an asyncio loop: every wait has a deadline, and a silent end counts as dead.

An end that has nothing to send sends pings, so silence beyond the limit means that it is gone. Payloads are read
directly into their final place. Standard library only, since the client uses it, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from rollout_common.transfer.settings import LEASE_SECONDS, PING_SECONDS

from .frame_sockets import (
    DESCRIPTOR_ROOM,
    descriptor_message,
    has_unread_bytes,
    received_descriptor,
)
from .frames import (
    FIRST_BYTES,
    HELLO_BYTES,
    MAX_HEAD_BYTES,
    Ended,
    Frame,
    Kind,
    Silent,
    TransferError,
    Untrusted,
    build_frame,
    check_descriptor,
    check_kind,
    decode_first,
    encode_frame,
)
from .tls_session import READ_BYTES, SPEAKS_NO_TLS, TlsEnded, TlsFailed, TlsSession

StillWanted = Callable[[], bool]
"""Whether the payload is still wanted; called before each part of it is written to its place."""


class FrameStream:
    """One end of a connection, used on one loop. One task reads; any may send. It owns the socket.

    Args:
        sock: Connected.
        silence: Seconds after which the other end counts as dead.
    """

    def __init__(self, sock: socket.socket, *, silence: float = LEASE_SECONDS) -> None:
        self._sock, self.silence = sock, silence
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()
        self._pinging: asyncio.Task[None] | None = None
        self._tls: TlsSession | None = None
        self._cipher = memoryview(b"")
        self.unix = sock.family == socket.AF_UNIX
        self.takes_memory = False
        """Whether `MEMORY` may come now: at any other time its descriptor is refused."""
        self.heard = time.monotonic()
        """When the other end last sent something, on the monotonic clock."""
        self.bytes_sent = self.bytes_received = 0
        """Bytes of payload in each direction."""
        sock.setblocking(False)
        if not self.unix:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def has_unread(self) -> bool:
        """Whether the other end has sent something that this end has not read yet."""
        return has_unread_bytes(self._sock)

    # TLS.

    async def peek_byte(self) -> int:
        """Return the first byte that the other end sent, without consuming it.

        Raises:
            TransferError: The other end sent nothing.
        """
        async with self._deadline(f"nothing came for {self.silence:g} s"):
            while True:
                try:
                    found = self._sock.recv(1, socket.MSG_PEEK)
                    break
                except BlockingIOError:
                    await self._wait_readable()
        if not found:
            raise Ended("the other end has closed the connection")
        return found[0]

    async def secure(self, context: ssl.SSLContext, name: str | None = None, fix: str = "") -> None:
        """Switch the connection to TLS.

        Args:
            context: This end's TLS context.
            name: The name that the other end's certificate must have; None: this end is the server.
            fix: What to do about a certificate that isn't trusted.

        Raises:
            Untrusted: The other end has no TLS, or its certificate is not trusted.
            TransferError: The other end is silent, or gone.
        """
        session = TlsSession(context, name)
        self._cipher = memoryview(bytearray(READ_BYTES))
        async with self._deadline(f"nothing came for {self.silence:g} s while TLS began"):
            try:
                while True:
                    try:
                        done = session.shake_hands(fix)
                    finally:
                        if pending := session.take_pending():
                            await self._loop.sock_sendall(self._sock, pending)
                    if done:
                        break
                    count = await self._loop.sock_recv_into(self._sock, self._cipher)
                    if not count:
                        raise TlsFailed(SPEAKS_NO_TLS)
                    session.feed_cipher(self._cipher[:count])
            except TlsFailed as error:
                raise Untrusted(str(error)) from error
        self._tls = session

    # Sending.

    async def send(
        self,
        kind: Kind,
        head: Mapping[str, Any] | None = None,
        payload: memoryview | bytes = b"",
        *,
        handle: int | None = None,
    ) -> None:
        """Send one whole frame; `handle`: a descriptor to send with it, over a Unix socket.

        Raises:
            Ended: The other end has closed the connection.
            Silent: The other end does not take it in time.
        """
        first = encode_frame(kind, head or {}, len(payload))
        why = f"nobody took {kind.name} for {self.silence:g} s"
        async with self._sending, self._deadline(why):
            if self._tls is not None:
                for cipher in self._tls.encrypt_parts(first, payload):
                    await self._loop.sock_sendall(self._sock, cipher)
            else:
                await self._send_plain(first, payload, handle)
        self.bytes_sent += len(payload)

    async def _send_plain(
        self, first: bytes, payload: memoryview | bytes, handle: int | None
    ) -> None:
        along = descriptor_message(handle)
        while True:
            try:
                count = self._sock.sendmsg([first, payload], along)
                break
            except BlockingIOError:
                await self._wait_writable()
        for part in first, payload:
            if count < len(part):
                with memoryview(part)[count:] as rest:
                    await self._loop.sock_sendall(self._sock, rest)
            count = max(0, count - len(part))

    def start_pinging(self) -> None:
        """Send a `PING` every `PING_SECONDS`, until this connection is closed."""
        if self._pinging is None:
            self._pinging = self._loop.create_task(self._ping())

    async def _ping(self) -> None:
        with contextlib.suppress(TransferError):  # the task that reads finds out why
            while True:
                await asyncio.sleep(PING_SECONDS)
                if not self._sending.locked():  # a frame that is being sent says as much as a ping
                    await self.send(Kind.PING)

    # Receiving.

    async def receive(self) -> Frame:
        """Return the next frame other than `PING`; the caller reads its payload.

        Raises:
            TransferError: There is none.
        """
        while True:
            frame = await self._receive(MAX_HEAD_BYTES)
            if frame.kind is not Kind.PING:
                return frame

    async def receive_first(self) -> Frame:
        """Return the first frame of an unknown caller: it must be small, and pings don't extend its time.

        Raises:
            TransferError: There is none.
        """
        try:
            async with asyncio.timeout(self.silence):
                while (frame := await self._receive(HELLO_BYTES)).kind is Kind.PING:
                    pass
                return frame
        except TimeoutError as error:
            raise Silent(f"nothing but pings came for {self.silence:g} s") from error

    async def expect(self, *kinds: Kind) -> Frame:
        """Return the next frame, which must be of one of these kinds.

        Raises:
            Refused: It is an `ERROR`.
            TransferError: There is none, or it is another.
        """
        return check_kind(await self.receive(), *kinds)

    async def _receive(self, most: int) -> Frame:
        handle: int | None = None
        try:
            async with self._deadline(f"nothing came for {self.silence:g} s"):
                first = bytearray(FIRST_BYTES)
                handle = await self._read_first(memoryview(first))
                kind, length = decode_first(first, most)
                check_descriptor(kind, handle, takes_memory=self.takes_memory)
                text = bytearray(length)
                await self._read_exactly(memoryview(text))
            frame = build_frame(kind, text, handle)
        except BaseException:
            if handle is not None:
                os.close(handle)
            raise
        self.heard = time.monotonic()
        return frame

    async def _read_first(self, view: memoryview) -> int | None:
        """Read the first bytes of a frame; return the descriptor that came with them."""
        if not self.unix:
            await self._read_exactly(view)
            return None
        while True:
            try:
                count, along, _, _ = self._sock.recvmsg_into(
                    [view], DESCRIPTOR_ROOM, socket.MSG_CMSG_CLOEXEC
                )
                break
            except BlockingIOError:
                await self._wait_readable()
        handle = received_descriptor(along)
        try:
            if not count:
                raise Ended("the other end has closed the connection")
            await self._read_exactly(view[count:])
        except BaseException:
            if handle is not None:
                os.close(handle)
            raise
        return handle

    async def read_into(self, view: memoryview, still_wanted: StillWanted | None = None) -> bool:
        """Fill a buffer with the payload, or a part of it.

        Args:
            view: The buffer.
            still_wanted: Called before each part is written; once it returns False, the rest is read and dropped.

        Returns:
            Whether all of it was written to the buffer.

        Raises:
            Ended: It ends early.
            Silent: It does not come in time.
        """
        async with self._deadline(f"{len(view)} bytes did not come within {self.silence:g} s"):
            left = await self._read_exactly(view, still_wanted)
            if left:
                await self._read_exactly(memoryview(bytearray(left)))
        self.bytes_received += len(view)
        return not left

    async def skip(self, frame: Frame) -> None:
        """Read the payload of a frame and drop it."""
        if frame.payload:
            await self.read_into(memoryview(bytearray(frame.payload)))

    async def _read_exactly(self, view: memoryview, still_wanted: StillWanted | None = None) -> int:
        """Fill a buffer; return how many of its bytes are not wanted any more and are still to be read."""
        count = 0
        while count < len(view):
            if still_wanted is not None and not still_wanted():
                return len(view) - count
            with view[count:] as rest:
                try:
                    got = self._read_some(rest)
                except BlockingIOError:
                    got = -1
                except TlsEnded:
                    got = 0
            if got < 0:
                await self._wait_readable()
                continue
            if not got:
                raise Ended("the other end has closed the connection")
            count += got
        return 0

    def _read_some(self, view: memoryview) -> int:
        """Read what has come; 0: the connection has ended. Raises BlockingIOError if nothing has come."""
        if self._tls is None:
            return self._sock.recv_into(view)
        while not (count := self._tls.decrypt_into(view)):
            taken = self._sock.recv_into(self._cipher)
            if not taken:
                return 0
            self._tls.feed_cipher(self._cipher[:taken])
        return count

    async def _wait_readable(self) -> None:
        await self._wait(self._loop.add_reader, self._loop.remove_reader)

    async def _wait_writable(self) -> None:
        await self._wait(self._loop.add_writer, self._loop.remove_writer)

    async def _wait(self, add: Callable[..., Any], remove: Callable[[int], Any]) -> None:
        handle = self._sock.fileno()
        if handle < 0:
            raise Ended("the connection is closed")
        ready: asyncio.Future[None] = self._loop.create_future()

        def note_ready() -> None:
            if not ready.done():
                ready.set_result(None)

        add(handle, note_ready)
        try:
            await ready
        finally:
            remove(handle)

    @contextlib.asynccontextmanager
    async def _deadline(self, why: str) -> AsyncIterator[None]:
        """Limit the block to the seconds of silence, and raise its errors as errors of transfers."""
        try:
            async with asyncio.timeout(self.silence):
                yield
        except TimeoutError as error:
            raise Silent(why) from error
        except OSError as error:
            raise Ended(f"the connection is closed: {error.strerror}") from error

    async def leave(self, seconds: float) -> None:
        """Close it once the other end has closed it, or these seconds have passed: time to read the last frame.

        A socket that is closed with unread bytes discards what it sent before.
        """
        with contextlib.suppress(OSError, TimeoutError, Ended):
            self._sock.shutdown(socket.SHUT_WR)
            waste = bytearray(1 << 16)
            async with asyncio.timeout(seconds):
                while await self._loop.sock_recv_into(self._sock, waste):
                    pass
        await self.close()

    def interrupt(self) -> None:
        """End every read and write, from any thread; `close` still frees it."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    async def close(self) -> None:
        """Close it once no task reads or sends any more. Idempotent."""
        self.interrupt()
        pinging, self._pinging = self._pinging, None
        try:
            if pinging is not None:  # the descriptor may belong to another socket by now
                pinging.cancel()
                await asyncio.wait([pinging])
        finally:
            self._sock.close()
