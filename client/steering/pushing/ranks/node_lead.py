"""The rank that leads a node other than rank 0's: it serves what its node has to the replicas, and sends rank 0 the rest."""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import override

from rollout_client.errors import PublishFailed
from rollout_client.steering.pushing.push_deltas import PieceDeltas, PreviousVersion
from rollout_client.steering.pushing.push_progress import PushProgress
from rollout_client.steering.pushing.routes import ROUTES
from rollout_client.steering.pushing.sending import Link, Sender, start_senders
from rollout_client.steering.pushing.settings import RANK_LOOK_SECONDS
from rollout_client.steering.pushing.shards.chunk_stream import send_chunks
from rollout_client.steering.pushing.shards.merged_version import MergedVersion
from rollout_client.steering.pushing.shards.node_parts import NodePart
from rollout_client.steering.pushing.shards.shard_plan import Offer
from rollout_client.steering.pushing.shards.shard_writing import InMemory, ShardWriting
from rollout_common.transfer.connections.blocking_connection import Connection
from rollout_common.transfer.connections.frames import Frame, Kind
from rollout_common.transfer.connections.rate_limit import RateLimit
from rollout_common.transfer.connections.tls_session import trust_in
from rollout_common.wire import WeightsId

from .rank_follower import RankFollower
from .rank_group import RankGroup


class NodeLead(RankFollower):
    """The part of such a rank in the publishes of a group; `group` has the other ranks of its node."""

    def __init__(self, connection: Connection, rank: int, group: RankGroup) -> None:
        super().__init__(connection, rank)
        self._group = group
        self._filling: MergedVersion | None = None
        self._request: Frame | None = None
        """What rank 0 asks this node to serve, until that has begun."""
        self._is_sent = False
        """Whether rank 0 has got the rest, and the hashes of what is here."""
        self._has_sent_everything = False
        """Whether rank 0 has got what this node serves as well, or is getting it."""
        self._senders: list[Sender] = []
        self._reported: set[str] = set()
        self._progress: PushProgress | None = None
        self._before: PreviousVersion | None = None

    @property
    @override
    def broken(self) -> bool:
        return self._group.broken or super().broken

    @override
    def close(self, *, meets: bool = True) -> None:
        self._stop_senders()
        self._forget_base()
        if self._filling is not None:
            self._filling.fail()  # else its thread would wait for what nobody writes any more
        super().close(meets=meets)
        self._group.close(meets=meets)

    # A publish.

    @override
    def _offer_parts(self, version: int, writing: ShardWriting) -> None:
        try:
            super()._offer_parts(version, writing)
        except PublishFailed as error:
            self._connection.send(Kind.FAILED, {"detail": str(error)})  # it names the rank

    @override
    def _collect_offers(self, version: int, writing: ShardWriting) -> Mapping[int, Offer]:
        offers = self._group.collect_offers(version, self._seconds, self._stopped)
        return {**offers, self._rank: writing.offer}

    @override
    def _write(self, frame: Frame, writing: ShardWriting) -> None:
        """Have the ranks of this node write their parts, and send rank 0 what others can't get from here."""
        part = self._read_order(frame)
        filling = MergedVersion(self._group.arena, self._copier)
        try:
            filling.take_memory(part.layout, part.nbytes)
            filling.begin(part.nbytes, part.blocks, part.scattered)
            self._group.order_work(filling, part)
            self._filling = filling
            self._serve_if_asked()
            place = InMemory.of(filling, self._copier)
            writing.write(part.boxes_of(self._rank), place, self._has_ended, part.layout)
            while not filling.wait_node(RANK_LOOK_SECONDS):
                if self._has_ended():
                    return
            self._send_part(filling, part)
        except PublishFailed as error:
            self._connection.send(Kind.FAILED, {"detail": str(error)})  # it names the rank
        finally:
            if self._filling is not filling:
                filling.close()

    def _has_ended(self) -> bool:
        """Whether nobody needs what this rank writes: rank 0 has ended the publish, or a rank of this node has failed."""
        return self._stopped() or (self._filling is not None and self._filling.given_up)

    def _send_part(self, filling: MergedVersion, part: NodePart) -> None:
        send_chunks(self._connection, filling.slot, part.rest(), self._stopped)
        held = filling.held
        digests = [held.leaf_digests_of(leaves).hex() for leaves in part.whole_leaves()]
        self._connection.send(Kind.END, {"digests": digests})
        self._is_sent = True
        self._send_everything_if_asked()

    @override
    def _stopped(self) -> bool:
        """Whether rank 0 has ended the publish; it also takes a request to serve."""
        if self._ended is None and (frame := self._connection.poll(0)) is not None:
            if frame.kind is Kind.SERVE:
                self._take_frame(frame)
            else:
                self._ended = frame
        self._report_unreached()
        return self._ended is not None

    @override
    def _take_frame(self, frame: Frame) -> None:
        if frame.kind is not Kind.SERVE:
            return super()._take_frame(frame)
        self._request = frame
        self._serve_if_asked()
        return self._send_everything_if_asked()

    @override
    def _mind(self) -> None:
        super()._mind()
        self._report_unreached()

    # What it serves.

    def _serve_if_asked(self) -> None:
        if self._request is None or self._filling is None or self._senders or self._progress:
            return
        head = self._request.head
        routes = ROUTES.validate_python(head["routes"])
        issuers = head.get("issuers")
        trust = trust_in(issuers, "rank 0's control_ca does not have its CA") if issuers else None
        rate = head.get("rate")
        pace = None if rate is None else RateLimit(rate)
        filling, base, before = self._filling, head.get("base"), self._before
        deltas = None
        if before is not None and base == before.named.model_dump():
            deltas = PieceDeltas(before, filling.held)
        names = [route.receiver.name for route in routes]
        self._progress = PushProgress(names, filling.layout.nbytes, lambda: None)
        self._senders = start_senders(routes, filling, self._progress, Link(trust, pace), deltas)

    def _send_everything_if_asked(self) -> None:
        """Send rank 0 what this node serves as well, if rank 0 needs it: for shared memory, or a folder."""
        filling, part, request = self._filling, self._part, self._request
        if not self._is_sent or filling is None or part is None or request is None:
            return
        self._request = None
        if request.head.get("everything") and not self._has_sent_everything:
            # Before a second request, which may come while it is sent.
            self._has_sent_everything = True
            send_chunks(self._connection, filling.slot, part.held(), self._stopped)

    def _report_unreached(self) -> None:
        """Report the replicas that this node can't serve, each once."""
        progress = self._progress
        if progress is None:
            return
        for name, why in progress.failures().items():
            if name not in self._reported:
                self._reported.add(name)
                self._connection.send(Kind.ERROR, {"name": name, "detail": why})

    # The end of a publish.

    @override
    def _end_publish(self, outcome: Frame) -> None:
        self._stop_senders()
        filling = self._filling
        self._filling = self._request = self._progress = None
        self._is_sent = self._has_sent_everything = False
        self._reported = set()
        if filling is not None:
            filling.fail()
        self._group.tell_outcome(outcome.kind, outcome.head)
        self._keep_base(outcome, filling)
        if filling is not None:
            filling.close()
        if self._group.broken:
            self._connection.close()  # instead of an answer, so that rank 0 has all ranks meet again

    def _stop_senders(self) -> None:
        senders, self._senders = self._senders, []
        for sender in senders:
            sender.stop()

    def _keep_base(self, outcome: Frame, filling: MergedVersion | None) -> None:
        """Keep the bytes of a published version, if deltas from it may be sent; release those of the one before."""
        self._forget_base()
        if outcome.kind is not Kind.STAGED or filling is None or not self._delta:
            return
        identity = WeightsId.model_validate(outcome.head["identity"])
        self._before = PreviousVersion.from_filling(
            filling, identity, str(outcome.head["root_hash"])
        )

    def _forget_base(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            before.close()
