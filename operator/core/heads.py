"""One head of a pool and its worker: what it serves, what it has staged, why it failed. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rollout_worker.schemas import Lifecycle, StagedWeights, WeightsId, WeightsSource, WorkerState

from .world import Pod, Worker, is_loaded

IN_SERVICE = (Lifecycle.ACTIVE, Lifecycle.PAUSING, Lifecycle.PAUSED, Lifecycle.DRAINING)

MISMATCH = "content-mismatch"
"""The problem of a worker that finds other bytes under an identity than it was told to."""


@dataclass(frozen=True, slots=True)
class Version:
    """An identity, where its bytes are, and their root hash once the pool is bound to one."""

    identity: WeightsId
    source: WeightsSource
    root_hash: str | None = None

    @property
    def pushed(self) -> bool:
        """A trainer brings the bytes to the workers; no volume has them."""
        return self.source.pushed is not None


@dataclass(frozen=True, slots=True)
class Head:
    """A living head pod of a wanted replica, and its worker."""

    pod: Pod
    worker: Worker
    members: tuple[Pod, ...] = ()
    """The other pods of its gang that are not being deleted, by rank."""

    @property
    def lost(self) -> Pod | None:
        """A member that has ended: no engine goes on without one of its ranks."""
        return next((pod for pod in self.members if pod.finished), None)

    @property
    def finished(self) -> bool:
        """It has ended, or its gang has: it comes back as new pods only."""
        return self.pod.finished or self.lost is not None

    @property
    def serves(self) -> bool:
        """It is in the data Service."""
        return self.pod.ready and self.pod.gate and not self.finished

    @property
    def boot(self) -> str | None:
        """Id of the worker process, from its last answer or from the gate it was given."""
        return self.worker.last.boot_id if self.worker.last else self.pod.gate_boot

    @property
    def has(self) -> WeightsId | None:
        """Identity of its weights as its last answer says."""
        active = self.worker.last.weights.active if self.worker.last else None
        return None if active is None or self.finished else active.identity

    @property
    def silent(self) -> bool:
        """Its process may live, and does not answer: nothing is known of it."""
        return self.worker.state is None and not self.finished

    @property
    def waits_for_turn(self) -> bool:
        """Others have its devices; however long they do, a wake that waits for them is no failure."""
        state = self.worker.state
        return state is not None and state.turn is not None and state.turn.state == "Waiting"

    @property
    def staged(self) -> StagedWeights | None:
        """Its staging slot."""
        return self.worker.state.weights.staged if self.worker.state else None

    def at_least(self, identity: WeightsId) -> bool:
        """It serves, or would serve, with this identity or a later one."""
        return self.worker.active is not None and self.worker.active >= identity

    def staged_hash(self, version: Version) -> str | None:
        """Root hash of what it has staged of the version, whole; None for nothing.

        From the version's source, or pushed: a trainer may write what it pushes to a path, too.
        """
        slot = self.staged
        if slot is None or slot.phase != "Staged":
            return None
        if slot.source != version.source and slot.source.pushed is None:
            return None
        return slot.root_hash if (slot.epoch, slot.version) == version.identity.as_tuple() else None

    def has_staged(self, version: Version) -> bool:
        """It could commit this version now, or has it already."""
        found = self.staged_hash(version)
        there = found is not None and version.root_hash in (None, found)
        return there or self.at_least(version.identity)

    def receives(self, version: Version) -> bool:
        """Its slot is being filled with this version."""
        slot = self.staged
        return (
            slot is not None
            and slot.phase == "Staging"
            and (slot.epoch, slot.version) == version.identity.as_tuple()
        )

    def given_later(self, version: Version) -> str | None:
        """That a trainer has pushed later weights into its slot: nobody else could bring them again."""
        slot = self.staged
        if slot is None or slot.source.pushed is None or slot.phase == "Failed":
            return None
        if (slot.epoch, slot.version) <= version.identity.as_tuple():
            return None
        later = f"({slot.epoch}, {slot.version})"
        return f"{self.pod.name}: weights {later} were pushed to it instead of {version.identity}"

    def in_service(self, committed: WeightsId) -> bool:
        """It serves, or would if the pool were not paused.

        Silence proves nothing: of who is silent the last answer counts, and if this process has
        heard none, whether it ever was in the Service.
        """
        if self.finished:
            return False
        if self.worker.last is not None:
            return _serves(self.worker.last, committed)
        return self.pod.gate_boot is not None

    def failure(self, identity: WeightsId | None, *verbs: str) -> str | None:
        """What the last of these calls said if it failed; `identity`: the weights it was about."""
        for verb in verbs:
            failed = self.worker.failures.get(verb)
            if failed is not None and failed.about == identity:
                return f"{self.pod.name}: {failed.message}"
        slot = self.staged
        if "stage" not in verbs or slot is None or slot.phase != "Failed" or identity is None:
            return None
        if (slot.epoch, slot.version) != identity.as_tuple():
            return None
        return f"{self.pod.name}: {slot.error or 'staging failed'}"

    def mismatch(self, version: Version) -> str | None:
        """How its bytes differ from those that the pool has under this identity."""
        found, wanted = self.staged_hash(version), version.root_hash
        if found is not None and wanted not in (None, found):
            return (
                f"{self.pod.name}: {MISMATCH}: it staged {version.identity} with root_hash {found}, "
                f"the pool's is {wanted}: publish the right bytes under a higher version"
            )
        for verb in ("stage", "commit"):
            failed = self.worker.failures.get(verb)
            if failed is None or failed.about != version.identity:
                continue
            if failed.slug == MISMATCH:
                return f"{self.pod.name}: {failed.message}"
        slot = self.staged
        if slot is None or slot.phase != "Failed" or slot.slug != MISMATCH:
            return None
        about = (slot.epoch, slot.version) == version.identity.as_tuple()
        return f"{self.pod.name}: {slot.error}" if about else None


def _serves(state: WorkerState, committed: WeightsId) -> bool:
    active = state.weights.active
    return (
        is_loaded(state)
        and state.lifecycle in IN_SERVICE
        and state.weights.required is not None
        and active is not None
        and active.identity >= committed
    )


def stage_failures(heads: Iterable[Head], version: Version) -> list[str]:
    """Return why these heads could not stage this version, other bytes first."""
    heads = list(heads)
    odd = {h.pod.uid: text for h in heads if (text := h.mismatch(version))}
    rest = (h.failure(version.identity, "stage") for h in heads if h.pod.uid not in odd)
    return [*sorted(odd.values()), *sorted(text for text in rest if text)]


def waits_for(head: Head) -> str:
    """What a head is doing, for a person; empty if it serves."""
    state = head.worker.state
    if head.serves:
        return ""
    if head.pod.trouble:
        return head.pod.trouble
    if trouble := _troubled_member(head):
        return trouble
    if state is None:
        return _before_it_answers(head)
    if state.progress is not None:
        told = state.progress.fraction is None or "%" in state.progress.message
        part = "" if told else f" {state.progress.fraction:.0%}"
        return f"is {state.lifecycle}: {state.progress.message}{part}"
    others = [h.holder for h in state.holds if h.holder != state.caller]
    if others:
        return f"is {state.lifecycle}, held by {', '.join(sorted(others))}"
    staged = state.weights.staged
    if staged is not None and staged.phase == "Staging":
        return f"is staging weights ({staged.epoch}, {staged.version})"
    return f"is {state.lifecycle}" + ("" if state.serving else " but does not serve yet")


def _before_it_answers(head: Head) -> str:
    for pod in (head.pod, *head.members):
        if not pod.started:
            there = pod.waits_on or "is waiting for its container"
            what = there if pod.node else "is not scheduled yet"
            return what if pod is head.pod else f"waits for {pod.name}, which {what}"
    if not head.worker.error:
        return "is starting"
    yet = "yet " if head.boot is None else ""
    return f"does not answer {yet}({head.worker.error})"


def _troubled_member(head: Head) -> str:
    """Which member keeps a head from serving, as far as its pod says so."""
    for member in head.members:
        if member.trouble or member.finished:
            verb = "lost" if member.finished else "waits for"
            return f"{verb} {member.name}: {member.trouble or 'it has ended'}"
    return ""
