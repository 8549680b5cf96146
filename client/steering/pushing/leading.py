"""Rank 0 of a trainer: it makes the memory, all ranks write into it or send their shards, and it publishes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from rollout_client.errors import PublishFailed
from rollout_client.steering.steering_protocol import Published
from rollout_common.transfer.arena import Arena, ArenaError
from rollout_common.transfer.connection import Connection
from rollout_common.transfer.frames import Frame, Kind, Malformed, TransferError
from rollout_common.transfer.layout import LayoutError
from rollout_common.transfer.settings import LEASE_SECONDS

from .beating import Beat
from .copying import Copier
from .merging import Merging
from .outcome import to_json
from .settings import ACK_SECONDS, DEATH_SECONDS, GRACE_SECONDS, RANK_LOOK_SECONDS
from .shards import Part, Shares, share_out
from .streaming import Arriving, Damaged
from .writing import InMemory, Writing, state_of

if TYPE_CHECKING:
    from rollout_client.steering.spool import Tensors


class Leading:
    """The part of rank 0 in the publishes of a group.

    Args:
        connections: The connections to all other ranks.
        far: The ranks of other nodes, which send their shards.
    """

    def __init__(self, connections: Mapping[int, Connection], far: Collection[int] = ()) -> None:
        self.broken = False
        """Whether the ranks have to meet again."""
        self.arena = Arena(share=self._share)
        self._connections, self._far = connections, far
        self._beats: list[Beat] = []
        self._slots: dict[int, int] = {}
        """By descriptor of the memory: the number by which the other ranks know it."""
        self._made = 0
        self._hearing: dict[int, _Hearing] = {}

    def fill(
        self, filling: Merging, copier: Copier, tensors: Tensors, version: int, seconds: float
    ) -> None:
        """Make all ranks write their parts; return once everything is there and hashed.

        Raises:
            PublishFailed: Another rank is gone, failed, or did not join in time.
            LayoutError: The ranks' tensors don't make a complete model.
            ArenaError: There is no room.
        """
        self._beats = [Beat(connection) for connection in self._connections.values()]
        writing = Writing(state_of(tensors))
        offers = [list(writing.parts.values()), *self._offers(version, seconds)]
        shares = share_out(offers, self._far)
        filling.plan(shares.specs)
        filling.begin()
        self._order(filling, shares)
        layout, slot = filling.layout, filling.slot

        def view(name: str, begin: int, end: int) -> memoryview:
            start = layout[name].start
            return slot.bytes(start + begin, start + end)

        place = InMemory(view, filling.arrived, filling.block, copier)
        try:
            writing.write(shares.work[0].boxes, place, lambda: filling.given_up, layout)
        except RuntimeError as error:  # from torch, as when another rank of a gather is gone
            raise filling.why(DEATH_SECONDS) or PublishFailed(f"rank 0: {error}") from error
        if filling.all_written():
            filling.end()

    def _offers(self, version: int, seconds: float) -> list[list[Part]]:
        """Return the parts of each other rank, once all ranks have joined."""
        until = time.monotonic() + seconds
        for connection in self._connections.values():
            connection.patience(seconds + GRACE_SECONDS)
            connection.heard = time.monotonic()
        found: dict[int, list[Part]] = {}
        while late := [rank for rank in self._connections if rank not in found]:
            if time.monotonic() > until:
                raise PublishFailed(
                    f"rank {late[0]} did not publish within {seconds:g} s: all ranks of the group call"
                    " publish_weights"
                )
            for rank, connection in self._connections.items():
                frame = self._heard(rank, RANK_LOOK_SECONDS if rank == late[0] else 0)
                if frame is None:
                    continue
                if rank in found or frame.kind is not Kind.HELLO:
                    raise PublishFailed(f"rank {rank} sent {frame.kind.name} out of its turn")
                if (theirs := frame.integer("version")) != version:
                    raise PublishFailed(f"rank {rank} publishes version {theirs}, rank 0 {version}")
                found[rank] = _parts(rank, frame)
                connection.patience(LEASE_SECONDS)  # from now on it sends pings
        return [found[rank] for rank in sorted(found)]

    def _heard(self, rank: int, seconds: float) -> Frame | None:
        try:
            frame = self._connections[rank].poll(seconds)
        except TransferError as error:
            raise PublishFailed(f"rank {rank} is gone: {error}") from error
        if frame is not None and frame.kind is Kind.FAILED:
            raise PublishFailed(f"rank {rank}: {frame.text('detail', '')}")
        return frame

    def _share(self, handle: int, size: int) -> None:
        """Let the other ranks of this node map new memory before it is sealed against writing."""
        self._made += 1
        self._slots[handle] = self._made
        for rank, connection in self._connections.items():
            if rank in self._far:
                continue
            try:
                connection.send(Kind.MEMORY, {"slot": self._made, "size": size}, handle=handle)
                connection.expect(Kind.READY)
            except TransferError as error:
                raise PublishFailed(f"rank {rank} is gone: {error}") from error

    def _order(self, filling: Merging, shares: Shares) -> None:
        """Send each rank its work, and start to read what it has written."""
        alive = {handle: self._slots[handle] for handle in self.arena.handles}
        self._slots = alive
        layout = filling.layout.to_json()
        for rank, connection in self._connections.items():
            boxes = shares.work[rank].boxes
            arriving = Arriving(filling, boxes) if rank in self._far else None
            self._hearing[rank] = _Hearing(rank, connection, filling, arriving)
            order = {"slot": alive[filling.slot.handle], "slots": list(alive.values())}
            try:
                connection.send(Kind.LAYOUT, {**order, "layout": layout, "boxes": boxes})
            except TransferError as error:
                raise PublishFailed(f"rank {rank} is gone: {error}") from error

    def tell(self, outcome: Published | BaseException) -> None:
        """Send the outcome to all ranks; once this returns, no rank writes any more."""
        self._still()
        news = to_json(outcome)
        kind = Kind.FAILED if "error" in news else Kind.STAGED
        hearing, self._hearing = self._hearing, {}
        until = time.monotonic() + ACK_SECONDS
        for rank, connection in self._connections.items():
            heard = hearing.get(rank) or _Hearing(rank, connection)
            hearing[rank] = heard
            heard.told = True
            try:
                connection.send(kind, news)
            except TransferError:
                heard.gone = True
        over = [heard.over(until) for heard in hearing.values()]
        if not all(over):
            self.close()  # a rank that hangs may write later, so the memory is freed, too

    def _still(self) -> None:
        """Stop the pings, since no rank reads them between two publishes."""
        beats, self._beats = self._beats, []
        for beat in beats:
            beat.stop()

    def close(self) -> None:
        """Close all connections and free the memory; replicas keep what they have mapped."""
        self.broken = True
        self._still()
        for connection in self._connections.values():
            with contextlib.suppress(TransferError):
                connection.send(Kind.RELEASED)
            connection.close()
        self.arena.close()


def _parts(rank: int, frame: Frame) -> list[Part]:
    try:
        return [Part.from_json(row) for row in frame.head["tensors"]]
    except (KeyError, TypeError, ValueError) as error:
        raise PublishFailed(
            f"rank {rank} describes its tensors in a format this release doesn't know"
            f" ({type(error).__name__}: {error}): all ranks need the same release of the client"
        ) from error


class _Hearing:
    """Reads from one rank until it has stopped, in a thread.

    Args:
        rank: The number of the rank.
        connection: The connection to it.
        filling: Notes what it has written; None: nothing more is expected.
        arriving: Writes what it sends; None: the rank writes by itself.
    """

    def __init__(
        self,
        rank: int,
        connection: Connection,
        filling: Merging | None = None,
        arriving: Arriving | None = None,
    ) -> None:
        self.gone = False
        self.told = filling is None
        """Whether the rank has got the outcome: before that it must not leave."""
        self._rank, self._connection, self._filling = rank, connection, filling
        self._arriving = arriving
        self._thread = threading.Thread(target=self._run, name=f"weights-rank-{rank}", daemon=True)
        self._thread.start()

    def over(self, until: float) -> bool:
        """Whether the rank reports, by that time, that it has stopped writing."""
        if not self.gone:
            self._thread.join(max(0.0, until - time.monotonic()))
        return not self.gone and not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (frame := self._connection.receive()).kind is not Kind.RELEASED:
                self._take(frame)
            if not self.told:
                raise Malformed("it left in the middle of a publish")
        except (TransferError, LayoutError, ArenaError) as error:
            self.gone = True
            self._fail(f" is gone: {error}")

    def _fail(self, why: str) -> None:
        if self._filling is not None:
            self._filling.fail(PublishFailed(f"rank {self._rank}{why}"))

    def _take(self, frame: Frame) -> None:
        filling = self._filling
        if filling is None or filling.given_up:
            return self._connection.skip(frame)
        match frame.kind:
            case Kind.DATA if self._arriving is not None:
                try:
                    self._arriving.take(self._connection, frame)
                except Damaged as error:  # the connection itself works
                    self._fail(f": {error}")
            case Kind.FILLED if self._arriving is None and "block" in frame.head:
                filling.block(frame.text("name"), frame.integer("block", 1))
            case Kind.FILLED if self._arriving is None:
                begin, end = frame.integer("begin"), frame.integer("end")
                filling.arrived(frame.text("name"), begin, end)
            case Kind.FAILED:
                self._fail(f": {frame.text('detail', '')}")
            case _:
                raise Malformed(f"{frame.kind.name} came from rank {self._rank}")
        return None
