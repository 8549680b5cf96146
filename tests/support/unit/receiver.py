"""A receiver of pushed weights that does what a test says: what no sound worker would show."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from rollout_common.transfer.arena import map_readonly
from rollout_common.transfer.connection import Connection
from rollout_common.transfer.dialing import dial
from rollout_common.transfer.frames import Frame, Kind, TransferError
from rollout_common.transfer.layout import PushLayout
from rollout_common.transfer.node import node_of
from rollout_common.wire.root_hash import HashedTensor, root_hash_of
from tests.support.unit.digests import tensor_digest

Fault = Callable[["Receiver", Connection, Frame], None]


class Receiver:
    """Takes one version after another over TCP and, with a folder, over a Unix socket."""

    def __init__(self, name: str, folder: Path | None = None) -> None:
        self.name, self.ticket = name, "0" * 32
        self.faults: dict[Kind, Fault] = {}
        """By kind of a frame: what is done in place of the right thing; may raise TransferError."""
        self.hellos: list[dict[str, Any]] = []
        self.chunks = 0
        self.content: dict[str, bytes] = {}
        self.root_hash: str | None = None
        self.error: str | None = None
        self.cut_off = False
        """Whether it reaches no other receiver."""
        self.release = threading.Event()
        """Set: it gives the memory back at once."""
        self.release.set()
        self.keeps: list[mmap.mmap] = []
        """While it does not give memory back: what it reads."""
        self._memory = bytearray()
        self._have: set[int] = set()
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
            threading.Thread(target=self._accept, args=(each,), daemon=True).start()

    def transfer(self) -> dict[str, Any]:
        """What the answer to a stage says of it; whatever it had is gone."""
        self.ticket = f"{int(self.ticket) + 1:032}"
        self._have, self.chunks = set(), 0
        node = None if self.path is None else node_of(self.path)
        return {"ticket": self.ticket, "port": self.port, "socket": self.path, "node": node}

    def hang_up(self) -> None:
        """End its connections without another word."""
        for connection in self._connections:
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
                connection = Connection(listener.accept()[0])
                self._connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        try:
            connection.keep_alive()
            hello = connection.expect(Kind.HELLO)
            about = {**hello.head, **connection.expect(Kind.LAYOUT).head}
            connection.takes_memory = True
            self.hellos.append(about)
            if not self._fault(connection, hello):
                self._take(connection, PushLayout.from_json(about["layout"]), about)
        except TransferError as error:
            self.error = str(error)
        finally:
            connection.close()

    def _fault(self, connection: Connection, frame: Frame) -> bool:
        fault = self.faults.get(frame.kind)
        if fault is not None:
            fault(self, connection, frame)
        return fault is not None

    def _take(self, connection: Connection, layout: PushLayout, hello: dict[str, Any]) -> None:
        have = sorted([begin, min(begin + 2**20, layout.nbytes)] for begin in self._have)
        if len(self._memory) != layout.nbytes:
            self._memory = bytearray(layout.nbytes)
        connection.send(Kind.READY, {"have": have})
        with contextlib.closing(connection), contextlib.ExitStack() as stack:
            following = self._following(connection, hello)
            if following is not None:
                stack.callback(following.close)
            self._receive(connection, following, layout, len(hello.get("hops") or []))

    def _receive(
        self,
        connection: Connection,
        following: Connection | None,
        layout: PushLayout,
        behind: int,
    ) -> None:
        shared: mmap.mmap | None = None
        while True:
            frame = connection.receive()
            if frame.kind is Kind.DATA:
                self._chunk(connection, frame, following)
            elif self._fault(connection, frame):
                continue
            elif frame.handle is not None:
                shared = map_readonly(frame.handle, frame.integer("size"))
                os.close(frame.handle)
            elif frame.kind is Kind.END:
                break
        view = memoryview(self._memory if shared is None else shared)
        while shared is None and len(self._have) < -(-layout.nbytes // 2**20):
            self._chunk(connection, connection.expect(Kind.DATA), following)  # once more
        self._verify(layout, view, dict(frame.head))
        connection.send(Kind.STAGED, {"name": self.name, "root_hash": self.root_hash})
        if following is not None:
            following.send(Kind.END, frame.head)
            _pass_on(following, connection, behind)
        if shared is not None:
            if not self.release.is_set():
                self.keeps.append(shared)
            self.release.wait(30)
            self.keeps.clear()
            view.release()
            shared.close()
            connection.send(Kind.RELEASED)

    def _following(self, back: Connection, hello: dict[str, Any]) -> Connection | None:
        hops = hello.get("hops") or []
        if not hops:
            return None
        try:
            made = dial(hops[0]["host"], 1 if self.cut_off else hops[0]["port"], 5)
        except TransferError as error:
            back.send(Kind.FAILED, {"name": hops[0]["name"], "detail": str(error)})
            return None
        made.keep_alive()
        about = {"name": hops[0]["name"], "layout": hello["layout"], "hops": hops[1:]}
        made.introduce(hops[0]["ticket"], about)
        try:
            made.expect(Kind.READY)
        except TransferError as error:
            back.send(Kind.FAILED, {"name": hops[0]["name"], "detail": str(error)})
            made.close()
            return None
        return made

    def _chunk(self, connection: Connection, frame: Frame, following: Connection | None) -> None:
        chunk = bytearray(frame.payload)
        connection.read_into(memoryview(chunk))
        offset = frame.integer("offset")
        self.chunks += 1
        if self._fault(connection, frame):
            return
        assert xxhash.xxh3_128_hexdigest(chunk) == frame.text("hash")
        self._memory[offset : offset + len(chunk)] = chunk
        self._have.add(offset)
        connection.send(Kind.PROGRESS, {"name": self.name, "bytes_done": len(self._have) << 20})
        if following is not None:
            following.send(Kind.DATA, {"offset": offset, "hash": frame.text("hash")}, bytes(chunk))

    def _verify(self, layout: PushLayout, view: memoryview, end: dict[str, Any]) -> None:
        self.content = {t.name: bytes(view[t.start : t.end]) for t in layout.tensors}
        digests = {name: tensor_digest(data) for name, data in self.content.items()}
        assert digests == end["digests"]
        hashed = {t.name: HashedTensor(t.dtype, t.shape, digests[t.name]) for t in layout.tensors}
        self.root_hash = root_hash_of(hashed)
        assert self.root_hash == end["root_hash"]


def _pass_on(source: Connection, to: Connection, outcomes: int) -> None:
    """Pass on what hops say until so many have settled."""
    while outcomes:
        told = source.receive()
        to.send(told.kind, told.head)
        outcomes -= told.kind is not Kind.PROGRESS
