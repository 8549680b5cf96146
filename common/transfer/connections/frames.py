"""Frames of the connections that carry weights: trainer to worker, worker to worker.

A frame is one byte of kind, the length of a JSON object in four bytes (big-endian), that object (its
head), and as many raw bytes as `head["payload"]` says. Over a Unix socket a frame may bring a
descriptor with it. `frame_stream` carries frames between trainers and workers, `blocking_connection` between the ranks of a
trainer.

    trainer -> worker   HELLO {protocol, ticket}, small, since an unknown caller sends it;
                        LAYOUT {layout, name, base, share, holders, by}
    worker -> trainer   READY {} or ERROR {slug, detail}; PROGRESS {name, bytes_done};
                        STAGED {name, root_hash} or FAILED {name, detail}; over a Unix socket
                        RELEASED {} once it no longer reads the memory
    fetcher -> holder   FETCH {protocol, ticket, name, base}, small, too -> LAYOUT {layout}

Over a Unix socket the trainer then sends MEMORY {size} with the descriptor, FILLED {upto} as bytes become final, and
END. Over TCP the trainer is a holder from then on, as is every worker that got FETCH:

    holder -> fetcher   HAVE {ranges} of pieces as they come, {claimed, share} of those that it has requested from a trainer;
                        END {root_hash, digests} once they are known;
                        PIECE {piece, digests, payload}, or DELTA {piece, digests, hash, payload}
    fetcher -> holder   GET {ranges}

A holder whose memory NIXL may read sends MEMORY {agent, address, size} before HAVE. To GET {ranges, by: "nixl"} it then answers PIECE
without a payload: the bytes are at their place in that memory. A trainer that wants it so says it in LAYOUT.by.

A rank of a trainer that holds a part of the version on another node than rank 0 is one more holder of this kind: it
sends HELLO {protocol, ticket, name}, gets READY, and serves, without LAYOUT and END.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

PROTOCOL = 3
HELLO_BYTES = 1 << 10
"""Longest head of a first frame: its sender has shown no ticket yet."""
CHUNK_BYTES = 1 << 20
"""Most bytes of one `DATA` frame, between the ranks of a trainer."""
MAX_HEAD_BYTES = 64 << 20
MAX_NESTED = 2_100_000
"""Most lists and objects of a head: a layout has two for each tensor, and at most a million tensors."""
MAX_ITEMS = 12_000_000
"""Most commas of a head: each parsed item costs a hundred bytes."""
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
    HAVE = 17
    PIECE = 18
    SERVE = 19


class TransferError(Exception):
    """Base of the errors that end a connection."""


class Ended(TransferError):
    """The other end has closed the connection, or its host has."""


class Silent(TransferError):
    """The other end sent nothing, or took nothing, for longer than the limit."""


class Malformed(TransferError):
    """The other end sent bytes that don't make a frame, or not the expected frame."""


class Untrusted(TransferError):
    """The other end has no TLS where it needs it, or its certificate is not trusted."""


class Refused(TransferError):
    """The other end answered `ERROR`: `slug` names the error, `head` has the rest."""

    def __init__(self, head: Mapping[str, Any]) -> None:
        super().__init__(str(head.get("detail") or head.get("slug") or "it gave no reason"))
        self.slug = str(head.get("slug") or "")
        self.head = head


@dataclass(frozen=True, slots=True)
class Frame:
    """A received frame: `payload` bytes are still to be read (`Connection.read_into`, `skip`).

    `handle`: the descriptor that came with it; the receiver closes it.
    """

    kind: Kind
    head: Mapping[str, Any]
    payload: int = 0
    handle: int | None = None

    def integer(self, name: str, least: int = 0, most: int = (1 << 63) - 1) -> int:
        """Return a number of the head.

        Raises:
            Malformed: it is missing, not a number, or out of bounds.
        """
        value = self.head.get(name)
        if type(value) is not int or not least <= value <= most:
            raise Malformed(f"{self.kind.name}.{name} must be a number from {least} to {most}")
        return value

    def text(self, name: str, default: str | None = None, most: int = 4096) -> str:
        """Return a text of the head, or the default if it has none.

        Raises:
            Malformed: it is missing, not a text, or too long.
        """
        value = self.head.get(name, default)
        if not isinstance(value, str) or len(value) > most:
            raise Malformed(f"{self.kind.name}.{name} must be a text of at most {most} characters")
        return value


def fetch_ticket(ticket: str) -> str:
    """Return the ticket with which other workers fetch what this ticket brings; it doesn't admit a sender."""
    return _derived_ticket(ticket, b"fetch")


def origin_ticket(ticket: str) -> str:
    """Return the ticket with which ranks of other nodes serve their parts of what this ticket brings."""
    return _derived_ticket(ticket, b"origin")


def _derived_ticket(ticket: str, use: bytes) -> str:
    return hmac.new(ticket.encode(), use, hashlib.sha256).hexdigest()[:32]


FIRST_BYTES = 5
"""Size of the first bytes of a frame: its kind and the length of its head."""

_FIRST = struct.Struct(">BI")


def encode_frame(kind: Kind, head: Mapping[str, Any], payload: int) -> bytes:
    """Return a frame without its payload.

    Raises:
        ValueError: The head is too long.
    """
    if payload:
        head = {**head, "payload": payload}
    text = json.dumps(head, separators=(",", ":")).encode()
    if len(text) > MAX_HEAD_BYTES or payload > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a {kind.name} of {len(text)} + {payload} bytes is above the bounds")
    return _FIRST.pack(kind, len(text)) + text


def decode_first(first: bytes | bytearray, most: int) -> tuple[Kind, int]:
    """Return the kind of a frame and the length of its head, from its first bytes.

    Raises:
        Malformed: The kind does not exist, or the head is longer than `most`.
    """
    number, length = _FIRST.unpack(first)
    if number not in Kind.__members__.values():
        raise Malformed(f"no frame of kind {number} exists")
    kind = Kind(number)
    if length > most:
        raise Malformed(f"{kind.name} has a head of {length} bytes: {most} are the most")
    return kind, length


def decode_head(kind: Kind, text: bytes | bytearray) -> Mapping[str, Any]:
    """Return the head of a frame.

    Raises:
        Malformed: It is not a JSON object, or has more parts than any layout.
    """
    if text.count(b"[") + text.count(b"{") > MAX_NESTED or text.count(b",") > MAX_ITEMS:
        raise Malformed(f"the head of {kind.name} has more parts than any layout")
    try:
        head = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the head of {kind.name} is not JSON") from error
    if not isinstance(head, dict):
        raise Malformed(f"the head of {kind.name} is no JSON object")
    return head


def check_descriptor(kind: Kind, handle: int | None, *, takes_memory: bool) -> None:
    """Refuse a descriptor that comes with another frame than `MEMORY`, or when none is due.

    Raises:
        Malformed: It is one of these.
    """
    if handle is not None and not (kind is Kind.MEMORY and takes_memory):
        raise Malformed(
            f"{kind.name} came with a descriptor: only MEMORY brings one, when it is due"
        )


def build_frame(kind: Kind, text: bytes | bytearray, handle: int | None) -> Frame:
    """Return the frame whose head has this text, and whose payload is still to be read.

    Raises:
        Malformed: The head or the size of the payload is not valid.
    """
    head = decode_head(kind, text)
    frame = Frame(kind, head, 0, handle)
    size = frame.integer("payload", 0, MAX_PAYLOAD_BYTES) if "payload" in head else 0
    return Frame(kind, head, size, handle)


def check_early_ping(frame: Frame, count: int) -> None:
    """Check the `count`th `PING` of a caller without a ticket, who can have us read `HELLO_BYTES` and no more.

    Raises:
        Malformed: It carries something, or there are too many.
    """
    if frame.head or frame.payload or count * FIRST_BYTES > HELLO_BYTES:
        raise Malformed("pings before HELLO must be empty and few")


def check_kind(frame: Frame, *kinds: Kind) -> Frame:
    """Return this frame, which must be of one of these kinds.

    Raises:
        Refused: It is an `ERROR`.
        Malformed: It is another one.
    """
    if frame.kind in kinds:
        return frame
    if frame.handle is not None:
        os.close(frame.handle)
    if frame.kind is Kind.ERROR:
        raise Refused(frame.head)
    due = " or ".join(kind.name for kind in kinds)
    raise Malformed(f"{frame.kind.name} came where {due} was due")
