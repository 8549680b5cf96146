"""One head of a pool and its worker: what it serves, what it has staged, why it failed. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rollout_worker.schemas import Lifecycle, StagedWeights, WeightsId, WeightsSource

from .world import Pod, Worker

IN_SERVICE = (Lifecycle.ACTIVE, Lifecycle.PAUSING, Lifecycle.PAUSED, Lifecycle.DRAINING)


@dataclass(frozen=True, slots=True)
class Version:
    """An identity and where its bytes are."""

    identity: WeightsId
    source: WeightsSource
    root_hash: str | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """A living head pod of a wanted replica, and its worker."""

    pod: Pod
    worker: Worker

    @property
    def boot(self) -> str | None:
        """Id of the worker process, from its own answer or from the gate it was given."""
        state = self.worker.state
        return state.boot_id if state else self.pod.gate_boot

    @property
    def staged(self) -> StagedWeights | None:
        """Its staging slot."""
        return self.worker.state.weights.staged if self.worker.state else None

    def at_least(self, identity: WeightsId) -> bool:
        """It serves, or would serve, with this identity or a later one."""
        return self.worker.active is not None and self.worker.active >= identity

    def has_staged(self, version: Version) -> bool:
        """It could commit this version now, or has it already."""
        if self.at_least(version.identity):
            return True
        slot = self.staged
        return (
            slot is not None
            and slot.phase == "Staged"
            and (slot.epoch, slot.version) == version.identity.as_tuple()
            and slot.source == version.source
        )

    def in_service(self, committed: WeightsId) -> bool:
        """It serves, or would if the pool were not paused."""
        state = self.worker.state
        if state is None:
            return self.pod.gate and self.pod.ready
        return (
            self.worker.loaded
            and state.lifecycle in IN_SERVICE
            and state.weights.required is not None
            and self.at_least(committed)
        )

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


def stage_failures(heads: Iterable[Head], identity: WeightsId) -> list[str]:
    """Return why these heads could not stage this identity, sorted."""
    found = (head.failure(identity, "stage") for head in heads)
    return sorted(text for text in found if text)
