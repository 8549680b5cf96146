"""How turns reach the columns: appended after sampled ids, counted, checked, truncated."""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import PrivateAttr

from rollout_common.wire import LogprobsOf, WeightsSpan

from .boundaries import TurnTokens, fit_turn
from .codec import TemplateError
from .columns import FLOAT32, INT32, ColumnView
from .conversation_data import (
    ConversationData,
    CounterName,
    OverlongPrompt,
    RequestState,
    WriteCursor,
)
from .media import MediaTurn, cut_media
from .sanity_check import SanityCheckMode, find_difference
from .template_messages import (
    MEDIA_KEYS,
    MediaLists,
    Message,
    check_stand_in_words,
    parse_tool_call,
)
from .templates import ChatTemplate, EncodedPrompt, cached_template

logger = logging.getLogger(__name__)


class ConversationWriter(ConversationData):
    """The private half of `Conversation`."""

    _template: tuple[Any, ChatTemplate] | None = PrivateAttr(default=None)

    def __getstate__(self) -> dict[Any, Any]:
        """Leave the template out of a pickle: it and its tokenizer stay in their process."""
        state = super().__getstate__()
        return {**state, "__pydantic_private__": {"_template": None}}

    def _begin_conversation(self, processing_class: Any, ids: Sequence[int] | None) -> None:
        template = self._template_for(processing_class)
        begun = self._cut_prompt(self._encode_prompt(template, ids))
        layout = template.codec.rope_layout
        rope = layout.rope_positions(begun.ids, begun.inputs) if layout else None
        self.streams.append_tokens(begun.ids, rope=rope)
        self._note_media(0, begun.inputs, self.multi_modal_data)
        self.streams.append_tokens(begun.generation)
        self.streams.prompt = len(self.streams)
        opened, messages = len(begun.generation), len(self.messages)
        self.cursor = WriteCursor(tokens=len(begun.ids), messages=messages, opened=opened)

    def _encode_prompt(self, template: ChatTemplate, given: Sequence[int] | None) -> EncodedPrompt:
        media = self.multi_modal_data
        if given is None:
            return template.encode_prompt(self.messages, media, self.mm_processor_kwargs)
        if any(media.values()):
            raise ValueError(
                "input_ids and media are mutually exclusive: let the processor make the ids"
            )
        ids, generation = list(given), template.generation_prompt(self.messages)
        if not generation or ids[-len(generation) :] != generation:
            generation = []
        return EncodedPrompt(ids[: len(ids) - len(generation)], generation, {})

    def _cut_prompt(self, begun: EncodedPrompt) -> EncodedPrompt:
        """Return the prompt within the limits.

        One with media is never cut: its placeholders and tensors would no longer match.
        """
        ids, generation, inputs = begun
        limit, policy = min(self.max_prompt_len, self.max_model_len), self.overlong_prompt
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
        self.prompt_cut = start, over
        return EncodedPrompt(ids[:start] + ids[start + over :], generation, inputs)

    def _template_for(self, processing_class: Any) -> ChatTemplate:
        if self._template is None or self._template[0] is not processing_class:
            template = cached_template(
                processing_class, self.tool_schemas, self.chat_template_kwargs
            )
            self._template = processing_class, template
        return self._template[1]

    def _check_open(self) -> None:
        if self.state in {RequestState.COMPLETED, RequestState.FAILED}:
            raise ValueError(
                f"request {self.request_id!r} is {self.state}: it accepts no more turns"
            )

    def _check_kind(self, given: bool, kind: str) -> None:
        kinds = get_args(LogprobsOf)
        if given and kind not in kinds:
            raise ValueError(f"logprobs_of is {kind!r}: use one of {', '.join(kinds)}")
        if given and self.logprobs_of is None and 1 in self.streams.sampled:
            raise ValueError("earlier turns have no logprobs: give them for all turns or none")
        if not given and self.logprobs_of is not None:
            raise ValueError("earlier turns have logprobs: give them for all turns or none")
        if given and self.logprobs_of not in (None, kind):
            raise ValueError(
                f"got {kind!r} logprobs after {self.logprobs_of!r} ones: use one kind per request"
            )

    def _count_event(self, counter: CounterName, count: int = 1) -> None:
        if count:
            self.counters[counter] = self.counters.get(counter, 0) + count

    def _add_group(self, processing_class: Any, found: list[tuple[Message, MediaLists]]) -> None:
        """Append messages after the last turn, or render all since the last answer again."""
        self._check_open()
        template = self._template_for(processing_class)
        group = [message for message, _ in found]
        media = {key: [i for _, items in found for i in items[key]] for key in MEDIA_KEYS}
        self.check_media_kinds(media)
        history, since, items = self.messages, self.cursor.messages, media
        end, unclosed = len(self.streams) - self.cursor.opened, self.cursor.unclosed
        turn = None
        if len(history) == since or template.can_split(history, group):
            turn = template.encode_turn(history, group, media, self.mm_processor_kwargs)
        again = len(history) > since and (turn is None or turn.merged)
        if turn is None or again:
            history, group = history[:since], [*history[since:], *group]
            items = {key: self._pending_media(key) + media[key] for key in MEDIA_KEYS}
            end, unclosed = self.cursor.tokens, self.cursor.sampled
            turn = template.encode_turn(history, group, items, self.mm_processor_kwargs)
        removed = self._fit_turn(template, turn, end, unclosed)
        layout = template.codec.rope_layout
        rope = layout.rope_positions(turn.body, turn.inputs) if layout else None
        # Nothing below raises: the request takes the whole turn or stays unchanged.
        if again:
            self.media = [m for m in self.media if m.start < end]
            self._count_event("regroups")
        self._cut_tokens(end - removed)
        if unclosed:
            self.cursor.tokens = len(self.streams)
        self.streams.append_tokens(turn.close)
        start = len(self.streams)
        self.streams.append_tokens(turn.body, rope=rope)
        self._note_media(start, turn.inputs, items)
        self._count_turn(turn, removed)
        self.cursor.unclosed = False
        for key in MEDIA_KEYS:
            self.multi_modal_data[key] += media[key]
        self.messages += [message for message, _ in found]

    def _add_text(self, processing_class: Any, message: Message) -> None:
        """Append an answer given as text, after the generation prompt."""
        check_stand_in_words(message)
        template = self._template_for(processing_class)
        turn = template.encode_reply(self.messages, message)
        self._open_turn(template)
        if turn.header:
            self._cut_tokens(len(self.streams) - self.cursor.opened)
        self.streams.append_tokens(turn.body[: turn.header])
        self.streams.append_tokens(turn.body[turn.header :], loss=True)
        turn.close = []
        self._count_turn(turn, 0)
        self._append_answer(message, None, sampled=False)

    def _open_turn(self, template: ChatTemplate) -> None:
        """Open the assistant's turn if it is not open yet."""
        if self.cursor.opened:
            return
        generation = template.generation_prompt(self.messages)
        if self.cursor.unclosed:
            turn = template.encode_closing(self.messages)
            removed = self._fit_turn(template, turn, len(self.streams), unclosed=True)
            self._cut_tokens(len(self.streams) - removed)
            self.streams.append_tokens(turn.close)
            self._count_turn(turn, removed)
            self.cursor.unclosed = False
        self.streams.append_tokens(generation)
        self.cursor.opened = len(generation)

    def _render_ids(self, template: ChatTemplate) -> ColumnView[int]:
        """Return the ids of all messages as the template prints them now, for an answer."""
        text = template.render(self.messages, generation_prompt=True)
        ids, _ = template.codec.encode_media(text, self.multi_modal_data, self.mm_processor_kwargs)
        self._count_event("full_renders")
        return ColumnView(array(INT32, ids), [])

    def _append_answer(self, message: Message, stopped: int | None, sampled: bool) -> None:
        self.messages.append(message)
        self.cursor = WriteCursor(
            tokens=len(self.streams), messages=len(self.messages), sampled=sampled,
            unclosed=sampled, stopped=stopped,
        )  # fmt: skip

    def _fit_turn(self, template: ChatTemplate, turn: TurnTokens, end: int, unclosed: bool) -> int:
        """Fit a turn to the ids before `end`; return how many of those must be removed."""
        if not unclosed:
            turn.close = []
            return 0
        tail = self.streams.ids[max(0, end - len(turn.close) - 1) : end]
        special = template.codec.special_ids
        return fit_turn(tail, turn, special, template.end_ids, self.cursor.stopped)

    def _cut_tokens(self, length: int) -> None:
        self.streams.cut_to(length)
        self.cursor.opened = 0

    def _count_turn(self, turn: TurnTokens, removed: int) -> None:
        self._count_event("full_renders", turn.full)
        self._count_event("history_rewrites", turn.rewritten)
        self._count_event("seam_merges", turn.merged)
        self._count_event("boundary_tokens_added", len(turn.close))
        self._count_event("boundary_tokens_removed", removed)

    def _note_media(self, start: int, inputs: dict[str, Any], items: MediaLists) -> None:
        counts = {key: len(values) for key, values in items.items()}
        if any(counts.values()):
            turn = MediaTurn(start=start, end=len(self.streams), inputs=inputs, counts=counts)
            self.media.append(turn)

    def _pending_media(self, key: str) -> list[Any]:
        """Media of the messages since the last answer."""
        count = sum(m.counts.get(key, 0) for m in self.media if m.start >= self.cursor.tokens)
        items: list[Any] = self.multi_modal_data[key]
        return items[len(items) - count :]

    # Ending.

    def _truncate_tokens(self) -> None:
        limit = min(self.max_model_len, self.streams.prompt + self.max_response_len)
        length = len(self.streams)
        if length <= limit:
            return
        cut = cut_media(self.media, self.multi_modal_data, limit)
        self.media, self.multi_modal_data, kept = cut
        self.streams.cut_to(kept)
        self.truncated_tokens = length - kept

    def _check_messages(self, processing_class: Any) -> None:
        if self.tokenization_sanity_check_mode is SanityCheckMode.DISABLE:
            return
        self.difference = self._find_difference(self._template_for(processing_class))
        if self.difference:
            mode = self.tokenization_sanity_check_mode
            logger.warning("request %r, %s: %s", self.request_id, mode, self.difference)

    def _find_difference(self, template: ChatTemplate) -> str | None:
        try:
            text = template.render(self.messages)
            ids, inputs = template.codec.encode_media(
                text, self.multi_modal_data, self.mm_processor_kwargs
            )
        except TemplateError as error:
            return f"no full render to compare with: {error}"
        if self.prompt_cut:
            start, count = self.prompt_cut
            del ids[start : start + count]
        found = find_difference(
            self.streams.ids,
            array(INT32, ids),
            self.streams.sampled,
            template.codec.decode,
            mode=self.tokenization_sanity_check_mode,
            close=template.plain_close,
            prompt=self.streams.prompt,
        )
        return str(found) if found else _media_difference(self.multi_modal_inputs, inputs)


class PromptTooLong(ValueError):
    """A prompt exceeds `max_prompt_len` (or `max_model_len`) and may not be truncated."""


def answer_message(content: str, calls: Sequence[Any] | None, more: Mapping[str, Any]) -> Message:
    """Return an assistant message."""
    found = {"role": "assistant", "content": content, **more}
    return found | ({"tool_calls": [parse_tool_call(call) for call in calls]} if calls else {})


def checked_logprobs(logprobs: Sequence[float], count: int) -> array[float]:
    """Return logprobs as a buffer; raise ValueError unless there is a finite one for each id."""
    values = array(FLOAT32, logprobs)
    if len(values) != count:
        raise ValueError(f"{len(values)} logprobs for {count} ids")
    if not math.isfinite(sum(values)):
        bad = next(i for i, value in enumerate(values) if not math.isfinite(value))
        raise ValueError(f"logprob {bad} is {values[bad]}: all must be finite")
    return values


def check_spans(weights: Sequence[WeightsSpan], count: int) -> None:
    """Raise ValueError unless spans, if given, cover `[0, count)`."""
    at = 0
    for span in weights:
        if span.start != at or span.end < at:
            raise ValueError(
                f"weights: got span [{span.start}, {span.end}), expected one that starts at {at}"
            )
        at = span.end
    if weights and at != count:
        raise ValueError(f"weights: the spans end at {at}, the ids at {count}")


def _media_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    for key in sorted({*ours, *theirs}):
        a, b = ours.get(key), theirs.get(key)
        if a is None or b is None or tuple(a.shape) != tuple(b.shape) or not bool((a == b).all()):
            return f"media tensors {key!r} differ from those of a full render"
    return None
