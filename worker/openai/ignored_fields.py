"""Fields of OpenAI's routes that have no effect here: which are harmless, which ask for something.

Whatever is not known to be harmless is refused by name: an answer that ignored it could be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rollout_common.wire.problems import ProblemError

HARMLESS: Final = frozenset(
    {
        *("user", "safety_identifier", "store", "metadata", "service_tier"),
        *("prompt_cache_key", "prompt_cache_retention", "prediction"),
    }
)
"""Who asks, what to keep, how to bill, and hints for speed: they never change an answer."""

ABSENT: Final[Mapping[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("echo", "use_beam_search", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("best_of", "num_beams", "length_penalty", "typical_p"), (1,)),
    **dict.fromkeys(("xtc_probability", "dry_multiplier", "top_a", "prompt_logprobs"), (0,)),
    **dict.fromkeys(("bad_words", "functions", "logits_processors"), ([],)),
    "suffix": ("",),
    "modalities": (["text"],),
    **dict.fromkeys(("detokenize", "spaces_between_special_tokens"), (True,)),
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
}
"""What to do instead of using a field; with all others: leave it out."""


def check_unused_fields(given: Mapping[str, Any]) -> None:
    """Refuse the first of these fields that would be ignored though it asks for something.

    Raises:
        ProblemError: 422 that names the field.
    """
    for field, value in given.items():
        if (
            field in HARMLESS
            or value is None
            or any(_is_same(value, v) for v in ABSENT.get(field, ()))
        ):
            continue
        raise unsupported_field(field[:80], INSTEAD.get(field, "leave it out"))


def _is_same(value: object, absent: object) -> bool:
    """Equal, where true is not 1."""
    return value == absent and isinstance(value, bool) is isinstance(absent, bool)


def unsupported_field(field: str, fix: str) -> ProblemError:
    """The refusal of a field that would otherwise be ignored."""
    detail = f"{field} is not supported here: {fix}"
    return ProblemError("unsupported", detail, errors=[{"field": field, "message": detail}])
