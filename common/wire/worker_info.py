"""Wire models of `GET /v1/info`: what is served, and what the engine can do."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .generate import SamplingParams
from .wire_base import InFlightPolicy, LogprobsOf, TokenId, Wire

__all__ = ["SAMPLING_FIELDS", "Capabilities", "WorkerInfo"]

SAMPLING_FIELDS = tuple(
    sorted(SamplingParams.model_fields.keys() - {"max_tokens", "n", "seed", "stop"})
)
"""Fields of `sampling` that the engine itself must support."""


class Capabilities(Wire):
    """What the engine supports; anything else is refused (422 naming the field), never ignored."""

    logprobs: tuple[LogprobsOf, ...] = Field(
        description="Kinds it records, that of requests that name none first. Either kind is served when"
        " both have the same values."
    )
    sampling: tuple[str, ...] = Field(
        default=SAMPLING_FIELDS, description="Fields of `sampling` that it supports."
    )
    sampling_logprobs: tuple[str, ...] = Field(
        default=SAMPLING_FIELDS,
        description="Fields of `sampling` that may differ from their defaults when `sampling`"
        " logprobs are requested.",
    )
    prompt_logprobs: bool = Field(
        default=False, description="It scores prompts: `prompt_logprobs`, and `max_tokens: 0`."
    )
    top_logprobs: int = Field(default=0, description="Largest `top_logprobs`; 0: it has none.")
    structured: bool = Field(
        default=False, description="It masks tokens that `structured` excludes."
    )
    return_routed_experts: bool = Field(
        default=False, description="The model routes to experts, and it records to which."
    )
    return_sampling_mask: bool = Field(
        default=False, description="It records which tokens could be drawn."
    )
    multimodal: bool = Field(default=False, description="Prompts may have pictures.")
    adapters: bool = Field(
        default=False, description="Weights may have LoRA adapters: `adapter` names one of them."
    )
    adapters_in_flight: tuple[InFlightPolicy, ...] = Field(
        default=(), description="As `in_flight`, of commits that bring or end adapters."
    )
    seed: bool = Field(
        description="The same seed samples the same tokens, whatever else is in the batch."
    )
    priority: bool = Field(description="Requests with a lower `priority` start first.")
    stop_strings: bool = Field(description="It supports `sampling.stop`.")
    in_flight: tuple[InFlightPolicy, ...] = Field(
        description="Policies for requests in flight at a commit; always `Drain` and `Abort`."
    )
    sleep_levels: tuple[Literal[1, 2], ...] = Field(description="Empty: it can't sleep.")
    memory_release: bool = Field(description="Sleep returns memory to the system.")
    prefix_cache: bool = Field(description="Prompts reuse the KV of shared prefixes.")
    cache_salt: bool = Field(
        description="Requests with different `cache_salt` share no cached prefixes."
    )
    chat: bool = Field(default=False, description="The model has a chat template.")
    tool_parser: str | None = Field(
        default=None, description="Format of the tool calls it parses; null: they stay text."
    )


class WorkerInfo(Wire):
    """Response of `GET /v1/info`."""

    api: Literal["v1"] = "v1"
    engine: str
    engine_version: str
    model: str
    max_length: int
    eos_token_ids: tuple[TokenId, ...] = Field(
        description="The model's own ids that end an output, unless `ignore_eos`; ascending."
    )
    capabilities: Capabilities
