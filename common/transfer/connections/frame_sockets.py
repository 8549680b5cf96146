"""What both kinds of connections do with their sockets: descriptors that come with frames, and callers that wait."""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from rollout_common.transfer.settings import RETRANSMIT_SECONDS, RETRY_SECONDS

_TCP_INFO = struct.Struct("=2xB5x16xI24xI")
"""Of `struct tcp_info`: retransmissions without an answer, packets without one, and milliseconds since data came."""
LEAST_RETRANSMITS = 4
"""So many in a row are three seconds: a busy network drops some packets, not all of them."""
LARGE_PACKETS_LOST = (
    "; small packets pass and large ones are lost: check the MTU of the pods' network"
)


class Caller(Protocol):
    """A connection whose other end has not shown yet what it is."""

    @property
    def has_unread(self) -> bool:
        """Whether the other end has sent something that this end has not read yet."""
        ...


_C = TypeVar("_C", bound=Caller)


def connect_unix(
    address: str | bytes, seconds: float, kind: int = socket.SOCK_STREAM
) -> socket.socket:
    """Connect to a Unix socket; try again while its queue is full, since it refuses at once what it can't queue.

    Raises:
        OSError: No process listens there, or the connection takes too long.
    """
    until = time.monotonic() + seconds
    sock = socket.socket(socket.AF_UNIX, kind)
    try:
        sock.setblocking(False)
        while True:
            try:
                sock.connect(address)
                sock.setblocking(True)
                return sock
            except BlockingIOError:
                if time.monotonic() > until:
                    raise
                time.sleep(RETRY_SECONDS)
    except BaseException:
        sock.close()
        raise


def receive_descriptors(
    sock: socket.socket, size: int, most: int, flags: int = 0
) -> tuple[bytes, list[int], int]:
    """Return bytes, the descriptors that came with them, and the flags of `recvmsg`; a program that starts just then gets none.

    `socket.recv_fds` does not use its flags.
    """
    handles = array.array("i")
    room = socket.CMSG_LEN(most * handles.itemsize)
    content, along, found, _ = sock.recvmsg(size, room, flags | socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in along:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            handles.frombytes(data[: len(data) - len(data) % handles.itemsize])
    return content, list(handles), found


@contextlib.contextmanager
def closed_on_error(handle: int | None) -> Iterator[None]:
    """Close a descriptor that came if the block fails."""
    try:
        yield
    except BaseException:
        if handle is not None:
            os.close(handle)
        raise


def is_socket_ready(sock: socket.socket, event: int, seconds: float = 0) -> bool:
    """Whether an event of `select.poll` is there, or comes within these seconds; False once the socket is closed."""
    waiting = select.poll()
    try:
        waiting.register(sock, event)
    except ValueError:  # it was closed just now
        return False
    return bool(waiting.poll(seconds * 1000))


def lost_packets_hint(sock: socket.socket) -> str:
    """Say so if large packets of this end are lost on a TCP connection whose other end hears and says small ones; else ''."""
    try:
        found = _TCP_INFO.unpack(
            sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        )
    except OSError:  # a Unix socket, or a closed one
        return ""
    retransmits, unacked, heard_ms = found
    if not unacked or retransmits < LEAST_RETRANSMITS:
        return ""
    # What the other end has sent since then came, so that it got our acknowledgements: small packets pass both ways.
    lost_seconds = RETRANSMIT_SECONDS * (2**retransmits - 1)
    return LARGE_PACKETS_LOST if heard_ms / 1000 < lost_seconds / 2 else ""


def first_to_go(callers: Sequence[_C]) -> _C:
    """Return which of these, oldest first, to drop for a new one: the oldest without unread bytes, else the oldest."""
    return next((each for each in callers if not each.has_unread), callers[0])
