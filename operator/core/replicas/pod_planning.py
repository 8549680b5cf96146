"""Which pods to create and to delete. Pure.

A replica is a *gang* of `parallelism.nodes` pods that live and die together. Its back-off is kept
in the world: a failed pod stays where it is until its replacement is due, and the replacement
carries the count in an annotation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from rollout_operator.api import names
from rollout_operator.api.revision import is_current_revision
from rollout_operator.api.spec import RolloutReplicaSpec
from rollout_operator.core.observed_pool import RECALLED_KEY, ObservedPool, Pod
from rollout_operator.core.pass_plan import CreatePod, DeletePod, RequeueAfter, SeekPod
from rollout_operator.core.placement import PlacementProblem, foreign_pod_problems
from rollout_operator.core.pods.forced_deletion import plan_forced_deletion, stuck_message
from rollout_operator.core.pool_placements import PoolPlacements
from rollout_operator.core.settings import FAILURE_RESET_SECONDS

from .replica_choice import ReplicaChoice

_LOST_POD_REASON = "its replica lost a pod and restarts as a whole"
_OUTDATED_REASON = "its pod template is outdated"
_SURGE_OVER_REASON = "what it was added for is over"


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
    """What replicas without pods wait for, of the trainer whose devices they share."""
    misplaced: list[PlacementProblem] = field(default_factory=list)
    """Why replicas have no place at all."""
    strangers: list[PlacementProblem] = field(default_factory=list)
    """Pods that look like the trainer's or the pool's and are not: they change nothing."""
    stuck: list[str] = field(default_factory=list)
    """Pods that outlive their deletion and may not be removed by force."""


@dataclass(frozen=True, slots=True)
class PodGang:
    """The pods of one replica."""

    index: int
    pods: tuple[Pod, ...]
    size: int
    living: tuple[Pod, ...] = field(init=False)
    """Pods that are not being deleted."""

    def __post_init__(self) -> None:
        """Look at the pods once: a pass asks a dozen times."""
        living = tuple(pod for pod in self.pods if not pod.is_deleting)
        object.__setattr__(self, "living", living)

    @property
    def is_complete(self) -> bool:
        """Every rank is there and none has ended."""
        return len(self.living) == self.size and not any(p.is_finished for p in self.living)

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks without a pod, of a gang that has any."""
        return sorted({*range(self.size)} - {p.rank for p in self.pods}) if self.pods else []

    def is_current(self, spec: RolloutReplicaSpec) -> bool:
        """All its pods are of the latest revision."""
        return all(is_current_revision(pod.revision, spec) for pod in self.living)


def group_gangs(
    spec: RolloutReplicaSpec, seen: ObservedPool, running: Iterable[int]
) -> dict[int, PodGang]:
    """Gangs by replica index: those that must run, and surplus ones that still have pods."""
    by_index: dict[int, list[Pod]] = {index: [] for index in running}
    for pod in seen.pods:
        by_index.setdefault(pod.replica, []).append(pod)
    nodes = spec.parallelism.nodes
    return {i: PodGang(i, tuple(pods), nodes) for i, pods in sorted(by_index.items())}


def plan_pods(
    spec: RolloutReplicaSpec,
    seen: ObservedPool,
    now: float,
    healthy: frozenset[int],
    wait: RequeueAfter,
    settling: frozenset[int] = frozenset(),
    *,
    choice: ReplicaChoice,
) -> PodPlan:
    """Decide creations and deletions; pods that are not ours are never touched.

    Replicas that are not `healthy`, which is to do what spec asks for, use up `maxUnavailable`. Those that are
    `settling` are on their way to it: not available, and no reason to replace them all.
    """
    planner = _PodPlanner(spec, seen, now, wait, choice)
    planner.force_late_deletions()
    planner.delete_surplus()
    if not spec.suspend:
        planner.reconcile_gangs()
        planner.roll_outdated(healthy, settling)
        planner.move_one(healthy)
    planner.report()
    return planner.plan


class _PodPlanner:
    """Decides about one gang after the other; `plan` holds what is decided so far."""

    def __init__(
        self,
        spec: RolloutReplicaSpec,
        seen: ObservedPool,
        now: float,
        wait: RequeueAfter,
        choice: ReplicaChoice,
    ) -> None:
        self.plan = PodPlan()
        self._choice = choice
        self._spec = spec
        self._seen = seen
        self._now = now
        self._wait = wait
        self._gangs = group_gangs(spec, seen, choice.running)
        self._places = PoolPlacements(spec, seen)
        self._running = [g for g in self._gangs.values() if g.index in choice.running]

    def force_late_deletions(self) -> None:
        for pod in (*self._seen.pods, *self._seen.predecessors):
            if pod.owned:
                forced = plan_forced_deletion(pod, self._now, self._wait)
                self.plan.delete += [forced] if forced else []
                text = stuck_message(pod, self._now)
                self.plan.stuck += [text] if text else []

    def delete_surplus(self) -> None:
        reason = "the pool is suspended" if self._spec.suspend else "scaled down"
        for gang in self._gangs.values():
            if gang.index not in self._choice.living:
                over = any(pod.is_surge for pod in gang.pods)
                self._delete_gang(gang, _SURGE_OVER_REASON if over else reason)

    def reconcile_gangs(self) -> None:
        taken = {pod.replica for pod in self._seen.predecessors}
        for gang in self._running:
            if gang.pods or gang.index not in taken:
                self._reconcile_gang(gang)

    def roll_outdated(self, healthy: frozenset[int], settling: frozenset[int]) -> None:
        """Delete gangs at an old revision, broken ones first, within `maxUnavailable` and what the surge adds."""
        strategy, going = self._spec.update_strategy, {d.name for d in self.plan.delete}
        outdated = [
            gang
            for gang in self._running
            if gang.index >= strategy.partition
            and gang.is_complete
            and not gang.is_current(self._spec)
            and not any(p.name in going for p in gang.living)
        ]
        self.plan.outdated = len(outdated)
        if self._seen.scheduling.lacking:
            return  # what is deleted could not be made again
        down = sum(gang.index not in healthy for gang in self._running)
        budget = strategy.max_unavailable + len(self._choice.surge) - down
        for gang in sorted(outdated, key=lambda g: (g.index in healthy, -g.index)):
            if gang.index in healthy:
                if budget <= 0:
                    continue
                budget -= 1
            elif gang.index in settling and budget < 0:
                continue  # with those that are down already it would be one too many
            self._delete_gang(gang, _OUTDATED_REASON)

    def move_one(self, healthy: frozenset[int]) -> None:
        """Delete the gang whose turn it is to leave its place for the one where it belongs."""
        there = {index: gang.pods for index, gang in self._gangs.items()}
        target = self._spec.weights.target
        moves = self._places.plan_moves(
            there,
            healthy,
            self._wait,
            busy=bool(self.plan.create or self.plan.delete),
            pushed=target is not None and target.source.pushed is not None,
        )
        for index, why in moves:
            self._delete_gang(self._gangs[index], why)

    def report(self) -> None:
        """Note what replicas wait for, and which are between their old pods and their new ones."""
        kept = {
            index: count
            for index, count in self._seen.restarts_of.items()
            if index in self._choice.running and not self._gangs[index].is_complete
        }
        self.plan.replacing = kept | self.plan.restarts
        self.plan.waiting, self.plan.misplaced = self._places.waiting, self._places.misplaced
        self.plan.strangers = [*self._places.strangers, *foreign_pod_problems(self._seen)]

    def _delete_gang(self, gang: PodGang, reason: str) -> None:
        """Delete a gang, its members only after the head has drained: they run the head's requests."""
        if gang.size > 1 and len(gang.living) == len(gang.pods):
            self.plan.seek += [SeekPod(gang.index, rank) for rank in gang.missing_ranks]
        head = next((p for p in gang.pods if p.rank == 0 and p.owned), None)
        members = [p for p in gang.living if p is not head]
        whole = len(members) == gang.size - 1 and not any(p.is_finished for p in members)
        if head is not None and not head.is_finished and whole:
            self._delete_pods([] if head.is_deleting else [head], reason)
        else:
            self._delete_pods(gang.living, reason)

    def _delete_pods(self, pods: Sequence[Pod], reason: str) -> None:
        self.plan.delete += [
            DeletePod(p.name, p.uid, self._grace_seconds(p), reason) for p in pods if p.owned
        ]

    def _grace_seconds(self, pod: Pod) -> int | None:
        """Seconds for a pod to end; None: its own, which spec has not changed since it was made."""
        if pod.is_finished and not (pod.colocated or pod.lingers):
            return 0
        grace = self._spec.grace_seconds
        return None if pod.own_grace in (None, grace) else grace

    def _reconcile_gang(self, gang: PodGang) -> None:
        """Replace a gang that failed, or lost a pod or its place; create a missing one."""
        failed = [p for p in gang.living if p.is_finished]
        missing = gang.missing_ranks
        if len(gang.living) < len(gang.pods):
            # A pod that ends while somebody deletes another of its gang ends because of that: no failure.
            self._delete_gang(gang, _LOST_POD_REASON)
        elif lost := self._places.lost_reason(gang.living):
            self._delete_gang(gang, lost)
        elif failed:
            self._replace_failed_gang(gang, failed)
        elif missing and not gang.is_current(self._spec):
            # The API server may refuse these for what the first ones have, by the old template.
            self._delete_gang(gang, _OUTDATED_REASON)
        elif missing and self._may_complete(gang, missing):
            self._create_ranks(gang, missing, max(p.restarts for p in gang.pods))
        elif missing:
            self._delete_gang(gang, _LOST_POD_REASON)
        elif not gang.pods:
            restarts = self._seen.restarts_of.get(gang.index, 0)
            self._create_ranks(gang, range(gang.size), restarts)

    def _may_complete(self, gang: PodGang, missing: Iterable[int]) -> bool:
        """No pod of the gang has run, or the API server refused the missing ones so far: none is lost."""
        refused = (
            self._seen.conflicts,
            self._seen.rejections,
            self._seen.api_errors,
            self._seen.awaited,
        )
        if any(RECALLED_KEY in those for those in refused):
            return True  # the process before this one was refused something: trying will show
        wanted = [f"pod/{names.pod_name(self._seen.name, gang.index, rank)}" for rank in missing]
        never_created = all(any(name in those for those in refused) for name in wanted)
        return never_created or not any(p.started for p in gang.pods)

    def _create_ranks(self, gang: PodGang, ranks: Sequence[int], restarts: int) -> None:
        """Create these ranks, as soon as there is a place for each.

        Until then seek those that a claim knows: such a pod lost its labels, and may be what keeps
        the trainer waiting.
        """
        found = self._places.place_ranks(gang.index, ranks)
        surge = gang.index in self._choice.surge
        self.plan.create += [
            CreatePod(gang.index, rank, restarts, place, surge) for rank, place in found
        ]
        if not found:
            unlabelled = self._places.unlabelled_ranks(gang.index, ranks)
            self.plan.seek += [SeekPod(gang.index, rank) for rank in unlabelled]

    def _replace_failed_gang(self, gang: PodGang, failed: list[Pod]) -> None:
        plan, policy, index = self.plan, self._spec.restart_policy, gang.index
        # The rank that ended first says why. Clocks of nodes differ, but a rank that followed says so.
        pod = min(failed, key=lambda p: (p.followed, p.ended_at, p.rank))
        plan.in_a_row[index] = count = 1 + consecutive_failures(
            self._spec, self._seen, gang.pods, pod
        )
        why = pod.trouble or f"pod {pod.name!r} ended with phase {pod.phase}"
        if gang.size > 1 and pod.trouble:
            why = f"{pod.name}: {why}"
        # At 0 the first failure is one too many, so it must not count against what the user has changed since.
        is_reset = _is_reset_by_user(self._spec, self._seen, pod)
        if policy.max_restarts is not None and count > policy.max_restarts and not is_reset:
            times = "once" if count == 1 else f"{count} times"
            plan.exhausted[index] = (
                f"replica {index} failed {times} (maxRestarts {policy.max_restarts}): {why}; "
                "fix the cause, then change the spec or set a new value for rollout.dev/retry"
            )
            return
        left = backoff_seconds(self._spec, count) - max(self._now - pod.ended_at, pod.seen_seconds)
        if left > 0:
            at = datetime.fromtimestamp(self._now + left, UTC).strftime("%H:%M:%S")
            plan.backing_off[index] = (
                f"replica {index} failed {count} times in a row and restarts at {at} UTC: {why}"
            )
            self._wait.at_most(left)
            return
        plan.restarts[index] = count
        if self._seen.restarts_of.get(index) != count:
            plan.failed[index] = f"{failure_message_prefix(index)}{why}"
            plan.logs[index] = pod.last_log
        self._delete_pods(gang.living, f"its replica failed ({why})")


def consecutive_failures(
    spec: RolloutReplicaSpec,
    seen: ObservedPool,
    gang: Collection[Pod],
    pod: Pod,
    at: float | None = None,
) -> int:
    """Failures in a row of a replica, the pods `gang`, before its `pod`; 0 after a reset.

    `at`: now, if the pod runs; None: when it ended. What the head has proven counts for all its ranks.
    """
    proven = [p.proven_since for p in gang if p.proven_since is not None]
    moment = pod.ended_at if at is None else at
    if proven and moment - min(proven) >= FAILURE_RESET_SECONDS:
        return 0
    return 0 if _is_reset_by_user(spec, seen, pod) else pod.restarts


def _is_reset_by_user(spec: RolloutReplicaSpec, seen: ObservedPool, pod: Pod) -> bool:
    """Whether the user has changed the template or asked for a retry since the pod was made."""
    return not is_current_revision(pod.revision, spec) or pod.retry != seen.retry


def backoff_seconds(spec: RolloutReplicaSpec, count: int) -> float:
    """Seconds between the `count`-th failure in a row and its replacement; none after the first."""
    policy = spec.restart_policy
    if count <= 1:
        return 0.0
    doubled: float = policy.base_delay_seconds * 2.0 ** min(count - 2, 30)
    return min(doubled, policy.max_delay_seconds)


def failure_message_prefix(index: int) -> str:
    """Return how the sentence about a replica's failure begins; its cause follows."""
    return f"replica {index} failed and restarts: "
