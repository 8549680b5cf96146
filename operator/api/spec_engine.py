"""The part of the spec that says what one replica runs: engine, model, shape, worker process."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from rollout_common.wire import LogprobsOf

from .schema import (
    ATOMIC_LIST,
    INT32_MAX,
    SUB_PATH_MEANING,
    ApiModel,
    Dns1123,
    ExtendedResourceName,
    KeyName,
    Quantity,
    SubPath,
    api_default,
    cel_rule,
    config_with_rules,
    map_list,
    schema_extra,
)
from .spec_weights import VolumeClaim


class KeyRef(ApiModel):
    """A key of a Secret or ConfigMap in the pool's namespace."""

    name: Dns1123
    """Name of the Secret or ConfigMap."""
    key: KeyName
    """Key in it."""
    optional: bool | None = None
    """If true, the variable is omitted when the key is missing."""


class FieldRef(ApiModel):
    """A field of the pod."""

    field_path: Annotated[str, Field(min_length=1, max_length=256)]
    """Path in the pod, for example `status.podIP`."""


class EnvSource(ApiModel):
    """Where a variable's value comes from; exactly one field is set."""

    model_config = config_with_rules(
        cel_rule(
            "[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef)]"
            ".exists_one(x, x)",
            "valueFrom needs exactly one of secretKeyRef, configMapKeyRef and fieldRef: keep one",
        )
    )

    secret_key_ref: KeyRef | None = None
    """A key of a Secret."""
    config_map_key_ref: KeyRef | None = None
    """A key of a ConfigMap."""
    field_ref: FieldRef | None = None
    """A field of the pod itself."""


class EnvVar(ApiModel):
    """One environment variable of the worker container."""

    model_config = config_with_rules(
        cel_rule(
            "!self.name.startsWith('ROLLOUT_')",
            "env must not set ROLLOUT_*: the operator sets these from the spec; remove the entry",
            path=".name",
        ),
        cel_rule(
            "!(has(self.value) && has(self.valueFrom))",
            "env takes value or valueFrom, not both: remove one",
        ),
    )

    name: Annotated[
        str, Field(min_length=1, max_length=256, pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$")
    ]
    """Name; `ROLLOUT_*` is reserved for the operator and rejected."""
    value: Annotated[str, Field(max_length=4096)] | None = None
    """Literal value."""
    value_from: EnvSource | None = None
    """Source of the value, instead of value."""


class EngineType(StrEnum):
    """Inference engine."""

    HF = "hf"
    VLLM = "vllm"
    SGLANG = "sglang"


EngineArgument = Annotated[str, Field(max_length=2048)]


class CacheClaim(ApiModel):
    """A PersistentVolumeClaim in the pool's namespace; mounted to be written to."""

    name: Dns1123
    """Name of the claim. Pods of several nodes need access mode ReadWriteMany."""
    sub_path: SubPath | None = Field(default=None, description=SUB_PATH_MEANING)


class EngineCache(ApiModel):
    """Where compiled kernels and graphs lie."""

    claim: CacheClaim
    """Volume, mounted read-write at `/rollout/cache`."""


class EngineSpec(ApiModel):
    """Inference engine and how to run it."""

    type: EngineType = Field(
        json_schema_extra=schema_extra(
            cel_rule(
                "self == oldSelf",
                "spec.engine.type is immutable: create another RolloutReplica for another engine",
            )
        )
    )
    """Inference engine. Immutable."""
    logprobs: Literal["Sampling", "Raw"] = "Sampling"
    """Logprobs for requests that don't choose. Sampling: of the distribution sampled from. Raw: of
    the model's own distribution."""
    image: Annotated[str, Field(min_length=1, max_length=512, pattern=r"^\S+$")] | None = None
    """Worker image; if unset, the operator's default for this engine."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When the image is pulled; if unset, the operator's default for this engine."""
    args: tuple[EngineArgument, ...] = Field(
        default=(), max_length=64, json_schema_extra=ATOMIC_LIST
    )
    """Flags passed to the engine."""
    env: tuple[EnvVar, ...] = Field(default=(), max_length=64, json_schema_extra=map_list("name"))
    """Environment of the worker container; `ROLLOUT_*` is rejected."""
    cache: EngineCache | None = None
    """Volume for what engines compile (kernels, graphs, tuning), which else goes with the pod: the
    next start finds it. Models are not cached there."""

    @property
    def logprobs_of(self) -> LogprobsOf:
        """The kind as the worker spells it."""
        return "raw" if self.logprobs == "Raw" else "sampling"


class SecretKey(ApiModel):
    """A key of a Secret in the pool's namespace."""

    name: Dns1123
    """Name of the Secret."""
    key: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]
    """Key in the Secret."""


class HubSource(ApiModel):
    """A model on the Hugging Face Hub; each worker downloads it."""

    repo: Annotated[
        str,
        Field(min_length=1, max_length=256, pattern=r"^[A-Za-z0-9][-\w.]*(/[A-Za-z0-9][-\w.]*)?$"),
    ]
    """Repository, for example `Qwen/Qwen3-0.6B`."""
    revision: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[-\w./]+$")] | None = (
        None
    )
    """Commit, tag or branch; defaults to `main`. Pin a commit to keep all replicas identical."""
    token_secret: SecretKey | None = None
    """Secret that holds a token, for private repositories."""


class ModelSource(ApiModel):
    """The checkpoint: exactly one of path, claim and hub."""

    model_config = config_with_rules(
        cel_rule(
            "[has(self.path), has(self.claim), has(self.hub)].exists_one(x, x)",
            "spec.model.source needs exactly one of path, claim and hub: keep one",
        ),
        cel_rule(
            "self == oldSelf",
            "spec.model.source is immutable: create another RolloutReplica for another model, or "
            "set spec.weights.target to serve other weights",
        ),
    )

    path: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        default=None,
        json_schema_extra=schema_extra(
            cel_rule(
                r"self.startsWith('/') && !self.matches('(^|/)[.][.](/|$)')",
                "spec.model.source.path must be an absolute path without '..': use one like "
                "/models/qwen",
            )
        ),
    )
    """Folder in the worker's file system, from the image or from a podTemplate volume."""
    claim: VolumeClaim | None = None
    """PersistentVolumeClaim, mounted read-only at `/rollout/model`."""
    hub: HubSource | None = None
    """Repository on the Hugging Face Hub."""


class ModelSpec(ApiModel):
    """Model that the pool serves."""

    source: ModelSource
    """Checkpoint. Immutable."""
    served_name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Model name in the OpenAI API; defaults to the object's name."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Data type of the weights; auto uses the checkpoint's."""
    max_length: int | None = Field(default=None, ge=1, le=INT32_MAX)
    """Maximum length of prompt plus output, in tokens; if unset, the engine's own limit."""


OPERATOR_CLASS_RULE = cel_rule(
    "has(self.operatorClass) == has(oldSelf.operatorClass) && (!has(self.operatorClass) || "
    "self.operatorClass == oldSelf.operatorClass)",
    "spec.operatorClass is immutable: create another RolloutReplica for another operator",
    path=".operatorClass",
)
"""Two operators never lead one pool, not even for the moment in which it changes hands."""


class Parallelism(ApiModel):
    """How one replica is spread across accelerators and pods. Immutable."""

    model_config = config_with_rules(
        cel_rule(
            "(self.tensor * self.pipeline * self.data) % self.nodes == 0",
            "'spec.parallelism: tensor*pipeline*data = %d is not divisible by nodes = %d: set nodes "
            "to a divisor of it'.format([self.tensor * self.pipeline * self.data, self.nodes])",
            expression=True,
        ),
        cel_rule(
            "self == oldSelf",
            "spec.parallelism is immutable: create another RolloutReplica with the new shape",
        ),
    )

    tensor: int = Field(default=1, ge=1, le=4096, json_schema_extra=api_default())
    """Tensor-parallel size."""
    pipeline: int = Field(default=1, ge=1, le=4096, json_schema_extra=api_default())
    """Pipeline-parallel size."""
    data: int = Field(default=1, ge=1, le=4096, json_schema_extra=api_default())
    """Data-parallel size within the replica."""
    nodes: int = Field(default=1, ge=1, le=999, json_schema_extra=api_default())
    """Pods per replica; must divide tensor*pipeline*data."""

    @property
    def world_size(self) -> int:
        """Ranks of one replica."""
        return self.tensor * self.pipeline * self.data


class AcceleratorSpec(ApiModel):
    """Accelerator that the engine runs on."""

    resource: ExtendedResourceName
    """Extended resource of one accelerator, for example `nvidia.com/gpu`."""


class SpillSpec(ApiModel):
    """Where sleep at level 1 keeps the weights: in a volume of the pod's own, or in a folder."""

    model_config = config_with_rules(
        cel_rule(
            "!has(self.path) || (!has(self.medium) && !has(self.sizeLimit))",
            "spec.sleep.spill.path names a folder of your own: remove medium and sizeLimit, or path",
        )
    )

    medium: Literal["Disk", "Memory"] = "Disk"
    """Disk: an emptyDir on the node's disk. Memory: one in the node's memory, which counts as the
    container's."""
    size_limit: Quantity | None = None
    """Size of that emptyDir: at least that of the weights that one pod holds. A pod that exceeds it
    is evicted. If unset, what the node has."""
    path: Annotated[str, Field(min_length=1, max_length=512)] | None = Field(
        default=None,
        json_schema_extra=schema_extra(
            cel_rule(
                r"self.startsWith('/') && !self.matches('(^|/)[.][.](/|$)')",
                "spec.sleep.spill.path must be an absolute path without '..': use one like /scratch",
            )
        ),
    )
    """A folder instead, which must exist and be writable, in a mount of
    spec.podTemplate.volumeMounts."""


class SleepSpec(ApiModel):
    """How an engine sleeps."""

    level: Literal[1, 2] = 1
    """1: a copy of the weights is kept and restored on wake. 2: the weights are dropped and
    reloaded from their source on wake."""
    spill: SpillSpec = SpillSpec()
    """Where level 1 keeps the copy; changing it replaces the pods."""


class WorkerProcess(ApiModel):
    """Settings of the worker processes; changing them replaces the pods."""

    start_timeout_seconds: int = Field(default=3600, ge=1, le=86400)
    """How long a model may take to load, a download included; then the worker starts its engine
    again."""
    max_queue: int = Field(default=1024, ge=1, le=1_048_576)
    """Maximum queued outputs of a worker; requests beyond it get a 429."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum log level."""
