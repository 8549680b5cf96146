"""Request models of the OpenAI routes: the fields that have an effect here.

Fields that never change an answer are ignored, as OpenAI clients expect. All others are refused by name,
since an answer that ignored them could be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SkipValidation,
    ValidationError,
    model_validator,
)
from typing_extensions import override

from rollout_common.wire import Bool, Float, GenerateRequest, Int, TokenId
from rollout_common.wire.generate import AllowedIds, Biases
from rollout_common.wire.problems import ProblemError, invalid_request_problem
from rollout_common.wire.wire_base import bounded_length, refuse_many_unknown

from .answer_reading import FUNCTION_NAME
from .openai_errors import unsupported_field
from .settings import DEFAULT_DEADLINE_SECONDS

HARMLESS: Final = frozenset(
    {
        *("user", "safety_identifier", "store", "metadata", "service_tier"),
        *("prompt_cache_key", "prompt_cache_retention", "prediction"),
    }
)
"""Names of users, storage, billing, and hints for speed: they never change an answer."""

ABSENT: Final[Mapping[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("echo", "use_beam_search", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("best_of", "num_beams", "length_penalty", "typical_p"), (1,)),
    **dict.fromkeys(("xtc_probability", "dry_multiplier", "top_a", "prompt_logprobs"), (0,)),
    **dict.fromkeys(("bad_words", "functions", "logits_processors"), ([],)),
    "suffix": ("",),
    "modalities": (["text"],),
    **dict.fromkeys(("detokenize", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("include_reasoning", "separate_reasoning"), (True,)),
    "parallel_tool_calls": (True, False),
}
"""Values that say the same as leaving a field out, as null does for all of them."""

_TEMPLATE = "set it in chat_template_kwargs, if the model's template knows it"

INSTEAD: Final[Mapping[str, str]] = {
    "max_new_tokens": "use max_tokens",
    "min_new_tokens": "use min_tokens",
    "repeat_penalty": "use repetition_penalty",
    "sampling_seed": "use seed",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "enable_thinking": _TEMPLATE,
    "reasoning_effort": _TEMPLATE,
    "thinking_token_budget": "use max_tokens",
    **dict.fromkeys(
        ("structured_outputs", "guided_json", "guided_regex", "guided_grammar", "guided_choice"),
        "use response_format, or `structured` of /v1/generate",
    ),
}
"""What a client should do instead of using a field; it should leave out all others."""

SAME_FIELDS = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "seed", "n", "min_tokens"),
    *("stop_token_ids", "allowed_token_ids", "ignore_eos"),
)
"""Fields that mean the same as their namesakes in `sampling`."""


class OpenAIBody(BaseModel):
    """What clients send; JSON's types are taken literally, as on the worker's own routes."""

    model_config = ConfigDict(extra="allow", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, given: Any) -> Any:
        given = refuse_many_unknown(cls, given)
        # Many clients write all the fields they know.
        return (
            {k: v for k, v in given.items() if v is not None} if isinstance(given, dict) else given
        )


class StreamOptions(OpenAIBody):
    """What a stream reports besides its chunks."""

    model_config = ConfigDict(extra="forbid")

    include_usage: Bool = False
    include_obfuscation: Bool | None = Field(default=None, description="Has no effect.")
    continuous_usage_stats: Bool | None = Field(
        default=None,
        description="With include_usage: each chunk of an output has its usage so far, too (vLLM's field).",
    )


MAX_STOPS = 16
MAX_VARIABLES = 64
"""Of a chat template, a response format or a tool, at the top level."""

Anything = Annotated[
    Mapping[str, Any], Field(max_length=MAX_VARIABLES), bounded_length(MAX_VARIABLES)
]


class OpenAIRequest(OpenAIBody):
    """The fields of both routes; defaults are OpenAI's."""

    model: str | None = None
    max_tokens: Int | None = None
    temperature: Float | None = None
    top_p: Float | None = None
    n: Int | None = None
    stream: Bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    presence_penalty: Float | None = None
    frequency_penalty: Float | None = None
    logit_bias: Biases | None = None
    seed: Int | None = None
    response_format: Anything | None = None
    # Ours, and other servers'.
    top_k: Int | None = Field(default=None, description="0 or -1: all tokens.")
    min_p: Float | None = None
    repetition_penalty: Float | None = None
    min_tokens: Int | None = None
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=256, fail_fast=True)
    allowed_token_ids: AllowedIds | None = None
    ignore_eos: Bool | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    skip_special_tokens: Bool = Field(
        default=True, description="false: the text shows special tokens, too."
    )
    add_special_tokens: Bool | None = Field(
        default=None,
        description="Whether the tokenizer adds its special tokens to a text; null: it does to a"
        " prompt, not to what a chat template wrote.",
    )
    deadline_seconds: Float = Field(
        default=DEFAULT_DEADLINE_SECONDS,
        gt=0,
        le=86400,
        description="After so many seconds the answer ends with what is there.",
    )
    return_token_ids: Bool | None = None
    return_tokens_as_token_ids: Bool | None = None

    @property
    def stop_strings(self) -> list[str]:
        """Stop strings."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def check_fields(self, served: Sequence[str]) -> None:
        """Refuse a model other than those served, and fields that would change the output.

        Raises:
            ProblemError: names the field.
        """
        if self.model not in (None, *served):
            raise ProblemError(
                "not-found",
                f"model {self.model!r} is not served here: use {' or '.join(map(repr, served))}",
                errors=[{"field": "model", "message": "unknown"}],
            )
        _check_unused_fields(self.model_extra or {})

    def to_generate_request(
        self,
        request_id: str,
        token_ids: list[int],
        *,
        logprobs: bool,
        max_tokens: int | None,
        structured: Mapping[str, Any] | None = None,
    ) -> GenerateRequest:
        """The request in the worker's own terms.

        Raises:
            ProblemError: 422 that names the field.
        """
        sampling = {name: getattr(self, name) for name in SAME_FIELDS}
        top_k = 0 if self.top_k in (None, -1) else self.top_k
        sampling |= {"max_tokens": max_tokens, "top_k": top_k}
        sampling |= {"stop": self.stop_strings or None}
        body = {
            "request_id": request_id,
            "token_ids": token_ids,
            "sampling": {k: v for k, v in sampling.items() if v is not None},
            "logprobs": None if logprobs else "none",
            "priority": self.priority or 0,
            "cache_salt": self.cache_salt,
            "session_id": self.session_id,
            "stream": bool(self.stream),
            "deadline_seconds": self.deadline_seconds,
            "structured": structured,
        }
        try:
            return GenerateRequest.model_validate(body)
        except ValidationError as error:
            raise invalid_request_problem(error.errors()) from error


Prompt = str | list[int] | list[str] | list[list[int]]


def _check_prompt(value: object) -> object:
    one = isinstance(value, str) or _is_list_of(str, value) or _is_list_of(int, value)
    lists = cast(list[object], value) if _is_list_of(list, value) else ()
    if not one and not (lists and all(_is_list_of(int, ids) for ids in lists)):
        raise ValueError("must be a string, a list of token ids, or a list of either")
    return value


class CompletionRequest(OpenAIRequest):
    """Body of `POST /v1/completions`: text or token ids, one prompt or several."""

    # In Python, element by element: C would hold the lock for all of them, once for each kind.
    prompt: Annotated[SkipValidation[Prompt], BeforeValidator(_check_prompt)]
    logprobs: Int | None = Field(
        default=None, ge=0, description="0 or 1: logprobs of the sampled tokens."
    )

    @property
    def all_prompts(self) -> list[str | list[int]]:
        """The prompts, one by one."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if given and isinstance(given[0], int):
            return [[token for token in given if isinstance(token, int)]]
        return [each for each in given if not isinstance(each, int)]


class ToolDefinition(OpenAIBody):
    """A function that the model may call."""

    type: Literal["function"] = "function"
    function: Anything


MAX_MESSAGES = 2**14
MAX_TOOLS = 1024


class ChatRequest(OpenAIRequest):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[
        list[dict[str, Any]],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
        bounded_length(MAX_MESSAGES),
    ]
    max_completion_tokens: Int | None = None
    logprobs: Bool | None = None
    top_logprobs: Int | None = None
    tools: list[ToolDefinition] | None = Field(default=None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: str | Anything | None = None
    parallel_tool_calls: Bool | None = Field(
        default=None, description="false: of several calls of tools, the answer has the first."
    )
    add_generation_prompt: Bool = True
    continue_final_message: Bool = False
    chat_template_kwargs: Anything | None = None

    @property
    def token_limit(self) -> int | None:
        """Maximum number of tokens to generate; None: up to the maximum length."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools to show to the model; with `tool_choice: none`, too, as vLLM does: TRL relies on that."""
        return [tool.model_dump() for tool in self.tools or ()]

    @property
    def may_call_tools(self) -> bool:
        """Whether calls are looked for in the answer's text."""
        return bool(self.tools) and self.tool_choice != "none"

    @override
    def check_fields(self, served: Sequence[str]) -> None:
        super().check_fields(served)
        for number, name in enumerate(each.function.get("name") for each in self.tools or ()):
            if not (isinstance(name, str) and FUNCTION_NAME.fullmatch(name)):
                raise unsupported_field(
                    f"tools.{number}.function.name", "name it, in one word without < and >"
                )
        if self.top_logprobs:
            raise unsupported_field(
                "top_logprobs", "only sampled tokens have logprobs: leave it out"
            )


def _is_list_of(kind: type, value: object) -> bool:
    """Whether it is a list of exactly this type: JSON's true does not count as a number."""
    return isinstance(value, list) and all(type(each) is kind for each in value)


def _check_unused_fields(given: Mapping[str, Any]) -> None:
    """Refuse the first of these fields that asks for something."""
    for field, value in given.items():
        if field in HARMLESS or any(_is_same(value, v) for v in ABSENT.get(field, ())):
            continue
        raise unsupported_field(field[:80], INSTEAD.get(field, "leave it out"))


def _is_same(value: object, absent: object) -> bool:
    """Whether they are equal; in JSON, true is not 1."""
    return value == absent and isinstance(value, bool) is isinstance(absent, bool)
