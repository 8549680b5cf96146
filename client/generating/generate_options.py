"""What a caller passes to `generate`, checked and turned into a request. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict, get_args

from pydantic import BaseModel, ValidationError

from rollout_client.option_names import check_option_names, did_you_mean
from rollout_common.wire import GenerateRequest, SamplingParams, StructuredOutput

from .sent_pictures import image_inputs
from .settings import DEFAULT_DEADLINE_SECONDS

OnVersionChange = Literal["continue", "restart", "fail"]

MAX_ID_LENGTH = 200
"""Characters of a caller's request id: attempts append to it, and workers limit the whole."""

MAX_REPORTED_ERRORS = 4
"""Mistakes that one message lists."""


class _Array(Protocol):
    """An array or a tensor of token ids."""

    def tolist(self) -> Any:
        """Return its numbers as Python's own."""


Prompt = GenerateRequest | Sequence[int] | _Array
"""A whole request, or token_ids [P]: a list, an array, a tensor."""


class ScoreOptions(TypedDict, total=False):
    """Further arguments of `score`, all by name; they mean what they mean to `generate`."""

    request_id: str | None
    session_id: str | None
    group_id: str | None
    epoch: int | None
    min_version: int | None
    exact_version: int | None
    cache_salt: str | None
    priority: int
    deadline_seconds: float
    images: Sequence[bytes]
    adapter: str | None


class GenerateOptions(ScoreOptions, total=False):
    """Arguments of `generate` and `stream`, all by name; the worker has defaults for the rest.

    Attributes:
        sampling: How tokens are sampled; a mapping has the fields of `SamplingParams`.
        request_id: Attempts have ids of their own, made from it.
        session_id: Requests of one conversation go to one replica if possible.
        group_id: The same for the samples of one prompt, which otherwise spread over replicas.
        logprobs: Which kind; default: the pool's.
        prompt_logprobs: Score the prompt, too: True for all of it, or [from, to].
        top_logprobs: How many of the most likely tokens to return at each position, at most 256.
        structured: What the text must match: `{"json_schema": …}`, `regex`, `grammar` or `choice`.
        return_routed_experts: Return which experts each token went to, as `routed_experts` of each output.
        return_sampling_mask: Return which tokens could have been drawn, as `sampling_mask`.
        epoch: The epoch of the versions; default: the active one.
        min_version: Wait for a replica with these weights or newer ones.
        exact_version: Wait for a replica with exactly these, and let no others make a token.
        cache_salt: Requests with other salts share no cached prefix.
        priority: Lower runs first.
        deadline_seconds: For everything, waiting and all attempts; default: the pool's.
        images: Encoded pictures (PNG or JPEG) of the prompt's placeholders, in order; `token_ids` are
            what the model's processor returns. Each worker gets their bytes once.
        adapter: Name of a LoRA adapter of the active weights, as published; default: the model alone.
        on_version_change: What to do if the weights change within an output: `continue` (spans say
            which weights made which token), `restart` from the prompt, or `fail`.
    """

    sampling: SamplingParams | Mapping[str, object]
    logprobs: Literal["sampling", "raw", "none"] | None
    prompt_logprobs: bool | Sequence[int] | None
    top_logprobs: int
    return_routed_experts: bool
    return_sampling_mask: bool
    structured: StructuredOutput | Mapping[str, object] | None
    on_version_change: OnVersionChange


OWN_OPTIONS = ("group_id", "on_version_change", "images")
"""Options that are not sent as they are."""


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options that do not exist (TypeError) and a wrong `on_version_change` (ValueError)."""
    check_option_names("generate", options, GenerateOptions.__annotations__, _fix_for_name)
    choices = get_args(OnVersionChange)
    if (chosen := options.get("on_version_change", "continue")) not in choices:
        raise ValueError(f"on_version_change is {chosen!r}: use one of {', '.join(choices)}")


def make_request(
    prompt: Prompt, options: GenerateOptions, deadline_seconds: float = DEFAULT_DEADLINE_SECONDS
) -> GenerateRequest:
    """Return the request for a prompt; options replace the same fields of a whole request.

    Raises:
        ValueError: A field is unknown or has a bad value; the message names each.
        TypeError: The prompt is not a sequence of token ids, or an option does not exist.
    """
    check_options(options)
    given: dict[str, Any] = {"deadline_seconds": deadline_seconds}
    if isinstance(prompt, GenerateRequest):
        given |= {name: getattr(prompt, name) for name in prompt.model_fields_set}
    else:
        given["token_ids"] = _prompt_token_ids(prompt)
    if options.get("images"):
        given["multimodal"] = image_inputs(options["images"])
    sent = {name: value for name, value in options.items() if name not in OWN_OPTIONS}
    try:
        request = GenerateRequest.model_validate({**given, **_plain_numbers(sent)})
    except ValidationError as error:
        raise ValueError(_error_words(error)) from None
    if request.request_id is not None and len(request.request_id) > MAX_ID_LENGTH:
        raise ValueError(f"request_id is longer than {MAX_ID_LENGTH} characters")
    return request


def _prompt_token_ids(prompt: Sequence[int] | _Array) -> tuple[int, ...]:
    if isinstance(prompt, str | bytes):
        raise TypeError("a prompt is token ids, not text: tokenize it first")
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(ids, Sequence):
        kind = type(prompt).__name__
        fix = (
            ": pass its ['input_ids'], or give return_dict=False to apply_chat_template"
            if hasattr(ids, "keys") and "input_ids" in ids
            else ""
        )
        raise TypeError(f"a prompt is a list, an array or a tensor of token ids, not a {kind}{fix}")
    if ids and isinstance(ids[0], Sequence):
        raise ValueError("a prompt is one row of token ids: pass many to generate_many")
    whole = tuple(ids)
    # A plain list may have a hundred thousand ids: do not convert them one by one.
    return whole if set(map(type, whole)) <= {int} else tuple(map(_plain_numbers, whole))


def _plain_numbers(value: Any) -> Any:
    """Return numbers of numpy and torch as Python's own, also within mappings and sequences."""
    if isinstance(value, BaseModel | str | bytes | int | float):
        return value  # numpy's float64 is a float, too, which every check accepts
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {_plain_numbers(key): _plain_numbers(each) for key, each in value.items()}
    return tuple(map(_plain_numbers, value)) if isinstance(value, list | tuple) else value


def _error_words(error: ValidationError) -> str:
    """Return what is wrong: the path of each field and what it must be."""
    wrong, found = [], error.errors()
    # A mistake inside a field also fails the field itself: report only the inner one.
    outer = {each["loc"][:size] for each in found for size in range(len(each["loc"]))}
    inner = [each for each in found if each["loc"] not in outer]
    for each in inner[:MAX_REPORTED_ERRORS]:
        path = ".".join(map(str, each["loc"]))
        if each["type"] == "extra_forbidden":
            fields = SamplingParams if each["loc"][0] == "sampling" else GenerateRequest
            name = str(each["loc"][-1])
            wrong.append(f"{path} does not exist{did_you_mean(name, fields.model_fields)}")
        else:
            fix = _KNOWN_FIXES.get(path, "")
            wrong.append(f"{path}: {each['msg']}, not {str(each['input'])[:80]!r}{fix}")
    more = len(inner) - len(wrong)
    return "; ".join(wrong) + (f"; and {more} more" if more else "")


_KNOWN_FIXES = {
    "logprobs": ": 'sampling' is what an output has by default, 'none' leaves them out",
    "sampling.stop": ": write a list of strings, also for one",
    "sampling.top_k": ": 0 stands for all tokens",
}


def _fix_for_name(name: str, known: Iterable[str]) -> str:
    if name in SamplingParams.model_fields:
        return f": put it into sampling, as in sampling={{{name!r}: …}}"
    return ": use deadline_seconds" if name == "timeout" else did_you_mean(name, known)
