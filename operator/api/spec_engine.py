"""The part of the spec that names the engine and the model."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from rollout_worker.schemas import LogprobsOf

from .schema import ATOMIC_LIST, INT32_MAX, ApiModel, Dns1123, cel, checked, map_list, rules
from .spec_env import EnvVar
from .spec_weights import Claim


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
