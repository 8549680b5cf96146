"""The part of the spec that says which weights the pool serves, and how it updates them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from rollout_common.wire import MAX_IDENTITY, WeightsId, WeightsSource

from .names import CONTROL_PORT, DATA_PORT, GANG_PORT, WEIGHTS_PORT
from .schema import (
    INT32_MAX,
    SUB_PATH_MEANING,
    ApiModel,
    Dns1123,
    Quantity,
    SchemaExtra,
    SubPath,
    api_default,
    cel_rule,
    config_with_rules,
    schema_extra,
)


def _bounded_quantity(field: str, least: str, most: str, unit: str = "bytes") -> SchemaExtra:
    """Return the rules that an amount is more than 0 and less than 1E, each with its fix."""
    return schema_extra(
        cel_rule(
            "type(self) == int ? self > 0 : quantity(self).isGreaterThan(quantity('0'))",
            f"spec.weights.{field} must be more than 0: {least}",
        ),
        cel_rule(
            "type(self) == int || quantity(self).isLessThan(quantity('1E'))",
            f"spec.weights.{field} must be less than 1E (10^18 {unit}): {most}",
        ),
    )


class WeightsStrategy(StrEnum):
    """How a pool moves to new weights."""

    ALL_AT_ONCE = "AllAtOnce"
    ROLLING = "Rolling"
    EAGER = "Eager"


class VolumeClaim(ApiModel):
    """A PersistentVolumeClaim in the pool's namespace; mounted read-only."""

    name: Dns1123
    """Name of the claim."""
    sub_path: SubPath | None = Field(default=None, description=SUB_PATH_MEANING)


TARGET_PATH = "spec.weights.target"


class WeightsTarget(ApiModel):
    """The target: the weights that the pool must serve."""

    model_config = config_with_rules(
        cel_rule(
            "self.epoch > oldSelf.epoch || "
            "(self.epoch == oldSelf.epoch && self.version >= oldSelf.version)",
            f"'{TARGET_PATH} (%d, %d) is lower than the stored (%d, %d): raise version, or use epoch %d'"
            ".format([self.epoch, self.version, oldSelf.epoch, oldSelf.version, "
            "oldSelf.epoch + 1])",
            expression=True,
        ),
        cel_rule(
            "self.epoch != oldSelf.epoch || self.version != oldSelf.version || "
            "self.source == oldSelf.source",
            f"{TARGET_PATH}.source must not change for the same epoch and version: raise version",
            path=".source",
        ),
        cel_rule(
            "self.epoch != oldSelf.epoch || self.version == oldSelf.version || "
            "self.source != oldSelf.source || has(self.source.pushed)",
            f"{TARGET_PATH}.source must change when version does: give the new version its own source",
            path=".source",
        ),
        cel_rule(
            "self.epoch > 0 || self.version > 0 || has(self.source.checkpoint)",
            f"{TARGET_PATH} (0, 0) is the model's own checkpoint: set source to {{checkpoint: {{}}}}, "
            "or raise version",
            path=".source",
        ),
        x_kubernetes_map_type="atomic",
    )

    epoch: int = Field(ge=0, le=MAX_IDENTITY)
    """Fencing token: a trainer that takes over uses a higher epoch."""
    version: int = Field(ge=0, le=MAX_IDENTITY)
    """Version chosen by the trainer; must increase."""
    source: WeightsSource = Field(
        json_schema_extra=schema_extra(
            cel_rule(
                "[has(self.path), has(self.checkpoint), has(self.pushed)].exists_one(x, x)",
                f"{TARGET_PATH}.source needs exactly one of path, checkpoint and pushed: keep one (in a "
                "merge patch, set the others to null)",
            ),
            cel_rule(
                r"!has(self.path) || !self.path.matches('(^|/)[.][.](/|$)')",
                f"{TARGET_PATH}.source.path must not contain '..': name the folder itself, absolute or "
                "relative to /rollout/weights",
                path=".path",
            ),
        )
    )
    """Where the weights are: exactly one of path, checkpoint and pushed. The files must not change
    until a later version is committed. Pushed: the trainer has staged the bytes on the replicas
    before it sets this; no volume has them."""

    @property
    def identity(self) -> WeightsId:
        """The identity without the source."""
        return WeightsId(epoch=self.epoch, version=self.version)


class WeightsVolume(ApiModel):
    """Volume with the trainer's weights, mounted read-only at `/rollout/weights`."""

    claim: VolumeClaim
    """PersistentVolumeClaim that holds the weights."""


class InFlightSpec(ApiModel):
    """What happens to running requests when new weights are committed."""

    policy: Literal["Drain", "Abort", "Keep", "Recompute", "Pin"] = "Drain"
    """Drain: they finish on the old weights, within the deadline. Abort: they end with partial
    output. Keep: they continue on the new weights with the KV cache they have. Recompute: they
    continue on the new weights, which recompute their KV cache. Pin (engine hf): they finish on the
    old weights, which stay in memory while new requests use the new ones."""
    deadline_seconds: int | None = Field(default=None, ge=0, le=86400)
    """How long Drain waits, and how long Pin waits for requests that are already pinned; defaults
    to spec.drainSeconds."""
    on_deadline: Literal["Abort", "Keep"] = "Abort"
    """What happens to requests still running at the deadline."""


class TransportSpec(ApiModel):
    """How pushed weights travel between trainers and workers."""

    port: int = Field(
        default=WEIGHTS_PORT,
        ge=1024,
        le=65535,
        json_schema_extra=schema_extra(
            cel_rule(
                f"!(self in [{DATA_PORT}, {CONTROL_PORT}, {GANG_PORT}])",
                f"spec.weights.transport.port must not be {DATA_PORT}, {CONTROL_PORT} or {GANG_PORT}, "
                f"the worker's other ports: use {WEIGHTS_PORT}",
            )
        ),
    )
    """TCP port of every worker for pushed weights; a change replaces the pods. The chart's
    NetworkPolicy opens the ports in networkPolicy.weightsPorts (8002)."""
    tls: Literal["Off", "Required"] = "Off"
    """Required: that port takes TLS alone, with the certificate of the control ports, which the
    chart's workers.controlTLS brings, and trainers and workers check it; a change replaces the
    pods."""
    egress: Quantity | None = Field(
        default=None,
        json_schema_extra=_bounded_quantity(
            "transport.egress",
            "give bytes a second, such as 500M, or leave it out",
            "give what the network takes, or leave it out",
            "bytes a second",
        ),
    )
    """Most bytes a second, such as 500M, that a worker sends of weights to others: to replicas that
    get the same version, to joiners and to the other nodes of its replica together. If unset, no
    limit. A change replaces the pods."""
    gang_fetch: Literal["Needed", "All"] = "Needed"
    """What the nodes of a replica take of pushed weights. Needed: what their ranks read, as far as
    that was seen. All: everything, for a model whose loader changes its mind. A change replaces the
    pods."""


class WeightsSpec(ApiModel):
    """Which weights the pool serves, and how it updates them."""

    target: WeightsTarget | None = None
    """Weights that the pool must serve; if unset, (0, 0), the model's own checkpoint. Never
    decreases and cannot be removed. Trainers set it, so keep it out of GitOps manifests."""
    volume: WeightsVolume | None = None
    """Volume that holds source.path, in addition to the model's."""
    strategy: WeightsStrategy = Field(
        default=WeightsStrategy.ALL_AT_ONCE, json_schema_extra=api_default()
    )
    """AllAtOnce: commit when every serving replica has staged. Rolling: at most maxUnavailable
    replicas at a time. Eager: each replica as soon as it can."""
    max_unavailable: int = Field(default=1, ge=1, le=9999)
    """Maximum number of replicas that Rolling updates at a time."""
    transport: TransportSpec = TransportSpec()
    """How pushed weights travel."""
    in_flight: InFlightSpec = InFlightSpec()
    """What happens to running requests at a commit."""
    deadline_seconds: int = Field(default=600, ge=1, le=86400)
    """Time limit for staging, and another for committing; past it, status says so and retries
    continue."""
    staging_memory: Quantity | None = Field(
        default=None,
        json_schema_extra=_bounded_quantity(
            "stagingMemory",
            "give it room for a version, or leave it out",
            "give the size of a version or two",
        ),
    )
    """Most memory that staged weights may take in a pod, in addition to what its engine takes: at
    least the size of a version. A version that has no room is refused. If unset, what
    spec.resources.limits.memory leaves, which bounds it anyway."""


class UpdateStrategy(ApiModel):
    """Rolling update of pods after a change that needs new ones."""

    model_config = config_with_rules(
        cel_rule(
            "(has(self.maxUnavailable) ? self.maxUnavailable : 1) > 0 || "
            "(has(self.maxSurge) ? self.maxSurge : 0) > 0",
            "spec.updateStrategy.maxUnavailable and maxSurge must not both be 0, since nothing could be "
            "replaced: raise one",
        )
    )

    max_unavailable: int = Field(default=1, ge=0, le=9999)
    """Maximum number of replicas that may be missing at a time."""
    max_surge: int = Field(default=0, ge=0, le=9999)
    """Maximum number of replicas that run in addition until the update is over; they need accelerators of
    their own. Standalone only."""
    partition: int = Field(default=0, ge=0, le=9999)
    """Only replicas with this number or a higher one are replaced. A lower one that fails gets the new
    template all the same, since the pool keeps no former one."""


class DisruptionSpec(ApiModel):
    """What evictions may take, such as those of a node's drain, by a PodDisruptionBudget."""

    max_unavailable: int = Field(default=1, ge=0, le=9999)
    """Maximum number of replicas that evictions may take at a time. While a commit runs it counts as 0,
    and the last copy of pushed weights is never among them: a replica is added to take one if its node is
    cordoned. With 0 no pod is ever evicted."""


class SchedulingSpec(ApiModel):
    """How a cluster's gang scheduler takes the pods of a replica. Standalone only."""

    model_config = config_with_rules(
        cel_rule(
            "!has(self.queue) || has(self.gang)",
            "spec.scheduling.queue needs spec.scheduling.gang: set gang to PodGroup, or remove queue",
        )
    )

    gang: Literal["PodGroup"] | None = None
    """PodGroup: the pods of a replica start together or not at all, by the gang scheduler that the
    cluster has (Kueue, Volcano or scheduler-plugins). Changing it replaces the pods."""
    queue: Annotated[Dns1123, Field(max_length=63)] | None = None
    """Queue of Volcano, or LocalQueue of Kueue, which needs one; it becomes a label. Changing it
    replaces the pods."""


class RestartPolicy(ApiModel):
    """Back-off for failing replicas; 10 minutes Ready or a new spec reset the count."""

    model_config = config_with_rules(
        cel_rule(
            "(has(self.baseDelaySeconds) ? self.baseDelaySeconds : 10) <= "
            "(has(self.maxDelaySeconds) ? self.maxDelaySeconds : 300)",
            "spec.restartPolicy.baseDelaySeconds (default 10) must not exceed maxDelaySeconds "
            "(default 300): lower one or raise the other",
        )
    )

    base_delay_seconds: int = Field(default=10, ge=1, le=86400)
    """Delay before the second restart in a row (the first is immediate); then doubles."""
    max_delay_seconds: int = Field(default=300, ge=1, le=86400)
    """Maximum delay."""
    max_restarts: int | None = Field(default=None, ge=0, le=INT32_MAX)
    """Restarts after which a replica stays Failed; if unset, no limit."""
