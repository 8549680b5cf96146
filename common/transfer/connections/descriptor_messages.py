"""Small messages over a Unix socket that keeps their bounds, with descriptors.

By them a trainer lends device memory, and a process asks the one that runs NIXL for it.
A message is a JSON object; the socket is of the kind `SOCK_SEQPACKET`, so each arrives whole or not at all, and the death
of one end shows at the other at once.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .frame_sockets import connect_unix, receive_descriptors
from .frames import Ended, Malformed, Silent, TransferError

LENDING_PROTOCOL = 1
"""Version of what trainer and worker say to each other."""

SOCKET_PREFIX = ".lend-"
"""Beginning of the names of the workers' sockets in the lock directory."""

MESSAGE_BYTES = 192 << 10
"""Longest message: below the send buffer that Linux gives a socket by default (208 KiB)."""

MAX_REASON = 2000
"""Most characters of an error that the other end is told: messages have a bound."""

MAX_DESCRIPTORS = 250
"""Most descriptors of a message; Linux takes 253."""


def make_socket() -> socket.socket:
    """Return a new socket for messages."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def dial_messages(path: Path | str, seconds: float) -> socket.socket:
    """Return a socket that is connected to a listener; each of its calls takes at most these seconds.

    Raises:
        Ended: Nobody listens there.
    """
    try:
        sock = connect_unix(str(path), seconds, socket.SOCK_SEQPACKET)
    except OSError as failure:
        raise Ended(f"nobody listens at {path} ({failure.strerror or failure})") from failure
    sock.settimeout(seconds)
    return sock


def send_message(sock: socket.socket, head: Mapping[str, Any], handles: Sequence[int] = ()) -> None:
    """Send a message, and copies of descriptors.

    Raises:
        Ended: The other end is gone.
        Silent: It does not read.
        ValueError: The message is too long.
    """
    text = json.dumps(head, separators=(",", ":")).encode()
    if len(text) > MESSAGE_BYTES or len(handles) > MAX_DESCRIPTORS:
        raise ValueError(f"{len(text)} bytes and {len(handles)} descriptors are too much to send")
    along = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", handles))] if handles else []
    try:
        sock.sendmsg([text], along, socket.MSG_NOSIGNAL)
    except (TimeoutError, BlockingIOError) as error:
        raise Silent("the other end of the connection does not read") from error
    except OSError as error:
        raise Ended(f"the connection is closed: {error.strerror or error}") from error


def receive_message(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the next message and its descriptors, which the caller closes.

    Raises:
        Ended: The other end is gone.
        Silent: None came within the socket's time-out; at once, if it does not block.
        Malformed: It is not a JSON object, or too long.
    """
    try:
        text, found, flags = receive_descriptors(sock, MESSAGE_BYTES, MAX_DESCRIPTORS)
    except (TimeoutError, BlockingIOError) as error:
        raise Silent("no message came in time") from error
    except OSError as error:
        raise Ended(f"the connection is closed: {error.strerror or error}") from error
    try:
        if not text:
            raise Ended("the other end has closed the connection")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise Malformed("a message is too long")
        return _read_object(text), found
    except TransferError:
        close_descriptors(found)
        raise


def _read_object(text: bytes) -> dict[str, Any]:
    try:
        head = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed("a message is not JSON") from error
    if not isinstance(head, dict):
        raise Malformed("a message is no JSON object")
    return head


def close_descriptors(handles: Sequence[int]) -> None:
    """Close descriptors that nobody needs."""
    for handle in handles:
        with contextlib.suppress(OSError):
            os.close(handle)
