"""The template of a conversation, its first prompt, and the contents of its answers."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from .codec import Codec, TemplateError
from .examples import PLAIN_EXAMPLE, REPLY_STAND_IN
from .template_messages import MediaLists, Message
from .templates import ChatTemplate, EncodedPrompt

_MAX_CACHED_TEMPLATES = 32
_CACHED_TEMPLATES: OrderedDict[tuple[int, str], ChatTemplate] = OrderedDict()


def cached_template(
    processing_class: Any, tools: Sequence[Message] | None, options: Mapping[str, Any]
) -> ChatTemplate:
    """Return the template of a tokenizer or processor, with all that was learned about it."""
    text = getattr(processing_class, "chat_template", None)
    words = json.dumps([tools or [], dict(options), text], sort_keys=True, default=repr)
    key = id(processing_class), words
    found = _CACHED_TEMPLATES.get(key)
    # An id may be reused once its object is gone; a cached template keeps its object alive.
    if found is None or found.codec.source is not processing_class:
        found = _CACHED_TEMPLATES[key] = ChatTemplate(Codec(processing_class), tools, options)
        while len(_CACHED_TEMPLATES) > _MAX_CACHED_TEMPLATES:
            _CACHED_TEMPLATES.popitem(last=False)
    return found


class OverlongPrompt(StrEnum):
    """What to do with a prompt that is too long."""

    ERROR = "error"
    TRUNCATE_LEFT = "truncate_left"
    TRUNCATE_MIDDLE = "truncate_middle"


class PromptTooLong(ValueError):
    """A prompt exceeds `max_prompt_len` (or `max_model_len`) and may not be truncated."""


def begin_prompt(
    template: ChatTemplate,
    messages: Sequence[Message],
    media: MediaLists,
    mm: Mapping[str, Any],
    given: Sequence[int] | None,
    limit: int,
    policy: OverlongPrompt,
) -> EncodedPrompt:
    """Return the ids that a conversation starts with, at most `limit` of them.

    A prompt with media is never cut: its placeholders and tensors would no longer match.
    """
    if given is None:
        begun = template.encode_prompt(messages, media, mm)
    elif any(media.values()):
        raise ValueError(
            "input_ids and media are mutually exclusive: let the processor make the ids"
        )
    else:
        ids, generation = list(given), template.generation_prompt(messages)
        if not generation or ids[-len(generation) :] != generation:
            generation = []
        begun = EncodedPrompt(ids[: len(ids) - len(generation)], generation, {})
    ids, generation, inputs, _ = begun
    over = len(ids) + len(generation) - limit
    if over <= 0:
        return begun
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
    return EncodedPrompt(ids[:start] + ids[start + over :], generation, inputs, (start, over))


def content_without_calls(template: ChatTemplate, text: str, calls: Sequence[Message]) -> str:
    """Return the part of an answer's text that is not its calls.

    A template prints the content and then the calls, so a content with calls would print them twice.
    The content is the part with which the template prints the whole text again. If there is none
    (the policy wrote a call differently from the template), it is what precedes the first call.
    """
    _, marked, printed = _render_answer(template, REPLY_STAND_IN, calls).rpartition(REPLY_STAND_IN)
    first_line = printed.strip().partition("\n")[0]
    begin = template.boundaries.first_special(printed.lstrip()) or first_line
    content = text[: text.find(begin)] if begin and begin in text else text
    gap = printed[: len(printed) - len(printed.lstrip())]
    found = [content.removesuffix(gap), content, ""] if marked else [""]
    for each in dict.fromkeys((*found, text)):
        before, same, rest = _render_answer(template, each, calls).rpartition(text)
        once = same and text not in before
        if once and not template.boundaries.without_specials(rest).strip():
            return each
    return found[0] if marked else text


def _render_answer(template: ChatTemplate, content: str, calls: Sequence[Message]) -> str:
    answer = {"role": "assistant", "content": content, "tool_calls": list(calls)}
    try:
        return template.render([PLAIN_EXAMPLE[0], answer])
    except TemplateError:
        return ""
