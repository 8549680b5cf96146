"""What the other end of a push's connection says: heard in a thread, told to the board."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollout_common.transfer.connection import Connection
from rollout_common.transfer.frames import CHUNK_BYTES, Frame, Kind, Malformed, TransferError

from .board import Board
from .routes import Receiver
from .stream_filling import Filling

if TYPE_CHECKING:
    from .sending import Sender


class Reader:
    """Hears what the other end says, in a thread, until there is nothing more to hear."""

    def __init__(
        self,
        connection: Connection,
        chain: Sequence[Receiver],
        filling: Filling,
        board: Board,
        sender: Sender,
    ) -> None:
        self.why: TransferError | None = None
        """What ended it too early; None: nothing did."""
        self._connection, self._filling, self._board = connection, filling, board
        self._sender = sender
        self._names = {each.name: each for each in chain}
        self._first = chain[0].name
        self._over = set[str]()
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
                self._over.add(name)
                self._sender.aside(self._names[name], frame.text("detail", "it gave no reason"))
            case Kind.FAILED:
                self._board.failed(name, frame.text("detail", "it gave no reason"))
            case Kind.ERROR if frame.text("slug", "") == "bad-chunk":
                self._again(frame.integer("offset"), delta=frame.head.get("delta") is True)
            case Kind.ERROR:
                raise TransferError(frame.text("detail", "it gave no reason"))
            case Kind.RELEASED:
                self._sender.given_back = True
                return False
            case _:
                raise Malformed(f"{frame.kind.name} came, which only senders send")
        return self._connection.unix or self._open

    @property
    def _open(self) -> bool:
        """Whether there is anybody of whom this connection has not told the end."""
        return any(not self._board.settled(name) for name in self._names.keys() - self._over)

    def _again(self, offset: int, *, delta: bool) -> None:
        """Send a chunk once more that arrived in another state; twice is no accident."""
        layout = self._filling.layout
        if offset % CHUNK_BYTES or offset >= layout.nbytes or offset in self._twice:
            raise TransferError(f"the chunk at {offset} arrived damaged, twice: check the network")
        self._twice.add(offset)
        self._sender.send_again(self._connection, offset, delta=delta)
