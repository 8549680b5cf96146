"""What there is to say about a pool: an ordered list of checks, the first hit of each kind wins.

Each check looks at one `View` and returns a `Finding` or None. The same sentence goes into the
condition, the status message, the log and the event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass
from enum import StrEnum

from rollout_common.wire import Lifecycle
from rollout_operator.api.spec import DesiredState, PoolMode
from rollout_operator.api.status import UpdatePhase

from .pass_plan import ControlVerb
from .placement import PlacementProblem
from .pool_view import PoolView
from .replica_heads import describe_wait


class FindingKind(StrEnum):
    """Which condition a finding speaks for."""

    DEGRADED = "Degraded"
    PROGRESSING = "Progressing"
    STALLED = "Stalled"
    """Progressing=False although the pool is not where it should be."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing worth saying."""

    kind: FindingKind
    reason: str
    message: str


FindingCheck = Callable[[PoolView], Finding | None]


def _check_name_conflict(view: PoolView) -> Finding | None:
    for text in view.seen.conflicts.values():
        return Finding(FindingKind.DEGRADED, "NameConflict", text)
    return None


def _check_rejected_write(view: PoolView) -> Finding | None:
    for text in view.seen.rejections.values():
        return Finding(FindingKind.DEGRADED, "Rejected", text)
    return None


def _check_api_error(view: PoolView) -> Finding | None:
    for text in view.seen.api_errors.values():
        return Finding(FindingKind.DEGRADED, "ApiError", text)
    return None


def _check_placement(view: PoolView) -> Finding | None:
    return _first_placement_finding(view.pods.misplaced)


def _first_placement_finding(told: Iterable[PlacementProblem]) -> Finding | None:
    for each in told:
        return Finding(FindingKind.DEGRADED, each.reason, each.message)
    return None


def _check_stuck_pod(view: PoolView) -> Finding | None:
    for text in view.pods.stuck:
        return Finding(FindingKind.DEGRADED, "PodStuck", text)
    return None


def _check_restarts_exhausted(view: PoolView) -> Finding | None:
    for text in view.pods.exhausted.values():
        return Finding(FindingKind.DEGRADED, "RestartsExhausted", text)
    return None


def _check_crash_loop(view: PoolView) -> Finding | None:
    looping = view.ailments.looping
    # First who is down now: of the others it is not known whether their failures have ended.
    for index in (*view.pods.backing_off, *looping):
        return Finding(FindingKind.DEGRADED, "CrashLooping", looping[index])
    return None


def _check_unreachable(view: PoolView) -> Finding | None:
    told = view.ailments.unreachable
    for text in told.values():
        return Finding(
            FindingKind.DEGRADED,
            "Unreachable",
            text + _more_suffix(told, f"of {view.wanted_replicas} replicas"),
        )
    return None


def _check_unschedulable(view: PoolView) -> Finding | None:
    told = view.ailments.unscheduled
    for text in told.values():
        return Finding(FindingKind.PROGRESSING, "Unschedulable", text + _more_suffix(told, "pods"))
    return None


def _more_suffix(told: Sized, what: str) -> str:
    """What follows the first of several sentences: how many others there are."""
    return f" (and {len(told) - 1} more {what})" if len(told) > 1 else ""


def _check_unsupported_policy(view: PoolView) -> Finding | None:
    if not view.weights.unsupported:
        return None
    return Finding(FindingKind.DEGRADED, "Unsupported", view.weights.failures[0])


def _check_content_mismatch(view: PoolView) -> Finding | None:
    for uid, version in view.weights.version_for.items():
        text = view.heads[uid].mismatch_message(version)
        if text:
            return Finding(FindingKind.DEGRADED, "ContentMismatch", text)
    return None


def _check_live_copy(view: PoolView) -> Finding | None:
    if view.weights.no_copy is None:
        return None
    return Finding(FindingKind.DEGRADED, "NoLiveCopy", view.weights.no_copy)


def _check_failed_update(view: PoolView) -> Finding | None:
    if not view.weights.failures:
        return None
    return Finding(FindingKind.DEGRADED, "WeightsFailed", view.weights.failures[0])


def _check_failed_load(view: PoolView) -> Finding | None:
    for uid, version in view.weights.version_for.items():
        text = view.heads[uid].failure_message(version.identity, "stage", "commit")
        if text:
            return Finding(FindingKind.DEGRADED, "WeightsFailed", text)
    return None


def _check_late_commit(view: PoolView) -> Finding | None:
    """It still drains for a commit that the others have finished."""
    committed = view.weights.committed.identity
    for head in view.heads.values():
        state = head.worker.state
        floor = state.weights.required if state else None
        if floor is None or floor >= committed or head.has_at_least(committed):
            continue
        if ControlVerb.COMMIT in head.worker.running:
            text = f"{head.pod.name} gets no requests: it has not committed weights {committed} yet"
            return Finding(FindingKind.DEGRADED, "WeightsFailed", text)
    return None


def _check_failed_engine(view: PoolView) -> Finding | None:
    for head in view.heads.values():
        state = head.worker.state
        if state is not None and state.lifecycle is Lifecycle.FAILED:
            why = state.last_error or "no reason given"
            return Finding(FindingKind.DEGRADED, "EngineFailed", f"{head.pod.name}: {why}")
    return None


def _check_other_engine(view: PoolView) -> Finding | None:
    """The trainer chooses the engine of a Hybrid pool, and may choose another one than spec says."""
    wanted = view.spec.engine.type.value
    for head in view.heads.values():
        state = head.worker.state
        if view.spec.mode is PoolMode.HYBRID and state is not None and state.engine != wanted:
            text = (
                f"{head.pod.name} runs engine {state.engine}, spec.engine.type is {wanted}: start that "
                "engine in the trainer, or create another RolloutReplica"
            )
            return Finding(FindingKind.DEGRADED, "OtherEngine", text)
    return None


def _check_failed_call(view: PoolView) -> Finding | None:
    verbs = ("require", "pause", "resume", "sleep", "wake", "discard")
    for head in () if view.is_settled else view.heads.values():
        text = head.failure_message(None, *verbs)
        if text and not head.waits_for_turn:
            return Finding(FindingKind.DEGRADED, "ControlFailed", text)
    return None


def _check_pod_trouble(view: PoolView) -> Finding | None:
    for pod in view.seen.pods:
        # A trainer's pod that has ended may start again by itself: nothing else tells of it.
        there = (pod.ended or not pod.is_finished) and not pod.is_deleting
        if pod.trouble and there and not pod.lacks_node:
            return Finding(FindingKind.DEGRADED, "PodTrouble", f"{pod.name}: {pod.trouble}")
    return None


def _check_foreign_pod(view: PoolView) -> Finding | None:
    return _first_placement_finding(view.pods.strangers)


def _check_stalled(view: PoolView) -> Finding | None:
    update = view.weights.update
    if view.pods.exhausted:
        return Finding(
            FindingKind.STALLED, "RestartsExhausted", next(iter(view.pods.exhausted.values()))
        )
    if view.weights.unsupported:
        return Finding(FindingKind.STALLED, "Unsupported", view.weights.failures[0])
    if view.weights.overdue and update is not None:
        return Finding(
            FindingKind.STALLED,
            "DeadlineExceeded",
            f"weights {update.identity} did not reach every replica within "
            f"{view.spec.weights.deadline_seconds} s, retrying: {update.message}",
        )
    if update is not None and update.phase is UpdatePhase.FAILED:
        text = (
            f"no replica could load weights epoch {update.epoch}, version {update.version} (retrying): "
            f"{update.message}"
        )
        return Finding(FindingKind.STALLED, "WeightsFailed", text)
    return None


def _check_scaling_down(view: PoolView) -> Finding | None:
    surplus = [p for p in view.seen.pods if view.spec.suspend or p.replica >= view.spec.replicas]
    if not surplus:
        return None
    what = "suspended" if view.spec.suspend else "scaled down"
    text = (
        f"{what}: waiting for {len(surplus)} pod{'s' * (len(surplus) != 1)} to drain and terminate"
    )
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
    return Finding(FindingKind.PROGRESSING, "RollingUpdate", text)


def _check_waiting_for_trainer(view: PoolView) -> Finding | None:
    for index, what in sorted(view.pods.waiting.items()):
        return Finding(FindingKind.PROGRESSING, "WaitingForTrainer", f"replica {index} {what}")
    return None


def _check_state_change(view: PoolView) -> Finding | None:
    if view.spec.suspend or view.spec.state is DesiredState.ACTIVE:
        return None
    asleep = view.spec.state is DesiredState.ASLEEP
    if view.is_settled:
        return None
    verb = "fall asleep" if asleep else "pause"
    text = f"waiting for {view.wanted_replicas - view.replicas_at_rest} of {view.wanted_replicas} workers to {verb}"
    return Finding(FindingKind.PROGRESSING, "FallingAsleep" if asleep else "Pausing", text)


def _check_starting(view: PoolView) -> Finding | None:
    missing = view.wanted_replicas - view.ready_replicas
    if view.spec.state is not DesiredState.ACTIVE or missing <= 0:
        return None
    waking = view.count_in_lifecycle(Lifecycle.WAKING) + view.count_in_lifecycle(Lifecycle.ASLEEP)
    what = describe_first_wait(view)
    text = f"waiting for {missing} of {view.wanted_replicas} replicas to serve" + (
        what and f": {what}"
    )
    return Finding(FindingKind.PROGRESSING, "Waking" if waking else "Starting", text)


def describe_first_wait(view: PoolView) -> str:
    """What the lowest replica that doesn't serve is doing."""
    by_replica = {h.pod.replica: h for h in view.heads.values()}
    for index in range(view.wanted_replicas):
        head = by_replica.get(index)
        if head is None:
            waited = next((p.name for p in view.seen.predecessors if p.replica == index), None)
            if waited is not None:
                return (
                    f"pod {waited!r} of a deleted RolloutReplica of this name is still terminating"
                )
            ours = (p for p in view.seen.pods if p.replica == index and p.is_deleting)
            going = next(ours, None)
            if going is not None:
                where = f" on node {going.node!r}" if going.node else ""
                return f"pod {going.name!r} is still terminating{where}: its replacement waits for the name"
            return f"replica {index} has no pod yet"
        if not head.pod.ready or head.is_finished:
            between = ":" if head.pod.trouble else ""
            return f"{head.pod.name}{between} {describe_wait(head)}"
    return ""


FINDING_CHECKS: tuple[FindingCheck, ...] = (
    _check_name_conflict,
    _check_rejected_write,
    _check_api_error,
    _check_placement,
    _check_stuck_pod,
    _check_restarts_exhausted,
    _check_unsupported_policy,
    _check_content_mismatch,
    _check_live_copy,
    _check_failed_update,
    _check_failed_load,
    _check_late_commit,
    _check_crash_loop,
    _check_failed_engine,
    _check_other_engine,
    _check_unreachable,
    _check_failed_call,
    _check_pod_trouble,
    _check_foreign_pod,
    _check_stalled,
    _check_weights_update,
    _check_scaling_down,
    _check_unschedulable,
    _check_rolling_update,
    _check_waiting_for_trainer,
    _check_state_change,
    _check_starting,
)


def first_findings(view: PoolView) -> dict[FindingKind, Finding]:
    """Return the first finding of each kind."""
    found: dict[FindingKind, Finding] = {}
    for check in FINDING_CHECKS:
        finding = check(view)
        if finding is not None:
            found.setdefault(finding.kind, finding)
    return found
