"""What there is to say about a pool: an ordered list of checks, the first hit of each kind wins.

Each check looks at one `View` and returns a `Finding` or None. The same sentence goes into the
condition, the status message, the log and the event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass
from enum import StrEnum

from rollout_operator.api.spec import Mode, State
from rollout_operator.api.status import UpdatePhase
from rollout_worker.schemas import Lifecycle

from .heads import waits_for
from .placement import Misplaced
from .plan import Verb
from .view import View


class Kind(StrEnum):
    """Which condition a finding speaks for."""

    DEGRADED = "Degraded"
    PROGRESSING = "Progressing"
    STALLED = "Stalled"
    """Progressing=False although the pool is not where it should be."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing worth saying."""

    kind: Kind
    reason: str
    message: str


Check = Callable[[View], Finding | None]


def _conflict(view: View) -> Finding | None:
    for text in view.seen.conflicts.values():
        return Finding(Kind.DEGRADED, "NameConflict", text)
    return None


def _rejected(view: View) -> Finding | None:
    for text in view.seen.rejections.values():
        return Finding(Kind.DEGRADED, "Rejected", text)
    return None


def _api_error(view: View) -> Finding | None:
    for text in view.seen.api_errors.values():
        return Finding(Kind.DEGRADED, "ApiError", text)
    return None


def _misplaced(view: View) -> Finding | None:
    return _first_of(view.pods.misplaced)


def _first_of(told: Iterable[Misplaced]) -> Finding | None:
    for each in told:
        return Finding(Kind.DEGRADED, each.reason, each.message)
    return None


def _stuck(view: View) -> Finding | None:
    for text in view.pods.stuck:
        return Finding(Kind.DEGRADED, "PodStuck", text)
    return None


def _exhausted(view: View) -> Finding | None:
    for text in view.pods.exhausted.values():
        return Finding(Kind.DEGRADED, "RestartsExhausted", text)
    return None


def _crash_looping(view: View) -> Finding | None:
    looping = view.ailments.looping
    # First who is down now: of the others it is not known whether their failures have ended.
    for index in (*view.pods.backing_off, *looping):
        return Finding(Kind.DEGRADED, "CrashLooping", looping[index])
    return None


def _unreachable(view: View) -> Finding | None:
    told = view.ailments.unreachable
    for text in told.values():
        return Finding(
            Kind.DEGRADED, "Unreachable", text + _more(told, f"of {view.wanted} replicas")
        )
    return None


def _unscheduled(view: View) -> Finding | None:
    told = view.ailments.unscheduled
    for text in told.values():
        return Finding(Kind.PROGRESSING, "Unschedulable", text + _more(told, "pods"))
    return None


def _more(told: Sized, what: str) -> str:
    """What follows the first of several sentences: how many others there are."""
    return f" (and {len(told) - 1} more {what})" if len(told) > 1 else ""


def _unsupported(view: View) -> Finding | None:
    if not view.weights.unsupported:
        return None
    return Finding(Kind.DEGRADED, "Unsupported", view.weights.failures[0])


def _content_mismatch(view: View) -> Finding | None:
    for uid, version in view.weights.version_for.items():
        text = view.heads[uid].mismatch(version)
        if text:
            return Finding(Kind.DEGRADED, "ContentMismatch", text)
    return None


def _no_live_copy(view: View) -> Finding | None:
    if view.weights.no_copy is None:
        return None
    return Finding(Kind.DEGRADED, "NoLiveCopy", view.weights.no_copy)


def _update_failed(view: View) -> Finding | None:
    if not view.weights.failures:
        return None
    return Finding(Kind.DEGRADED, "WeightsFailed", view.weights.failures[0])


def _load_failed(view: View) -> Finding | None:
    for uid, version in view.weights.version_for.items():
        text = view.heads[uid].failure(version.identity, "stage", "commit")
        if text:
            return Finding(Kind.DEGRADED, "WeightsFailed", text)
    return None


def _late_commit(view: View) -> Finding | None:
    """It still drains for a commit that the others have finished."""
    committed = view.weights.committed.identity
    for head in view.heads.values():
        state = head.worker.state
        floor = state.weights.required if state else None
        if floor is None or floor >= committed or head.at_least(committed):
            continue
        if Verb.COMMIT in head.worker.running:
            text = f"{head.pod.name} gets no requests: it has not committed weights {committed} yet"
            return Finding(Kind.DEGRADED, "WeightsFailed", text)
    return None


def _worker_failed(view: View) -> Finding | None:
    for head in view.heads.values():
        state = head.worker.state
        if state is not None and state.lifecycle is Lifecycle.FAILED:
            why = state.last_error or "no reason given"
            return Finding(Kind.DEGRADED, "EngineFailed", f"{head.pod.name}: {why}")
    return None


def _other_engine(view: View) -> Finding | None:
    """The trainer chooses the engine of a Hybrid pool, and may choose another one than spec says."""
    wanted = view.spec.engine.type.value
    for head in view.heads.values():
        state = head.worker.state
        if view.spec.mode is Mode.HYBRID and state is not None and state.engine != wanted:
            text = (
                f"{head.pod.name} runs engine {state.engine}, spec.engine.type is {wanted}: start that "
                "engine in the trainer, or create another RolloutReplica"
            )
            return Finding(Kind.DEGRADED, "OtherEngine", text)
    return None


def _call_failed(view: View) -> Finding | None:
    verbs = ("require", "pause", "resume", "sleep", "wake", "discard")
    for head in () if view.reached else view.heads.values():
        text = head.failure(None, *verbs)
        if text and not head.waits_for_turn:
            return Finding(Kind.DEGRADED, "ControlFailed", text)
    return None


def _pod_trouble(view: View) -> Finding | None:
    for pod in view.seen.pods:
        # A trainer's pod that has ended may start again by itself: nothing else tells of it.
        there = (pod.ended or not pod.finished) and not pod.deleting
        if pod.trouble and there and not pod.lacks_node:
            return Finding(Kind.DEGRADED, "PodTrouble", f"{pod.name}: {pod.trouble}")
    return None


def _stranger(view: View) -> Finding | None:
    return _first_of(view.pods.strangers)


def _stalled(view: View) -> Finding | None:
    update = view.weights.update
    if view.pods.exhausted:
        return Finding(Kind.STALLED, "RestartsExhausted", next(iter(view.pods.exhausted.values())))
    if view.weights.unsupported:
        return Finding(Kind.STALLED, "Unsupported", view.weights.failures[0])
    if view.weights.overdue and update is not None:
        return Finding(
            Kind.STALLED,
            "DeadlineExceeded",
            f"weights {update.identity} did not reach every replica within "
            f"{view.spec.weights.deadline_seconds} s, retrying: {update.message}",
        )
    if update is not None and update.phase is UpdatePhase.FAILED:
        text = (
            f"no replica could load weights epoch {update.epoch}, version {update.version} (retrying): "
            f"{update.message}"
        )
        return Finding(Kind.STALLED, "WeightsFailed", text)
    return None


def _leaving(view: View) -> Finding | None:
    surplus = [p for p in view.seen.pods if view.spec.suspend or p.replica >= view.spec.replicas]
    if not surplus:
        return None
    what = "suspended" if view.spec.suspend else "scaled down"
    text = (
        f"{what}: waiting for {len(surplus)} pod{'s' * (len(surplus) != 1)} to drain and terminate"
    )
    return Finding(Kind.PROGRESSING, "ScalingDown", text)


def _updating(view: View) -> Finding | None:
    update = view.weights.update
    if update is None or update.phase not in (UpdatePhase.STAGING, UpdatePhase.COMMITTING):
        return None
    verb = "Staging" if update.phase is UpdatePhase.STAGING else "Committing"
    text = update.message or f"{verb.lower()} weights {update.identity}"
    return Finding(Kind.PROGRESSING, f"{verb}Weights", text)


def _rolling(view: View) -> Finding | None:
    if not view.pods.outdated:
        return None
    text = f"rolling update: {view.pods.outdated} of {view.wanted} replicas have an old template"
    return Finding(Kind.PROGRESSING, "RollingUpdate", text)


def _beside_trainer(view: View) -> Finding | None:
    for index, what in sorted(view.pods.waiting.items()):
        return Finding(Kind.PROGRESSING, "WaitingForTrainer", f"replica {index} {what}")
    return None


def _changing_state(view: View) -> Finding | None:
    if view.spec.suspend or view.spec.state is State.ACTIVE:
        return None
    asleep = view.spec.state is State.ASLEEP
    if view.reached:
        return None
    verb = "fall asleep" if asleep else "pause"
    text = f"waiting for {view.wanted - view.at_rest} of {view.wanted} workers to {verb}"
    return Finding(Kind.PROGRESSING, "FallingAsleep" if asleep else "Pausing", text)


def _starting(view: View) -> Finding | None:
    missing = view.wanted - view.ready
    if view.spec.state is not State.ACTIVE or missing <= 0:
        return None
    waking = view.count(Lifecycle.WAKING) + view.count(Lifecycle.ASLEEP)
    what = first_wait(view)
    text = f"waiting for {missing} of {view.wanted} replicas to serve" + (what and f": {what}")
    return Finding(Kind.PROGRESSING, "Waking" if waking else "Starting", text)


def first_wait(view: View) -> str:
    """What the lowest replica that doesn't serve is doing."""
    by_replica = {h.pod.replica: h for h in view.heads.values()}
    for index in range(view.wanted):
        head = by_replica.get(index)
        if head is None:
            waited = next((p.name for p in view.seen.predecessors if p.replica == index), None)
            if waited is not None:
                return (
                    f"pod {waited!r} of a deleted RolloutReplica of this name is still terminating"
                )
            ours = (p for p in view.seen.pods if p.replica == index and p.deleting)
            going = next(ours, None)
            if going is not None:
                where = f" on node {going.node!r}" if going.node else ""
                return f"pod {going.name!r} is still terminating{where}: its replacement waits for the name"
            return f"replica {index} has no pod yet"
        if not head.pod.ready or head.finished:
            between = ":" if head.pod.trouble else ""
            return f"{head.pod.name}{between} {waits_for(head)}"
    return ""


CHECKS: tuple[Check, ...] = (
    _conflict,
    _rejected,
    _api_error,
    _misplaced,
    _stuck,
    _exhausted,
    _unsupported,
    _content_mismatch,
    _no_live_copy,
    _update_failed,
    _load_failed,
    _late_commit,
    _crash_looping,
    _worker_failed,
    _other_engine,
    _unreachable,
    _call_failed,
    _pod_trouble,
    _stranger,
    _stalled,
    _updating,
    _leaving,
    _unscheduled,
    _rolling,
    _beside_trainer,
    _changing_state,
    _starting,
)


def find(view: View) -> dict[Kind, Finding]:
    """Return the first finding of each kind."""
    found: dict[Kind, Finding] = {}
    for check in CHECKS:
        finding = check(view)
        if finding is not None:
            found.setdefault(finding.kind, finding)
    return found
