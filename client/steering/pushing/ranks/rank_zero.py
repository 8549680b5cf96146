"""Rank 0 of a trainer: it plans who writes and serves what, and publishes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollout_client.errors import PublishFailed
from rollout_client.steering.pushing.options import PushWork
from rollout_client.steering.pushing.push_tensors import Dtypes
from rollout_client.steering.pushing.routes import ROUTES, Route
from rollout_client.steering.pushing.settings import DEATH_SECONDS
from rollout_client.steering.pushing.shards.merged_version import MergedVersion
from rollout_client.steering.pushing.shards.node_parts import NodePart, node_parts
from rollout_client.steering.pushing.shards.shard_plan import Offer, share_out
from rollout_client.steering.pushing.shards.shard_writing import InMemory, ShardWriting
from rollout_client.steering.pushing.tensor_copying import Copier
from rollout_client.steering.steering_protocol import Published
from rollout_common.transfer.connections.frames import Kind
from rollout_common.transfer.connections.tls_session import Trust, issuers_of

from .rank_group import RankGroup
from .rank_outcome import to_json

logger = logging.getLogger(__name__)


_Basis = tuple[Mapping[int, Offer], bool, Dtypes]
"""What a plan depends on: the offers by rank, whether other nodes write a share, what is cast."""


class _MadePlan(NamedTuple):
    """Who writes what: the ranks of this node, and by lead those of the others."""

    basis: _Basis
    own: NodePart
    far: Mapping[int, NodePart]


class RankZero:
    """The part of rank 0 in the publishes of a group: all other ranks of its node, and the leads of other nodes."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self._lock = threading.Lock()
        self.source_count = 1.0
        """How many nodes serve, by their parts: half of all bytes on one is two."""
        self._takes_requests = False
        """Whether leads may be asked to serve: all have joined, and none has got the outcome."""
        self._request: dict[str, Any] | None = None
        """What the leads of other nodes are to serve; None: unknown so far."""
        self._failing: set[int] = set()
        """Leads that can't serve all replicas."""
        self._plan: _MadePlan | None = None
        """The last plan, which holds as long as all ranks have the same."""

    @property
    def broken(self) -> bool:
        """Whether the ranks have to meet again."""
        return self.group.broken

    def has_missed(self, version: int) -> bool:
        """Whether a version was ended without this rank: never."""
        return False

    def fill(self, filling: MergedVersion, copier: Copier, work: PushWork) -> None:
        """Make all ranks write their parts; return once everything is there and hashed.

        Raises:
            PublishFailed: Another rank is gone, failed, or did not join in time.
            LayoutError: The ranks' tensors don't make a complete model.
            SharedMemoryError: There is no room.
        """
        writing = ShardWriting(work.tensors)
        offers = {0: writing.offer, **self.group.collect_offers(work.version, work.seconds)}
        # By shared memory, replicas of this node need all of it here; else other nodes write a share of it, too.
        spread = work.plan.transport in ("tcp", "nixl")
        own, far = self._make_plan(filling, (offers, spread, filling.dtypes))
        names = own.scattered.union(*(part.scattered for part in far.values()))
        scattered = {name: (0, filling.layout[name].nbytes) for name in names}
        filling.begin(own.nbytes, {**own.blocks, **scattered})
        with self._lock:
            self._takes_requests = True
        self.group.order_work(filling, own, far, self._serve_instead)
        self._ask_to_serve()
        try:
            place = InMemory.of(filling, copier)
            writing.write(own.boxes_of(0), place, lambda: filling.given_up, filling.layout)
        except RuntimeError as error:  # from torch, as when another rank of a gather is gone
            raise filling.why(DEATH_SECONDS) or PublishFailed(f"rank 0: {error}") from error
        if filling.all_written():
            filling.end()

    def _make_plan(
        self, filling: MergedVersion, basis: _Basis
    ) -> tuple[NodePart, Mapping[int, NodePart]]:
        """Take memory; return the part of this node, and by lead those of the other nodes."""
        plan, leads = self._plan, self.group.leads
        if plan is not None and plan.basis == basis:
            filling.take_memory(plan.own.layout)
            return plan.own, plan.far
        self._plan = None
        offers, spread, _ = basis
        node_of = {rank: lead for lead, node in leads.items() for rank in node}
        specs, shares = share_out(offers, () if spread else node_of)
        filling.plan(specs)
        parts = node_parts(filling.layout, shares, dict.fromkeys(offers, 0) | node_of)
        own = parts.pop(0)
        far = [part.nbytes for part in parts.values()]
        self.source_count = (own.nbytes + sum(far)) / max(1, own.nbytes, *far)
        self._plan = _MadePlan(basis, own, parts)
        return own, parts

    def serve(
        self,
        routes: Sequence[Route],
        base: Mapping[str, Any] | None,
        trust: Trust | None,
        *,
        everything: bool,
        rate: float | None = None,
    ) -> None:
        """Let the other nodes serve their parts to the replicas; may be called from any thread.

        Args:
            routes: To the replicas.
            base: The version from which deltas are sent; None: no deltas are.
            trust: What TLS trusts.
            everything: Whether this rank needs all bytes itself, for shared memory or a folder.
            rate: Most bytes a second over TCP that each of them sends; None: no limit.
        """
        served = [route.for_part for route in routes if route.kind != "shm"]
        request: dict[str, Any] = {"everything": everything, "base": base, "rate": rate}
        request["routes"] = ROUTES.dump_python(served, mode="json")
        if trust is not None and any(route.receiver.transfer.tls for route in served):
            request["issuers"] = issuers_of(trust)
        with self._lock:
            self._request = request
        if self.group.leads:
            # In a thread, since the caller's loop must not wait for a rank that reads slowly.
            threading.Thread(target=self._ask_to_serve, name="weights-serve", daemon=True).start()

    def _ask_to_serve(self) -> None:
        # Under the lock: what followed the outcome would be taken for the next publish's by a lead.
        with self._lock:
            if self._takes_requests and self._request is not None:
                request, self._request = self._request, None
                self.group.ask_leads(request)

    def _serve_instead(self, lead: int, replica: str, why: str) -> None:
        """Get the part of a node that can't serve all replicas, and serve it from here."""
        if lead in self._failing:
            return
        self._failing.add(lead)
        logger.warning(
            "rank %d can't serve its node's weights to %s, so rank 0 does: %s; let all nodes of the trainer reach"
            " the replicas' weights port",
            lead,
            replica,
            why,
        )
        with self._lock:
            if self._takes_requests:
                self.group.ask_leads({"routes": [], "everything": True, "base": None}, (lead,))

    def tell(self, version: int, outcome: Published | BaseException) -> None:
        """Send the outcome of a version to all ranks; once this returns, no rank writes any more."""
        news = {**to_json(outcome), "version": version}
        with self._lock:
            self._takes_requests, self._request = False, None
            self._failing = set()
        self.group.tell_outcome(Kind.FAILED if "error" in news else Kind.STAGED, news)

    def close(self, *, meets: bool = True) -> None:
        """Close all connections and free the memory, as `RankGroup.close`."""
        self.group.close(meets=meets)
