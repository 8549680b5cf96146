"""The ranks that one rank of a trainer leads: those of its node, and for rank 0 the leads of other nodes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rollout_client.errors import PublishFailed
from rollout_client.steering.pushing.settings import (
    ACK_SECONDS,
    GRACE_SECONDS,
    LEAD_SECONDS,
    RANK_LOOK_SECONDS,
)
from rollout_client.steering.pushing.shards.chunk_stream import ArrivingChunks, Damaged
from rollout_client.steering.pushing.shards.merged_version import MergedVersion
from rollout_client.steering.pushing.shards.node_parts import NodePart, pack_layout
from rollout_client.steering.pushing.shards.shard_plan import Names, Offer, offers_from_json
from rollout_common.transfer.connections.blocking_connection import Connection
from rollout_common.transfer.connections.frames import Frame, Kind, Malformed, TransferError
from rollout_common.transfer.layout import LayoutError
from rollout_common.transfer.memory.arena import Arena
from rollout_common.transfer.memory.mapped_memory import SharedMemoryError
from rollout_common.transfer.settings import LEASE_SECONDS
from rollout_common.wire.root_hash import DIGEST_BYTES

MAX_REASON = 1 << 16
"""Most characters of why a rank failed."""

OnUnreached = Callable[[int, str, str], None]
"""Takes the lead of a node, the name of a replica that it can't serve, and why."""


class RankGroup:
    """The connections to the ranks that this rank leads, and the memory of its node.

    `leads` are those of them that lead another node: by rank, the ranks of that node, itself included.
    """

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, Connection],
        leads: Mapping[int, Collection[int]] | None = None,
    ) -> None:
        self.broken = False
        """Whether the ranks have to meet again."""
        self.leads = leads or {}
        self.arena = Arena(share=self._share_memory)
        self._rank, self._connections = rank, connections
        self._slots: dict[int, int] = {}
        """By descriptor of the memory: the number by which the other ranks know it."""
        self._made = 0
        self._hearing: dict[int, _Hearing] = {}
        self._offers: dict[int, dict[int, Offer]] = {}
        """By connection: the last offers that came, which the other end refers to as long as they stay the same."""
        self._ordered: NodePart | None = None
        """What this node writes by the last order, if all have got that."""

    def collect_offers(
        self, version: int, seconds: float, has_stopped: Callable[[], bool] = lambda: False
    ) -> dict[int, Offer]:
        """Return what each rank below this one has, once all of them have joined, or raise once that `has_stopped`.

        Raises:
            PublishFailed: One is gone, failed, or did not join in time; it names the rank.
        """
        until = time.monotonic() + seconds
        for connection in self._connections.values():
            connection.start_pinging()
            connection.patience(seconds + GRACE_SECONDS)
            connection.heard = time.monotonic()
        found: dict[int, Offer] = {}
        known: dict[Names, Names] = {}
        while late := [rank for rank in self._connections if rank not in found]:
            # The lead of a node says which of its ranks is late.
            over = [rank for rank in late if rank not in self.leads] or late
            if time.monotonic() > until + (LEAD_SECONDS if over[0] in self.leads else 0):
                raise PublishFailed(
                    f"rank {over[0]} did not publish within {seconds:g} s: all ranks of the group call"
                    " publish_weights"
                )
            if has_stopped():
                raise PublishFailed("another rank has ended the publish")
            for rank, connection in self._connections.items():
                frame = self._poll_rank(rank, RANK_LOOK_SECONDS if rank == late[0] else 0)
                if frame is None:
                    continue
                if rank in found or frame.kind is not Kind.HELLO:
                    raise PublishFailed(f"rank {rank} sent {frame.kind.name} out of its turn")
                if (theirs := frame.integer("version")) != version:
                    raise PublishFailed(
                        f"rank {rank} publishes version {theirs}, rank {self._rank} {version}"
                    )
                found |= self._read_offers(rank, frame, known)
                connection.patience(LEASE_SECONDS)  # from now on it sends pings
        return found

    def _poll_rank(self, rank: int, seconds: float) -> Frame | None:
        try:
            frame = self._connections[rank].poll(seconds)
        except TransferError as error:
            raise PublishFailed(f"rank {rank} is gone: {error}") from error
        if frame is not None and frame.kind is Kind.FAILED:
            raise PublishFailed(frame.text("detail", "", most=MAX_REASON))
        return frame

    def _read_offers(self, rank: int, frame: Frame, known: dict[Names, Names]) -> dict[int, Offer]:
        """Return the offers that a rank describes: its own, or those of all ranks of its node."""
        try:
            if "offers" not in frame.head:
                return self._offers[rank]
            offers = offers_from_json(frame.head, known)
            due = sorted(self.leads.get(rank, (rank,)))
            if sorted(offers) != due:
                raise ValueError(f"it offers for ranks {sorted(offers)}, not {due}")
            self._offers[rank] = offers
            return offers
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise PublishFailed(
                f"rank {rank} describes its tensors in a format this release doesn't know"
                f" ({type(error).__name__}: {error}): all ranks need the same release of the client"
            ) from error

    def _share_memory(self, handle: int, size: int) -> None:
        """Let the other ranks of this node map new memory before it is sealed against writing."""
        self._made += 1
        self._slots[handle] = self._made
        for rank, connection in self._connections.items():
            if rank in self.leads:
                continue
            try:
                connection.send(Kind.MEMORY, {"slot": self._made, "size": size}, handle=handle)
                connection.expect(Kind.READY)
            except TransferError as error:
                raise PublishFailed(f"rank {rank} is gone: {error}") from error

    def order_work(
        self,
        filling: MergedVersion,
        own: NodePart,
        parts: Mapping[int, NodePart] | None = None,
        unreached: OnUnreached | None = None,
    ) -> None:
        """Send each rank its work, and start to read what it has written.

        Args:
            filling: The version, for which memory was taken.
            own: What the ranks of this node write. If it is the same object as last time, ranks do the same again.
            parts: By lead of another node: what its node writes.
            unreached: Told of the replicas that a node can't serve.

        Raises:
            PublishFailed: A rank is gone.
        """
        parts = parts or {}
        again, self._ordered = own is self._ordered, None
        layout = "" if again else pack_layout(filling.layout)
        alive = {handle: self._slots[handle] for handle in self.arena.handles}
        self._slots = alive
        memory = {"slot": alive[filling.slot.handle], "slots": list(alive.values())}
        for rank, connection in self._connections.items():
            part = parts.get(rank)
            arriving = None if part is None else ArrivingChunks(filling, part)
            self._hearing[rank] = _Hearing(rank, connection, filling, arriving, unreached)
            order: dict[str, Any] = dict(memory) if part is None else {}
            if not again:
                below = self.leads.get(rank, (rank,))
                order |= {"layout": layout, "shares": (part or own).to_json(below)}
            try:
                connection.send(Kind.LAYOUT, order)
            except TransferError as error:
                raise PublishFailed(f"rank {rank} is gone: {error}") from error
        self._ordered = own

    def ask_leads(self, head: Mapping[str, Any], ranks: Collection[int] | None = None) -> None:
        """Ask all leads of other nodes, or these, to serve; the threads that read from them notice if one is gone."""
        for rank in self.leads if ranks is None else ranks:
            with contextlib.suppress(TransferError):
                self._connections[rank].send(Kind.SERVE, head)

    def tell_outcome(self, kind: Kind, head: Mapping[str, Any]) -> None:
        """Send the outcome to all ranks; once this returns, no rank writes any more."""
        self._stop_pings()
        hearing, self._hearing = self._hearing, {}
        # The lead of another node waits as long for its own ranks.
        until = time.monotonic() + (2 * ACK_SECONDS if self.leads else ACK_SECONDS)
        for rank, connection in self._connections.items():
            heard = hearing.get(rank) or _Hearing(rank, connection)
            hearing[rank] = heard
            heard.reported = True
            try:
                connection.send(kind, head)
            except TransferError:
                heard.gone = True
        over = [heard.wait_for_end(until) for heard in hearing.values()]
        if not all(over):
            self.close()  # a rank that hangs may write later, so the memory is freed, too

    def _stop_pings(self) -> None:
        """Stop the pings, since no rank reads them between two publishes."""
        for connection in self._connections.values():
            connection.stop_pinging()

    def close(self, *, meets: bool = True) -> None:
        """Close all connections and free the memory; replicas keep what they have mapped.

        Args:
            meets: Whether this rank meets the others again: without that word, the ranks below it don't wait for a meeting.
        """
        self.broken = True
        self._stop_pings()
        for connection in self._connections.values():
            if meets:
                with contextlib.suppress(TransferError):
                    connection.send(Kind.RELEASED)
            connection.close()
        self.arena.close()


class _Hearing:
    """Reads from one rank until it has stopped, in a thread.

    `filling` notes what it has written; without one, nothing more is expected. If it leads another node, `arriving`
    writes what it sends, and `unreached` takes the replicas that it can't serve.
    """

    def __init__(
        self,
        rank: int,
        connection: Connection,
        filling: MergedVersion | None = None,
        arriving: ArrivingChunks | None = None,
        unreached: OnUnreached | None = None,
    ) -> None:
        self.gone = False
        self.reported = filling is None
        """Whether the rank has got the outcome: before that it must not leave."""
        self._rank, self._connection, self._filling = rank, connection, filling
        self._arriving, self._unreached = arriving, unreached
        self._thread = threading.Thread(target=self._run, name=f"weights-rank-{rank}", daemon=True)
        self._thread.start()

    def wait_for_end(self, until: float) -> bool:
        """Whether the rank reports, by that time, that it has stopped writing."""
        if not self.gone:
            self._thread.join(max(0.0, until - time.monotonic()))
        return not self.gone and not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (frame := self._connection.receive()).kind is not Kind.RELEASED:
                self._take_frame(frame)
            if not self.reported:
                raise Malformed("it left in the middle of a publish")
        except (TransferError, LayoutError, SharedMemoryError) as error:
            self.gone = True
            self._fail(f"rank {self._rank} is gone: {error}")

    def _fail(self, why: str) -> None:
        if self._filling is not None:
            self._filling.fail(PublishFailed(why))

    def _take_frame(self, frame: Frame) -> None:
        filling = self._filling
        if filling is None or filling.given_up:
            return self._connection.skip(frame)
        match frame.kind:
            case Kind.FAILED:
                self._fail(frame.text("detail", "", most=MAX_REASON))
            case _ if self._arriving is not None:
                self._take_lead_frame(frame, filling, self._arriving)
            case Kind.FILLED if "block" in frame.head:
                filling.block(frame.text("name"), frame.integer("block", 1))
            case Kind.FILLED:
                begin, end = frame.integer("begin"), frame.integer("end")
                filling.arrived(frame.text("name"), begin, end)
            case _:
                raise Malformed(f"{frame.kind.name} came from rank {self._rank}")
        return None

    def _take_lead_frame(
        self, frame: Frame, filling: MergedVersion, arriving: ArrivingChunks
    ) -> None:
        match frame.kind:
            case Kind.DATA:
                try:
                    arriving.take(self._connection, frame)
                except Damaged as error:  # the connection itself works
                    self._fail(f"rank {self._rank}: {error}")
            case Kind.END:
                digests = _read_digests(frame, arriving.part)
                for leaves, found in zip(arriving.part.whole_leaves(), digests, strict=True):
                    filling.held.note_digests(leaves.start, found)
            case Kind.ERROR if self._unreached is not None:
                self._unreached(self._rank, frame.text("name"), frame.text("detail"))
            case _:
                raise Malformed(f"{frame.kind.name} came from rank {self._rank}")


def _read_digests(frame: Frame, part: NodePart) -> list[bytes]:
    """Return the hashes of the leaves that a node serves, by run of them.

    Raises:
        Malformed: They are not those.
    """
    try:
        found = [bytes.fromhex(each) for each in frame.head["digests"]]
    except (KeyError, TypeError, ValueError) as error:
        raise Malformed("END.digests must be a list of hexadecimal digits") from error
    if [len(each) for each in found] != [
        DIGEST_BYTES * len(leaves) for leaves in part.whole_leaves()
    ]:
        raise Malformed("END.digests must have the hash of each leaf that the node has")
    return found
