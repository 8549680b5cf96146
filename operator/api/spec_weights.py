"""The part of the spec that says which weights the pool serves and how it comes to them."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from rollout_worker.schemas import MAX_IDENTITY, WeightsId, WeightsSource

from .schema import (
    INT32_MAX,
    SUB_PATH_MEANING,
    ApiModel,
    Dns1123,
    SubPath,
    api_default,
    cel,
    checked,
    rules,
)


class Strategy(StrEnum):
    """How a fleet comes to new weights."""

    ALL_AT_ONCE = "AllAtOnce"
    ROLLING = "Rolling"
    EAGER = "Eager"


class Claim(ApiModel):
    """A PersistentVolumeClaim in the pool's namespace; mounted read-only."""

    name: Dns1123 = Field(description="Name of the claim.")
    sub_path: SubPath | None = Field(default=None, description=SUB_PATH_MEANING)


TARGET = "spec.weights.target"


class WeightsTarget(ApiModel):
    """The pointer: the weights that the pool must come to serve."""

    model_config = checked(
        cel(
            "self.epoch > oldSelf.epoch || "
            "(self.epoch == oldSelf.epoch && self.version >= oldSelf.version)",
            f"'{TARGET} (%d, %d) is below the stored (%d, %d): raise version, or take epoch %d'"
            ".format([self.epoch, self.version, oldSelf.epoch, oldSelf.version, "
            "oldSelf.epoch + 1])",
            expression=True,
        ),
        cel(
            "self.epoch != oldSelf.epoch || self.version != oldSelf.version || "
            "self.source == oldSelf.source",
            f"{TARGET}.source must not change under the same epoch and version: raise version",
            path=".source",
        ),
        cel(
            "self.epoch != oldSelf.epoch || self.version == oldSelf.version || "
            "self.source != oldSelf.source",
            f"{TARGET}.source must change with version: give the new version's own source",
            path=".source",
        ),
        cel(
            "self.epoch > 0 || self.version > 0 || has(self.source.checkpoint)",
            f"{TARGET} (0, 0) is the model's own checkpoint: set source to {{checkpoint: {{}}}}, "
            "or raise version",
            path=".source",
        ),
        x_kubernetes_map_type="atomic",
    )

    epoch: int = Field(
        ge=0, le=MAX_IDENTITY, description="Fencing token of the trainer's incarnation."
    )
    version: int = Field(
        ge=0, le=MAX_IDENTITY, description="The trainer's number of these weights; grows."
    )
    source: WeightsSource = Field(
        description="Where the bytes are: exactly one of path and checkpoint. They stay unchanged "
        "until a later version is committed.",
        json_schema_extra=rules(
            cel(
                "[has(self.path), has(self.checkpoint)].exists_one(x, x)",
                f"{TARGET}.source needs exactly one of path and checkpoint: keep one (in a merge "
                "patch, set the other to null)",
            ),
            cel(
                r"!has(self.path) || !self.path.matches('(^|/)[.][.](/|$)')",
                f"{TARGET}.source.path must not contain '..': give the folder itself, absolute or "
                "relative to /rollout/weights",
                path=".path",
            ),
        ),
    )

    @property
    def identity(self) -> WeightsId:
        """The identity without the source."""
        return WeightsId(epoch=self.epoch, version=self.version)


class WeightsVolume(ApiModel):
    """Volume with trainers' weights, mounted read-only at `/rollout/weights`."""

    claim: Claim = Field(description="The claim that holds the weights.")


class InFlight(ApiModel):
    """What happens to running requests when new weights are committed."""

    policy: Literal["Drain", "Abort", "Keep", "Recompute", "Pin"] = Field(
        default="Drain",
        description="Drain: they end on the old weights within the deadline. Abort: partial "
        "output. Keep: they go on with their KV. Recompute: their prefix is prefilled again with "
        "the new weights. Pin (engine hf): they end on the old weights, kept beside the new ones "
        "that later requests use.",
    )
    deadline_seconds: int | None = Field(
        default=None,
        ge=0,
        le=86400,
        description="How long Drain waits, and Pin for requests that are pinned already; "
        "spec.drainSeconds if absent.",
    )
    on_deadline: Literal["Abort", "Keep"] = Field(
        default="Abort", description="What happens to requests that still run after the wait."
    )


class Weights(ApiModel):
    """Which weights the pool serves and how it comes to them."""

    target: WeightsTarget | None = Field(
        default=None,
        description="The pointer: what the pool must serve; absent: (0, 0), the model's own "
        "checkpoint. Never goes down and is never removed. Trainers move it, so it never belongs "
        "into a GitOps manifest.",
    )
    volume: WeightsVolume | None = Field(
        default=None, description="Volume that source.path lies on, besides the model's."
    )
    strategy: Strategy = Field(
        default=Strategy.ALL_AT_ONCE,
        description="AllAtOnce: commit when every serving replica has staged. Rolling: at most "
        "maxUnavailable replicas at a time. Eager: each replica as soon as it can.",
        json_schema_extra=api_default(),
    )
    max_unavailable: int = Field(
        default=1, ge=1, le=9999, description="Replicas that Rolling updates at a time."
    )
    in_flight: InFlight = Field(
        default=InFlight(), description="What happens to running requests at a commit."
    )
    deadline_seconds: int = Field(
        default=600,
        ge=1,
        le=86400,
        description="Time for one update; when it passes, status reports it and retries go on.",
    )


class UpdateStrategy(ApiModel):
    """Rolling update of pods after a change that needs new ones."""

    max_unavailable: int = Field(
        default=1, ge=1, le=9999, description="Replicas that may be replaced at a time."
    )


class RestartPolicy(ApiModel):
    """Back-off of replicas that fail; the count resets after 10 minutes Ready or a new spec."""

    model_config = checked(
        cel(
            "(has(self.baseDelaySeconds) ? self.baseDelaySeconds : 10) <= "
            "(has(self.maxDelaySeconds) ? self.maxDelaySeconds : 300)",
            "spec.restartPolicy.baseDelaySeconds (10 if absent) must not exceed maxDelaySeconds "
            "(300 if absent): lower the one or raise the other",
        )
    )

    base_delay_seconds: int = Field(
        default=10,
        ge=1,
        le=86400,
        description="Wait before the second restart in a row (the first is at once); then doubles.",
    )
    max_delay_seconds: int = Field(default=300, ge=1, le=86400, description="Longest wait.")
    max_restarts: int | None = Field(
        default=None,
        ge=0,
        le=INT32_MAX,
        description="Restarts after which a replica is left Failed; absent: no limit.",
    )
