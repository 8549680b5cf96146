"""Pushed weights: who has a copy to give, who lacks the bytes, and what nobody has any more.

The operator brings none of these bytes. A trainer pushes them to every worker and then moves the
pointer; who joins, restarts or has lost them fetches them from workers that keep them. A worker
keeps what it serves, so there is nobody to fetch from before the first commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rollout_operator.core.pass_plan import RequeueAfter
from rollout_operator.core.replica_heads import ReplicaHead, WeightsVersion

from .weights_plan import WeightsPlan, has_unpolled_head

MAX_PEERS = 3
"""Workers from which one fetches: the load is shared, and one that fails is not missed."""


def lacks_bytes(head: ReplicaHead, version: WeightsVersion) -> bool:
    """It is known to have none of the bytes of this pushed version, nor to be given them."""
    if not version.is_pushed or head.worker.state is None:
        return False
    return not head.has_staged(version) and not head.is_receiving(version)


def can_share_copy(head: ReplicaHead, version: WeightsVersion) -> bool:
    """Others can fetch these bytes from it."""
    state = head.worker.state
    kept = state.weights.kept if state else None
    if kept is None or head.is_finished or not head.pod.ip:
        return False
    same = (kept.epoch, kept.version) == version.identity.as_tuple()
    return same and version.root_hash in (None, kept.root_hash)


def is_staged_nowhere(version: WeightsVersion, heads: Mapping[str, ReplicaHead]) -> bool:
    """Nobody has all of these pushed bytes: there is nothing that could be committed."""
    return version.is_pushed and not any(h.has_staged(version) for h in heads.values())


def is_lost_everywhere(version: WeightsVersion, heads: Mapping[str, ReplicaHead]) -> bool:
    """Nobody can give these pushed bytes, nor will soon, nor may be silent and have them."""
    return version.is_pushed and not any(
        can_share_copy(h, version)
        or h.staged_hash(version) is not None
        or h.is_receiving(version)
        or _may_have_copy(h, version)
        for h in heads.values()
    )


def _may_have_copy(head: ReplicaHead, version: WeightsVersion) -> bool:
    """It is silent, and had these bytes when it last spoke, or perhaps."""
    if not head.is_silent or not head.pod.started:
        return False
    last = head.worker.last
    if last is None:
        return head.pod.gate_boot is not None
    found = (last.weights.kept, last.weights.staged)
    return any(f and (f.epoch, f.version) == version.identity.as_tuple() for f in found)


def is_copy_available(version: WeightsVersion, heads: Mapping[str, ReplicaHead]) -> bool:
    """Somebody gives these bytes now."""
    return any(can_share_copy(h, version) for h in heads.values())


def is_stranded(head: ReplicaHead, version: WeightsVersion, *, given: bool) -> bool:
    """It lacks the bytes, and nobody gives them now (`is_copy_available`)."""
    return lacks_bytes(head, version) and not given


def no_copy_message(head: ReplicaHead, version: WeightsVersion) -> str:
    """Say that nobody has what a head needs, and what helps."""
    return (
        f"{head.pod.name} can't get weights {version.identity}: they were pushed, and no replica has "
        "a copy to give any more: publish again, under a higher version"
    )


def waiting_for_bytes_message(
    version: WeightsVersion, waiting: Iterable[ReplicaHead], heads: Mapping[str, ReplicaHead]
) -> str:
    """Say who has not been given the bytes of a pushed version; empty if all have, or will soon."""
    missing = [h.pod.name for h in waiting if lacks_bytes(h, version)]
    if is_lost_everywhere(version, heads):
        return "no replica has the bytes: publish again, under a higher version"
    if not missing:
        return ""
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"waiting for the trainer to push them to {missing[0]}{more}"


def assign_peers(plan: WeightsPlan, heads: Mapping[str, ReplicaHead]) -> None:
    """Choose from whom each head that lacks bytes fetches them; note what nobody has any more."""
    lacking: dict[object, tuple[WeightsVersion, list[ReplicaHead]]] = {}
    for uid, version in plan.version_for.items():
        if lacks_bytes(heads[uid], version):
            same = (version.identity.as_tuple(), version.root_hash)
            lacking.setdefault(same, (version, []))[1].append(heads[uid])
    for version, found in lacking.values():
        _assign_version_peers(plan, heads, version, found)


def _assign_version_peers(
    plan: WeightsPlan,
    heads: Mapping[str, ReplicaHead],
    version: WeightsVersion,
    lacking: Iterable[ReplicaHead],
) -> None:
    givers = sorted(
        (h for h in heads.values() if can_share_copy(h, version)), key=lambda h: h.pod.replica
    )
    serving = [h for h in givers if h.is_serving]
    others = [h for h in givers if not h.is_serving]
    due = plan.has_commit_begun or version.identity <= plan.committed.identity
    lost = due and not has_unpolled_head(heads) and is_lost_everywhere(version, heads)
    for head in lacking:
        peers = _choose_peers(head, serving, others)
        if peers:
            plan.peers[head.pod.uid] = tuple(h.pod.ip for h in peers if h.pod.ip)
        elif lost and not head.newer_push_message(version):
            plan.no_copy = plan.no_copy or no_copy_message(head, version)


def awaits_pointer(
    plan: WeightsPlan,
    head: ReplicaHead,
    version: WeightsVersion,
    seconds: float,
    wait: RequeueAfter,
) -> bool:
    """A trainer has pushed later weights into its slot, and is about to move the pointer to them.

    Nobody could bring them again. A trainer that is gone is waited for no longer than a staging may
    take (`seconds`), and not at all if its epoch is over.
    """
    slot = head.staged_slot
    if slot is None or head.newer_push_message(version) is None or slot.epoch < plan.fence_epoch:
        return False
    if version.is_pushed and head.pod.uid not in plan.peers:
        return True  # there is nothing to put in its place
    left = seconds - head.worker.slot_seconds
    if left > 0:
        wait.at_most(left)
    return left > 0


def _choose_peers(head: ReplicaHead, *givers: Sequence[ReplicaHead]) -> list[ReplicaHead]:
    """A few that give it, those that serve first; each joiner begins with another one."""
    first = head.pod.replica
    chosen = [
        found[(first + turn) % len(found)]
        for found in givers
        for turn in range(min(MAX_PEERS + 1, len(found)))
    ]
    return [h for h in chosen if h is not head][:MAX_PEERS]
