"""One head of a pool and its worker: what it serves, what it has staged, why it failed. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rollout_common.wire import Lifecycle, StagedWeights, WeightsId, WeightsSource, WorkerState
from rollout_operator.api.spec import DesiredState

from .observed_pool import ObservedWorker, Pod, is_loaded
from .pass_plan import ControlVerb

UNDOING_VERBS = {
    DesiredState.ACTIVE: frozenset[ControlVerb](),
    DesiredState.PAUSED: frozenset({ControlVerb.WAKE, ControlVerb.RESUME}),
    DesiredState.ASLEEP: frozenset({ControlVerb.WAKE, ControlVerb.RESUME, ControlVerb.PAUSE}),
}
"""Calls after which a worker is not in this state; a pause wakes a sleeper. They may wait for a device that another program
has, maybe the one that wants the pool asleep."""

IN_SERVICE_LIFECYCLES = (Lifecycle.ACTIVE, Lifecycle.PAUSING, Lifecycle.PAUSED, Lifecycle.DRAINING)

CONTENT_MISMATCH_SLUG = "content-mismatch"
"""The problem of a worker that finds other bytes under an identity than the pool has."""


@dataclass(frozen=True, slots=True)
class WeightsVersion:
    """An identity, where its bytes are, and their root hash once the pool is bound to one."""

    identity: WeightsId
    source: WeightsSource
    root_hash: str | None = None

    @property
    def is_pushed(self) -> bool:
        """A trainer brings the bytes to the workers; no volume has them."""
        return self.source.pushed is not None


@dataclass(frozen=True, slots=True)
class ReplicaHead:
    """A living head pod of a wanted replica, and its worker."""

    pod: Pod
    worker: ObservedWorker
    members: tuple[Pod, ...] = ()
    """The other pods of its gang that are not being deleted, by rank."""
    lost_member: Pod | None = field(init=False)
    """A member that has ended: no engine goes on without one of its ranks."""
    is_finished: bool = field(init=False)
    """It has ended, or its gang has: it comes back as new pods only."""

    def __post_init__(self) -> None:
        """Look at the pods once: a pass asks a dozen times."""
        lost = next((pod for pod in self.members if pod.is_finished), None)
        object.__setattr__(self, "lost_member", lost)
        object.__setattr__(self, "is_finished", self.pod.is_finished or lost is not None)

    def is_leaving(self, state: DesiredState) -> bool:
        """A call of ours is under way that ends this state, whatever the last answer says."""
        return bool(self.worker.running & UNDOING_VERBS[state])

    @property
    def is_serving(self) -> bool:
        """It is in the data Service."""
        return self.pod.ready and self.pod.gate and not self.is_finished

    @property
    def boot_id(self) -> str | None:
        """Id of the worker process, from its last answer or from the gate it was given."""
        return self.worker.last.boot_id if self.worker.last else self.pod.gate_boot

    @property
    def last_active(self) -> WeightsId | None:
        """Identity of its weights as its last answer says."""
        active = self.worker.last.weights.active if self.worker.last else None
        return None if active is None or self.is_finished else active.identity

    @property
    def is_silent(self) -> bool:
        """Its process may live, and does not answer: nothing is known of it."""
        return self.worker.state is None and not self.is_finished

    @property
    def requests(self) -> int:
        """Outputs that it works on and requests that wait for it, by its last answer."""
        last = self.worker.last
        return 0 if last is None or self.is_finished else last.in_flight + last.queued

    @property
    def waits_for_turn(self) -> bool:
        """Another program has its devices; a wake may wait for them for any time without a failure."""
        state = self.worker.state
        return state is not None and state.turn is not None and state.turn.state == "Waiting"

    @property
    def staged_slot(self) -> StagedWeights | None:
        """Its staging slot."""
        return self.worker.state.weights.staged if self.worker.state else None

    @property
    def staged_identity(self) -> WeightsId | None:
        """Identity of what is in its staging slot, in whatever phase."""
        slot = self.staged_slot
        return None if slot is None else WeightsId(epoch=slot.epoch, version=slot.version)

    def has_at_least(self, identity: WeightsId) -> bool:
        """It serves, or would serve, with this identity or a later one."""
        return self.worker.active is not None and self.worker.active >= identity

    def staged_hash(self, version: WeightsVersion) -> str | None:
        """Root hash of what it has staged of the version, whole; None for nothing.

        From the version's source, or pushed: a trainer may write what it pushes to a path, too.
        """
        slot = self.staged_slot
        if slot is None or slot.phase != "Staged" or self.staged_identity != version.identity:
            return None
        return slot.root_hash if slot.source == version.source or slot.source.pushed else None

    def has_staged(self, version: WeightsVersion) -> bool:
        """It could commit this version now, or has it already."""
        found = self.staged_hash(version)
        there = found is not None and version.root_hash in (None, found)
        return there or self.has_at_least(version.identity)

    def is_receiving(self, version: WeightsVersion) -> bool:
        """Its slot is being filled with this version."""
        slot = self.staged_slot
        staging = slot is not None and slot.phase == "Staging"
        return staging and self.staged_identity == version.identity

    def newer_push_message(self, version: WeightsVersion) -> str | None:
        """Say that a trainer has pushed later weights into its slot: nothing else brings them again."""
        slot, later = self.staged_slot, self.staged_identity
        if slot is None or slot.source.pushed is None or slot.phase == "Failed":
            return None
        if later is None or later <= version.identity or self.has_at_least(version.identity):
            return None
        return f"{self.pod.name}: weights {later} were pushed to it instead of {version.identity}"

    def is_in_service(self, committed: WeightsId) -> bool:
        """It serves, or would if the pool were not paused.

        Silence proves nothing: of a silent head the last answer counts, or, if this process has had
        none, whether it ever was in the Service.
        """
        if self.is_finished:
            return False
        if self.worker.last is not None:
            return _is_state_in_service(self.worker.last, committed)
        return self.pod.gate_boot is not None

    def failure_message(self, identity: WeightsId | None, *verbs: str) -> str | None:
        """What the last of these calls said if it failed; `identity`: the weights it was about."""
        for verb in verbs:
            failed = self.worker.failures.get(verb)
            if failed is not None and failed.about == identity:
                return f"{self.pod.name}: {failed.message}"
        slot = self._failed_slot(identity) if "stage" in verbs else None
        return f"{self.pod.name}: {slot.error or 'staging failed'}" if slot else None

    def mismatch_message(self, version: WeightsVersion) -> str | None:
        """How its bytes differ from those that the pool has under this identity."""
        found, wanted = self.staged_hash(version), version.root_hash
        if found is not None and wanted not in (None, found):
            return (
                f"{self.pod.name}: {CONTENT_MISMATCH_SLUG}: it staged {version.identity} with root_hash {found}, "
                f"the pool's is {wanted}: publish the right bytes under a higher version"
            )
        for verb in ("stage", "commit"):
            failed = self.worker.failures.get(verb)
            if failed and (failed.about, failed.slug) == (version.identity, CONTENT_MISMATCH_SLUG):
                return f"{self.pod.name}: {failed.message}"
        slot = self._failed_slot(version.identity)
        mismatch = slot is not None and slot.slug == CONTENT_MISMATCH_SLUG
        return f"{self.pod.name}: {slot.error}" if slot and mismatch else None

    def _failed_slot(self, identity: WeightsId | None) -> StagedWeights | None:
        """Its staging slot, if staging of this identity failed there."""
        slot = self.staged_slot
        failed = slot is not None and slot.phase == "Failed"
        return slot if failed and self.staged_identity == identity else None


def _is_state_in_service(state: WorkerState, committed: WeightsId) -> bool:
    active = state.weights.active
    return (
        is_loaded(state)
        and state.lifecycle in IN_SERVICE_LIFECYCLES
        and state.weights.required is not None
        and active is not None
        and active.identity >= committed
    )


def stage_failures(heads: Iterable[ReplicaHead], version: WeightsVersion) -> list[str]:
    """Return why these heads could not stage this version, other bytes first."""
    heads = list(heads)
    odd = {h.pod.uid: text for h in heads if (text := h.mismatch_message(version))}
    rest = (h.failure_message(version.identity, "stage") for h in heads if h.pod.uid not in odd)
    return [*sorted(odd.values()), *sorted(text for text in rest if text)]


def describe_wait(head: ReplicaHead) -> str:
    """What a head is doing, for a person; empty if it serves."""
    state = head.worker.state
    if head.is_serving:
        return ""
    if head.pod.trouble:
        return head.pod.trouble
    if trouble := _describe_member_trouble(head):
        return trouble
    if state is None:
        return _describe_startup(head)
    if state.progress is not None:
        said = state.progress.fraction is None or "%" in state.progress.message
        part = "" if said else f" {state.progress.fraction:.0%}"
        return f"is {state.lifecycle}: {state.progress.message}{part}"
    others = [h.holder for h in state.holds if h.holder != state.caller]
    if others:
        return f"is {state.lifecycle}, held by {', '.join(sorted(others))}"
    staged = state.weights.staged
    if staged is not None and staged.phase == "Staging":
        return f"is staging weights ({staged.epoch}, {staged.version})"
    return f"is {state.lifecycle}" + ("" if state.serving else " but does not serve yet")


def _describe_startup(head: ReplicaHead) -> str:
    for pod in (head.pod, *head.members):
        if not pod.started:
            there = pod.waits_on or "is waiting for its container"
            what = there if pod.node else "is not scheduled yet"
            return what if pod is head.pod else f"waits for {pod.name}, which {what}"
    if not head.worker.error:
        return "is starting"
    yet = "yet " if head.boot_id is None else ""
    return f"does not answer {yet}({head.worker.error})"


def _describe_member_trouble(head: ReplicaHead) -> str:
    """Which member keeps a head from serving, as far as its pod says so."""
    for member in head.members:
        if member.trouble or member.is_finished:
            verb = "lost" if member.is_finished else "waits for"
            return f"{verb} {member.name}: {member.trouble or 'it has ended'}"
    return ""
