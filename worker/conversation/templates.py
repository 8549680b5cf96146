"""What a chat template adds for a turn, without rendering the conversation again.

A turn is rendered behind a short stand-in for its conversation (`windows`), and the text that it
adds is tokenized alone (`seams`). Whether that is what the template does in a longer conversation,
too, is tried once for every kind of turn; where it is not, the whole conversation is rendered, and
the turn says so. Nothing here knows a model's name: Qwen, Llama, GLM, Gemma and Mistral differ only
in what their templates answer.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from .messages import Media, Message
from .processing import Codec, TemplateError
from .seams import Seams, Turn, common
from .windows import (
    LONGER,
    MARK,
    PLAIN,
    group_for,
    kind_of,
    window_for,
    window_of,
    with_real_end,
)

_KEPT = 32


class Prompt(NamedTuple):
    """Ids of a first render, those of its generation prompt, and the tensors of its media."""

    ids: list[int]
    generation: list[int]
    inputs: dict[str, Any]


class _Split(NamedTuple):
    before: str
    added: str


class Template:
    """The chat template of a tokenizer or processor for one set of tools and options."""

    def __init__(
        self, codec: Codec, tools: Sequence[Message] | None, options: Mapping[str, Any]
    ) -> None:
        self.codec, self.tools, self.options = codec, tools, options
        self._windows: dict[str, str] = {}
        self._closes: dict[str, list[int]] = {}
        self._generation: dict[str, list[int]] = {}
        self._trusted: dict[tuple[str, str], bool] = {}
        self._seams = Seams(codec)

    def render(self, messages: Sequence[Message], generation_prompt: bool = False) -> str:
        """Return the text of messages."""
        return self.codec.render(
            messages, self.tools, self.options, generation_prompt=generation_prompt
        )

    def prompt(self, messages: Sequence[Message], media: Media, mm: Mapping[str, Any]) -> Prompt:
        """Render and tokenize a conversation's beginning."""
        text = self.render(messages)
        opened = self.render(messages, generation_prompt=True)
        if not opened.startswith(text):
            ids, inputs = self.codec.encode_media(opened, media, mm)
            return Prompt(ids, [], inputs)
        ids, inputs = self.codec.encode_media(text, media, mm)
        generation, _ = self._seams.encode(text, opened[len(text) :])
        return Prompt(ids, generation, inputs)

    def generation_prompt(self, history: Sequence[Message]) -> list[int]:
        """Return the ids that open the assistant's turn; none if the template has none."""
        kind = kind_of(history[-1])
        if kind not in self._generation:
            window = window_of(history) or list(history)
            text, opened = self.render(window), self.render(window, generation_prompt=True)
            if not opened.startswith(text):
                raise TemplateError(f"the generation prompt after {kind!r} does not end the text")
            self._generation[kind], _ = self._seams.encode(text, opened[len(text) :])
        return self._generation[kind]

    def splits(self, history: Sequence[Message], new: Message) -> bool:
        """Return whether such a turn can be rendered alone."""
        return window_of(history) is not None and self._trusts(kind_of(history[-1]), kind_of(new))

    # A turn.

    def turn(
        self, history: Sequence[Message], group: Sequence[Message], media: Media,
        mm: Mapping[str, Any],
    ) -> Turn:  # fmt: skip
        """Return what messages of user, tool or system add to a conversation.

        Raises:
            TemplateError: The template refuses them, or rewrites the conversation past repair.
        """
        window = window_of(history, group)
        split = self._split(window, group) if window else None
        if split and window and self._trusts(kind_of(history[-1]), kind_of(group[0])):
            close = self._close(window, split.before)
            split = split._replace(before=with_real_end(split.before, history[-1]))
            return self._tokenized(close, split, media, mm)
        before, after = self.render(history), self.render([*history, *group])
        if after.startswith(before):
            close = self._close(window, before) if window else ""
            whole = _Split(before, after[len(before) :])
            return self._tokenized(close, whole, media, mm, full=True)
        last = history[-1]
        if last["role"] == "assistant" and not last.get("tool_calls"):
            text = self.render([*history[:-1], {**last, "content": MARK}, *group])
            if text.count(MARK) == 1:
                added = text.partition(MARK)[2]
                close = self.plain_close if added.startswith(self.plain_close) else ""
                seam = _Split(MARK + close, added.removeprefix(close))
                return self._tokenized(close, seam, media, mm, full=True, rewritten=True)
        if split and window:
            close = self._close(window, split.before)
            return self._tokenized(close, split, media, mm, full=True, rewritten=True)
        raise TemplateError(
            f"the chat template can't continue {last['role']!r} with {group[0]['role']!r}: "
            "it prints the conversation before it anew"
        )

    def reply(self, history: Sequence[Message], message: Message) -> Turn:
        """Return what an assistant's message given as text adds behind the generation prompt."""
        window = window_of(history)
        trusted = window and self._trusts(kind_of(history[-1]), "assistant")
        base = window if window and trusted else list(history)
        opened, plain = self.render(base, generation_prompt=True), self.render(base)
        whole = self.render([*base, message])
        full = base is not window
        for before in (opened, plain):
            if whole.startswith(before):
                body, clean = self._seams.encode(before, whole[len(before) :])
                header = 0 if before is opened else common(body, self.generation_prompt(history))
                return Turn(body=body, full=full, merged=not clean, header=header)
        raise TemplateError("the chat template prints the conversation anew before an answer")

    def closing(self, history: Sequence[Message]) -> Turn:
        """Return what ends the last answer, for another answer right behind it."""
        window = window_of(history)
        text = self._close(window, self.render(window)) if window else ""
        return Turn(close=self.codec.encode(text))

    def _tokenized(
        self,
        close: str,
        split: _Split,
        media: Media,
        mm: Mapping[str, Any],
        *,
        full: bool = False,
        rewritten: bool = False,
    ) -> Turn:
        if close not in self._closes:
            self._closes[close] = self.codec.encode(close)
        turn = Turn(list(self._closes[close]), full=full, rewritten=rewritten)
        if any(media.values()):
            turn.body, turn.inputs = self.codec.encode_media(split.added, media, mm)
        else:
            turn.body, clean = self._seams.encode(split.before, split.added)
            turn.merged = not clean
        return turn

    # Windows.

    def _split(self, window: Sequence[Message], group: Sequence[Message]) -> _Split | None:
        """Return what a group adds to a window; None: the template changes the window for it."""
        try:
            before = self._rendered(window)
            after = self.render([*window, *group])
        except TemplateError:
            return None
        return _Split(before, after[len(before) :]) if after.startswith(before) else None

    def _rendered(self, window: Sequence[Message]) -> str:
        """Return a window's text; calls without ids of their own make the same window again."""
        key = json.dumps(window, default=repr)
        if key not in self._windows:
            if len(self._windows) >= _KEPT:
                self._windows.clear()
            self._windows[key] = self.render(window)
        return self._windows[key]

    def _close(self, window: Sequence[Message], rendered: str) -> str:
        """Return the end of a text that the template, not the assistant, wrote after an answer."""
        if window[-1]["role"] != "assistant":
            return ""
        if rendered.endswith(self.plain_close):
            return self.plain_close
        return self._seams.last_special(rendered)

    @cached_property
    def plain_close(self) -> str:
        """What the template writes behind an answer."""
        return self.render(PLAIN).rpartition(MARK)[2]

    def _trusts(self, last: str, new: str) -> bool:
        """Return whether a window stands for longer conversations; tried once for each kind."""
        key = last, new
        if key not in self._trusted:
            self._trusted[key] = self._try(*key)
        return self._trusted[key]

    def _try(self, last: str, new: str) -> bool:
        window, group = window_for(last), group_for(new)
        short = self._split(window, group)
        if short is None:
            return False
        for before in LONGER:
            split = self._split([*before, *window], group)
            if split is not None:
                return split.added == short.added
        return False

    # Which tokens end a turn.

    @cached_property
    def ends(self) -> frozenset[int]:
        """Ids with which a policy ends its turn: EOS, the template's own, the next turn's first."""
        found = set(self.codec.eos_ids)
        for last, new in (("assistant", "user"), ("calls", "tool")):
            window = window_for(last)
            split = self._split(window, group_for(new))
            if split is None:
                continue
            close = self._close(window, split.before)
            found |= set(self.codec.encode(close or split.added)[:1]) & self.codec.special_ids
        return frozenset(found)


_KNOWN: OrderedDict[tuple[int, str], Template] = OrderedDict()


def template_of(
    processing_class: Any, tools: Sequence[Message] | None, options: Mapping[str, Any]
) -> Template:
    """Return the template of a tokenizer or processor, with what is known of it already."""
    text = getattr(processing_class, "chat_template", None)
    words = json.dumps([tools or [], dict(options), text], sort_keys=True, default=repr)
    key = id(processing_class), words
    found = _KNOWN.get(key)
    # An id may come again after its object is gone; a kept template keeps its object alive.
    if found is None or found.codec.source is not processing_class:
        found = _KNOWN[key] = Template(Codec(processing_class), tools, options)
        while len(_KNOWN) > _KEPT:
            _KNOWN.popitem(last=False)
    return found
