"""A receiver of pushed weights that does what a test says: what no sound worker would show.

It asks the trainer for its share of the pieces, the other receivers that `LAYOUT` names for all others, and the trainer
for the rest once one of those is gone.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rollout_common.transfer import delta
from rollout_common.transfer.connections.blocking_connection import Connection
from rollout_common.transfer.connections.frames import (
    PROTOCOL,
    Frame,
    Kind,
    Malformed,
    TransferError,
    fetch_ticket,
)
from rollout_common.transfer.connections.node_identity import node_of
from rollout_common.transfer.layout import PushLayout
from rollout_common.wire.root_hash import HashedTensor, hash_leaf, root_hash_of
from tests.support.unit.digests import tensor_digest
from tests.support.unit.plain_dialing import dial

Fault = Callable[["Receiver", Connection, Frame], None]
WAIT_SECONDS = 30.0


class Coming:
    """What of one version is here; any thread may write it, with `news` held.

    Attributes:
        layout: None: not known yet.
        base: [bytes] what deltas are applied to.
        content: [bytes] in the layout's order.
        pieces: By number, in the order in which they came: the digests that came along.
        from_trainer: Those that the trainer sent.
        deltas: Those that came as what differs from the base.
        end: What the trainer, or a receiver, says at the end.
        origin: The trainer's connection.
        announced: The pieces that the trainer has.
        lonely: Whether another receiver is out of reach, so that the trainer has to bring its share, too.
        staged: Whether the trainer was told the outcome.
    """

    def __init__(self) -> None:
        self.news = threading.Condition()
        self.layout: PushLayout | None = None
        self.base = b""
        self.content = bytearray()
        self.pieces: dict[int, str] = {}
        self.from_trainer: list[int] = []
        self.deltas: list[int] = []
        self.end: Mapping[str, Any] | None = None
        self.origin: Connection | None = None
        self.share = (0, 1)
        self.announced: list[int] = []
        self.lonely = False
        self.staged = False

    def wanted(self) -> list[int]:
        """The pieces that the trainer is to be asked for."""
        mine, count = self.share
        pieces = [each for each in self.announced if self.lonely or each % count == mine]
        return [each for each in pieces if each not in self.pieces]

    def is_whole(self) -> bool:
        return (
            self.layout is not None
            and self.end is not None
            and len(self.pieces) == len(self.layout.pieces)
        )


class Receiver:
    """Takes one version after another over TCP and, with a folder, over a Unix socket."""

    def __init__(self, name: str, folder: Path | None = None) -> None:
        self.name, self.ticket = name, "0" * 32
        self.faults: dict[Kind, Fault] = {}
        """By kind of a frame: what is done in place of the right thing; may raise TransferError."""
        self.hellos: list[dict[str, Any]] = []
        self.coming = Coming()
        self.content: dict[str, bytes] = {}
        self.root_hash: str | None = None
        self.on_piece: Callable[[], object] = lambda: None
        """Called once a piece is here."""
        self.release = threading.Event()
        """Set: it gives the memory back at once."""
        self.release.set()
        self.keeps: list[mmap.mmap] = []
        """While it does not give memory back: what it reads."""
        self._staged: dict[str, bytes] = {}
        """By root hash: the bytes of every version that was staged."""
        self._closed = False
        self._connections: list[Connection] = []
        self._tcp = socket.create_server(("127.0.0.1", 0))
        self.port = self._tcp.getsockname()[1]
        self.path = None if folder is None else str(folder / f"{name}.sock")
        self._listeners = [self._tcp]
        if self.path is not None:
            self._listeners.append(socket.socket(socket.AF_UNIX))
            self._listeners[-1].bind(self.path)
            self._listeners[-1].listen()
        for each in self._listeners:
            self._start_thread(self._accept, each)

    def _start_thread(self, work: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=work, args=args, daemon=True).start()

    def transfer(self) -> dict[str, Any]:
        """What the answer to a stage says of it; whatever it had is gone."""
        self.ticket = f"{int(self.ticket) + 1:032}"
        self.coming = Coming()
        node = None if self.path is None else node_of(self.path)
        return {"ticket": self.ticket, "port": self.port, "socket": self.path, "node": node}

    def hang_up(self) -> None:
        """End its connections without another word."""
        for connection in list(self._connections):
            connection.interrupt()

    def close(self) -> None:
        for each in self._listeners:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self.hang_up()
        with self.coming.news:
            self._closed = True
            self.coming.news.notify_all()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._start_thread(self._serve, Connection(listener.accept()[0]))

    @contextlib.contextmanager
    def _alive(self, connection: Connection) -> Iterator[None]:
        """Say that this end is there until the block ends, and close the connection then."""
        self._connections.append(connection)
        connection.start_pinging()
        try:
            yield
        finally:
            connection.stop_pinging()
            connection.close()

    def _serve(self, connection: Connection) -> None:
        with contextlib.suppress(TransferError), self._alive(connection):
            first = connection.expect(Kind.HELLO, Kind.FETCH)
            if first.kind is Kind.FETCH:
                return self._give(connection, first)
            about = {**first.head, **connection.expect(Kind.LAYOUT).head}
            self.hellos.append(about)
            if not self._fault(connection, first):
                self._take(connection, about)
        return None

    def _fault(self, connection: Connection, frame: Frame) -> bool:
        fault = self.faults.get(frame.kind)
        if fault is not None:
            fault(self, connection, frame)
        return fault is not None

    # From the trainer.

    def _take(self, connection: Connection, about: dict[str, Any]) -> None:
        coming, layout = self.coming, PushLayout.from_json(about["layout"])
        if about["ticket"] != self.ticket:
            return connection.send(Kind.ERROR, {"slug": "bad-ticket", "detail": "it is void"})
        with coming.news:
            again, coming.origin = coming.layout is not None, connection
            coming.layout, coming.share = layout, tuple(about["share"])
            coming.base = self._staged[about["base"]["root_hash"]] if "base" in about else b""
            coming.content = coming.content or bytearray(layout.nbytes)
            coming.announced = []
            coming.news.notify_all()
        connection.takes_memory = connection.unix
        connection.send(Kind.READY)
        if connection.unix:
            return self._take_memory(connection, layout)
        for holder in () if again else about["holders"]:
            self._start_thread(self._fetch, coming, holder)
        while True:
            self._take_frame(coming, connection, connection.receive())
        return None

    def _take_frame(self, coming: Coming, connection: Connection, frame: Frame) -> None:
        """Do what a holder's frame is for."""
        payload = bytearray(frame.payload)
        connection.read_into(memoryview(payload))
        if frame.kind in (Kind.PIECE, Kind.DELTA) and connection is coming.origin:
            coming.from_trainer.append(frame.integer("piece"))
        if self._fault(connection, frame):
            return
        match frame.kind:
            case Kind.HAVE:
                self._ask(coming, connection, frame)
            case Kind.PIECE:
                self._note_piece(coming, frame, payload)
            case Kind.DELTA:
                self._note_piece(coming, frame, _changed(coming, frame, payload))
            case Kind.END:
                with coming.news:
                    coming.end = coming.end or frame.head
            case _:
                raise Malformed(f"{frame.kind.name} came from a holder")
        self._stage_if_whole(coming)

    def _ask(self, coming: Coming, connection: Connection, frame: Frame) -> None:
        """Ask for what was announced here."""
        news = [piece for begin, end in frame.head["ranges"] for piece in range(begin, end)]
        with coming.news:
            if connection is coming.origin:
                coming.announced += news
                wanted = [each for each in coming.wanted() if each in news]
            else:
                wanted = [each for each in news if each not in coming.pieces]
        _ask_for(connection, wanted)

    def _note_piece(self, coming: Coming, frame: Frame, payload: bytearray) -> None:
        piece, layout = frame.integer("piece"), coming.layout
        assert layout is not None
        begin, end = layout.pieces.span(piece)
        assert len(payload) == end - begin
        assert layout.pieces.hash_leaves(piece, memoryview(payload)).hex() == frame.text("digests")
        with coming.news:
            coming.content[begin:end] = payload
            coming.pieces[piece] = frame.text("digests")
            done = sum(layout.pieces.nbytes_of(each) for each in coming.pieces)
            coming.news.notify_all()
        self.on_piece()
        self._say(coming, Kind.PROGRESS, {"name": self.name, "bytes_done": done})

    def _say(self, coming: Coming, kind: Kind, head: dict[str, Any]) -> None:
        """Tell the trainer, whose connection may be broken for now."""
        assert coming.origin is not None
        with contextlib.suppress(TransferError):
            coming.origin.send(kind, head)

    def _stage_if_whole(self, coming: Coming) -> None:
        with coming.news:
            if coming.staged or not coming.is_whole():
                return
            coming.staged = True
        assert coming.layout is not None
        assert coming.end is not None
        self._verify(coming.layout, memoryview(coming.content), coming.end)
        self._say(coming, Kind.STAGED, {"name": self.name, "root_hash": self.root_hash})

    def _verify(self, layout: PushLayout, view: memoryview, end: Mapping[str, Any]) -> None:
        self.content = {t.name: bytes(view[t.start : t.end]) for t in layout.tensors}
        digests = {name: tensor_digest(data) for name, data in self.content.items()}
        assert digests == end["digests"]
        hashed = {t.name: HashedTensor(t.dtype, t.shape, digests[t.name]) for t in layout.tensors}
        self.root_hash = root_hash_of(hashed)
        assert self.root_hash == end["root_hash"]
        self._staged[self.root_hash] = bytes(view)

    # Shared memory.

    def _take_memory(self, connection: Connection, layout: PushLayout) -> None:
        memory = connection.expect(Kind.MEMORY)
        assert memory.handle is not None
        with mmap.mmap(memory.handle, memory.integer("size"), prot=mmap.PROT_READ) as shared:
            os.close(memory.handle)
            if self._fault(connection, memory):
                return
            while True:
                frame = connection.expect(Kind.FILLED, Kind.END)
                if not self._fault(connection, frame) and frame.kind is Kind.END:
                    break
            with memoryview(shared) as view:
                self._verify(layout, view, frame.head)
            connection.send(Kind.STAGED, {"name": self.name, "root_hash": self.root_hash})
            if not self.release.is_set():
                self.keeps.append(shared)
            self.release.wait(WAIT_SECONDS)
            self.keeps.clear()
        connection.send(Kind.RELEASED)

    # From and to other receivers.

    def _fetch(self, coming: Coming, holder: dict[str, Any]) -> None:
        """Fetch from another receiver; once that ends too early, the trainer is asked for the rest."""
        try:
            made = dial(holder["host"], holder["port"], 5)
            with self._alive(made):
                made.send(Kind.FETCH, {"protocol": PROTOCOL, "ticket": holder["ticket"]})
                made.expect(Kind.LAYOUT)
                while not coming.is_whole():
                    self._take_frame(coming, made, made.receive())
        except (OSError, TransferError):
            with coming.news:
                coming.lonely, origin = True, coming.origin
                wanted = coming.wanted()
            assert origin is not None
            with contextlib.suppress(TransferError):  # it is called again, and asked then
                _ask_for(origin, wanted)

    def _give(self, connection: Connection, first: Frame) -> None:
        """Serve what is here, and comes, to another receiver until that closes the connection."""
        coming = self.coming
        if first.text("ticket") != fetch_ticket(self.ticket):
            return connection.send(Kind.ERROR, {"slug": "bad-ticket", "detail": "it is void"})
        with coming.news:
            coming.news.wait_for(lambda: coming.layout or self._closed, WAIT_SECONDS)
        layout = coming.layout
        if layout is None:  # the trainer was refused here, or never came
            return None
        connection.send(Kind.LAYOUT, {"layout": layout.to_json()})
        announced, ended = 0, False
        while True:
            with coming.news:
                news, end = list(coming.pieces)[announced:], coming.end
            if news:
                announced += len(news)
                connection.send(Kind.HAVE, {"ranges": [(each, each + 1) for each in news]})
            if end is not None and not ended:
                ended = True
                connection.send(Kind.END, end)
            request = connection.poll(0.01)
            if request is not None and not self._fault(connection, request):
                for begin, last in request.head["ranges"]:
                    for piece in range(begin, last):
                        _send_piece(connection, coming, layout, piece)
        return None


def _changed(coming: Coming, frame: Frame, payload: bytearray) -> bytearray:
    """What a piece of the base becomes by what came."""
    assert hash_leaf(payload).hex() == frame.text("hash")
    assert coming.layout is not None
    coming.deltas.append(frame.integer("piece"))
    begin, end = coming.layout.pieces.span(frame.integer("piece"))
    content = bytearray(coming.base[begin:end])
    delta.apply_delta(bytes(payload), memoryview(content))
    return content


def _ask_for(connection: Connection, pieces: list[int]) -> None:
    if pieces:
        connection.send(Kind.GET, {"ranges": [(each, each + 1) for each in pieces]})


def _send_piece(connection: Connection, coming: Coming, layout: PushLayout, piece: int) -> None:
    begin, end = layout.pieces.span(piece)
    head = {"piece": piece, "digests": coming.pieces[piece]}
    connection.send(Kind.PIECE, head, bytes(coming.content[begin:end]))
