"""A receiver of pushed weights that does what a test says: what no sound worker would show.

It asks the trainer for all pieces, and fetches none from the other receivers that `LAYOUT` names.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollout_common.transfer import delta
from rollout_common.transfer.connections.blocking_connection import Connection
from rollout_common.transfer.connections.frames import Frame, Kind, Malformed, TransferError
from rollout_common.transfer.connections.node_identity import node_of
from rollout_common.transfer.layout import PushLayout
from rollout_common.wire.root_hash import HashedTensor, hash_leaf, root_hash_of
from tests.support.unit.digests import tensor_digest

Fault = Callable[["Receiver", Connection, Frame], None]
WAIT_SECONDS = 30.0


class Coming:
    """What of one version is here.

    Attributes:
        base: [bytes] what deltas are applied to.
        content: [bytes] in the layout's order.
        pieces: The numbers of those that came.
        deltas: Those that came as what differs from the base.
        end: What the trainer says at the end.
        staged: Whether the trainer was told the outcome.
    """

    def __init__(self) -> None:
        self.base = b""
        self.content = bytearray()
        self.pieces: set[int] = set()
        self.deltas: list[int] = []
        self.end: Mapping[str, Any] | None = None
        self.staged = False


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

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._start_thread(self._serve, Connection(listener.accept()[0]))

    def _serve(self, connection: Connection) -> None:
        self._connections.append(connection)
        connection.start_pinging()
        with contextlib.suppress(TransferError), contextlib.closing(connection):
            first = connection.expect(Kind.HELLO)
            about = {**first.head, **connection.expect(Kind.LAYOUT).head}
            self.hellos.append(about)
            if not self._fault(connection, first):
                self._take(connection, about)

    def _fault(self, connection: Connection, frame: Frame) -> bool:
        fault = self.faults.get(frame.kind)
        if fault is not None:
            fault(self, connection, frame)
        return fault is not None

    def _take(self, connection: Connection, about: dict[str, Any]) -> None:
        coming, layout = self.coming, PushLayout.from_json(about["layout"])
        if about["ticket"] != self.ticket:
            return connection.send(Kind.ERROR, {"slug": "bad-ticket", "detail": "it is void"})
        coming.base = self._staged[about["base"]["root_hash"]] if "base" in about else b""
        coming.content = coming.content or bytearray(layout.nbytes)
        connection.takes_memory = connection.unix
        connection.send(Kind.READY)
        if connection.unix:
            return self._take_memory(connection, layout)
        while True:
            self._take_frame(coming, layout, connection, connection.receive())

    def _take_frame(
        self, coming: Coming, layout: PushLayout, connection: Connection, frame: Frame
    ) -> None:
        """Do what a frame is for; stage the version once all of it is here."""
        payload = bytearray(frame.payload)
        connection.read_into(memoryview(payload))
        if self._fault(connection, frame):
            return
        match frame.kind:
            case Kind.HAVE:
                news = [range(*each) for each in frame.head["ranges"]]
                wanted = [n for run in news for n in run if n not in coming.pieces]
                if wanted:
                    connection.send(Kind.GET, {"ranges": [(each, each + 1) for each in wanted]})
            case Kind.PIECE | Kind.DELTA:
                done = self._note_piece(coming, layout, frame, payload)
                connection.send(Kind.PROGRESS, {"name": self.name, "bytes_done": done})
            case Kind.END:
                coming.end = coming.end or frame.head
            case _:
                raise Malformed(f"{frame.kind.name} came from a trainer")
        if coming.end is None or coming.staged or len(coming.pieces) < len(layout.pieces):
            return
        coming.staged = True
        self._verify(layout, memoryview(coming.content), coming.end)
        connection.send(Kind.STAGED, {"name": self.name, "root_hash": self.root_hash})

    def _note_piece(
        self, coming: Coming, layout: PushLayout, frame: Frame, payload: bytearray
    ) -> int:
        """Keep a piece; return how many bytes are here then."""
        piece = frame.integer("piece")
        begin, end = layout.pieces.span(piece)
        if frame.kind is Kind.DELTA:
            assert hash_leaf(payload).hex() == frame.text("hash")
            coming.deltas.append(piece)
            changes, payload = bytes(payload), bytearray(coming.base[begin:end])
            delta.apply_delta(changes, memoryview(payload))
        assert len(payload) == end - begin
        assert layout.pieces.hash_leaves(piece, memoryview(payload)).hex() == frame.text("digests")
        coming.content[begin:end] = payload
        coming.pieces.add(piece)
        self.on_piece()
        return sum(map(layout.pieces.nbytes_of, coming.pieces))

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
