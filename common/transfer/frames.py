"""Frames of the connections that carry weights: trainer to worker, worker to worker.

A frame is one byte of kind, the length of a JSON object in four bytes (big-endian), that object (its
head), and as many raw bytes as `head["payload"]` says. Over a Unix socket a frame may bring a
descriptor along. `connection` carries them.

    sender -> receiver   HELLO {protocol, ticket}, small, as a stranger sends it; LAYOUT {layout, hops,
                         name, base}; then over a Unix socket MEMORY {size} with the descriptor and
                         FILLED {upto} as bytes become final, over TCP DATA {offset, payload, hash},
                         or with a base DELTA {offset, bytes, payload, hash}; then END {root_hash,
                         digests}
    receiver -> sender   READY {have} or ERROR {slug, detail}; PROGRESS {name, bytes_done};
                         STAGED {name, root_hash} or FAILED {name, detail}; over a Unix socket
                         RELEASED {} once it reads the memory no more
    fetching             FETCH {ticket}, small, too -> LAYOUT {layout, root_hash, digests}; GET {ranges} -> DATA
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

PROTOCOL = 3
HELLO_BYTES = 1 << 10
"""What the head of a first frame may have: whoever sends it has shown no ticket yet."""
CHUNK_BYTES = 1 << 20
"""What `DATA` carries: whole multiples of this begin a chunk, and only the last one is shorter."""
LEASE_SECONDS = 30.0
"""Silence after which the other end counts as dead, and what was begun for it is undone."""
HOP_SECONDS = 5.0
"""Silence after which a hop of a chain is skipped."""
PING_SECONDS = 1.0
"""How often an end that has nothing to say says so: well within `HOP_SECONDS`."""
MAX_HEAD_BYTES = 64 << 20
MAX_NESTED = 2_100_000
"""Lists and objects of a head: a layout has two for each tensor, of which it has a million at most."""
MAX_ITEMS = 12_000_000
"""Commas of a head: parsed, each costs a hundred bytes."""
MAX_PAYLOAD_BYTES = 4 << 20


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
    DELTA = 16


class TransferError(Exception):
    """Base of what ends a connection."""


class Ended(TransferError):
    """The other end has closed the connection, or its host has."""


class Silent(TransferError):
    """The other end said nothing, or took nothing, for longer than it may."""


class Slow(Silent):
    """The other end takes so little that it holds up others."""


class Malformed(TransferError):
    """The other end sent what is no frame, or not the one that is due."""


class Untrusted(TransferError):
    """The other end speaks no TLS where it must, or is not who it should be."""


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
