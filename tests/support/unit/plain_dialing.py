"""Connections of blocking sockets to the ports of workers and trainers, for tests that script every frame."""

from __future__ import annotations

import json
import socket
import struct

from rollout_common.transfer.connections.blocking_connection import Connection
from rollout_common.transfer.connections.frame_sockets import connect_unix
from rollout_common.transfer.connections.frames import MAX_HEAD_BYTES, Kind
from rollout_common.transfer.settings import LEASE_SECONDS


def dial(host: str, port: int, seconds: float, *, silence: float = LEASE_SECONDS) -> Connection:
    """Connect over TCP, in the clear, within these seconds."""
    return Connection(socket.create_connection((host, port), timeout=seconds), silence=silence)


def dial_unix(path: str, seconds: float, *, silence: float = LEASE_SECONDS) -> Connection:
    """Connect over a Unix socket within these seconds."""
    return Connection(connect_unix(path, seconds), silence=silence)


def raw_frame(kind: int, head: bytes, length: int | None = None) -> bytes:
    """A frame as bytes, whatever it says; `length`: what it says of its head."""
    return struct.pack(">BI", kind, len(head) if length is None else length) + head


NO_FRAMES = [
    (raw_frame(99, b"{}"), "no frame of kind 99"),
    (raw_frame(Kind.HELLO, b"", MAX_HEAD_BYTES + 1), "are the most"),
    (raw_frame(Kind.HELLO, b"{"), "not JSON"),
    (raw_frame(Kind.LAYOUT, b"[" + b"{}," * 300 + b"0]"), "more parts than any layout"),
    (raw_frame(Kind.LAYOUT, b"[" + b"0," * 300 + b"0]"), "more parts than any layout"),
    (raw_frame(Kind.HELLO, b"[" * 200_000), "not JSON"),
    (raw_frame(Kind.HELLO, b"\xff"), "not JSON"),
    (raw_frame(Kind.HELLO, b"[]"), "no JSON object"),
    (raw_frame(Kind.HELLO, b'{"payload": -1}'), "payload must be a number"),
    (raw_frame(Kind.HELLO, b'{"payload": true}'), "payload must be a number"),
    (
        raw_frame(Kind.HELLO, json.dumps({"payload": 1 << 40}).encode()),
        "payload must be a number",
    ),
]
"""What is no frame, and what is said of it where 250 items, and 250 levels, are the most."""
