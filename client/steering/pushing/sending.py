"""One connection of a push: it carries the bytes as they come and hears what became of them.

A thread sends, another one reads. Over a Unix socket the memory itself goes, and the connection stays
until the replica reads it no more; over TCP chunks go to the first replica of a chain, and if that one
fails, to the next one, which says what it has already.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from rollout_worker.transfer.frames import (
    CHUNK_BYTES,
    PROTOCOL,
    Connection,
    Frame,
    Kind,
    Malformed,
    TransferError,
    dial,
    dial_unix,
)

from .board import Board
from .filling import Filling, GivenUp
from .routes import Receiver, Route

DIAL_SECONDS = 5.0
WAIT_SECONDS = 1.0
"""How long a sender waits for bytes before it looks whether its connection still stands."""

FOLLOW_BYTES = 16 << 20
"""How many bytes more a receiver of shared memory is told of at once."""


class Sender:
    """See the module; a thread from `start` on.

    Args:
        route: Where to.
        filling: What.
        board: Told what comes of each replica.
    """

    def __init__(self, route: Route, filling: Filling, board: Board) -> None:
        self._route, self._filling, self._board = route, filling, board
        self._connection: Connection | None = None
        self._stopped = threading.Event()
        self._skipped: dict[str, str] = {}
        """Hops of which the one before says that they failed, and why: each is tried from here."""
        names = ",".join(each.name for each in route.receivers)
        self._thread = threading.Thread(target=self._run, name=f"weights-to-{names}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End it, whatever has been sent; replicas that have the bytes keep them."""
        self._stopped.set()
        connection = self._connection
        if connection is not None:
            connection.interrupt()

    def join(self, seconds: float) -> bool:
        """Whether it has ended, and freed all, within these seconds."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        rest = list(self._route.receivers)
        while rest and not self._stopped.is_set():
            first, why = rest[0], self._carry(rest)
            if not self._board.settled(first.name):
                # It answers for the connection; the others say what they have already.
                self._board.failed(first.name, self._skipped.get(first.name, why))
            rest = [each for each in rest if not self._board.settled(each.name)]

    def _carry(self, chain: Sequence[Receiver]) -> str:
        """Carry all of it to the first of a chain; return what went wrong for who has not settled."""
        release = self._filling.slot.lend()
        try:
            connection = self._dial(chain[0])
            try:
                self._talk(connection, chain)
            finally:
                connection.close()
        except GivenUp:
            return "the publish was given up"
        except TransferError as error:
            return str(error)
        finally:
            release()
        return "it ended the connection without a word"

    def _dial(self, first: Receiver) -> Connection:
        where = first.transfer
        if self._route.kind == "shm":
            assert where.socket is not None
            made = dial_unix(where.socket, DIAL_SECONDS)
        else:
            assert where.port is not None
            made = dial(first.host, where.port, DIAL_SECONDS)
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
        hello = {"protocol": PROTOCOL, "ticket": chain[0].transfer.ticket, "name": chain[0].name}
        layout = self._filling.layout.to_json()
        connection.send(Kind.HELLO, {**hello, "layout": layout, "hops": hops})
        have = _ranges(connection.expect(Kind.READY), self._filling.layout.nbytes)
        reader = _Reader(connection, chain, self._filling, self._board, self._skipped)
        reader.start()
        try:
            if self._route.kind == "shm":
                self._share(connection, reader)
            else:
                self._stream(connection, reader, have)
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

    def _share(self, connection: Connection, reader: _Reader) -> None:
        """Hand over the memory, and say how far it is filled."""
        filling = self._filling
        slot, total = filling.slot, filling.layout.nbytes
        connection.send(Kind.MEMORY, {"size": slot.size}, handle=slot.handle)
        told = 0
        while told < total and reader.alive:
            upto = filling.wait_upto(min(told + FOLLOW_BYTES, total), WAIT_SECONDS)
            if upto > told:
                connection.send(Kind.FILLED, {"upto": upto})
                told = upto

    def _stream(
        self, connection: Connection, reader: _Reader, have: Sequence[tuple[int, int]]
    ) -> None:
        """Send every chunk that is not there already."""
        total = self._filling.layout.nbytes
        for begin in range(0, total, CHUNK_BYTES):
            end = min(begin + CHUNK_BYTES, total)
            if any(first <= begin and end <= last for first, last in have):
                continue
            while self._filling.wait_upto(end, WAIT_SECONDS) < end:
                if not reader.alive:
                    return
            send_chunk(connection, self._filling, begin)

    def _end(self, connection: Connection, reader: _Reader) -> None:
        root_hash = None
        while root_hash is None and reader.alive:
            root_hash = self._filling.wait_end(WAIT_SECONDS)
        if root_hash is not None:
            end = {"root_hash": root_hash, "digests": dict(self._filling.digests)}
            connection.send(Kind.END, end)


class _Reader:
    """Hears what the other end says, in a thread, until there is nothing more to hear."""

    def __init__(
        self,
        connection: Connection,
        chain: Sequence[Receiver],
        filling: Filling,
        board: Board,
        skipped: dict[str, str],
    ) -> None:
        self.why: TransferError | None = None
        """What ended it too early; None: nothing did."""
        self._connection, self._filling, self._board = connection, filling, board
        self._names = {each.name for each in chain}
        self._first = chain[0].name
        self._skipped, self._over = skipped, set[str]()
        self._twice: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="weights-hear", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def join(self, seconds: float | None) -> None:
        """Wait for its end: of a silent connection it comes after the lease."""
        self._thread.join(seconds)

    @property
    def alive(self) -> bool:
        """Whether the connection stands."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._hear(self._connection.receive()):
                pass
        except TransferError as error:
            if self._open:
                self.why = error
        finally:
            self._connection.interrupt()

    def _hear(self, frame: Frame) -> bool:
        """Take note of a frame; whether more may come."""
        self._connection.skip(frame)
        name = frame.text("name", self._first)
        if name not in self._names:
            raise Malformed(f"{frame.kind.name} is about {name!r}, which is not in this chain")
        match frame.kind:
            case Kind.PROGRESS:
                self._board.progress(name, frame.integer("bytes_done"))
            case Kind.STAGED:
                self._board.staged(name, frame.text("root_hash"))
            case Kind.FAILED if name != self._first:
                self._skipped[name] = frame.text("detail", "it gave no reason")
                self._over.add(name)
            case Kind.FAILED:
                self._board.failed(name, frame.text("detail", "it gave no reason"))
            case Kind.ERROR if frame.text("slug", "") == "bad-chunk":
                self._again(frame.integer("offset"))
            case Kind.ERROR:
                raise TransferError(frame.text("detail", "it gave no reason"))
            case Kind.RELEASED:
                return False
            case _:
                raise Malformed(f"{frame.kind.name} came, which only senders send")
        return self._connection.unix or self._open

    @property
    def _open(self) -> bool:
        """Whether there is anybody of whom this connection has not told the end."""
        return any(not self._board.settled(name) for name in self._names - self._over)

    def _again(self, offset: int) -> None:
        """Send a chunk once more that arrived in another state; twice is no accident."""
        layout = self._filling.layout
        if offset % CHUNK_BYTES or offset >= layout.nbytes or offset in self._twice:
            raise TransferError(f"the chunk at {offset} arrived damaged, twice: check the network")
        self._twice.add(offset)
        send_chunk(self._connection, self._filling, offset)


def send_chunk(connection: Connection, filling: Filling, begin: int) -> None:
    """Send the chunk that begins there."""
    import xxhash

    view = filling.slot.bytes(begin, min(begin + CHUNK_BYTES, filling.layout.nbytes))
    digest = xxhash.xxh3_128_hexdigest(view)
    connection.send(Kind.DATA, {"offset": begin, "hash": digest}, view)


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
