"""Pushed weights: which heads can give a copy, which lack the bytes, and what no worker has any more.

The operator brings none of these bytes. A trainer pushes them to every worker and then moves the
pointer; a worker that joins, restarts or has lost them fetches them from workers that keep them. A
worker keeps what it serves, so before the first commit there is none to fetch from, except what a
former worker left on its node: then it is its own peer. What came while it slept waits in its slot,
and it commits that as it wakes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rollout_common.wire import KeptWeights, StagedWeights
from rollout_operator.core.observed_pool import is_asleep
from rollout_operator.core.pass_plan import RequeueAfter
from rollout_operator.core.replica_heads import ReplicaHead, WeightsVersion

from .weights_plan import WeightsPlan, has_unpolled_head

MAX_PEERS = 3
"""Workers from which one fetches: they share the load, and the others serve if one fails."""


def lacks_bytes(head: ReplicaHead, version: WeightsVersion) -> bool:
    """Its answer shows that it has none of the bytes of this pushed version and receives none."""
    if not version.is_pushed or head.worker.state is None:
        return False
    return not head.has_staged(version) and not head.is_receiving(version)


def can_share_copy(head: ReplicaHead, version: WeightsVersion) -> bool:
    """Others can fetch these bytes from it."""
    state = head.worker.state
    kept = state.weights.kept if state else None
    if kept is None or head.is_finished or not head.pod.ip:
        return False
    if version.root_hash is None:
        # What a former worker left on a node may be another run's: what serves here is this pool's.
        return _is_of(kept, version) and head.has_at_least(version.identity)
    return _is_of(kept, version) and version.root_hash == kept.root_hash


def waits_for_wake(head: ReplicaHead, version: WeightsVersion) -> bool:
    """It sleeps, and has these pushed bytes staged, which its sleep does not end."""
    state = head.worker.state
    if not version.is_pushed or state is None or head.is_finished:
        return False
    return is_asleep(state) and head.staged_hash(version) is not None


def copy_certainty(head: ReplicaHead, version: WeightsVersion) -> int:
    """Return 2 if it has a copy of these weights, 1 if it had a pushed one when it last answered, else 0."""
    if can_share_copy(head, version) or waits_for_wake(head, version):
        return 2
    return int(version.is_pushed and _may_have_copy(head, version))


def is_staged_nowhere(version: WeightsVersion, heads: Mapping[str, ReplicaHead]) -> bool:
    """No worker has all of these pushed bytes: there is nothing to commit."""
    return version.is_pushed and not any(h.has_staged(version) for h in heads.values())


def is_lost_everywhere(version: WeightsVersion, heads: Mapping[str, ReplicaHead]) -> bool:
    """No worker can give these pushed bytes, receives them, or may have them while it is silent."""
    return version.is_pushed and not any(
        can_share_copy(h, version)
        or h.staged_hash(version) is not None
        or h.is_receiving(version)
        or _may_have_copy(h, version)
        for h in heads.values()
    )


def _may_have_copy(head: ReplicaHead, version: WeightsVersion) -> bool:
    """It is silent, and had these bytes by its last answer, or has not answered this process yet."""
    if not head.is_silent or not head.pod.started:
        return False
    last = head.worker.last
    if last is None:
        return head.pod.gate_boot is not None
    return any(f and _is_of(f, version) for f in (last.weights.kept, last.weights.staged))


def _is_of(found: KeptWeights | StagedWeights, version: WeightsVersion) -> bool:
    return (found.epoch, found.version) == version.identity.as_tuple()


def is_copy_available(version: WeightsVersion, heads: Mapping[str, ReplicaHead]) -> bool:
    """Some worker gives these bytes now."""
    return any(can_share_copy(h, version) for h in heads.values())


def is_stranded(head: ReplicaHead, version: WeightsVersion, *, given: bool) -> bool:
    """It lacks the bytes, and no worker gives them now (`given`: of `is_copy_available`)."""
    return lacks_bytes(head, version) and not given


def no_copy_message(head: ReplicaHead, version: WeightsVersion) -> str:
    """Say that no replica has what a head needs, and what helps."""
    return (
        f"{head.pod.name} can't get weights {version.identity}: they were pushed, and no replica has "
        "a copy to give any more: publish again, under a higher version"
    )


def waiting_for_bytes_message(
    version: WeightsVersion, waiting: Iterable[ReplicaHead], heads: Mapping[str, ReplicaHead]
) -> str:
    """Say which heads the trainer has yet to push a version to; empty if it is under way to all."""
    missing = [h.pod.name for h in waiting if lacks_bytes(h, version)]
    if is_lost_everywhere(version, heads):
        return "no replica has the bytes: publish again, under a higher version"
    if not missing:
        return ""
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"waiting for the trainer to push them to {missing[0]}{more}"


def assign_peers(plan: WeightsPlan, heads: Mapping[str, ReplicaHead]) -> None:
    """Choose the peers from which each head fetches bytes that it lacks; note what no worker has."""
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
    ordered = sorted(heads.values(), key=lambda h: h.pod.replica)
    givers = [h for h in ordered if can_share_copy(h, version)]
    serving, others = ([h for h in givers if h.is_serving is now] for now in (True, False))
    due = plan.has_commit_begun or version.identity <= plan.committed.identity
    lost = due and not has_unpolled_head(heads) and is_lost_everywhere(version, heads)
    for head in lacking:
        peers = _choose_peers(head, serving, others, keeps=can_share_copy(head, version))
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

    No other program could bring them again. The head waits for the trainer no longer than a staging
    may take (`seconds`), and not at all if its epoch is over.
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


def _choose_peers(
    head: ReplicaHead, *givers: Sequence[ReplicaHead], keeps: bool
) -> list[ReplicaHead]:
    """A few that can give it, itself first if it `keeps` it, then serving ones; each joiner begins with another one."""
    first = head.pod.replica
    chosen = [
        found[(first + turn) % len(found)]
        for found in givers
        for turn in range(min(MAX_PEERS + 1, len(found)))
    ]
    own = [head] if keeps else []
    return [*own, *(h for h in chosen if h is not head)][:MAX_PEERS]
