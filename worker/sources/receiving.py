"""What one connection brings to a slot: read, checked, noted, and what became of it told back.

Over TCP chunks are verified one by one and passed on to the next hop; over a Unix socket the sender's
memory comes, and how far it is filled. Runs in the connection's thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import xxhash

from rollout_common.transfer.arena import ArenaError
from rollout_common.transfer.connection import Connection
from rollout_common.transfer.delta import DeltaError
from rollout_common.transfer.frames import (
    CHUNK_BYTES,
    PROTOCOL,
    Ended,
    Frame,
    Kind,
    Malformed,
    TransferError,
)
from rollout_common.transfer.layout import LayoutError, PushLayout
from rollout_common.transfer.maps import Maps

from .basis import Delta
from .forwarding import Forwarding, hops_of
from .incoming import LOOK_SECONDS, Incoming, Refusal, end_of
from .outward import Outward
from .pushed_memory import Memory, TransferFailed

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 0.1
LEAVE_SECONDS = 2.0
"""What the other end gets to read the last word."""


class Receiving:
    """See the module; `run` in the connection's thread.

    Args:
        connection: Which has said `HELLO`.
        hello: That frame.
        incoming: What its ticket is for.
        outward: How the hops behind are reached.
        maps: Where mappings of senders' memory come from.
    """

    def __init__(
        self,
        connection: Connection,
        hello: Frame,
        incoming: Incoming,
        outward: Outward,
        maps: Maps,
    ) -> None:
        self._connection, self._hello, self._incoming = connection, hello, incoming
        self._outward, self._maps = outward, maps
        self._name = ""
        self._told = 0.0
        self._damaged: set[int] = set()
        self._by_delta = False
        """Whether the sender has said of which base its deltas are."""
        self._forwarding: Forwarding | None = None

    def run(self) -> None:
        """Receive until it is staged or has failed, and tell.

        Raises:
            TransferError: The connection ended before.
        """
        incoming, connection = self._incoming, self._connection
        try:
            incoming.attach(connection)
        except Refusal as refusal:
            return self._refuse(refusal)
        why = "the worker gave it up"
        try:
            connection.keep_alive()
            try:
                self._receive()
            except Refusal as refusal:
                why = str(refusal)
                incoming.fail(why, refusal.tensor)
                return self._refuse(refusal)
            except (TransferFailed, Malformed) as error:
                why = str(error)
                incoming.fail(why)
            self._tell()
        except TransferError as error:
            why = f"the sender is gone: {error}"
            raise
        finally:
            if self._forwarding is not None:
                self._forwarding.stop()
            incoming.detach(connection, why)

    def _refuse(self, refusal: Refusal) -> None:
        head: dict[str, Any] = {"slug": refusal.slug, "detail": str(refusal), "name": self._name}
        if refusal.tensor is not None:
            head["tensor"] = refusal.tensor
        self._connection.send(Kind.ERROR, head)
        self._connection.leave(LEAVE_SECONDS)

    def _receive(self) -> None:
        """Bring everything there."""
        incoming = self._incoming
        if (spoken := self._hello.integer("protocol")) != PROTOCOL:
            raise Malformed(
                f"the sender speaks protocol {spoken}, this worker {PROTOCOL}: use the same release at"
                " both ends"
            )
        about = self._awaited(Kind.LAYOUT)
        self._name = about.text("name", "")
        try:
            layout = PushLayout.from_json(about.head.get("layout"))
        except LayoutError as error:
            raise Refusal("wrong-layout", str(error), error.tensor) from error
        hops = hops_of(about.head.get("hops", []))
        have = incoming.begin(layout)
        if (base := about.head.get("base")) is not None:
            incoming.rest_on(base)
            self._by_delta = True
        memory = None if self._connection.unix else incoming.take_room()
        self._connection.send(Kind.READY, {"have": have})
        if memory is None:
            memory = self._take_memory(layout)
        release = memory.hold()
        try:
            if hops:
                self._forwarding = Forwarding(
                    incoming, layout, memory, hops, self._connection, self._outward
                )
                self._forwarding.start()
            self._follow(layout, memory)
        finally:
            release()

    def _awaited(self, kind: Kind) -> Frame:
        """Return the next frame, which must be this one: a sender may take its time, and the slot may go meanwhile."""
        while (frame := self._connection.poll(LOOK_SECONDS)) is None:
            if self._incoming.failure is not None:
                raise TransferFailed(self._incoming.failure)
        return self._connection.checked(frame, kind)

    def _take_memory(self, layout: PushLayout) -> Memory:
        self._connection.takes_memory = True
        frame = self._awaited(Kind.MEMORY)
        self._connection.takes_memory = False
        if frame.handle is None:
            raise Malformed("MEMORY came without a descriptor")
        try:
            size = frame.integer("size", max(layout.nbytes, 1))
        except Malformed:
            os.close(frame.handle)
            raise
        try:
            memory = Memory(size, frame.handle, self._maps)
        except ArenaError as error:
            raise Refusal("bad-memory", str(error)) from error
        self._incoming.lay(memory)
        return memory

    def _follow(self, layout: PushLayout, memory: Memory) -> None:
        """Take note of what comes until there is nothing more to come."""
        incoming, connection = self._incoming, self._connection
        while incoming.upto < layout.nbytes or incoming.end is None:
            if incoming.failure is not None:
                return
            frame = connection.poll(LOOK_SECONDS)
            if frame is None:
                continue
            match frame.kind:
                case Kind.DATA if memory.own:
                    self._data(frame, layout, memory)
                case Kind.DELTA if memory.own and self._by_delta:
                    self._delta(frame, layout)
                case Kind.FILLED if not memory.own:
                    incoming.advance(frame.integer("upto", 0, layout.nbytes))
                case Kind.END:
                    incoming.finish(end_of(frame, layout))
                case _:
                    raise Malformed(f"{frame.kind.name} came in the middle of the bytes")
            self._progress()

    def _data(self, frame: Frame, layout: PushLayout, memory: Memory) -> None:
        """Verify a chunk where it goes; one that is there already is read and forgotten."""
        offset = frame.integer("offset", 0, max(layout.nbytes - 1, 0))
        chunk, rest = divmod(offset, CHUNK_BYTES)
        size = min(CHUNK_BYTES, layout.nbytes - offset)
        if rest or frame.payload != size:
            raise Malformed(f"a chunk begins at {offset} with {frame.payload} bytes")
        if self._incoming.has(chunk):
            return self._connection.skip(frame)
        self._incoming.begin_chunk(chunk)
        found = memory.take(offset, offset + size, self._connection.read_into)
        if found == frame.text("hash"):
            return self._incoming.mark(chunk, found)
        self._again(offset, delta=False)

    def _delta(self, frame: Frame, layout: PushLayout) -> None:
        """Verify what differs in a run of whole chunks, and apply it."""
        offset = frame.integer("offset", 0, max(layout.nbytes - 1, 0))
        end = offset + frame.integer("bytes", 1, layout.nbytes - offset)
        if offset % CHUNK_BYTES or (end % CHUNK_BYTES and end != layout.nbytes):
            raise Malformed(f"a delta covers {offset} to {end}, which are no whole chunks")
        content = bytearray(frame.payload)
        self._connection.read_into(memoryview(content))
        if xxhash.xxh3_128_hexdigest(content) != frame.text("hash"):
            return self._again(offset, delta=True)
        try:
            self._incoming.renew(offset, Delta(end - offset, bytes(content)))
        except DeltaError as error:
            raise Malformed(f"the delta at {offset}: {error}") from error

    def _again(self, offset: int, *, delta: bool) -> None:
        """Ask for what arrived damaged; twice is no accident."""
        if offset in self._damaged:
            raise Malformed(f"the chunk at {offset} arrived damaged twice: check the network")
        self._damaged.add(offset)
        why = f"the chunk at {offset} has the wrong hash: send it again"
        head = {"slug": "bad-chunk", "detail": why, "offset": offset, "delta": delta}
        self._connection.send(Kind.ERROR, head)

    def _progress(self) -> None:
        now = time.monotonic()
        if now - self._told >= PROGRESS_SECONDS:
            self._told = now
            head = {"name": self._name, "bytes_done": self._incoming.upto}
            # Who is gone may have sent all of it: what came is read to its end first.
            with contextlib.suppress(Ended):
                self._connection.send(Kind.PROGRESS, head)

    def _tell(self) -> None:
        """Say what became of it, here and behind; over a Unix socket stay until the memory is free."""
        incoming, connection = self._incoming, self._connection
        while not incoming.wait(lambda: incoming.over, LOOK_SECONDS):
            self._listen()
        if incoming.root_hash is not None:
            told = {"name": self._name, "root_hash": incoming.root_hash}
            connection.send(Kind.STAGED, told)
        else:
            head: dict[str, Any] = {"name": self._name, "detail": incoming.failure or ""}
            if incoming.tensor is not None:
                head["tensor"] = incoming.tensor
            connection.send(Kind.FAILED, head)
        if self._forwarding is not None:
            self._until(self._forwarding.ended.wait)
        memory = incoming.memory
        if memory is not None and not memory.own:
            self._until(memory.freed.wait)
            connection.send(Kind.RELEASED)
        connection.leave(LEAVE_SECONDS)

    def _until(self, wait: Callable[[float], bool]) -> None:
        while not wait(LOOK_SECONDS):
            self._listen()

    def _listen(self) -> None:
        """Read what the sender says meanwhile; a closed connection ends the wait."""
        while (frame := self._connection.poll(0)) is not None:
            self._connection.skip(frame)
