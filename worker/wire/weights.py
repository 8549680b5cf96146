"""Wire models of weights: their source, what is staged and active, and the verbs that change it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    model_validator,
)

from .base import (
    Body,
    Float,
    Identity,
    InFlightPolicy,
    OnDeadline,
    Seconds,
    WeightsId,
    Wire,
    _absent,
)
from .bounds import bounded


class Checkpoint(Body):
    """Names the model's own checkpoint as the source, to go back to it."""


class WeightsSource(Body):
    """Where to read the bytes of a version; exactly one field is set."""

    path: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        exclude_if=_absent,
        description="Folder or file of safetensors in the model's or the weights' volume; a relative path starts in the latter.",
    )
    checkpoint: Checkpoint | None = Field(
        default=None, exclude_if=_absent, description="The model's own checkpoint."
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.path is None) == (self.checkpoint is None):
            raise ValueError("give exactly one of source.path and source.checkpoint")
        return self


class StagedWeights(Wire):
    """The staging slot, as `POST /v1/weights/stage` and `GET /v1/weights` report it."""

    epoch: Identity
    version: Identity
    source: WeightsSource
    phase: Literal["Staging", "Staged", "Failed"]
    bytes_done: int = 0
    bytes_total: int = 0
    root_hash: str | None = None
    labels: Mapping[str, str] = Field(default_factory=dict)
    error: str | None = Field(
        default=None, description="Names the tensor or file at fault, and the fix."
    )


class ActiveWeights(Wire):
    """The serving weights, or those that served before the last commit."""

    epoch: Identity
    version: Identity
    root_hash: str | None = None
    labels: Mapping[str, str] = Field(default_factory=dict)

    @property
    def identity(self) -> WeightsId:
        """The identity alone, without the content."""
        return WeightsId(epoch=self.epoch, version=self.version)


class WeightsState(Wire):
    """Response of `GET /v1/weights`, and part of `/v1/state`."""

    active: ActiveWeights | None = Field(description="null until a model is loaded.")
    previous: ActiveWeights | None = None
    staged: StagedWeights | None = None
    required: WeightsId | None = Field(
        default=None,
        description="Floor set by `POST /v1/require`; null: not set in this process yet.",
    )
    fence_epoch: Identity = Field(
        default=0, description="Stage and commit refuse lower epochs (`stale-epoch`)."
    )
    commit_seq: int = 0


Labels = Annotated[
    Mapping[Annotated[str, Field(max_length=63)], Annotated[str, Field(max_length=256)]],
    Field(max_length=32),
    bounded(32),
]


class StageRequest(Body):
    """Body of `POST /v1/weights/stage`."""

    epoch: Identity
    version: Identity
    source: WeightsSource
    root_hash: str | None = Field(default=None, max_length=128)
    labels: Labels = Field(default_factory=dict)
    deadline_seconds: Float = Field(default=600, gt=0, le=86400)


class CommitRequest(Body):
    """Body of `POST /v1/weights/commit`."""

    epoch: Identity
    version: Identity
    root_hash: str | None = Field(default=None, max_length=128)
    in_flight: InFlightPolicy = "Drain"
    deadline_seconds: Float = Field(default=30, ge=0, le=86400)
    on_deadline: OnDeadline = "Abort"


class CommitResponse(Wire):
    """What a commit did; for `pause_seconds` the engine could not generate tokens."""

    active: ActiveWeights
    previous: ActiveWeights | None
    commit_seq: int
    pause_seconds: Seconds
    finished: int = Field(description="Running requests that completed during the drain.")
    aborted: int
    kept: int


class DiscardRequest(Body):
    """Body of `POST /v1/weights/discard`."""

    epoch: Identity
    version: Identity


class DiscardResponse(Wire):
    """Whether the slot held that identity; discarding an absent one is not an error."""

    outcome: Literal["discarded", "unchanged"]


class RequireRequest(Body):
    """Body of `POST /v1/require`: lifts the fence, raises the epoch and the admission floor.

    From then on, stage and commit refuse epochs below `epoch` (`stale-epoch`). With `min_version`
    the worker serves only weights at or above (epoch, min_version). Without it the floor, and the
    fence of a fresh process, stay as they are: this is how the operator shuts out a dead trainer
    while the old weights keep serving.

    With `drain_seconds` running requests get that much when the process is told to end, from now on.
    """

    epoch: Identity
    min_version: Identity | None = None
    drain_seconds: Float | None = Field(default=None, ge=0, le=86400)
