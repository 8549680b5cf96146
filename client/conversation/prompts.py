"""The start of a conversation: render, tokenize, and truncate it to its limit where allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from .messages import Media, Message
from .templates import Template


class OverlongPrompt(StrEnum):
    """What to do with a prompt that is too long."""

    ERROR = "error"
    TRUNCATE_LEFT = "truncate_left"
    TRUNCATE_MIDDLE = "truncate_middle"


class PromptTooLong(ValueError):
    """A prompt exceeds `max_prompt_len` (or `max_model_len`) and may not be truncated."""


class Begun(NamedTuple):
    """The ids of a start, its generation prompt, its media, and what was cut from it."""

    ids: list[int]
    generation: list[int]
    inputs: dict[str, Any]
    cut: tuple[int, int] | None


def begin(
    template: Template,
    messages: Sequence[Message],
    media: Media,
    mm: Mapping[str, Any],
    given: Sequence[int] | None,
    limit: int,
    policy: OverlongPrompt,
) -> Begun:
    """Return the ids that a conversation starts with, at most `limit` of them.

    Raises:
        PromptTooLong: See the policy; a prompt with media is never cut, as placeholders and
            tensors would no longer match.
    """
    if given is None:
        ids, generation, inputs = template.prompt(messages, media, mm)
    elif any(media.values()):
        raise ValueError(
            "input_ids and media are mutually exclusive: let the processor make the ids"
        )
    else:
        generation, inputs = template.generation_prompt(messages), {}
        ids = list(given)
        if generation and ids[-len(generation) :] == generation:
            ids = ids[: -len(generation)]
        else:
            generation = []
    over = len(ids) + len(generation) - limit
    if over <= 0:
        return Begun(ids, generation, inputs, None)
    keep = len(ids) - over
    if policy is OverlongPrompt.ERROR or inputs or keep < 1:
        why = (
            ", and it holds media, which can't be cut" if inputs
            else ", and the generation prompt leaves no room" if keep < 1
            else " (overlong_prompt may be truncate_left or truncate_middle)"
        )  # fmt: skip
        raise PromptTooLong(
            f"the prompt has {len(ids) + len(generation)} tokens, {limit} are allowed{why}"
        )
    start = 0 if policy is OverlongPrompt.TRUNCATE_LEFT else (keep + 1) // 2
    return Begun(ids[:start] + ids[start + over :], generation, inputs, (start, over))
