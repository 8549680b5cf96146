"""The part of the spec that names the engine and the model."""

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
    SubPath,
    cel_rule,
    config_with_rules,
    map_list,
    schema_extra,
)
from .spec_env import EnvVar
from .spec_weights import VolumeClaim


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
