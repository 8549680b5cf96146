"""The spec of a RolloutReplica: the source of the CRD, and what `decide` reads.

A default that stands in a model but not in the schema belongs to the operator: it may change with
a release without touching stored objects. Attributes that have a default are never None.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from rollout_worker.schemas import CHECKPOINT, LogprobsOf, WeightsId

from .schema import (
    ATOMIC_LIST,
    INT32_MAX,
    ApiModel,
    Dns1123,
    ResourceName,
    api_default,
    cel,
    checked,
    field_path,
    map_list,
    rules,
)
from .spec_pod import EnvVar, PodTemplate, Resources
from .spec_weights import (
    Claim,
    InFlight,
    RestartPolicy,
    Strategy,
    UpdateStrategy,
    Weights,
    WeightsTarget,
)

__all__ = [
    "Claim",
    "Engine",
    "EngineType",
    "EnvVar",
    "InFlight",
    "InvalidSpec",
    "Mode",
    "PodTemplate",
    "Resources",
    "RestartPolicy",
    "RolloutReplicaSpec",
    "State",
    "Strategy",
    "UpdateStrategy",
    "Weights",
    "WeightsTarget",
    "parse_spec",
]


class InvalidSpec(ValueError):
    """A stored object that these models don't take; the text names the field and the fix."""


class Mode(StrEnum):
    """Whose accelerators the pool uses."""

    STANDALONE = "Standalone"


class State(StrEnum):
    """Wanted lifecycle of the pool's engines."""

    ACTIVE = "Active"
    PAUSED = "Paused"
    ASLEEP = "Asleep"


class EngineType(StrEnum):
    """The inference software."""

    HF = "hf"
    VLLM = "vllm"
    SGLANG = "sglang"


Argument = Annotated[str, Field(max_length=2048)]


class Engine(ApiModel):
    """The inference software and how it is run."""

    type: EngineType = Field(
        description="The inference software; immutable.",
        json_schema_extra=rules(
            cel(
                "self == oldSelf",
                "spec.engine.type is immutable: make another RolloutReplica for another engine",
            )
        ),
    )
    logprobs: Literal["Sampling", "Raw"] = Field(
        default="Sampling",
        description="Logprobs of requests that don't choose: of the distribution sampled from, or "
        "of the model's own.",
    )
    image: Annotated[str, Field(min_length=1, max_length=512, pattern=r"^\S+$")] | None = Field(
        default=None, description="Image of the worker; the operator's for the type if absent."
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None, description="When the image is pulled; the operator's for the type if absent."
    )
    args: tuple[Argument, ...] = Field(
        default=(),
        max_length=64,
        description="The engine's own flags.",
        json_schema_extra=ATOMIC_LIST,
    )
    env: tuple[EnvVar, ...] = Field(
        default=(),
        max_length=64,
        description="Environment of the worker container; `ROLLOUT_*` is refused.",
        json_schema_extra=map_list("name"),
    )

    @property
    def logprobs_of(self) -> LogprobsOf:
        """The kind as the worker spells it."""
        return "raw" if self.logprobs == "Raw" else "sampling"


class SecretKey(ApiModel):
    """A key of a Secret in the pool's namespace."""

    name: Dns1123 = Field(description="Name of the Secret.")
    key: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")] = Field(
        description="Key inside the Secret."
    )


class Hub(ApiModel):
    """A model on the Hugging Face hub; downloaded by each worker."""

    repo: Annotated[
        str,
        Field(min_length=1, max_length=256, pattern=r"^[A-Za-z0-9][-\w.]*(/[A-Za-z0-9][-\w.]*)?$"),
    ] = Field(description="Repository, for example `Qwen/Qwen3-0.6B`.")
    revision: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[-\w./]+$")] | None = (
        Field(
            default=None,
            description="Commit, tag or branch; `main` if absent. A commit keeps all replicas "
            "alike.",
        )
    )
    token_secret: SecretKey | None = Field(
        default=None, description="Secret that holds a token, for private repositories."
    )


class ModelSource(ApiModel):
    """The checkpoint; exactly one of path, claim and hub."""

    model_config = checked(
        cel(
            "[has(self.path), has(self.claim), has(self.hub)].exists_one(x, x)",
            "spec.model.source needs exactly one of path, claim and hub: keep one",
        ),
        cel(
            "self == oldSelf",
            "spec.model.source is immutable: make another RolloutReplica for another model, or "
            "move spec.weights.target for other weights",
        ),
    )

    path: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        default=None,
        description="Folder in the worker's file system: of the image, or of a volume of "
        "podTemplate.",
        json_schema_extra=rules(
            cel(
                r"self.startsWith('/') && !self.matches('(^|/)[.][.](/|$)')",
                "spec.model.source.path must be absolute and without '..': give one like "
                "/models/qwen",
            )
        ),
    )
    claim: Claim | None = Field(
        default=None, description="A claim, mounted read-only at `/rollout/model`."
    )
    hub: Hub | None = Field(default=None, description="A repository of the Hugging Face hub.")


class Model(ApiModel):
    """The model that the pool serves."""

    source: ModelSource = Field(description="The checkpoint; immutable.")
    served_name: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        default=None, description="Name in the OpenAI routes; the object's name if absent."
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="Number format of the weights; auto: the checkpoint's."
    )
    max_length: int | None = Field(
        default=None,
        ge=1,
        le=INT32_MAX,
        description="Longest prompt plus output in tokens; the engine's own if absent.",
    )


class Parallelism(ApiModel):
    """How one replica spreads over accelerators and pods; immutable."""

    model_config = checked(
        cel(
            "(self.tensor * self.pipeline * self.data) % self.nodes == 0",
            "'spec.parallelism: tensor*pipeline*data = %d does not divide over %d nodes: set nodes "
            "to a divisor of it'.format([self.tensor * self.pipeline * self.data, self.nodes])",
            expression=True,
        ),
        cel(
            "self == oldSelf",
            "spec.parallelism is immutable: make another RolloutReplica with the new shape",
        ),
    )

    tensor: int = Field(
        default=1,
        ge=1,
        le=4096,
        description="Tensor parallel size.",
        json_schema_extra=api_default(),
    )
    pipeline: int = Field(
        default=1,
        ge=1,
        le=4096,
        description="Pipeline parallel size.",
        json_schema_extra=api_default(),
    )
    data: int = Field(
        default=1,
        ge=1,
        le=4096,
        description="Data parallel size within the replica.",
        json_schema_extra=api_default(),
    )
    nodes: int = Field(
        default=1,
        ge=1,
        le=999,
        description="Pods of one replica; must divide tensor*pipeline*data.",
        json_schema_extra=api_default(),
    )

    @property
    def world(self) -> int:
        """Ranks of one replica."""
        return self.tensor * self.pipeline * self.data


class Accelerator(ApiModel):
    """What the engine computes on."""

    resource: ResourceName = Field(
        description="Extended resource of one accelerator, for example `nvidia.com/gpu`."
    )


class Sleep(ApiModel):
    """How an engine sleeps."""

    level: Literal[1, 2] = Field(
        default=1,
        description="1: the weights come back as they were. 2: they are dropped and loaded again "
        "on waking.",
    )


_WORLD = "(self.parallelism.tensor * self.parallelism.pipeline * self.parallelism.data)"


class RolloutReplicaSpec(ApiModel):
    """What the pool shall be."""

    model_config = checked(
        cel(
            "!has(oldSelf.weights) || !has(oldSelf.weights.target) || "
            "(has(self.weights) && has(self.weights.target))",
            "spec.weights.target cannot be removed: keep it, or raise its version",
            path=".weights",
        ),
        cel(
            f"self.engine.type != 'hf' || {_WORLD} == 1",
            f"'spec.parallelism: engine hf runs on one device, not %d: set tensor, pipeline and "
            f"data to 1 or choose another engine'.format([{_WORLD}])",
            expression=True,
            path=".parallelism",
        ),
        cel(
            f"has(self.accelerator) || {_WORLD} == 1",
            f"'spec.parallelism: a pool on CPU (no spec.accelerator) has one rank, not %d: set "
            f"spec.accelerator.resource, or tensor, pipeline and data to 1'.format([{_WORLD}])",
            expression=True,
            path=".parallelism",
        ),
        cel(
            "has(self.accelerator) == has(oldSelf.accelerator) && (!has(self.accelerator) || "
            "self.accelerator.resource == oldSelf.accelerator.resource)",
            "spec.accelerator.resource is immutable: make another RolloutReplica",
            path=".accelerator",
        ),
        cel(
            "!has(self.accelerator) || !has(self.resources) || "
            "!((has(self.resources.limits) && self.accelerator.resource in self.resources.limits)"
            " || (has(self.resources.requests) && "
            "self.accelerator.resource in self.resources.requests))",
            "spec.resources must not name the accelerator: the operator adds it from "
            "spec.accelerator and spec.parallelism; remove it",
            path=".resources",
        ),
    )

    replicas: int = Field(
        default=1,
        ge=0,
        le=9999,
        description="Engine replicas; what `kubectl scale` changes.",
        json_schema_extra=api_default(),
    )
    mode: Mode = Field(
        default=Mode.STANDALONE,
        description="Standalone: the pool has its own accelerators. Immutable.",
        json_schema_extra=api_default()
        | rules(cel("self == oldSelf", "spec.mode is immutable: make another RolloutReplica")),
    )
    state: State = Field(
        default=State.ACTIVE,
        description="Wanted lifecycle. Paused: memory kept, no generation. Asleep: memory given "
        "back.",
        json_schema_extra=api_default(),
    )
    sleep: Sleep = Field(default=Sleep(), description="How the engines sleep.")
    suspend: bool = Field(
        default=False,
        description="True: no pods at all, the objects stay; beats state.",
        json_schema_extra=api_default(),
    )
    engine: Engine = Field(description="The inference software and how it is run.")
    model: Model = Field(description="The model that the pool serves.")
    parallelism: Parallelism = Field(
        default=Parallelism(),
        description="How one replica spreads over accelerators and pods; immutable.",
        json_schema_extra=api_default(),
    )
    accelerator: Accelerator | None = Field(
        default=None, description="What the engine computes on; absent: CPU, one rank. Immutable."
    )
    resources: Resources = Field(
        default=Resources(),
        description="Resources of the worker container, without the accelerator.",
    )
    weights: Weights = Field(
        default=Weights(), description="Which weights the pool serves and how it comes to them."
    )
    update_strategy: UpdateStrategy = Field(
        default=UpdateStrategy(), description="Rolling update of pods."
    )
    restart_policy: RestartPolicy = Field(
        default=RestartPolicy(), description="Back-off of replicas that fail."
    )
    drain_seconds: int = Field(
        default=30,
        ge=0,
        le=86400,
        description="What running requests get before sleep, update and deletion. The pod's grace "
        "period is 15 seconds longer.",
    )
    service_account_name: Dns1123 = Field(
        default="rollout-worker", description="Account of the pods."
    )
    pod_template: PodTemplate = Field(
        default=PodTemplate(), description="Overlay on the pods; changing it replaces them."
    )

    @property
    def world(self) -> int:
        """Ranks of one replica."""
        return self.parallelism.world

    @property
    def pods_per_replica(self) -> int:
        """Pods of one gang."""
        return self.parallelism.nodes

    @property
    def accelerators_per_pod(self) -> int:
        """Accelerators that each pod asks for; 0 on CPU."""
        return self.world // self.parallelism.nodes if self.accelerator else 0

    @property
    def target(self) -> WeightsTarget | None:
        """The pointer, if a trainer has set it."""
        return self.weights.target

    @property
    def target_id(self) -> WeightsId:
        """Identity that the pool must come to serve."""
        return self.target.identity if self.target else CHECKPOINT

    @property
    def in_flight_deadline_seconds(self) -> int:
        """How long a commit's Drain waits."""
        deadline = self.weights.in_flight.deadline_seconds
        return self.drain_seconds if deadline is None else deadline

    @property
    def grace_seconds(self) -> int:
        """Termination grace period of the pods; no part of the revision."""
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
