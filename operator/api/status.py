"""The status of a RolloutReplica: what was observed, as `kubectl` and trainers read it.

Texts are cut to their bounds instead of refused, so that no error message can make a status
invalid. Times survive a round trip through the API server unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from rollout_common.wire import MAX_IDENTITY, WeightsId, WeightsSource

from .schema import (
    ATOMIC_LIST,
    INT32_MAX,
    ApiModel,
    LogTail,
    Message,
    ShortMessage,
    Timestamp,
    TimestampSeconds,
    field_path,
    map_list,
    without_location,
)

MAX_MEMBERS = 50
MAX_ERRORS = 5
MAX_SELECTOR_LENGTH = 100_000
"""Above the longest that spec can say: 32 labels of 381 characters, 32 expressions of 32 values."""


class PoolPhase(StrEnum):
    """Summary of the conditions, derived; decide nothing from it."""

    PENDING = "Pending"
    LOADING = "Loading"
    READY = "Ready"
    UPDATING = "Updating"
    PAUSED = "Paused"
    ASLEEP = "Asleep"
    SUSPENDED = "Suspended"
    DEGRADED = "Degraded"
    FAILED = "Failed"


class UpdatePhase(StrEnum):
    """Phase of a weights update."""

    STAGING = "Staging"
    COMMITTING = "Committing"
    COMPLETE = "Complete"
    FAILED = "Failed"
    SUPERSEDED = "Superseded"


PoolState = Literal["Active", "Paused", "Asleep", "Suspended"]
Count = Annotated[int, Field(ge=0, le=INT32_MAX)]
Identity = Annotated[int, Field(ge=0, le=MAX_IDENTITY)]
ObjectName = Annotated[str, Field(max_length=253)]


class StatusId(ApiModel):
    """An identity of weights."""

    epoch: Identity
    """Epoch of the identity."""
    version: Identity
    """Version of the identity."""

    @property
    def identity(self) -> WeightsId:
        """The identity as the wire models have it."""
        return WeightsId(epoch=self.epoch, version=self.version)

    @classmethod
    def from_identity(cls, identity: WeightsId) -> StatusId:
        """Return the identity as status has it."""
        return cls(epoch=identity.epoch, version=identity.version)


class CommittedWeights(StatusId):
    """Weights that new and restarted workers load; no worker below them is Ready."""

    source: WeightsSource
    """Where the weights are."""
    root_hash: Annotated[str, Field(max_length=128)] | None = None
    """Hash of the content, once a worker has computed it."""


class ActiveRange(ApiModel):
    """Lowest and highest identity being served."""

    min: StatusId
    """Lowest identity being served."""
    max: StatusId
    """Highest identity being served."""


class LastUpdate(StatusId):
    """Latest weights update, finished or in progress."""

    source: WeightsSource | None = None
    """Where its weights are; kept because the target may have moved on."""
    phase: UpdatePhase
    """Phase of the update."""
    attempts: Count = 0
    """Number of attempts."""
    started_at: Timestamp | None = None
    """When staging began; its deadline counts from here."""
    completed_at: Timestamp | None = None
    """When it ended."""
    commit_started_at: Timestamp | None = None
    """When committing began: from then on workers may have the new weights. Its deadline counts
    from here."""
    root_hash: Annotated[str, Field(max_length=128)] | None = None
    """Hash of the content that is committed; no worker commits any other."""
    message: Message = ""
    """One sentence on its progress."""


class WeightsStatus(ApiModel):
    """Weights of the pool."""

    committed: CommittedWeights | None = None
    """Weights that new and restarted workers load; no worker below them is Ready."""
    active: ActiveRange | None = None
    """Weights observed on the serving replicas."""
    staged_replicas: Count = 0
    """Replicas that have staged the update in progress."""
    last_update: LastUpdate | None = None
    """Latest weights update, finished or in progress."""


class StateTransition(ApiModel):
    """A change of the pool's lifecycle."""

    from_: PoolState | None = Field(default=None, alias="from")
    """Previous lifecycle."""
    to: PoolState
    """Requested lifecycle."""
    started_at: Timestamp
    """When the change began."""
    completed_at: Timestamp | None = None
    """When every replica had completed it; unset while in progress."""
    message: Message = ""
    """One sentence on its progress."""


class MemberStatus(ApiModel):
    """A head pod, as its worker reports it."""

    name: ObjectName
    """Name of the pod."""
    node: ObjectName | None = None
    """Node that it runs on."""
    state: Annotated[str, Field(max_length=32)]
    """The worker's lifecycle, or Pending, Terminating or Unreachable."""
    epoch: Identity | None = None
    """Epoch of its active weights."""
    version: Identity | None = None
    """Version of its active weights."""
    ready: bool
    """Whether it serves."""
    restarts: Count = 0
    """Restarts of the replica."""
    turn: Literal["Held", "Waiting", "Released"] | None = None
    """Whether it may hold memory of the devices that it shares with a trainer; unset if it shares
    none."""
    message: ShortMessage = ""
    """What it is waiting for, or what failed."""


class LastError(ApiModel):
    """Something that went wrong."""

    time: Timestamp
    """When it was observed."""
    message: Message
    """What went wrong and where."""
    log: LogTail = ""
    """End of the log of the container that failed, as the kubelet had it; empty if it is not known.
    The pod itself has been replaced."""


class PendingReplacement(ApiModel):
    """A replica whose failed pods are deleted and whose new pods are not all there yet."""

    replica: Count
    """Index of the replica."""
    restarts: Count
    """Failures in a row, to be noted on the new pods."""


class PoolCondition(ApiModel):
    """One condition; `reason` is for programs, `message` for people."""

    type: Annotated[str, Field(min_length=1, max_length=316)]
    """Ready, Progressing, Degraded, WeightsSynced, Asleep or Suspended."""
    status: Literal["True", "False", "Unknown"]
    """True, False or Unknown."""
    reason: Annotated[
        str,
        Field(min_length=1, max_length=256, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"),
    ]
    """CamelCase reason, for programs."""
    message: Annotated[Message, Field(max_length=32768)] = ""
    """One sentence, for people."""
    last_transition_time: TimestampSeconds
    """When status last changed."""
    observed_generation: Annotated[int, Field(ge=0, le=MAX_IDENTITY)] | None = None
    """Generation of the spec that this describes."""


class RolloutReplicaStatus(ApiModel):
    """What was observed of the pool; one server-side apply writes it whole."""

    observed_generation: Annotated[int, Field(ge=0, le=MAX_IDENTITY)] | None = None
    """Generation of the spec that this status describes."""
    phase: PoolPhase | None = None
    """Summary for people, derived from the conditions."""
    message: Message = ""
    """One sentence on what the pool is waiting for, or what is wrong."""
    replicas: Count = 0
    """Replicas that have pods."""
    desired_replicas: Count = 0
    """Replicas that should run: spec.replicas, or one for each of the trainer's pods in mode
    Hybrid."""
    ready_replicas: Count = 0
    """Replicas that serve."""
    updated_replicas: Count = 0
    """Replicas at the latest revision."""
    asleep_replicas: Count = 0
    """Replicas that are asleep."""
    selector: Annotated[str, Field(max_length=MAX_SELECTOR_LENGTH)] | None = None
    """Label selector that matches one pod per replica, for HPA and PDB."""
    weights: WeightsStatus = WeightsStatus()
    """Weights of the pool, as observed."""
    last_transition: StateTransition | None = None
    """Latest change of the pool's lifecycle."""
    members: tuple[MemberStatus, ...] = Field(
        default=(), max_length=MAX_MEMBERS, json_schema_extra=ATOMIC_LIST
    )
    """Head pods, unready ones first; at most 50."""
    restarts: Count = 0
    """Restarts of replicas since the pool was created."""
    replacing: tuple[PendingReplacement, ...] = Field(
        default=(), max_length=9999, json_schema_extra=ATOMIC_LIST
    )
    """Failed replicas between their old pods and their new ones."""
    last_errors: tuple[LastError, ...] = Field(
        default=(), max_length=MAX_ERRORS, json_schema_extra=ATOMIC_LIST
    )
    """Recent errors, newest first; at most 5."""
    conditions: tuple[PoolCondition, ...] = Field(
        default=(), max_length=32, json_schema_extra=map_list("type")
    )
    """Ready, Progressing, Degraded, WeightsSynced, Asleep, Suspended."""

    def find_condition(self, kind: str) -> PoolCondition | None:
        """Return the condition of this type, if it is there."""
        return next((c for c in self.conditions if c.type == kind), None)

    def to_document(self) -> dict[str, Any]:
        """Return the JSON document for the API server; absent values are left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def parse_status(obj: Mapping[str, Any]) -> tuple[RolloutReplicaStatus, str | None]:
    """Read the status of a stored RolloutReplica (the whole object).

    Never fails: a field that another version of the operator wrote and this one does not
    understand is left out, the rest is kept.

    Returns:
        The status, and a sentence on what could not be read; None: all was.
    """
    document = dict(obj.get("status") or {})
    why: str | None = None
    while True:
        try:
            return RolloutReplicaStatus.model_validate(document), why
        except ValidationError as error:
            first = error.errors()[0]
            why = why or (
                f"{field_path(('status', *first['loc']))} was written by another version of the "
                f"operator and can't be read ({first['msg']}): upgrade this one; until then it "
                "leaves the pool as it is"
            )
            faults = {e["loc"][:-1] if e["type"] == "missing" else e["loc"] for e in error.errors()}
            # From the back, so that indices of list items stay right.
            for location in sorted(faults, key=lambda loc: [str(p).zfill(4) for p in loc])[::-1]:
                document = without_location(document, location)
