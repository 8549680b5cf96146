"""What a chat template adds for a turn, without rendering the conversation again.

A turn is rendered after a short example of its conversation (`examples`), and the text that it
adds is tokenized alone (`Codec.encode_after`). The added text begins where the stand-in's own words end, so
what the template changes before them once a turn follows does not matter. For each shape of example
the template is tried once with a longer one: if it adds something else there, the whole
conversation is rendered, and the turn says so. Nothing here knows a model's name: families differ
only in how their templates answer.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

from . import examples
from .boundaries import TurnTokens, common_length
from .codec import Codec, TemplateError
from .content_forms import ContentForms
from .template_messages import STAND_IN, MediaLists, Message

_MAX_CACHED_TEXTS = 32


class EncodedPrompt(NamedTuple):
    """Ids of a first render, those of its generation prompt, and the tensors of its media."""

    ids: list[int]
    generation: list[int]
    inputs: dict[str, Any]


class _SplitTurn(NamedTuple):
    """What a group adds after `before`; `close` is the end of `before` that ends an answer."""

    before: str
    close: str
    added: str
    rewritten: bool

    def is_real(self) -> bool:
        """Return whether the text holds no stand-in, which a message that moved would leave."""
        return not STAND_IN.search(self.close + self.added)


class ChatTemplate:
    """The chat template of a tokenizer or processor for one set of tools and options."""

    def __init__(
        self, codec: Codec, tools: Sequence[Message] | None, options: Mapping[str, Any]
    ) -> None:
        self.codec, self.tools, self.options = codec, tools, options
        self._forms = ContentForms(lambda messages: codec.render(messages, tools, options))
        self._example_texts: dict[str, str] = {}
        self._generation_ids: dict[tuple[str, ...], list[int] | None] = {}
        self._trailers: dict[str, str] = {}
        self._trusted: dict[tuple[tuple[str, ...], ...], bool] = {}

    def render(self, messages: Sequence[Message], generation_prompt: bool = False) -> str:
        """Return the text of messages, in the form in which the template takes them."""
        shaped = [self._forms.shape_message(message) for message in messages]
        return self.codec.render(
            shaped, self.tools, self.options, generation_prompt=generation_prompt
        )

    def encode_prompt(
        self, messages: Sequence[Message], media: MediaLists, mm: Mapping[str, Any]
    ) -> EncodedPrompt:
        """Render and tokenize a conversation's beginning."""
        text, opened = self._render_body(messages), self.render(messages, generation_prompt=True)
        if not opened.startswith(text):
            text = opened
        ids, inputs = self.codec.encode_media(text, media, mm)
        generation, _ = self.codec.encode_after(text, opened[len(text) :])
        return EncodedPrompt(ids, generation, inputs)

    def generation_prompt(self, history: Sequence[Message]) -> list[int]:
        """Return the ids that open the assistant's turn; none if the template has none."""
        example = self._example_for(history)
        shape = examples.message_kinds(example)
        if shape not in self._generation_ids:
            text, more = self._generation_text(example), examples.longer_example(example)
            same = more == example or self._generation_text(more) == text
            known = same and not STAND_IN.search(text)
            self._generation_ids[shape] = self._encode_generation(example, text) if known else None
        found = self._generation_ids[shape]
        if found is None:
            return self._encode_generation(history, self._generation_text(history))
        return found

    def _generation_text(self, messages: Sequence[Message]) -> str:
        text, opened = self._render_body(messages), self.render(messages, generation_prompt=True)
        if not opened.startswith(text):
            kind = examples.message_kind(messages[-1])
            raise TemplateError(f"the generation prompt after {kind!r} is not at the text's end")
        return opened[len(text) :]

    def _encode_generation(self, messages: Sequence[Message], text: str) -> list[int]:
        return self.codec.encode_after(self._render_body(messages), text)[0]

    def can_split(self, history: Sequence[Message], group: Sequence[Message]) -> bool:
        """Return whether a group can be rendered after messages that have no answer yet."""
        example = self._example_for(history, group)
        if not self._is_trusted(example, group):
            return False
        split = self._split_turn(example, examples.stand_in_group(group))
        return split is not None and not split.rewritten

    # A turn.

    def encode_turn(
        self, history: Sequence[Message], group: Sequence[Message], media: MediaLists,
        mm: Mapping[str, Any],
    ) -> TurnTokens:  # fmt: skip
        """Return what messages of user, tool or system add to a conversation."""
        example = self._example_for(history, group)
        split = self._split_turn(example, group) if self._is_trusted(example, group) else None
        full = split is None or not split.is_real()
        if full:
            whole = self._with_call_contents(examples.with_stand_in_end(history))
            split = self._split_turn(whole, group)
        if split is None or not split.is_real():
            raise TemplateError(
                f"the chat template can't continue {history[-1]['role']!r} with "
                f"{group[0]['role']!r}: it then prints the earlier conversation differently"
            )
        before = examples.with_real_end(split.before, history[-1])
        return self._encode_split(split._replace(before=before), media, mm, full=full)

    def encode_reply(self, history: Sequence[Message], message: Message) -> TurnTokens:
        """Return what an assistant's message given as text adds after the generation prompt."""
        generation = self.generation_prompt(history)
        for short, full in ((self._example_for(history), False), (history, True)):
            opened, plain = self.render(short, generation_prompt=True), self._render_body(short)
            whole = self._render_body([*short, message])
            for before in (opened, plain):
                added = whole[len(before) :]
                if whole.startswith(before) and not STAND_IN.search(added):
                    body, clean = self.codec.encode_after(before, added)
                    header = 0 if before is opened else common_length(body, generation)
                    return TurnTokens(body=body, merged=not clean, full=full, header=header)
        raise TemplateError(
            "the chat template can't continue with an answer: it then prints the earlier "
            "conversation differently"
        )

    def encode_closing(self, history: Sequence[Message]) -> TurnTokens:
        """Return what closes the last answer when another answer follows directly."""
        example = self._example_for(history)
        text = self._render_body(example)
        end = examples.end_of_words(text, example[-1])
        tail = text[end:] if end >= 0 else ""
        return TurnTokens(close=self.codec.encode(self._closing_text(example[-1], tail)))

    def _encode_split(
        self, split: _SplitTurn, media: MediaLists, mm: Mapping[str, Any], *, full: bool = False
    ) -> TurnTokens:
        close = self.codec.encode(split.close)
        turn = TurnTokens(close, full=full, rewritten=split.rewritten)
        if any(media.values()):
            turn.body, turn.inputs = self.codec.encode_media(split.added, media, mm)
        else:
            turn.body, clean = self.codec.encode_after(split.before, split.added)
            turn.merged = not clean
        return turn

    # Examples.

    def _example_for(
        self, history: Sequence[Message], group: Sequence[Message] = ()
    ) -> list[Message]:
        return self._with_call_contents(examples.example_of(history, group))

    def _with_call_contents(self, example: list[Message]) -> list[Message]:
        return example if self._forms.prints_calls else examples.with_call_contents(example)

    def _split_turn(
        self, example: Sequence[Message], group: Sequence[Message]
    ) -> _SplitTurn | None:
        """Return what a group adds to an example; None: it changes how the example is printed."""
        last = example[-1]
        before, after = self._cached_body(example), self._render_body([*example, *group])
        i, j = examples.end_of_words(before, last), examples.end_of_words(after, last)
        if i < 0 or j < 0:
            return None
        mine, theirs = before[i:], after[j:]
        answered = last["role"] == "assistant"
        if not theirs.startswith(mine):
            if not answered:
                return None
            mine = self.codec.shared_beginning(mine, theirs)
        kept = examples.end_before_answer(before[:i]) if answered else i
        rewritten = before[:kept] != after[:kept]
        close = self._closing_text(last, mine)
        return _SplitTurn(before[:i] + mine, close, theirs[len(mine) :], rewritten)

    def _render_body(self, messages: Sequence[Message]) -> str:
        """Return the text of messages without a trailer that is printed only at a text's end."""
        text, kind = self.render(messages), examples.message_kind(messages[-1])
        if kind not in self._trailers:
            opened = self.render(messages, generation_prompt=True)
            if not opened.startswith(text):
                self._trailers[kind] = text[len(self.codec.shared_beginning(text, opened)) :]
            else:
                self._trailers[kind] = self._unasked_opening(kind)
        return text.removesuffix(self._trailers[kind])

    def _unasked_opening(self, kind: str) -> str:
        """Return the next answer's beginning, if a template prints that unasked (Command A)."""
        if kind not in ("assistant", "calls"):
            return ""
        example = self._with_call_contents(examples.example_ending_with(kind))
        group = examples.group_of_role("tool" if kind == "calls" else "user")
        with suppress(TemplateError):
            texts = self.render(example), self.render([*example, *group])
            mine, theirs = (t[max(0, examples.end_of_words(t, example[-1])) :] for t in texts)
            return mine[len(self.codec.shared_beginning(mine, theirs)) :]
        return ""

    def _cached_body(self, example: Sequence[Message]) -> str:
        """Return an example's text; most conversations of one shape have the same example."""
        key = json.dumps(example, default=repr)
        if key not in self._example_texts:
            if len(self._example_texts) >= _MAX_CACHED_TEXTS:
                self._example_texts.clear()
            self._example_texts[key] = self._render_body(example)
        return self._example_texts[key]

    def _closing_text(self, last: Message, tail: str) -> str:
        """Return the part of `tail`, the text after an answer's words, that ends the answer."""
        kind = examples.message_kind(last)
        if kind == "calls":
            own = self.codec.shared_end(self._own_closing_text, tail)
            return max(own, self.codec.last_special(tail), key=len)
        return tail if kind == "assistant" else ""

    @cached_property
    def _own_closing_text(self) -> str:
        return self._render_body(examples.PLAIN_EXAMPLE).rpartition(examples.REPLY_STAND_IN)[2]

    @cached_property
    def plain_close(self) -> str:
        """What the template writes after an answer that nothing follows."""
        return self.render(examples.PLAIN_EXAMPLE).rpartition(examples.REPLY_STAND_IN)[2]

    def _is_trusted(self, example: Sequence[Message], group: Sequence[Message]) -> bool:
        """Return whether a turn adds the same to longer conversations; tried once for each shape."""
        key = examples.message_kinds(example), examples.message_kinds(group)
        if key not in self._trusted:
            self._trusted[key] = self._try_example(example, examples.stand_in_group(group))
        return self._trusted[key]

    def _try_example(self, example: Sequence[Message], group: Sequence[Message]) -> bool:
        short = None
        with suppress(TemplateError):
            short = self._split_turn(example, group)
        if short is None:
            return False
        rest = short.added
        for message in group:
            if message["content"] not in rest:
                raise TemplateError(
                    f"the chat template prints nothing of a message of role {message['role']!r} "
                    f"after one of role {example[-1]['role']!r}"
                )
            rest = rest.replace(message["content"], "")
        if not short._replace(added=rest).is_real():
            return False
        more = examples.longer_example(example)
        try:
            long = short if more == example else self._split_turn(more, group)
        except TemplateError:
            return True  # the template rejects every longer conversation
        return long is not None and (long.close, long.added) == (short.close, short.added)

    # Which tokens end a turn.

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Ids with which a policy ends its turn: EOS, the template's own, the next turn's first."""
        found = set(self.codec.eos_ids)
        for last, new in (("assistant", "user"), ("calls", "tool")):
            example = self._with_call_contents(examples.example_ending_with(last))
            with suppress(TemplateError):
                if split := self._split_turn(example, examples.group_of_role(new)):
                    token = self.codec.first_special(split.close or split.added)
                    found |= {self.codec.special_tokens[token]} if token else set()
        return frozenset(found)

    # The content of an answer with calls.

    def content_without_calls(self, text: str, calls: Sequence[Message]) -> str:
        """Return the part of an answer's text that is not its calls.

        A template prints the content and then the calls, so a content with calls would print them twice.
        The content is the part with which the template prints the whole text again. If there is none
        (the policy wrote a call differently from the template), it is what precedes the first call.
        """
        _, marked, printed = self._render_answer(examples.REPLY_STAND_IN, calls).rpartition(
            examples.REPLY_STAND_IN
        )
        first_line = printed.strip().partition("\n")[0]
        begin = self.codec.first_special(printed.lstrip()) or first_line
        content = text[: text.find(begin)] if begin and begin in text else text
        gap = printed[: len(printed) - len(printed.lstrip())]
        found = [content.removesuffix(gap), content, ""] if marked else [""]
        for each in dict.fromkeys((*found, text)):
            before, same, rest = self._render_answer(each, calls).rpartition(text)
            once = same and text not in before
            if once and not self.codec.without_specials(rest).strip():
                return each
        return found[0] if marked else text

    def _render_answer(self, content: str, calls: Sequence[Message]) -> str:
        answer = {"role": "assistant", "content": content, "tool_calls": list(calls)}
        try:
            return self.render([examples.PLAIN_EXAMPLE[0], answer])
        except TemplateError:
            return ""


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
