"""Request models of the OpenAI routes: the fields that have an effect here.

Unknown fields that don't change what is sampled are ignored, as OpenAI clients expect. Those that
would change it are refused by name: an answer that ignored them would be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from rollout_worker.schemas import GenerateRequest, Problem
from rollout_worker.wire.problems import ProblemError
from rollout_worker.wire.validation import invalid_request

ALTERING = {
    **dict.fromkeys(("echo", "suffix", "best_of", "use_beam_search"), "leave it out"),
    **dict.fromkeys(("functions", "function_call"), "use tools"),
    **dict.fromkeys(("prompt_logprobs", "bad_words", "length_penalty"), "leave it out"),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice"), "leave it out"),
    **dict.fromkeys(("guided_grammar", "structured_outputs", "regex", "ebnf"), "leave it out"),
    **dict.fromkeys(("json_schema", "logits_processors", "lora_path"), "leave it out"),
    **dict.fromkeys(("audio", "modalities", "chat_template"), "leave it out"),
    **dict.fromkeys(("typical_p", "top_a", "top_n_sigma", "xtc_probability"), "leave it out"),
    **dict.fromkeys(("dry_multiplier", "num_beams", "stop_regex"), "leave it out"),
    **dict.fromkeys(("custom_logit_processor", "vllm_xargs"), "leave it out"),
    **dict.fromkeys(("prompt_embeds", "truncate_prompt_tokens"), "leave it out"),
    **dict.fromkeys(("adapter", "multimodal", "structured", "engine_params"), "leave it out"),
    "max_new_tokens": "use max_tokens",
    "min_new_tokens": "use min_tokens",
    "repeat_penalty": "use repetition_penalty",
    "sampling_seed": "use seed",
}
"""Fields of other servers that would change the output, and what to do instead."""

SAME = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "seed", "n", "min_tokens"),
    *("stop_token_ids", "allowed_token_ids", "ignore_eos"),
)
"""Fields that mean the same as their namesakes in `sampling`."""


class StreamOptions(BaseModel):
    """What a stream reports besides its chunks."""

    include_usage: bool = False


class OpenAIRequest(BaseModel):
    """The fields of both routes; defaults are OpenAI's."""

    model_config = ConfigDict(extra="allow", frozen=True)

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    response_format: Mapping[str, Any] | None = None
    # Ours, and other servers'.
    top_k: int | None = Field(default=None, description="0 or -1: all tokens.")
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def stops(self) -> list[str]:
        """Stop strings."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def check(self, served: str) -> None:
        """Refuse a different model, and fields that would change the output.

        Raises:
            ProblemError: names the field.
        """
        if self.model not in (None, served):
            raise ProblemError(
                "not-found",
                f"model {self.model!r} is not served here: use {served!r}",
                errors=[{"field": "model", "message": "unknown"}],
            )
        if (self.response_format or {}).get("type", "text") != "text":
            raise unable("response_format", "leave it out")
        for field, value in (self.model_extra or {}).items():
            harmless = value in (None, False, "", [], {}, 0) or (field, value) == ("best_of", 1)
            if field in ALTERING and not harmless:
                raise unable(field, ALTERING[field])

    def generate(
        self, request_id: str, token_ids: list[int], *, logprobs: bool, max_tokens: int | None
    ) -> GenerateRequest:
        """The request in the worker's own terms.

        Raises:
            ProblemError: 422 that names the field.
        """
        sampling = {name: getattr(self, name) for name in SAME}
        top_k = 0 if self.top_k in (None, -1) else self.top_k
        sampling |= {"max_tokens": max_tokens, "top_k": top_k}
        sampling |= {"stop": self.stops or None}
        body = {
            "request_id": request_id,
            "token_ids": token_ids,
            "sampling": {k: v for k, v in sampling.items() if v is not None},
            "logprobs": None if logprobs else "none",
            "priority": self.priority or 0,
            "cache_salt": self.cache_salt,
            "session_id": self.session_id,
            "stream": bool(self.stream),
        }
        try:
            return GenerateRequest.model_validate(body)
        except ValidationError as error:
            raise invalid_request(error.errors()) from error


class CompletionRequest(OpenAIRequest):
    """Body of `POST /v1/completions`: text or token ids, one prompt or several."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(
        default=None, ge=0, description="0 or 1: logprobs of the sampled tokens."
    )

    @field_validator("prompt", mode="before")
    @classmethod
    def _text_or_ids(cls, value: object) -> object:
        one = isinstance(value, str) or _all(str, value) or _all(int, value)
        lists = cast(list[object], value) if _all(list, value) else ()
        if not one and not (lists and all(_all(int, ids) for ids in lists)):
            raise ValueError("must be a string, a list of token ids, or a list of either")
        return value

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one by one."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if given and isinstance(given[0], int):
            return [[token for token in given if isinstance(token, int)]]
        return [each for each in given if not isinstance(each, int)]


class Tool(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: Literal["function"] = "function"
    function: Mapping[str, Any]


class ChatRequest(OpenAIRequest):
    """Body of `POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] | None = None

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens to generate; None: up to the maximum length."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools to show to the model."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump() for tool in self.tools or ()]

    def check(self, served: str) -> None:
        """See `OpenAIRequest.check`."""
        super().check(served)
        if self.top_logprobs:
            raise unable("top_logprobs", "only sampled tokens have logprobs: leave it out")
        if self.tool_choice not in (None, "auto", "none"):
            raise unable("tool_choice", "tool calls can't be forced: use 'auto' or 'none'")


def in_openais_words(problem: Problem, prompt: str) -> tuple[str, str | None]:
    """Detail and first field of a refusal, under the names the client used.

    `prompt`: the field of the route that the token ids come from.
    """
    detail, fields = problem.detail, []
    for said in (problem.model_extra or {}).get("errors", ()):
        field = said["field"].removeprefix("sampling.")
        if field.partition(".")[0] == "token_ids":
            field = prompt
        detail = detail.replace(f"{said['field']}: ", f"{field}: ")
        fields.append(field)
    return detail, next(filter(None, fields), None)


def _all(kind: type, value: object) -> bool:
    """Whether it is a list of exactly this type: JSON's true does not count as a number."""
    return isinstance(value, list) and all(type(each) is kind for each in value)


def unable(field: str, fix: str) -> ProblemError:
    """The refusal of a field that would otherwise be ignored."""
    detail = f"{field} is not supported here: {fix}"
    return ProblemError("unsupported", detail, errors=[{"field": field, "message": detail}])
