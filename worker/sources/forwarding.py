"""Passing on what arrives: the next hop of a chain gets each chunk as soon as it is verified here.

A hop that fails or is silent is reported and skipped: the one after it is asked what it has, and gets
the rest. Runs in a thread beside the connection that brings the bytes, and tells through that one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import dataclass
from typing import Any

import xxhash

from rollout_common.transfer.connection import Connection
from rollout_common.transfer.frames import (
    CHUNK_BYTES,
    Frame,
    Kind,
    Malformed,
    Refused,
    Slow,
    TransferError,
)
from rollout_common.transfer.layout import PushLayout

from .basis import Delta
from .incoming import LOOK_SECONDS, Incoming
from .outward import Outward
from .pushed_memory import Memory, TransferFailed

logger = logging.getLogger(__name__)

MAX_HOPS = 256
STOP_SECONDS = 10.0
"""What a thread that is told to stop gets: longer than a dial."""
FAREWELL_SECONDS = 120.0
"""What a hop that has everything gets to hash and seal it; it pings meanwhile."""


@dataclass(frozen=True, slots=True)
class Hop:
    """A worker further down the chain."""

    host: str
    port: int
    ticket: str
    name: str

    def head(self) -> dict[str, Any]:
        """As `LAYOUT` names it."""
        return {"host": self.host, "port": self.port, "ticket": self.ticket, "name": self.name}


def hops_of(given: object) -> list[Hop]:
    """Return the hops that `LAYOUT` names.

    Raises:
        Malformed: They are none.
    """
    if not isinstance(given, list) or len(given) > MAX_HOPS:
        raise Malformed(f"LAYOUT.hops must be a list of at most {MAX_HOPS}")
    found = []
    for each in given:
        if not isinstance(each, dict):
            raise Malformed("a hop must be an object")
        frame = Frame(Kind.LAYOUT, each)
        host, port = frame.text("host", most=253), frame.integer("port", 1, 65535)
        name = frame.text("name", f"{host}:{port}")
        found.append(Hop(host, port, frame.text("ticket", most=64), name))
    return found


class Forwarding:
    """See the module.

    Args:
        incoming: What arrives.
        layout: Of it.
        memory: Where it is.
        hops: The chain behind this worker.
        upstream: Who is told what becomes of them.
        outward: How they are reached.
    """

    def __init__(
        self,
        incoming: Incoming,
        layout: PushLayout,
        memory: Memory,
        hops: list[Hop],
        upstream: Connection,
        outward: Outward,
    ) -> None:
        self._incoming, self._layout, self._memory = incoming, layout, memory
        self._hops, self._upstream, self._outward = hops, upstream, outward
        self._release = memory.hold()
        self._settled: set[str] = set()
        self._stopped = False
        self._connection: Connection | None = None
        self.ended = threading.Event()
        """Set once there is nothing more to pass on, or nobody to pass it to."""

    def start(self) -> None:
        """Begin, in a thread."""
        threading.Thread(target=self._run, name="weights-forward", daemon=True).start()

    def stop(self) -> None:
        """Pass nothing on any more; returns once that is so."""
        self._stopped = True
        connection = self._connection
        if connection is not None:
            connection.interrupt()
        self.ended.wait(STOP_SECONDS)

    def _run(self) -> None:
        try:
            for at, hop in enumerate(self._hops):
                if hop.name not in self._settled and not self._stopped:
                    self._try(hop, self._hops[at + 1 :])
        except TransferError as error:
            logger.info("passing weights on has ended: %s", error)
        finally:
            self._release()
            self.ended.set()

    def _try(self, hop: Hop, rest: list[Hop]) -> None:
        """Bring everything to a hop; if that fails, say so.

        Raises:
            TransferError: Nobody listens to what becomes of it any more.
        """
        try:
            self._feed(hop, rest)
            why = "it closed the connection without reporting what became of the weights"
        except (Refused, Slow) as error:
            why = str(error)
        except (TransferError, TransferFailed) as error:
            why = f"it can't be reached from the hop before: {error}"
        if hop.name not in self._settled:
            logger.warning("skipping hop %s: %s", hop.name, why)
            self._tell(Kind.FAILED, {"name": hop.name, "detail": why})

    def _tell(self, kind: Kind, head: dict[str, Any]) -> None:
        if kind is not Kind.PROGRESS:
            self._settled.add(str(head["name"]))
        self._upstream.send(kind, head)

    def _feed(self, hop: Hop, rest: list[Hop]) -> None:
        connection = self._outward.dial(hop.host, hop.port)
        self._connection = connection
        try:
            if self._stopped:
                return
            connection.keep_alive()
            base = self._incoming.basis
            connection.introduce(
                hop.ticket,
                {
                    **({} if base is None else {"base": base.named.model_dump()}),
                    "name": hop.name,
                    "layout": self._layout.to_json(),
                    "hops": [each.head() for each in rest],
                },
            )
            ready = connection.expect(Kind.READY)
            names = {hop.name, *(each.name for each in rest)}
            listening = _Listening(self, connection, names)
            listening.start()
            try:
                self._send(connection, ready, listening, others=bool(rest))
                listening.join(FAREWELL_SECONDS)
            finally:
                connection.interrupt()
                listening.join(None)
        finally:
            connection.close()
        if listening.why is not None:
            raise listening.why

    def _send(
        self, connection: Connection, ready: Frame, listening: _Listening, *, others: bool
    ) -> None:
        have, total = ready.head.get("have", []), self._layout.nbytes
        spans = [(begin, end) for begin, end in have] if isinstance(have, list) else []
        sent = 0
        for begin in range(0, total, CHUNK_BYTES):
            end = min(begin + CHUNK_BYTES, total)
            if begin < sent or any(first <= begin and end <= last for first, last in spans):
                continue
            if not self._follow(lambda end=end: self._incoming.upto >= end, listening):
                return
            delta = self._incoming.deltas.get(begin)
            if delta is None or any(
                first < begin + delta.nbytes and begin < last for first, last in spans
            ):
                self.send_chunk(connection, begin, others=others)
            else:
                self.send_delta(connection, begin, delta, others=others)
                sent = begin + delta.nbytes
        if self._follow(lambda: self._incoming.end is not None, listening):
            end_ = self._incoming.end
            assert end_ is not None
            connection.send(Kind.END, {"root_hash": end_.root_hash, "digests": dict(end_.digests)})

    def _follow(self, until: Any, listening: _Listening) -> bool:
        """Wait for what arrives; whether it did, and the hop is still there.

        Raises:
            TransferFailed: It will not arrive.
        """
        while listening.alive and not self._stopped:
            if until():
                return True
            if not self._incoming.wait(until, LOOK_SECONDS) and self._incoming.failure is not None:
                raise TransferFailed(self._incoming.failure)
        return False

    def send_chunk(self, connection: Connection, begin: int, *, others: bool = False) -> None:
        """Send the chunk that begins there; `other_holders`: who wait behind it."""
        with self._memory.bytes(begin, min(begin + CHUNK_BYTES, self._layout.nbytes)) as view:
            self._outward.wait_for(connection, len(view))
            # As it was verified here: what changes in this memory, the next hop finds.
            known = self._incoming.hashes.get(begin // CHUNK_BYTES)
            digest = known or xxhash.xxh3_128_hexdigest(view)
            send = connection.hurry if others else connection.send
            send(Kind.DATA, {"offset": begin, "hash": digest}, view)

    def send_delta(
        self, connection: Connection, begin: int, delta: Delta, *, others: bool = False
    ) -> None:
        """Send what differs in the run that begins there, as it came."""
        self._outward.wait_for(connection, len(delta.content))
        digest = xxhash.xxh3_128_hexdigest(delta.content)
        head = {"offset": begin, "bytes": delta.nbytes, "hash": digest}
        send = connection.hurry if others else connection.send
        send(Kind.DELTA, head, memoryview(delta.content))

    def hear(self, connection: Connection, frame: Frame, names: set[str]) -> bool:
        """Pass on what a hop says; whether more may come."""
        connection.skip(frame)
        if frame.kind is Kind.ERROR and frame.text("slug", "") == "bad-chunk":
            offset = frame.integer("offset", 0, max(self._layout.nbytes - 1, 0))
            delta = self._incoming.deltas.get(offset) if frame.head.get("delta") else None
            if delta is None:
                self.send_chunk(connection, offset - offset % CHUNK_BYTES)
            else:
                self.send_delta(connection, offset, delta)
            return True
        if frame.kind is Kind.ERROR:
            raise Refused(frame.head)
        if frame.kind not in (Kind.PROGRESS, Kind.STAGED, Kind.FAILED):
            raise Malformed(f"{frame.kind.name} came from a hop")
        if frame.text("name") in names:
            self._tell(frame.kind, dict(frame.head))
        return bool(names - self._settled)


class _Listening:
    """Hears what a hop says, in a thread."""

    def __init__(self, forwarding: Forwarding, connection: Connection, names: set[str]) -> None:
        self.why: TransferError | None = None
        self._forwarding, self._connection, self._names = forwarding, connection, names
        self._thread = threading.Thread(target=self._run, name="weights-hear", daemon=True)
        self.start, self.join = self._thread.start, self._thread.join

    @property
    def alive(self) -> bool:
        """Whether the hop still talks."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._forwarding.hear(self._connection, self._connection.receive(), self._names):
                pass
        except TransferError as error:
            self.why = error
        finally:
            with contextlib.suppress(OSError):
                self._connection.interrupt()
