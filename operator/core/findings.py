"""What there is to report about a pool: an ordered list of checks, the first hit of each kind wins.

Each check looks at one `PoolView` and returns a `Finding` or None. The same sentence goes into the
condition, the status message, the log and the event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from rollout_common.wire import Lifecycle, WeightsId
from rollout_operator.api.spec import DesiredState, PoolMode, RolloutReplicaSpec
from rollout_operator.api.status import UpdatePhase
from rollout_operator.core.replicas.pod_planning import PodGang, PodPlan
from rollout_operator.core.replicas.replica_choice import ReplicaChoice
from rollout_operator.core.replicas.replica_troubles import ReplicaTroubles
from rollout_operator.core.replicas.surge import CopyMove

from .observed_pool import ObservedPool, is_asleep
from .pass_plan import ControlVerb
from .placement import PlacementProblem
from .replica_heads import ReplicaHead, describe_wait
from .updates.weights_plan import WeightsPlan


@dataclass(frozen=True, slots=True)
class PoolView:
    """What the checks may look at: spec, world and what this pass decided."""

    spec: RolloutReplicaSpec
    seen: ObservedPool
    gangs: Mapping[int, PodGang]
    heads: Mapping[str, ReplicaHead]
    pods: PodPlan
    weights: WeightsPlan
    target: WeightsId
    troubles: ReplicaTroubles
    was_at_rest: bool
    """By the stored status the pool has reached the rest that spec still asks for."""
    choice: ReplicaChoice
    """Numbers of the replicas that are to be there."""
    move: CopyMove | None
    """The copy of pushed weights that one of them is for."""

    @property
    def wanted_replicas(self) -> int:
        """Replicas that should run."""
        return 0 if self.spec.suspend else self.spec.replicas

    @property
    def ready_replicas(self) -> int:
        """Replicas whose head is Ready: it serves."""
        return sum(h.is_serving for h in self.heads.values())

    def count_in_lifecycle(self, lifecycle: Lifecycle) -> int:
        """Replicas whose worker reports this state."""
        states = (h.worker.state for h in self.heads.values())
        return sum(state is not None and state.lifecycle is lifecycle for state in states)

    @property
    def asleep_replicas(self) -> int:
        """Replicas whose worker reports that it sleeps, with all its memory given back."""
        states = (h.worker.state for h in self.heads.values())
        return sum(state is not None and is_asleep(state) for state in states)

    @property
    def unknown_replicas(self) -> int:
        """Replicas that once did what was asked of them and do not report what they do now."""
        return sum(
            h.worker.state is None and h.pod.proven_since is not None and not h.is_finished
            for h in self.heads.values()
        )

    @property
    def replicas_at_rest(self) -> int:
        """Replicas that are paused or asleep, as spec wants them; unknown ones count as unchanged."""
        wanted = self.spec.state

        def rests(head: ReplicaHead) -> bool:
            state = head.worker.state
            if state is None or head.is_leaving(wanted):
                return False
            paused = state.lifecycle is Lifecycle.PAUSED
            return paused if wanted is DesiredState.PAUSED else is_asleep(state)

        known = sum(map(rests, self.heads.values()))
        return known + (self.unknown_replicas if self.was_at_rest else 0)

    @property
    def is_settled(self) -> bool:
        """Every replica is where spec wants it."""
        if self.spec.suspend:
            return not self.seen.pods
        if self.spec.state is DesiredState.ACTIVE:
            return self.ready_replicas >= self.wanted_replicas
        return self.replicas_at_rest >= self.wanted_replicas


class FindingKind(StrEnum):
    """Which condition a finding speaks for."""

    DEGRADED = "Degraded"
    PROGRESSING = "Progressing"
    STALLED = "Stalled"
    """Progressing=False although the pool is not where it should be."""


class Finding(NamedTuple):
    """One thing worth reporting."""

    kind: FindingKind
    reason: str
    message: str


FindingCheck = Callable[[PoolView], Finding | None]


def _check_texts(
    reason: str,
    find: Callable[[PoolView], Iterable[str]],
    kind: FindingKind = FindingKind.DEGRADED,
) -> FindingCheck:
    """Make the check that reports the first of these sentences, under one reason."""

    def check(view: PoolView) -> Finding | None:
        return next((Finding(kind, reason, text) for text in find(view)), None)

    return check


def _check_problems(find: Callable[[PoolView], Iterable[PlacementProblem]]) -> FindingCheck:
    """Make the check that reports the first of these problems, under its own reason."""

    def check(view: PoolView) -> Finding | None:
        problems = find(view)
        return next((Finding(FindingKind.DEGRADED, p.reason, p.message) for p in problems), None)

    return check


def _crash_loops(view: PoolView) -> Iterator[str]:
    looping = view.troubles.looping
    # First replicas that are down now: the failures of the others may have ended.
    return (looping[index] for index in (*view.pods.backing_off, *looping))


def _more_suffix(found: Sized, what: str) -> str:
    """What follows the first of several sentences: how many others there are."""
    return f" (and {len(found) - 1} more {what})" if len(found) > 1 else ""


def _unreachable_replicas(view: PoolView) -> Iterator[str]:
    found = view.troubles.unreachable
    more = _more_suffix(found, f"of {view.wanted_replicas} replicas")
    return (text + more for text in found.values())


def _unschedulable_pods(view: PoolView) -> Iterator[str]:
    found = view.troubles.unscheduled
    return (text + _more_suffix(found, "pods") for text in found.values())


def _unsupported_policies(view: PoolView) -> Iterable[str]:
    return view.weights.failures if view.weights.unsupported else ()


def _mismatches(view: PoolView) -> Iterator[str]:
    for uid, version in view.weights.version_for.items():
        if text := view.heads[uid].mismatch_message(version):
            yield text


def _failed_loads(view: PoolView) -> Iterator[str]:
    for uid, version in view.weights.version_for.items():
        if text := view.heads[uid].failure_message(version.identity, "stage", "commit"):
            yield text


def _late_commits(view: PoolView) -> Iterator[str]:
    """Heads that still drain for a commit that the others have finished."""
    committed = view.weights.committed.identity
    for head in view.heads.values():
        state = head.worker.state
        floor = state.weights.required if state else None
        if floor is None or floor >= committed or head.has_at_least(committed):
            continue
        if ControlVerb.COMMIT in head.worker.running:
            yield f"{head.pod.name} gets no requests: it has not committed weights {committed} yet"


def _failed_engines(view: PoolView) -> Iterator[str]:
    for head in view.heads.values():
        state = head.worker.state
        if state is not None and state.lifecycle is Lifecycle.FAILED:
            yield f"{head.pod.name}: {state.last_error or 'no reason given'}"


def _other_engines(view: PoolView) -> Iterator[str]:
    """The trainer chooses the engine of a Hybrid pool, and may choose another one than spec says."""
    wanted = view.spec.engine.type.value
    for head in view.heads.values():
        state = head.worker.state
        if view.spec.mode is PoolMode.HYBRID and state is not None and state.engine != wanted:
            yield (
                f"{head.pod.name} runs engine {state.engine}, spec.engine.type is {wanted}: start that "
                "engine in the trainer, or create another RolloutReplica"
            )


def _failed_calls(view: PoolView) -> Iterator[str]:
    verbs = ("require", "pause", "resume", "sleep", "wake", "discard")
    for head in () if view.is_settled else view.heads.values():
        text = head.failure_message(None, *verbs)
        if text and not head.waits_for_turn:
            yield text


def _pod_troubles(view: PoolView) -> Iterator[str]:
    for pod in view.seen.pods:
        # A trainer's pod that has ended may start again by itself: nothing else reports it.
        there = (pod.ended or not pod.is_finished) and not pod.is_deleting
        if pod.trouble and there and not pod.lacks_node:
            yield f"{pod.name}: {pod.trouble}"


def _waiting_replicas(view: PoolView) -> Iterator[str]:
    return (f"replica {index} {what}" for index, what in sorted(view.pods.waiting.items()))


def _check_stalled(view: PoolView) -> Finding | None:
    weights, update = view.weights, view.weights.update
    if view.pods.exhausted:
        reason, text = "RestartsExhausted", next(iter(view.pods.exhausted.values()))
    elif weights.unsupported:
        reason, text = "Unsupported", weights.failures[0]
    elif weights.overdue and update is not None:
        reason = "DeadlineExceeded"
        text = (
            f"weights {update.identity} did not reach every replica within "
            f"{view.spec.weights.deadline_seconds} s, retrying: {update.message}"
        )
    elif update is not None and update.phase is UpdatePhase.FAILED:
        reason = "WeightsFailed"
        rests = view.spec.suspend or view.spec.state is DesiredState.ASLEEP
        again = "tried again once the pool serves" if rests else "retrying"
        text = (
            f"no replica could load weights epoch {update.epoch}, version {update.version} ({again}): "
            f"{update.message}"
        )
    else:
        return None
    return Finding(FindingKind.STALLED, reason, text)


def _check_scaling_down(view: PoolView) -> Finding | None:
    surplus = [p for p in view.seen.pods if p.replica not in view.choice.living]
    if not surplus or all(p.is_surge for p in surplus):
        return None
    what = "suspended" if view.spec.suspend else "scaled down"
    pods = f"{len(surplus)} pod{'s' * (len(surplus) != 1)}"
    text = f"{what}: waiting for {pods} to drain and terminate"
    return Finding(FindingKind.PROGRESSING, "ScalingDown", text)


def _check_weights_update(view: PoolView) -> Finding | None:
    update = view.weights.update
    if update is None or update.phase not in (UpdatePhase.STAGING, UpdatePhase.COMMITTING):
        return None
    verb = "Staging" if update.phase is UpdatePhase.STAGING else "Committing"
    text = update.message or f"{verb.lower()} weights {update.identity}"
    return Finding(FindingKind.PROGRESSING, f"{verb}Weights", text)


def _check_rolling_update(view: PoolView) -> Finding | None:
    if not view.pods.outdated:
        return None
    text = f"rolling update: {view.pods.outdated} of {view.wanted_replicas} replicas have an old template"
    if view.choice.surge:
        text += f", and {len(view.choice.surge)} more run until it is over"
    return Finding(FindingKind.PROGRESSING, "RollingUpdate", text)


def _check_copy_move(view: PoolView) -> Finding | None:
    move = view.move
    if move is None or move.is_copied:
        return None
    text = f"only {move.pod} has a copy of the pushed weights: it stays until one of the wanted replicas has one"
    if move.node:
        text = (
            f"node {move.node!r} is cordoned, and {move.pod} on it has the only copy of the pushed weights: "
            f"replica {min(view.choice.surge)} is added to take one, so that the node can be drained"
        )
    return Finding(FindingKind.PROGRESSING, "MovingWeights", text)


def _check_state_change(view: PoolView) -> Finding | None:
    if view.spec.suspend or view.spec.state is DesiredState.ACTIVE or view.is_settled:
        return None
    asleep = view.spec.state is DesiredState.ASLEEP
    left, verb = view.wanted_replicas - view.replicas_at_rest, "fall asleep" if asleep else "pause"
    text = f"waiting for {left} of {view.wanted_replicas} workers to {verb}"
    return Finding(FindingKind.PROGRESSING, "FallingAsleep" if asleep else "Pausing", text)


def _check_starting(view: PoolView) -> Finding | None:
    missing = view.wanted_replicas - view.ready_replicas
    if view.spec.state is not DesiredState.ACTIVE or missing <= 0:
        return None
    waking = view.count_in_lifecycle(Lifecycle.WAKING) + view.count_in_lifecycle(Lifecycle.ASLEEP)
    text = f"waiting for {missing} of {view.wanted_replicas} replicas to serve"
    if what := describe_first_wait(view):
        text += f": {what}"
    return Finding(FindingKind.PROGRESSING, "Waking" if waking else "Starting", text)


def describe_first_wait(view: PoolView) -> str:
    """What the lowest replica that doesn't serve is doing."""
    by_replica = {h.pod.replica: h for h in view.heads.values()}
    for index in sorted(view.choice.wanted):
        head = by_replica.get(index)
        if head is None:
            return _describe_missing_replica(view, index)
        if not head.pod.ready or head.is_finished:
            between = ":" if head.pod.trouble else ""
            return f"{head.pod.name}{between} {describe_wait(head)}"
    return ""


def _describe_missing_replica(view: PoolView, index: int) -> str:
    waited = next((p.name for p in view.seen.predecessors if p.replica == index), None)
    if waited is not None:
        return f"pod {waited!r} of a deleted RolloutReplica of this name is still terminating"
    ours = (p for p in view.seen.pods if p.replica == index and p.is_deleting)
    going = next(ours, None)
    if going is None:
        return f"replica {index} has no pod yet"
    where = f" on node {going.node!r}" if going.node else ""
    return f"pod {going.name!r} is still terminating{where}: its replacement waits for the name"


FINDING_CHECKS: tuple[FindingCheck, ...] = (
    _check_texts("NameConflict", lambda view: view.seen.conflicts.values()),
    _check_texts("Rejected", lambda view: view.seen.rejections.values()),
    _check_texts("NoGangScheduler", lambda view: filter(None, [view.seen.scheduling.trouble])),
    _check_texts("ApiError", lambda view: view.seen.api_errors.values()),
    _check_problems(lambda view: view.pods.misplaced),
    _check_texts("PodStuck", lambda view: view.pods.stuck),
    _check_texts("RestartsExhausted", lambda view: view.pods.exhausted.values()),
    _check_texts("Unsupported", _unsupported_policies),
    _check_texts("ContentMismatch", _mismatches),
    _check_texts("NoLiveCopy", lambda view: filter(None, [view.weights.no_copy])),
    _check_texts("WeightsFailed", lambda view: view.weights.failures),
    _check_texts("WeightsFailed", _failed_loads),
    _check_texts("WeightsFailed", _late_commits),
    _check_texts("CrashLooping", _crash_loops),
    _check_texts("EngineFailed", _failed_engines),
    _check_texts("OtherEngine", _other_engines),
    _check_texts("Unreachable", _unreachable_replicas),
    _check_texts("ControlFailed", _failed_calls),
    _check_texts("PodTrouble", _pod_troubles),
    _check_problems(lambda view: view.pods.strangers),
    _check_stalled,
    _check_weights_update,
    _check_scaling_down,
    _check_texts("Unschedulable", _unschedulable_pods, FindingKind.PROGRESSING),
    _check_rolling_update,
    _check_texts("WaitingForTrainer", _waiting_replicas, FindingKind.PROGRESSING),
    _check_state_change,
    _check_starting,
    _check_copy_move,
)


def first_findings(view: PoolView) -> dict[FindingKind, Finding]:
    """Return the first finding of each kind."""
    found: dict[FindingKind, Finding] = {}
    for check in FINDING_CHECKS:
        finding = check(view)
        if finding is not None:
            found.setdefault(finding.kind, finding)
    return found
