"""The spec of a RolloutReplica: the source of the CRD, and what `plan_pass` reads.

A default that is in a model but not in the schema belongs to the operator: it may change with a
release without touching stored objects. Attributes that have a default are never None.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from pydantic import Field, ValidationError

from .schema import (
    ApiModel,
    Dns1123,
    Dns1123Label,
    api_default,
    cel_rule,
    config_with_rules,
    field_path,
    schema_extra,
)
from .spec_colocation import COLOCATED_RULES, HYBRID_RULES, Colocation, PoolMode
from .spec_engine import (
    OPERATOR_CLASS_RULE,
    AcceleratorSpec,
    EngineSpec,
    EngineType,
    ModelSource,
    ModelSpec,
    Parallelism,
    SleepSpec,
    WorkerProcess,
)
from .spec_pod import PodTemplate, ResourceRequirements
from .spec_weights import (
    DisruptionSpec,
    InFlightSpec,
    RestartPolicy,
    SchedulingSpec,
    UpdateStrategy,
    VolumeClaim,
    WeightsSpec,
    WeightsStrategy,
)

__all__ = [
    "Colocation",
    "DesiredState",
    "EngineType",
    "InFlightSpec",
    "InvalidSpec",
    "PoolMode",
    "RolloutReplicaSpec",
    "VolumeClaim",
    "WeightsStrategy",
    "parse_spec",
]


class InvalidSpec(ValueError):
    """A stored object that this operator can't read; the text names the field and the fix."""


class DesiredState(StrEnum):
    """Desired lifecycle of the pool's engines."""

    ACTIVE = "Active"
    PAUSED = "Paused"
    ASLEEP = "Asleep"


_WORLD_SIZE_EXPRESSION = (
    "(self.parallelism.tensor * self.parallelism.pipeline * self.parallelism.data)"
)


class RolloutReplicaSpec(ApiModel):
    """Desired state of the pool."""

    model_config = config_with_rules(
        cel_rule(
            "!has(oldSelf.weights) || !has(oldSelf.weights.target) || "
            "(has(self.weights) && has(self.weights.target))",
            "spec.weights.target cannot be removed: keep it, or raise its version",
            path=".weights",
        ),
        cel_rule(
            f"self.engine.type != 'hf' || {_WORLD_SIZE_EXPRESSION} == 1",
            f"'spec.parallelism: engine hf runs on one device, not %d: set tensor, pipeline and "
            f"data to 1 or choose another engine'.format([{_WORLD_SIZE_EXPRESSION}])",
            expression=True,
            path=".parallelism",
        ),
        cel_rule(
            "self.engine.type != 'sglang' || self.parallelism.pipeline == 1",
            "spec.parallelism.pipeline: engine sglang cannot pause a pipeline for an update: set it to "
            "1 and raise tensor",
            path=".parallelism",
        ),
        cel_rule(
            "self.engine.type != 'sglang' || self.parallelism.data == 1",
            "spec.parallelism.data: engine sglang updates no weights of data-parallel ranks: set it "
            "to 1 and raise replicas",
            path=".parallelism",
        ),
        cel_rule(
            "self.engine.type != 'vllm' || self.parallelism.data == 1 || self.parallelism.nodes == 1",
            "'spec.parallelism.data: engine vllm spreads data-parallel ranks within one pod, not %d over "
            "%d pods: set data or nodes to 1 and raise replicas'"
            ".format([self.parallelism.data, self.parallelism.nodes])",
            expression=True,
            path=".parallelism",
        ),
        cel_rule(
            "self.engine.type == 'hf' || !has(self.weights) || !has(self.weights.inFlight) || "
            "!has(self.weights.inFlight.policy) || self.weights.inFlight.policy != 'Pin'",
            "'spec.weights.inFlight.policy: engine %s cannot run two versions at once (Pin): use "
            "Drain, Abort, Keep or Recompute, or engine hf'.format([self.engine.type])",
            expression=True,
            path=".weights.inFlight.policy",
        ),
        cel_rule(
            f"has(self.accelerator) || self.mode != 'Standalone' || {_WORLD_SIZE_EXPRESSION} == 1",
            f"'spec.parallelism: without spec.accelerator a pool runs on CPU with one rank, not %d: set "
            f"spec.accelerator.resource, or tensor, pipeline and data to 1'.format([{_WORLD_SIZE_EXPRESSION}])",
            expression=True,
            path=".parallelism",
        ),
        cel_rule(
            "has(self.accelerator) == has(oldSelf.accelerator) && (!has(self.accelerator) || "
            "self.accelerator.resource == oldSelf.accelerator.resource)",
            "spec.accelerator.resource is immutable: create another RolloutReplica",
            path=".accelerator",
        ),
        cel_rule(
            "!has(self.accelerator) || !has(self.resources) || "
            "!((has(self.resources.limits) && self.accelerator.resource in self.resources.limits)"
            " || (has(self.resources.requests) && "
            "self.accelerator.resource in self.resources.requests))",
            "spec.resources must not name the accelerator: the operator adds it from "
            "spec.accelerator and spec.parallelism; remove it",
            path=".resources",
        ),
        cel_rule(
            "!has(self.resources) || !has(self.resources.claims) || self.resources.claims.all(c, "
            "has(self.podTemplate) && has(self.podTemplate.resourceClaims) && "
            "self.podTemplate.resourceClaims.exists(p, p.name == c.name))",
            "every entry of spec.resources.claims needs a claim of the same name: add it to "
            "spec.podTemplate.resourceClaims",
            path=".resources.claims",
        ),
        OPERATOR_CLASS_RULE,
        *COLOCATED_RULES,
        *HYBRID_RULES,
    )

    operator_class: Dns1123Label | None = None
    """Only the operator with this `--class` acts on the object; if unset, the one without.
    Immutable."""
    replicas: int = Field(default=1, ge=0, le=9999, json_schema_extra=api_default())
    """Number of engine replicas; `kubectl scale` changes this, and a smaller number deletes those with least to do. Leave it out in mode Hybrid: there
    is one in each of the trainer's pods."""
    mode: PoolMode = Field(
        default=PoolMode.STANDALONE,
        json_schema_extra=api_default()
        | schema_extra(
            cel_rule("self == oldSelf", "spec.mode is immutable: create another RolloutReplica")
        ),
    )
    """Standalone: the pool has its own accelerators. Colocated: its engines use those of a
    trainer's pods, by turns. Hybrid: its engines run in the trainer's own processes. Immutable."""
    colocation: Colocation | None = None
    """Next to which pods the engines run, or in which; required in the modes Colocated and Hybrid.
    Immutable."""
    state: DesiredState = Field(default=DesiredState.ACTIVE, json_schema_extra=api_default())
    """Desired lifecycle. Paused: no generation, memory is kept. Asleep: memory is released."""
    sleep: SleepSpec = SleepSpec()
    """How the engines sleep."""
    suspend: bool = Field(default=False, json_schema_extra=api_default())
    """If true, no pods run but the objects stay; overrides state."""
    engine: EngineSpec
    """Inference engine and how to run it."""
    model: ModelSpec = ModelSpec(source=ModelSource())
    """Model that the pool serves; required unless the mode is Hybrid, where it is the trainer's
    own."""
    parallelism: Parallelism = Field(default=Parallelism(), json_schema_extra=api_default())
    """How one replica is spread across accelerators and pods. Immutable."""
    accelerator: AcceleratorSpec | None = None
    """Accelerator that the engine runs on; if unset, CPU with one rank. Immutable."""
    resources: ResourceRequirements = ResourceRequirements()
    """Compute resources of the worker container, excluding the accelerator."""
    weights: WeightsSpec = WeightsSpec()
    """Which weights the pool serves, and how it updates them."""
    update_strategy: UpdateStrategy = UpdateStrategy()
    """Rolling update of pods."""
    disruption: DisruptionSpec = DisruptionSpec()
    """What evictions may take: the operator makes a PodDisruptionBudget of the pool's name."""
    scheduling: SchedulingSpec = SchedulingSpec()
    """How a cluster's gang scheduler takes the pods of a replica. Standalone only."""
    restart_policy: RestartPolicy = RestartPolicy()
    """Back-off for failing replicas."""
    drain_seconds: int = Field(default=30, ge=0, le=86400)
    """Time that running requests get to finish before sleep, update or deletion. The pod's
    termination grace period is 15 seconds longer."""
    worker: WorkerProcess = WorkerProcess()
    """Settings of the worker processes; changing them replaces the pods."""
    service_account_name: Dns1123 = "rollout-worker"
    """Service account of the pods. In mode Hybrid: which one the trainer's pods must have to be
    members."""
    pod_template: PodTemplate = PodTemplate()
    """Fields merged into the pods; changing them replaces the pods."""

    @property
    def world_size(self) -> int:
        """Ranks of one replica."""
        return self.parallelism.world_size

    @property
    def accelerators_per_pod(self) -> int:
        """Accelerators that each pod asks for; 0 on CPU."""
        return self.world_size // self.parallelism.nodes if self.accelerator else 0

    @property
    def in_flight_deadline_seconds(self) -> int:
        """How long a commit's Drain waits."""
        deadline = self.weights.in_flight.deadline_seconds
        return self.drain_seconds if deadline is None else deadline

    @property
    def grace_seconds(self) -> int:
        """Termination grace period of the pods; not part of the revision."""
        return self.drain_seconds + 15


def parse_spec(obj: Mapping[str, Any]) -> RolloutReplicaSpec:
    """Read the spec of a stored RolloutReplica (the whole object).

    Raises:
        InvalidSpec: this operator's models don't take it, because another version of the CRD let
            it in; the text names the first field and what to do.
    """
    try:
        return RolloutReplicaSpec.model_validate(obj.get("spec") or {})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = field_path(("spec", *first["loc"]))
        if first["type"] == "extra_forbidden":
            fix = "this operator does not know the field; remove it or upgrade the operator"
        else:
            fix = f"{first['msg']}, found {str(first['input'])[:80]!r}; correct it"
        raise InvalidSpec(f"{where}: {fix}") from error
