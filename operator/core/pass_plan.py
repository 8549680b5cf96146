"""A pass's decision as data: what `plan_pass` returns and `act` carries out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from rollout_common.wire import (
    CommitRequest,
    DiscardRequest,
    PauseRequest,
    ReleaseRequest,
    RequireRequest,
    SleepRequest,
    StageRequest,
    WakeRequest,
    WeightsId,
)
from rollout_operator.api.status import RolloutReplicaStatus

from .placement import PodPlacement


@dataclass(frozen=True, slots=True)
class DisruptionBudget:
    """What evictions must leave."""

    min_available: int
    """Pods."""
    unready_go: bool
    """Pods that aren't Ready may be evicted in any case."""


@dataclass(frozen=True, slots=True)
class CreatePod:
    """Create the pod of `(replica, rank)`; `restarts` failures came before it.

    A colocated pod has a place, all others none.
    """

    replica: int
    rank: int
    restarts: int
    place: PodPlacement | None = None
    surge: bool = False
    """Its replica is one in addition to the wanted ones, for a time."""


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete exactly this pod; `grace` None: its own grace period."""

    name: str
    uid: str
    grace: int | None
    reason: str
    forced: bool = False
    """It terminates already: nothing more of it need be seen, and a finalizer may hold it."""


@dataclass(frozen=True, slots=True)
class SeekPod:
    """See whether the pod of `(replica, rank)` is there after all, without the labels that show it."""

    replica: int
    rank: int


@dataclass(frozen=True, slots=True)
class SetGate:
    """Set the readiness gate of a head, bound to the worker process `boot`."""

    name: str
    uid: str
    serving: bool
    boot: str
    reason: str
    proven_since: float | None = None
    """When the worker first did what its pool asks for; None: it has not yet."""


class ControlVerb(StrEnum):
    """Calls to a worker's control port."""

    STAGE = "stage"
    COMMIT = "commit"
    DISCARD = "discard"
    REQUIRE = "require"
    PAUSE = "pause"
    RESUME = "resume"
    SLEEP = "sleep"
    WAKE = "wake"


CallBody = (
    StageRequest
    | CommitRequest
    | DiscardRequest
    | RequireRequest
    | PauseRequest
    | ReleaseRequest
    | SleepRequest
    | WakeRequest
)


@dataclass(frozen=True, slots=True)
class CallWorker:
    """Call `verb` on the head pod `uid`; one call at a time for each key of a pod."""

    uid: str
    pod: str
    verb: ControlVerb
    body: CallBody
    deadline_seconds: float
    peers: tuple[str, ...] = ()
    """Addresses of pods that have a copy of the pushed weights to stage: they are asked for it first."""
    instead_of: frozenset[ControlVerb] = frozenset()
    """Calls under way for its key that it ends: what they wait for is not wanted any more."""

    @property
    def is_irreversible(self) -> bool:
        """It gives a worker other weights, or takes those that it has: nothing brings them back."""
        emptied = isinstance(self.body, WakeRequest) and not self.body.load
        return self.verb is ControlVerb.COMMIT or emptied

    @property
    def about(self) -> WeightsId | None:
        """The weights that are staged or committed; failures count for these alone."""
        if isinstance(self.body, StageRequest | CommitRequest):
            return WeightsId(epoch=self.body.epoch, version=self.body.version)
        return None


@dataclass(frozen=True, slots=True)
class EventNote:
    """An event for a person."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PassPlan:
    """Everything one pass does, and the status that describes the world it saw."""

    status: RolloutReplicaStatus
    budget: DisruptionBudget | None = None
    """What evictions must leave; None: the pods are a trainer's."""
    seek: tuple[SeekPod, ...] = ()
    create: tuple[CreatePod, ...] = ()
    delete: tuple[DeletePod, ...] = ()
    gates: tuple[SetGate, ...] = ()
    calls: tuple[CallWorker, ...] = ()
    notes: tuple[EventNote, ...] = ()
    restarts: Mapping[int, int] = field(default_factory=dict)
    """Failures to note on the pods that replace deleted ones, by replica."""
    barrier: frozenset[str] | None = None
    replicas: frozenset[int] = frozenset()
    """Numbers of the replicas that must have pods."""
    requeue: float | None = None
    """Seconds until the next pass, if nothing happens before."""
    unreachable: int = 0
    """Replicas whose control port does not answer."""
    in_a_row: int = 0
    """Most failures in a row of a replica that has not proven itself since."""


@dataclass(slots=True)
class RequeueAfter:
    """The earliest of several times to look again."""

    seconds: float | None = field(default=None)

    def at_most(self, seconds: float) -> None:
        """Look again within `seconds`."""
        seconds = max(seconds, 0.05)
        self.seconds = seconds if self.seconds is None else min(self.seconds, seconds)
