"""A socket that carries frames, for an asyncio loop: every wait has a deadline, and a silent end counts as dead.

An end that has nothing to send sends pings, so silence beyond the limit means that it is gone. Payloads are read
directly into their final place. Standard library only, since the client uses it, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from rollout_common.transfer.settings import (
    HOLD_SECONDS,
    LEASE_SECONDS,
    LINGER_SECONDS,
    PING_SECONDS,
)

from .frame_sockets import (
    closed_on_error,
    is_socket_ready,
    lost_packets_hint,
    receive_descriptors,
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
    check_early_ping,
    check_kind,
    decode_first,
    encode_frame,
)
from .payload import THREADED_BYTES, Payload, Step, payload_threads
from .tls_session import READ_BYTES, SPEAKS_NO_TLS, WRITE_BYTES, TlsEnded, TlsFailed, TlsSession

T = TypeVar("T")


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
        """Where encrypted bytes come to."""
        self._pending, self._pending_count = b"", 0
        """Encrypted bytes that are still to be sent, and how many plain ones they are."""
        self.unix = sock.family == socket.AF_UNIX
        self.takes_memory = False
        """Whether `MEMORY` may come now: at any other time its descriptor is refused."""
        self.heard = time.monotonic()
        """When the other end last sent something, on the monotonic clock."""
        self._waited_at = self.heard
        """When it last left the loop to others, on the monotonic clock."""
        self.bytes_sent = 0
        """Bytes of payload."""
        sock.setblocking(False)
        if not self.unix:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def has_unread(self) -> bool:
        """Whether the other end has sent something that this end has not read yet."""
        return is_socket_ready(self._sock, select.POLLIN)

    @property
    def was_ended(self) -> bool:
        """Whether the other end has ended the connection, and hears nothing more."""
        return is_socket_ready(self._sock, select.POLLRDHUP)

    async def peek_byte(self) -> int:
        """Return the first byte that the other end sent, without consuming it.

        Raises:
            TransferError: The other end sent nothing.
        """
        async with self._deadline(f"nothing came for {self.silence:g} s"):
            found = await self._call_ready(
                select.POLLIN, lambda: self._sock.recv(1, socket.MSG_PEEK)
            )
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
        await self._share_loop()
        async with self._sending:
            step: Step = self._encrypt_step
            sent = 0
            if self._tls is None:
                step, sent = self._sock.send, await self._send_begin(first, payload, handle, why)
            for part in first, payload:
                with memoryview(part)[sent:] as rest:
                    await self._move(Payload(rest), step, select.POLLOUT, why)
                sent = max(0, sent - len(part))
        self.bytes_sent += len(payload)

    async def _send_begin(
        self, first: bytes, payload: memoryview | bytes, handle: int | None, why: str
    ) -> int:
        """Send a descriptor with the begin of a frame, or with all of it; return how many bytes went out."""
        parts = [first, payload] if len(payload) < THREADED_BYTES else [first]
        handles = [] if handle is None else [handle]
        send = partial(socket.send_fds, self._sock, parts, handles)
        async with self._deadline(why):
            return await self._call_ready(select.POLLOUT, send)

    def _encrypt_step(self, view: memoryview) -> int:
        """Encrypt some bytes and send them; return how many have gone out. Raises BlockingIOError if none can now."""
        assert self._tls is not None
        if not self._pending:
            with view[:WRITE_BYTES] as part:
                self._pending, self._pending_count = self._tls.encrypt(part), len(part)
        self._pending = self._pending[self._sock.send(self._pending) :]
        return 0 if self._pending else self._pending_count

    async def _move(self, payload: Payload, step: Step, event: int, why: str) -> None:
        """Move a payload, in a thread if it is large; when this returns or raises, its memory is left alone.

        The silence begins again whenever some bytes have moved: a slow link may need longer for all.
        """
        try:
            while payload.is_moving:
                async with self._deadline(why):
                    if payload.size < THREADED_BYTES:
                        blocked = payload.move(step, self._sock, event, 0)
                    else:
                        blocked = await self._loop.run_in_executor(
                            payload_threads(), payload.move, step, self._sock, event, LINGER_SECONDS
                        )
                        self._waited_at = time.monotonic()
                    if blocked:
                        await self._wait_for(event)
        except BaseException:
            payload.revoke()
            raise

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
        pings = 0
        try:
            async with asyncio.timeout(self.silence):
                while (frame := await self._receive(HELLO_BYTES)).kind is Kind.PING:
                    check_early_ping(frame, pings := pings + 1)
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
        await self._share_loop()
        async with self._deadline(f"nothing came for {self.silence:g} s"):
            first = bytearray(FIRST_BYTES)
            handle = await self._read_first(memoryview(first))
            with closed_on_error(handle):
                kind, length = decode_first(first, most)
                check_descriptor(kind, handle, takes_memory=self.takes_memory)
                text = bytearray(length)
                await self._read_exactly(memoryview(text))
                frame = build_frame(kind, text, handle)
        self.heard = time.monotonic()
        return frame

    async def _read_first(self, view: memoryview) -> int | None:
        """Read the first bytes of a frame; return the descriptor that came with them."""
        if not self.unix:
            await self._read_exactly(view)
            return None
        receive = partial(receive_descriptors, self._sock, len(view), 1)
        begin, handles, _ = await self._call_ready(select.POLLIN, receive)
        handle = handles[0] if handles else None
        with closed_on_error(handle):
            if not begin:
                raise Ended("the other end has closed the connection")
            view[: len(begin)] = begin
            await self._read_exactly(view[len(begin) :])
        return handle

    async def read_into(self, view: memoryview) -> None:
        """Fill a buffer with the payload, or a part of it.

        Raises:
            Ended: It ends early.
            Silent: It does not come in time.
        """
        await self.read_payload(Payload(view))

    async def read_payload(self, payload: Payload) -> bool:
        """Read a payload to its memory; once it was revoked, the rest is read and dropped.

        Returns:
            Whether all of it was written to its memory.

        Raises:
            Ended: It ends early.
            Silent: It does not come in time.
        """
        why = f"nothing came for {self.silence:g} s while {payload.size} bytes were due"
        await self._move(payload, self._read_step, select.POLLIN, why)
        if left := payload.size - payload.count:
            rest = Payload(memoryview(bytearray(left)))
            await self._move(rest, self._read_step, select.POLLIN, why)
        return not left

    async def skip(self, frame: Frame) -> None:
        """Read the payload of a frame and drop it."""
        if frame.payload:
            await self.read_into(memoryview(bytearray(frame.payload)))

    async def _read_exactly(self, view: memoryview) -> None:
        """Fill a buffer, on the loop."""
        count = 0
        while count < len(view):
            with view[count:] as rest:
                count += await self._call_ready(select.POLLIN, partial(self._read_step, rest))

    def _read_step(self, view: memoryview) -> int:
        """Read what has come, at least a byte. Raises BlockingIOError if nothing has come."""
        tls = self._tls
        count = self._sock.recv_into(view) if tls is None else self._read_decrypted(tls, view)
        if not count:
            raise Ended(f"the other end has closed the connection{lost_packets_hint(self._sock)}")
        return count

    def _read_decrypted(self, tls: TlsSession, view: memoryview) -> int:
        with contextlib.suppress(TlsEnded):
            while not (count := tls.decrypt_into(view)):
                if not (taken := self._sock.recv_into(self._cipher)):
                    return 0
                tls.feed_cipher(self._cipher[:taken])
            return count
        return 0

    async def _share_loop(self) -> None:
        """Leave the loop to others if it was long ago: a socket that is always ready would block all other tasks."""
        if time.monotonic() - self._waited_at > HOLD_SECONDS:
            await asyncio.sleep(0)
            self._waited_at = time.monotonic()

    async def _call_ready(self, event: int, call: Callable[[], T]) -> T:
        """Call the socket; as long as the call would block, wait for an event and call again."""
        while True:
            try:
                return call()
            except BlockingIOError:
                await self._wait_for(event)

    async def _wait_for(self, event: int) -> None:
        """Wait until the socket can be read or written: `select.POLLIN` or `select.POLLOUT`."""
        if event == select.POLLIN:
            add, remove = self._loop.add_reader, self._loop.remove_reader
        else:
            add, remove = self._loop.add_writer, self._loop.remove_writer
        handle = self._sock.fileno()
        if handle < 0:
            raise Ended("the connection is closed")
        ready = asyncio.Event()
        add(handle, ready.set)
        try:
            await ready.wait()
        finally:
            remove(handle)
            self._waited_at = time.monotonic()

    @contextlib.asynccontextmanager
    async def _deadline(self, why: str) -> AsyncIterator[None]:
        """Limit the block to the seconds of silence, and raise its errors as errors of transfers."""
        try:
            async with asyncio.timeout(self.silence):
                yield
        except TimeoutError as error:
            raise Silent(why + lost_packets_hint(self._sock)) from error
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

    def detach(self) -> socket.socket:
        """Return the socket, which is the caller's from now on; no byte was read ahead of the last frame."""
        return self._sock

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
