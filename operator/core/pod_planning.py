"""Which pods to create and to delete. Pure.

A replica is a *gang* of `parallelism.nodes` pods that live and die together. Its back-off is kept
in the world: a failed pod stays where it is until its replacement is due, and the replacement
carries the count in an annotation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from rollout_operator.api import names
from rollout_operator.api.revision import is_current_revision
from rollout_operator.api.spec import RolloutReplicaSpec

from .failures import backoff_seconds, consecutive_failures, failure_message_prefix
from .observed_pool import RECALLED_KEY, ObservedPool, Pod
from .pass_plan import CreatePod, DeletePod, RequeueAfter, SeekPod
from .placement import PlacementProblem, foreign_pod_problems
from .pool_placements import PoolPlacements
from .stuck_pods import plan_forced_deletion, stuck_message


@dataclass(slots=True)
class PodPlan:
    """What `plan_pods` decides."""

    seek: list[SeekPod] = field(default_factory=list)
    create: list[CreatePod] = field(default_factory=list)
    delete: list[DeletePod] = field(default_factory=list)
    exhausted: dict[int, str] = field(default_factory=dict)
    """Replicas that failed too often, with the reason."""
    backing_off: dict[int, str] = field(default_factory=dict)
    restarts: dict[int, int] = field(default_factory=dict)
    """Failures to note on the pods that replace these replicas."""
    failed: dict[int, str] = field(default_factory=dict)
    """Why replicas restart now, of those whose failure no pass before this one counted."""
    logs: dict[int, str] = field(default_factory=dict)
    """Of those, the end of the log of what failed."""
    in_a_row: dict[int, int] = field(default_factory=dict)
    """Failures in a row of the replicas whose pods have ended, this one included."""
    replacing: dict[int, int] = field(default_factory=dict)
    """The same, of all replicas whose new pods are not all there yet; for status."""
    outdated: int = 0
    """Gangs at an old revision that still wait for their turn."""
    waiting: dict[int, str] = field(default_factory=dict)
    """What replicas without pods wait for, of the trainer beside which they belong."""
    misplaced: list[PlacementProblem] = field(default_factory=list)
    """Why replicas have no place at all."""
    strangers: list[PlacementProblem] = field(default_factory=list)
    """Pods that look like the trainer's or the pool's and are not: they change nothing."""
    stuck: list[str] = field(default_factory=list)
    """Pods that don't go and may not be removed by force."""


@dataclass(frozen=True, slots=True)
class PodGang:
    """The pods of one replica."""

    index: int
    pods: tuple[Pod, ...]
    living: tuple[Pod, ...]
    """Pods that are not being deleted."""
    size: int

    @property
    def is_complete(self) -> bool:
        """Every rank is there and none has ended."""
        return len(self.living) == self.size and not any(p.is_finished for p in self.living)


def group_gangs(spec: RolloutReplicaSpec, seen: ObservedPool) -> dict[int, PodGang]:
    """Gangs by replica index: those wanted, and surplus ones that still have pods."""
    by_index: dict[int, list[Pod]] = {index: [] for index in range(spec.replicas)}
    for pod in seen.pods:
        by_index.setdefault(pod.replica, []).append(pod)
    return {
        index: PodGang(
            index,
            tuple(pods),
            tuple(pod for pod in pods if not pod.is_deleting),
            spec.parallelism.nodes,
        )
        for index, pods in sorted(by_index.items())
    }


def plan_pods(
    spec: RolloutReplicaSpec,
    seen: ObservedPool,
    now: float,
    healthy: frozenset[int],
    wait: RequeueAfter,
    settling: frozenset[int] = frozenset(),
) -> PodPlan:
    """Decide creations and deletions.

    Args:
        spec: the wanted pool.
        seen: the world; pods that are not ours are never touched.
        now: wall clock, seconds.
        healthy: replicas that do what the spec asks for; the others use up `maxUnavailable`.
        wait: told when to look again.
        settling: replicas on their way to it; not available, and no reason to replace them all.
    """
    plan = PodPlan()
    gangs = group_gangs(spec, seen)
    places = PoolPlacements(spec, seen)
    for pod in (*seen.pods, *seen.predecessors):
        if pod.owned:
            forced = plan_forced_deletion(pod, now, wait)
            plan.delete += [forced] if forced else []
            told = stuck_message(pod, now)
            plan.stuck += [told] if told else []
    for gang in gangs.values():
        if spec.suspend or gang.index >= spec.replicas:
            reason = "the pool is suspended" if spec.suspend else "scaled down"
            _delete_gang(spec, gang, plan, reason)
    if not spec.suspend:
        taken = {pod.replica for pod in seen.predecessors}
        for gang in gangs.values():
            if gang.index < spec.replicas and (gang.pods or gang.index not in taken):
                _reconcile_gang(spec, seen, gang, places, now, plan, wait)
        _roll_outdated_gangs(spec, gangs, healthy, settling, plan)
        there, busy = {g.index: g.pods for g in gangs.values()}, bool(plan.create or plan.delete)
        for index, why in places.plan_moves(
            there, healthy, wait, busy=busy, pushed=_is_target_pushed(spec)
        ):
            _delete_gang(spec, gangs[index], plan, why)
    plan.replacing = _failures_under_replacement(spec, seen, gangs, plan)
    plan.waiting, plan.misplaced = places.waiting, places.misplaced
    plan.strangers = [*places.strangers, *foreign_pod_problems(seen)]
    return plan


def _is_target_pushed(spec: RolloutReplicaSpec) -> bool:
    target = spec.weights.target
    return target is not None and target.source.pushed is not None


def _failures_under_replacement(
    spec: RolloutReplicaSpec, seen: ObservedPool, gangs: dict[int, PodGang], plan: PodPlan
) -> dict[int, int]:
    """Failures of replicas between their old pods and their new ones."""
    wanted = 0 if spec.suspend else spec.replicas
    kept = {
        index: count
        for index, count in seen.restarts_of.items()
        if index < wanted and not gangs[index].is_complete
    }
    return kept | plan.restarts


def _missing_ranks(gang: PodGang) -> set[int]:
    return {*range(gang.size)} - {p.rank for p in gang.pods} if gang.pods else set()


def _delete_gang(spec: RolloutReplicaSpec, gang: PodGang, plan: PodPlan, reason: str) -> None:
    """Delete a gang, its members once nothing of it drains any more: they run the head's requests."""
    if gang.size > 1 and len(gang.living) == len(gang.pods):
        plan.seek += [SeekPod(gang.index, rank) for rank in sorted(_missing_ranks(gang))]
    head = next((p for p in gang.pods if p.rank == 0 and p.owned), None)
    members = [p for p in gang.living if p is not head]
    whole = len(members) == gang.size - 1 and not any(p.is_finished for p in members)
    if head is not None and not head.is_finished and whole:
        _delete_pods(spec, [] if head.is_deleting else [head], plan, reason)
    else:
        _delete_pods(spec, gang.living, plan, reason)


def _delete_pods(spec: RolloutReplicaSpec, pods: Sequence[Pod], plan: PodPlan, reason: str) -> None:
    plan.delete += [
        DeletePod(p.name, p.uid, _grace_seconds(spec, p), reason) for p in pods if p.owned
    ]


def _grace_seconds(spec: RolloutReplicaSpec, pod: Pod) -> int | None:
    """Seconds for a pod to end; None: its own, which spec has not changed since it was made."""
    if pod.is_finished and not pod.colocated:
        return 0
    return None if pod.own_grace in (None, spec.grace_seconds) else spec.grace_seconds


def _reconcile_gang(
    spec: RolloutReplicaSpec,
    seen: ObservedPool,
    gang: PodGang,
    places: PoolPlacements,
    now: float,
    plan: PodPlan,
    wait: RequeueAfter,
) -> None:
    """Replace a gang that failed, or lost a pod or its place; create a missing one."""
    failed = [p for p in gang.living if p.is_finished]
    going = len(gang.living) < len(gang.pods)
    missing = _missing_ranks(gang)
    if going:
        # What ends beside a pod that somebody deletes ends because of it: that is no failure.
        _delete_gang(spec, gang, plan, "its replica lost a pod and restarts as a whole")
    elif lost := places.lost_reason(gang.living):
        _delete_gang(spec, gang, plan, lost)
    elif failed:
        _replace_failed_gang(spec, seen, gang, failed, now, plan, wait)
    elif gang.pods and missing:
        if not all(is_current_revision(p.revision, spec) for p in gang.living):
            # What the API server refuses may be for what the first ones take, by the old template.
            _delete_gang(spec, gang, plan, "its pod template is outdated")
        elif _were_never_created(seen, gang, missing) or not any(p.started for p in gang.pods):
            restarts = max(p.restarts for p in gang.pods)
            _create_ranks(gang, places, sorted(missing), restarts, plan)
        else:
            _delete_gang(spec, gang, plan, "its replica lost a pod and restarts as a whole")
    elif not gang.pods:
        restarts = seen.restarts_of.get(gang.index, 0)
        _create_ranks(gang, places, range(gang.size), restarts, plan)


def _create_ranks(
    gang: PodGang, places: PoolPlacements, ranks: Sequence[int], restarts: int, plan: PodPlan
) -> None:
    """Create these ranks, as soon as there is a place for each.

    Until then those are sought that a claim knows: such a pod lost its labels, and may be what keeps
    the trainer waiting.
    """
    found = places.place_ranks(gang.index, ranks)
    plan.create += [CreatePod(gang.index, rank, restarts, place) for rank, place in found]
    if not found:
        plan.seek += [
            SeekPod(gang.index, rank) for rank in places.unlabelled_ranks(gang.index, ranks)
        ]


def _were_never_created(seen: ObservedPool, gang: PodGang, missing: set[int]) -> bool:
    """The API server has refused these ranks so far: the others wait for them, and lost none."""
    refused = (seen.conflicts, seen.rejections, seen.api_errors, seen.awaited)
    if any(RECALLED_KEY in those for those in refused):
        return True  # the process before this one was refused something: trying will show
    wanted = (f"pod/{names.pod_name(seen.name, gang.index, rank)}" for rank in missing)
    return all(any(name in those for those in refused) for name in wanted)


def _replace_failed_gang(
    spec: RolloutReplicaSpec,
    seen: ObservedPool,
    gang: PodGang,
    failed: list[Pod],
    now: float,
    plan: PodPlan,
    wait: RequeueAfter,
) -> None:
    # Who ended first says why; the clocks of nodes differ, but who followed says so itself.
    pod = min(failed, key=lambda p: (p.followed, p.ended_at, p.rank))
    count = consecutive_failures(spec, seen, gang.pods, pod) + 1
    plan.in_a_row[gang.index] = count
    policy = spec.restart_policy
    why = pod.trouble or f"pod {pod.name!r} ended with phase {pod.phase}"
    if gang.size > 1 and pod.trouble:
        why = f"{pod.name}: {why}"
    if policy.max_restarts is not None and count > policy.max_restarts:
        plan.exhausted[gang.index] = (
            f"replica {gang.index} failed {count} times (maxRestarts {policy.max_restarts}): {why}; "
            "fix the cause, then change the spec or set a new value for rollout.dev/retry"
        )
        return
    left = backoff_seconds(spec, count) - max(now - pod.ended_at, pod.witnessed)
    if left > 0:
        at = datetime.fromtimestamp(now + left, UTC).strftime("%H:%M:%S")
        plan.backing_off[gang.index] = (
            f"replica {gang.index} failed {count} times in a row and restarts at {at} UTC: {why}"
        )
        wait.at_most(left)
        return
    plan.restarts[gang.index] = count
    if seen.restarts_of.get(gang.index) != count:
        plan.failed[gang.index] = f"{failure_message_prefix(gang.index)}{why}"
        plan.logs[gang.index] = pod.last_log
    _delete_pods(spec, gang.living, plan, f"its replica failed ({why})")


def _roll_outdated_gangs(
    spec: RolloutReplicaSpec,
    gangs: dict[int, PodGang],
    healthy: frozenset[int],
    settling: frozenset[int],
    plan: PodPlan,
) -> None:
    """Delete gangs at an old revision, broken ones first, within `maxUnavailable`."""
    going = {d.name for d in plan.delete}
    wanted = [g for g in gangs.values() if g.index < spec.replicas]
    outdated = [
        g
        for g in wanted
        if g.is_complete
        and not any(p.name in going for p in g.living)
        and not all(is_current_revision(p.revision, spec) for p in g.living)
    ]
    plan.outdated = len(outdated)
    budget = spec.update_strategy.max_unavailable - sum(g.index not in healthy for g in wanted)
    for gang in sorted(outdated, key=lambda g: (g.index in healthy, -g.index)):
        if gang.index in healthy:
            if budget <= 0:
                continue
            budget -= 1
        elif gang.index in settling and budget < 0:
            continue  # with those that are down already it would be one too many
        _delete_gang(spec, gang, plan, "its pod template is outdated")
