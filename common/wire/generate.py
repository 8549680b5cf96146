"""Wire models of the data port: a generate request, its response and its stream."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, LiteralString, Self

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from .adapters import AdapterName
from .rich_requests import (
    MAX_TOP_LOGPROBS,
    Multimodal,
    PromptLogprobs,
    PromptRange,
    RoutedExperts,
    SamplingMask,
    StructuredOutput,
    TopLogprobs,
)
from .wire_base import (
    MAX_TOKEN_ID,
    AbortReason,
    Body,
    Bool,
    Float,
    Identified,
    Identity,
    Int,
    LogprobsOf,
    Seconds,
    StopReason,
    TokenId,
    Wire,
    _is_absent,
    bounded_length,
    omittable_field,
)

__all__ = [
    "MAX_BATCH_N",
    "DoneOutput",
    "GenerateOutput",
    "GenerateRequest",
    "GenerateResponse",
    "SamplingParams",
    "StopMatch",
    "StreamDelta",
    "StreamDone",
    "Timing",
    "TokenKey",
    "Usage",
    "WeightsSpan",
]

MAX_BATCH_N = 128
"""Largest `n` of one request."""
MAX_PROMPT = 2**24
"""Most token ids of a prompt; the served model's maximum length is far less."""
MAX_VOCABULARY = 2**18
"""Most token ids that a request may allow: the largest vocabularies."""
MAX_BIASES = 2**14


def _token_key(key: object) -> object:
    """JSON keys are strings: accept plain decimal digits, nothing else that `int()` would take."""
    if isinstance(key, str) and re.fullmatch(r"0|[1-9][0-9]{0,9}", key):
        return int(key)
    return key


TokenKey = Annotated[TokenId, BeforeValidator(_token_key)]


Biases = Annotated[
    Mapping[TokenKey, Float], Field(max_length=MAX_BIASES), bounded_length(MAX_BIASES)
]


AllowedIds = Annotated[
    tuple[TokenId, ...],
    Field(min_length=1, max_length=MAX_VOCABULARY, fail_fast=True),
    bounded_length(MAX_VOCABULARY),
]


class SamplingParams(Body):
    """How tokens are sampled; the defaults sample from the model's own distribution.

    They apply in vLLM's order: allowed ids and logit bias, penalties, `min_tokens` (masks EOS and
    stop ids), temperature, `min_p`, `top_k`, `top_p`.
    """

    max_tokens: Int | None = Field(
        default=None,
        ge=0,
        description="null: up to the maximum length; 0: only score the prompt (`prompt_logprobs`).",
    )
    min_tokens: Int = Field(default=0, ge=0)
    temperature: Float = Field(default=1.0, ge=0, le=100)
    top_p: Float = Field(default=1.0, gt=0, le=1)
    top_k: Int = Field(default=0, ge=0, le=MAX_TOKEN_ID, description="0: all tokens.")
    min_p: Float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: Float = Field(default=1.0, gt=0, le=10)
    presence_penalty: Float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: Float = Field(default=0.0, ge=-2, le=2)
    logit_bias: Biases = Field(default_factory=dict)
    allowed_token_ids: AllowedIds | None = None
    stop_token_ids: tuple[TokenId, ...] = Field(default=(), max_length=256, fail_fast=True)
    stop: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = Field(
        default=(), max_length=16, fail_fast=True
    )
    ignore_eos: Bool = False
    seed: Int | None = Field(default=None, ge=0, le=2**63 - 1)
    n: Int = Field(default=1, ge=1, le=MAX_BATCH_N)

    @field_validator("min_tokens")
    @classmethod
    def _within_max_tokens(cls, value: int, info: ValidationInfo) -> int:
        most = info.data.get("max_tokens")
        if most is not None and value > most:
            raise ValueError("exceeds max_tokens: lower it, or raise max_tokens")
        return value


class GenerateRequest(Body):
    """Body of `POST /v1/generate`: one prompt of token ids."""

    request_id: str | None = Field(
        default=None, min_length=1, max_length=256, description="null: the worker generates one."
    )
    session_id: str | None = Field(default=None, min_length=1, max_length=256)
    token_ids: Annotated[
        tuple[TokenId, ...],
        Field(min_length=1, max_length=MAX_PROMPT, fail_fast=True),
        bounded_length(MAX_PROMPT),
    ]
    multimodal: Multimodal | None = Field(
        default=None,
        description="Pictures of the prompt; `token_ids` has the processor's expanded ids.",
    )
    adapter: AdapterName | None = Field(
        default=None, description="LoRA adapter of the active weights; null: the model alone."
    )
    sampling: SamplingParams = SamplingParams()
    logprobs: Literal["sampling", "raw", "none"] | None = Field(
        default=None, description="null: the pool's default; 'none': no logprobs."
    )
    prompt_logprobs: PromptRange | None = Field(
        default=None,
        description="Score the prompt: true for all of its tokens, [from, to] for those positions.",
    )
    top_logprobs: Int = Field(
        default=0,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="How many of the most likely tokens to return at each scored or sampled position.",
    )
    structured: StructuredOutput | None = Field(
        default=None, description="What the output's text must match; null: anything."
    )
    return_routed_experts: Bool = Field(
        default=False, description="Return which experts each token went to, prompt included."
    )
    return_sampling_mask: Bool = Field(
        default=False, description="Return which tokens could have been drawn for each token."
    )
    epoch: Identity | None = Field(
        default=None, description="Epoch that the version bounds refer to; null: the active epoch."
    )
    min_version: Identity | None = None
    exact_version: Identity | None = None
    cache_salt: str | None = Field(default=None, max_length=256)
    priority: Int = Field(
        default=0, ge=-(2**31), le=2**31 - 1, description="Lower values run first."
    )
    deadline_seconds: Float = Field(default=600, gt=0, le=86400)
    stream: Bool = False

    @property
    def scored_range(self) -> tuple[int, int] | None:
        """Positions of the prompt to score, the second excluded; None: none."""
        if isinstance(self.prompt_logprobs, bool):
            return (0, len(self.token_ids)) if self.prompt_logprobs else None
        return self.prompt_logprobs

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        found = next(self._find_mistakes(), None)
        if found is not None:
            path, given, text = found
            error = InitErrorDetails(
                type=PydanticCustomError("fields_do_not_fit", text), loc=path, input=given
            )
            raise ValidationError.from_exception_data("GenerateRequest", [error])
        return self

    def _find_mistakes(self) -> Iterator[tuple[tuple[str, ...], object, LiteralString]]:
        """Yield path, value and message of what does not fit the other fields."""
        scored, sampling = self.scored_range, self.sampling
        if self.structured is not None:
            yield from _structure_conflicts(sampling)
        if scored is not None and scored[1] > len(self.token_ids):
            text = "must end within the prompt: lower its second number"
            yield ("prompt_logprobs",), self.prompt_logprobs, text
        if self.logprobs == "none" and (scored or self.top_logprobs):
            field = "prompt_logprobs" if scored else "top_logprobs"
            text = "needs logprobs: leave logprobs out, or ask for raw"
            yield (field,), getattr(self, field), text
        if sampling.max_tokens == 0:
            if scored is None:
                text = "must be greater than 0, unless the prompt is scored: add prompt_logprobs"
                yield ("sampling", "max_tokens"), 0, text
            if self.structured is not None:
                text = "must be left out where max_tokens is 0, which makes no text"
                yield ("structured",), "…", text
            if sampling.n > 1:
                text = "must be 1 where max_tokens is 0: the prompt is one"
                yield ("sampling", "n"), sampling.n, text


def _structure_conflicts(
    sampling: SamplingParams,
) -> Iterator[tuple[tuple[str, ...], object, LiteralString]]:
    """Yield what would leave no token to draw where a structured output may only end, or could never end."""
    if sampling.ignore_eos:
        text = "must be left out with structured: EOS ends a text that is complete"
        yield ("sampling", "ignore_eos"), True, text
    if sampling.min_tokens:
        text = "must be left out with structured: a complete text ends, however short it is"
        yield ("sampling", "min_tokens"), sampling.min_tokens, text
    if sampling.allowed_token_ids is not None:
        text = "must be left out with structured, which allows tokens by the text they make"
        yield ("sampling", "allowed_token_ids"), "…", text


class StopMatch(Wire):
    """What caused a `stop`: a token id (EOS or stop id) or a stop string; the other is omitted."""

    token_id: TokenId | None = omittable_field()
    text: str | None = omittable_field()


class WeightsSpan(Identified):
    """A forward pass of these weights produced tokens `[start, end)` of an output."""

    start: int = Field(ge=0)
    end: int = Field(ge=0)
    stale_kv: bool = Field(
        default=False, description="Whether KV computed with older weights was reused."
    )
    adapter: str | None = omittable_field(
        "The adapter of these weights that was applied; omitted: none."
    )


AbortSlug = Annotated[
    str | None,
    Field(
        exclude_if=_is_absent,
        description="What aborted it, where trying again can't help: `not-finite`, `grammar-failed`.",
    ),
]
AbortDetail = Annotated[
    str | None,
    Field(exclude_if=_is_absent, description="The same in a sentence, with the fix."),
]


class StreamDelta(Wire):
    """Event `delta` of a stream; span offsets count from the output's first token."""

    index: int = Field(ge=0)
    token_ids: tuple[TokenId, ...]
    logprobs: tuple[Float, ...] | None = omittable_field()
    top_logprobs: TopLogprobs | None = omittable_field()
    routed_experts: RoutedExperts | None = omittable_field()
    sampling_mask: SamplingMask | None = omittable_field()
    weights: tuple[WeightsSpan, ...]


class DoneOutput(Wire):
    """An output without its arrays, as in event `done`."""

    index: int = Field(ge=0)
    stop_reason: StopReason
    stop_match: StopMatch | None = None
    abort_reason: AbortReason | None = None
    abort_slug: AbortSlug = None
    abort_detail: AbortDetail = None


class GenerateOutput(DoneOutput, StreamDelta):
    """One sampled continuation: token_ids [T], logprobs [T] (natural log, float32 precision).

    `logprobs` is omitted if the request asked for none; `top_logprobs`, `routed_experts` and `sampling_mask` unless
    it asked for them, and if the output was aborted before its first token.
    """


class Usage(Wire):
    """Token counts of a request; `cached_tokens` prompt tokens came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Timing(Wire):
    """Where a request spent its time, in seconds."""

    queued_seconds: Seconds
    first_token_seconds: Seconds | None = None
    total_seconds: Seconds
    preemptions: int = 0


class StreamDone(Wire):
    """Event `done` of a stream: the response without its arrays."""

    request_id: str
    logprobs_of: LogprobsOf | None
    outputs: tuple[DoneOutput, ...]
    usage: Usage
    timing: Timing


class GenerateResponse(StreamDone):
    """Response of `POST /v1/generate`.

    `prompt_logprobs` is omitted unless asked for, and if the request was aborted before the prompt was scored.
    """

    outputs: tuple[GenerateOutput, ...]
    prompt_logprobs: PromptLogprobs | None = omittable_field()
