"""One connection of a push: it carries the bytes as they come; whole, for each way out falls back to the next.

A thread sends, another one reads (`hearing`). Over a Unix socket the memory itself goes, and the connection stays
until the replica reads it no more; over TCP chunks go to the first replica of a chain, and if that one
fails, to the next one, which says what it has already.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_common.transfer.arena import ArenaError
from rollout_common.transfer.connection import Connection
from rollout_common.transfer.delta import SPAN_BYTES
from rollout_common.transfer.dialing import dial, dial_unix
from rollout_common.transfer.frames import (
    CHUNK_BYTES,
    HOP_SECONDS,
    LEASE_SECONDS,
    Ended,
    Frame,
    Kind,
    Malformed,
    Silent,
    TransferError,
)
from rollout_common.transfer.pace import Pace
from rollout_common.transfer.tls import Trust

from .board import Board
from .deltas import Deltas
from .hearing import Reader
from .routes import Receiver, Route
from .stream_filling import Filling, GivenUp

DIAL_SECONDS = 5.0
WAIT_SECONDS = 1.0
"""How long a sender waits for bytes before it looks whether its connection still stands."""

FOLLOW_BYTES = 8 << 20
"""How many bytes more a receiver of shared memory is told of at once."""


@dataclass(frozen=True, slots=True)
class Link:
    """How bytes go out over TCP.

    Attributes:
        trust: Whom TLS trusts, where a replica's port takes TLS alone.
        pace: Which all connections share; None: as fast as they go.
    """

    trust: Trust | None = None
    pace: Pace | None = None


class Sender:
    """See the module; a thread from `start` on.

    Args:
        route: Where to.
        filling: What.
        board: Told what comes of each replica.
        link: How TCP goes out of here.
        deltas: What differs from what they all serve; None: all bytes go.
        why: What went wrong on another way; it is told if this one fails, too.
    """

    def __init__(
        self,
        route: Route,
        filling: Filling,
        board: Board,
        link: Link,
        deltas: Deltas | None = None,
        why: str = "",
    ) -> None:
        self._route, self._filling, self._board = route, filling, board
        self._link, self._deltas, self._why = link, deltas, why
        self._sent = 0
        self._connection: Connection | None = None
        self._made_at = time.monotonic()
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._beside: dict[str, Sender] = {}
        """Who failed or was late as a part of the chain: each is tried by itself, and nobody waits for it."""
        self._release: Callable[[], None] | None = None
        self._given = False
        """Whether a replica may have this process's memory."""
        self.given_back = False
        """Whether it has said that nothing reads that memory any more: nothing else means so."""
        names = ",".join(each.name for each in route.receivers)
        self._thread = threading.Thread(target=self._run, name=f"weights-to-{names}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._release = self._filling.slot.lend()
        self._thread.start()

    def stop(self) -> None:
        """End it, whatever has been sent; replicas that have the bytes keep them."""
        with self._lock:
            self._stopped.set()
            beside = list(self._beside.values())
        for each in beside:
            each.stop()
        connection = self._connection
        if connection is not None:
            connection.interrupt()

    def stands(self, name: str) -> bool:
        """Whether it carries the bytes to this replica, and the other end has said so a moment ago."""
        if (beside := self._beside.get(name)) is not None:
            return beside.stands(name)
        connection = self._connection
        heard = self._made_at if connection is None else connection.tally.heard
        mine = any(each.name == name for each in self._route.receivers)
        return mine and time.monotonic() - heard < HOP_SECONDS

    @property
    def sent(self) -> int:
        """Bytes of tensors, or of what differs, that went out on connections that have ended."""
        return self._sent + sum(each.sent for each in list(self._beside.values()))

    def join(self, seconds: float) -> bool:
        """Whether it has ended, and freed all, within these seconds."""
        until = time.monotonic() + seconds
        self._thread.join(seconds)
        return not self._thread.is_alive() and all(
            each.join(max(0.0, until - time.monotonic())) for each in list(self._beside.values())
        )

    def _run(self) -> None:
        assert self._release is not None
        try:
            rest = list(self._route.receivers)
            while rest and not self._stopped.is_set():
                first, why = rest[0], self._carry(rest)
                if not self._board.settled(first.name) and first.name not in self._beside:
                    # It answers for the connection; the others say what they have already.
                    self._board.failed(first.name, self._why or why)
                rest = [each for each in rest if not self._done(each.name)]
        finally:
            if self._given and not self.given_back:
                # Silent, gone or refused: perhaps it serves from these pages all the same.
                self._filling.slot.doubt(self._route.receivers[0].name)
            self._release()

    def _done(self, name: str) -> bool:
        return self._board.settled(name) or name in self._beside

    def aside(self, late: Receiver, why: str) -> None:
        """Try a part of the chain by itself, once more and with all patience, while the others go on."""
        with self._lock:
            if self._stopped.is_set() or late.name in self._beside:
                return
            alone = Route(self._route.kind, (late,))
            made = Sender(alone, self._filling, self._board, self._link, self._deltas, why)
            self._beside[late.name] = made
            made.start()

    def _carry(self, chain: Sequence[Receiver]) -> str:
        """Carry all of it to the first of a chain; return what went wrong for who has not settled."""
        met = False
        try:
            connection = self._dial(chain[0], HOP_SECONDS if len(chain) > 1 else LEASE_SECONDS)
            met = True
            try:
                self._talk(connection, chain)
            finally:
                connection.close()
                self._sent += connection.tally.sent
        except GivenUp:
            return "the publish was given up"
        except Silent as error:
            if len(chain) > 1:
                self.aside(chain[0], str(error))
            return str(error)
        except Ended as error:
            # Perhaps the connection alone: for a while the replica keeps what came, for the same ticket.
            if met and self._route.kind == "tcp" and not self._why:
                self.aside(chain[0], str(error))
            return str(error)
        except TransferError as error:
            return str(error)
        return "it closed the connection without an answer"

    def _dial(self, first: Receiver, silence: float) -> Connection:
        where = first.transfer
        if self._route.kind == "shm":
            assert where.socket is not None
            made = dial_unix(where.socket, DIAL_SECONDS, silence=LEASE_SECONDS)
        else:
            assert where.port is not None
            trust = self._link.trust if where.tls else None
            made = dial(first.host, where.port, DIAL_SECONDS, silence=silence, trust=trust)
        self._connection = made
        if self._stopped.is_set():
            made.interrupt()
        return made

    def _talk(self, connection: Connection, chain: Sequence[Receiver]) -> None:
        connection.keep_alive()
        hops = [
            {
                "host": each.host,
                "port": each.transfer.port,
                "ticket": each.transfer.ticket,
                "name": each.name,
            }
            for each in chain[1:]
        ]
        about: dict[str, Any] = {"name": chain[0].name, "hops": hops}
        if self._deltas is not None:
            about["base"] = self._deltas.base
        about["layout"] = self._filling.layout.to_json()
        connection.introduce(chain[0].transfer.ticket, about)
        have = _ranges(connection.expect(Kind.READY), self._filling.layout.nbytes)
        reader = Reader(connection, chain, self._filling, self._board, self)
        reader.start()
        try:
            if self._route.kind == "shm":
                self._share(connection, reader)
            else:
                self._stream(connection, reader, have, others=len(chain) > 1)
            self._end(connection, reader)
        except TransferError:
            # The other end says why before it closes: that is worth more than "closed".
            reader.join(WAIT_SECONDS)
            if reader.why is None:
                raise
        except BaseException:
            connection.interrupt()
            reader.join(WAIT_SECONDS)
            raise
        reader.join(None)
        if reader.why is not None:
            raise reader.why

    def _share(self, connection: Connection, reader: Reader) -> None:
        """Hand over the memory, and say how far it is filled."""
        filling = self._filling
        slot, total = filling.slot, filling.layout.nbytes
        try:
            handle = slot.open_reader()
        except ArenaError as error:  # the pool was closed
            raise TransferError(str(error)) from error
        self._given = True
        try:
            connection.send(Kind.MEMORY, {"size": slot.size}, handle=handle)
        finally:
            os.close(handle)
        told = 0
        while told < total and reader.alive:
            upto = filling.wait_upto(min(told + FOLLOW_BYTES, total), WAIT_SECONDS)
            if upto > told:
                connection.send(Kind.FILLED, {"upto": upto})
                told = upto

    def _stream(
        self,
        connection: Connection,
        reader: Reader,
        have: Sequence[tuple[int, int]],
        *,
        others: bool,
    ) -> None:
        """Send every chunk that is not there already."""
        total, sent = self._filling.layout.nbytes, 0
        for begin in range(0, total, CHUNK_BYTES):
            end = min(begin + CHUNK_BYTES, total)
            if begin < sent or any(first <= begin and end <= last for first, last in have):
                continue
            if self._differs(connection, reader, have, begin, others=others):
                sent = begin + SPAN_BYTES
                continue
            while self._filling.wait_upto(end, WAIT_SECONDS) < end:
                if not reader.alive:
                    return
            self.send_chunk(connection, begin, others=others)

    def send_chunk(self, connection: Connection, begin: int, *, others: bool = False) -> None:
        """Send the chunk that begins there; `other_holders`: who wait behind that replica."""
        import xxhash

        total = self._filling.layout.nbytes
        try:
            view = self._filling.slot.bytes(begin, min(begin + CHUNK_BYTES, total))
        except ArenaError as error:  # the pool was closed
            raise TransferError(str(error)) from error
        connection.wait_for(self._link.pace, len(view))
        digest = xxhash.xxh3_128_hexdigest(view)
        send = connection.hurry if others else connection.send
        send(Kind.DATA, {"offset": begin, "hash": digest}, view)

    def _differs(
        self,
        connection: Connection,
        reader: Reader,
        have: Sequence[tuple[int, int]],
        begin: int,
        *,
        others: bool,
    ) -> bool:
        """Whether what differs in the span that begins there was enough, and was sent."""
        deltas, end = self._deltas, begin + SPAN_BYTES
        # What is there in part is filled up with whole bytes.
        if deltas is None or begin % SPAN_BYTES or any(f < end and begin < to for f, to in have):
            return False
        while not deltas.ready(begin, WAIT_SECONDS):
            if not reader.alive:
                return False
        content = deltas.of(begin)
        if content is not None:
            self._send_delta(connection, begin, content, others=others)
        return content is not None

    def _send_delta(
        self, connection: Connection, begin: int, content: bytes, *, others: bool = False
    ) -> None:
        """Send what differs in the span that begins there."""
        import xxhash

        size = min(SPAN_BYTES, self._filling.layout.nbytes - begin)
        connection.wait_for(self._link.pace, len(content))
        digest = xxhash.xxh3_128_hexdigest(content)
        send = connection.hurry if others else connection.send
        send(Kind.DELTA, {"offset": begin, "bytes": size, "hash": digest}, memoryview(content))

    def send_again(self, connection: Connection, begin: int, *, delta: bool) -> None:
        """Send what arrived damaged: a chunk, or what differs in a span."""
        content = self._deltas.of(begin) if delta and self._deltas is not None else None
        if content is None:
            self.send_chunk(connection, begin)
        else:
            self._send_delta(connection, begin, content)

    def _end(self, connection: Connection, reader: Reader) -> None:
        root_hash = None
        while root_hash is None and reader.alive:
            root_hash = self._filling.wait_end(WAIT_SECONDS)
        if root_hash is not None:
            end = {"root_hash": root_hash, "digests": dict(self._filling.digests)}
            connection.send(Kind.END, end)


def _ranges(ready: Frame, total: int) -> list[tuple[int, int]]:
    """Return what the receiver has already.

    Raises:
        Malformed: These are no ranges.
    """
    have = ready.head.get("have", [])
    try:
        found = [(int(begin), int(end)) for begin, end in have]
    except (TypeError, ValueError):
        raise Malformed("READY.have must be pairs of offsets") from None
    if any(not 0 <= begin <= end <= total for begin, end in found):
        raise Malformed("READY.have lies outside of the layout")
    return found
