"""Connects to an address and returns a connection that carries frames, by TLS where the other end requires it."""

from __future__ import annotations

import asyncio
import socket

from rollout_common.transfer.settings import LEASE_SECONDS, RETRY_SECONDS

from .frame_stream import FrameStream
from .frames import Ended, TransferError
from .tls_session import TLS_NAME, Trust


async def dial_stream(
    host: str,
    port: int,
    seconds: float,
    *,
    silence: float = LEASE_SECONDS,
    trust: Trust | None = None,
) -> FrameStream:
    """Connect over TCP within these seconds, on the running loop.

    `silence`: seconds after which the other end counts as dead; `trust`: whom TLS trusts; None: plain TCP.

    Raises:
        Ended: No process listens there, or the connection takes too long.
        Untrusted: TLS fails; the text says why.
    """
    try:
        async with asyncio.timeout(seconds):
            sock = await _connect_tcp(host, port)
    except OSError as error:
        why = getattr(error, "strerror", None) or str(error) or "nobody answers"
        raise Ended(f"{host}:{port} can't be reached: {why}") from error
    stream = FrameStream(sock, silence=seconds)
    try:
        if trust is not None:
            await stream.secure(trust.context, TLS_NAME, trust.fix)
    except BaseException as error:
        await stream.close()
        if isinstance(error, TransferError):
            raise type(error)(f"{host}:{port}: {error}") from error
        raise
    stream.silence = silence
    return stream


async def _connect_tcp(host: str, port: int) -> socket.socket:
    """Connect to the first address of a host that answers."""
    loop = asyncio.get_running_loop()
    why: OSError = OSError("the name has no address")
    try:  # without a thread, which a name needs
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, address in found:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, address)
            return sock
        except OSError as error:
            sock.close()
            why = error
        except BaseException:
            sock.close()
            raise
    raise why


async def dial_unix_stream(
    path: str, seconds: float, *, silence: float = LEASE_SECONDS
) -> FrameStream:
    """Connect over a Unix socket, on the running loop.

    Raises:
        Ended: No process listens there, or the connection takes too long.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Not `connect_unix` in a thread: a cancelled call would leave its socket open.
        sock.setblocking(False)
        async with asyncio.timeout(seconds):
            while not _is_connected(sock, path):  # noqa: ASYNC110 - nothing says when there is room
                await asyncio.sleep(RETRY_SECONDS)
    except OSError as error:
        sock.close()
        why = error.strerror or str(error) or "nobody answers"
        raise Ended(f"{path} can't be reached: {why}") from error
    except BaseException:
        sock.close()
        raise
    return FrameStream(sock, silence=silence)


def _is_connected(sock: socket.socket, path: str) -> bool:
    """Connect; return False if the queue of the other end is full now."""
    try:
        sock.connect(path)
    except BlockingIOError:
        return False
    return True
