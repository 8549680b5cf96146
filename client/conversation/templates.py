"""What a chat template adds for a turn, without rendering the conversation again.

A turn is rendered behind a short stand-in for its conversation (`windows`), and the text that it
adds is tokenized alone (`seams`). What it adds begins where the stand-in's own words end, so that
it does not matter what the template prints otherwise before them once a turn follows. Whether that
is what the template does in a longer conversation, too, is tried once for every shape of window;
where it is not, the whole conversation is rendered, and the turn says so. Nothing here knows a
model's name: families differ only in what their templates answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

from . import windows
from .forms import Forms
from .messages import STAND_IN, Media, Message
from .processing import Codec, TemplateError
from .seams import Seams, Turn, common

_KEPT = 32


class Prompt(NamedTuple):
    """Ids of a first render, those of its generation prompt, and the tensors of its media."""

    ids: list[int]
    generation: list[int]
    inputs: dict[str, Any]


class _Split(NamedTuple):
    """What a group adds behind `before`; `close` is the end of `before` that ends an answer."""

    before: str
    close: str
    added: str
    rewritten: bool

    def is_real(self) -> bool:
        """Return whether nothing in it stands for a message before it, as a moved one would."""
        return not STAND_IN.search(self.close + self.added)


class Template:
    """The chat template of a tokenizer or processor for one set of tools and options."""

    def __init__(
        self, codec: Codec, tools: Sequence[Message] | None, options: Mapping[str, Any]
    ) -> None:
        self.codec, self.tools, self.options = codec, tools, options
        self._forms = Forms(lambda messages: codec.render(messages, tools, options))
        self._windows: dict[str, str] = {}
        self._closes: dict[str, list[int]] = {}
        self._openings: dict[tuple[str, ...], list[int] | None] = {}
        self._trailers: dict[str, str] = {}
        self._trusted: dict[tuple[tuple[str, ...], ...], bool] = {}
        self.seams = Seams(codec)

    def render(self, messages: Sequence[Message], generation_prompt: bool = False) -> str:
        """Return the text of messages, in the form in which the template takes them."""
        shaped = [self._forms.shaped(message) for message in messages]
        return self.codec.render(
            shaped, self.tools, self.options, generation_prompt=generation_prompt
        )

    def prompt(self, messages: Sequence[Message], media: Media, mm: Mapping[str, Any]) -> Prompt:
        """Render and tokenize a conversation's beginning."""
        text, opened = self._body(messages), self.render(messages, generation_prompt=True)
        if not opened.startswith(text):
            ids, inputs = self.codec.encode_media(opened, media, mm)
            return Prompt(ids, [], inputs)
        ids, inputs = self.codec.encode_media(text, media, mm)
        generation, _ = self.seams.encode(text, opened[len(text) :])
        return Prompt(ids, generation, inputs)

    def generation_prompt(self, history: Sequence[Message]) -> list[int]:
        """Return the ids that open the assistant's turn; none if the template has none."""
        window = self._window(history)
        shape = windows.shape_of(window)
        if shape not in self._openings:
            text, more = self._opening(window), windows.longer(window)
            same = (more == window or self._opening(more) == text) and not STAND_IN.search(text)
            self._openings[shape] = self._opened(window, text) if same else None
        found = self._openings[shape]
        return self._opened(history, self._opening(history)) if found is None else found

    def _opening(self, messages: Sequence[Message]) -> str:
        text, opened = self._body(messages), self.render(messages, generation_prompt=True)
        if not opened.startswith(text):
            kind = windows.kind_of(messages[-1])
            raise TemplateError(f"the generation prompt after {kind!r} does not end the text")
        return opened[len(text) :]

    def _opened(self, messages: Sequence[Message], text: str) -> list[int]:
        return self.seams.encode(self._body(messages), text)[0]

    def splits(self, history: Sequence[Message], group: Sequence[Message]) -> bool:
        """Return whether a group can be rendered behind messages that nobody has answered."""
        window = self._window(history, group)
        if not self._trusts(window, group):
            return False
        split = self._split(window, windows.tried(group))
        return split is not None and not split.rewritten

    # A turn.

    def turn(
        self, history: Sequence[Message], group: Sequence[Message], media: Media,
        mm: Mapping[str, Any],
    ) -> Turn:  # fmt: skip
        """Return what messages of user, tool or system add to a conversation.

        Raises:
            TemplateError: The template refuses them, prints nothing of them behind what is there,
                or prints the conversation anew.
        """
        window = self._window(history, group)
        split = self._split(window, group) if self._trusts(window, group) else None
        full = split is None or not split.is_real()
        if full:
            split = self._split(self._named(windows.whole_of(history)), group)
        if split is None or not split.is_real():
            raise TemplateError(
                f"the chat template can't continue {history[-1]['role']!r} with "
                f"{group[0]['role']!r}: it prints the conversation before it anew"
            )
        before = windows.with_real_end(split.before, history[-1])
        return self._tokenized(split._replace(before=before), media, mm, full=full)

    def reply(self, history: Sequence[Message], message: Message) -> Turn:
        """Return what an assistant's message given as text adds behind the generation prompt."""
        generation = self.generation_prompt(history)
        for short, full in ((self._window(history), False), (history, True)):
            opened, plain = self.render(short, generation_prompt=True), self._body(short)
            whole = self._body([*short, message])
            for before in (opened, plain):
                added = whole[len(before) :]
                if whole.startswith(before) and not STAND_IN.search(added):
                    body, clean = self.seams.encode(before, added)
                    header = 0 if before is opened else common(body, generation)
                    return Turn(body=body, merged=not clean, full=full, header=header)
        raise TemplateError("the chat template prints the conversation anew before an answer")

    def closing(self, history: Sequence[Message]) -> Turn:
        """Return what ends the last answer, for another answer right behind it."""
        window = self._window(history)
        text = self._body(window)
        end = windows.end_in(text, window[-1])
        tail = text[end:] if end >= 0 else ""
        return Turn(close=self.codec.encode(self._close(window[-1], tail)))

    def _tokenized(
        self, split: _Split, media: Media, mm: Mapping[str, Any], *, full: bool = False
    ) -> Turn:
        if split.close not in self._closes:
            self._closes[split.close] = self.codec.encode(split.close)
        turn = Turn(list(self._closes[split.close]), full=full, rewritten=split.rewritten)
        if any(media.values()):
            turn.body, turn.inputs = self.codec.encode_media(split.added, media, mm)
        else:
            turn.body, clean = self.seams.encode(split.before, split.added)
            turn.merged = not clean
        return turn

    # Windows.

    def _window(self, history: Sequence[Message], group: Sequence[Message] = ()) -> list[Message]:
        return self._named(windows.window_of(history, group))

    def _named(self, window: list[Message]) -> list[Message]:
        return window if self._forms.prints_calls else windows.named(window)

    def _split(self, window: Sequence[Message], group: Sequence[Message]) -> _Split | None:
        """Return what a group adds behind a window; None: the window is printed anew for it."""
        last = window[-1]
        before, after = self._rendered(window), self._body([*window, *group])
        i, j = windows.end_in(before, last), windows.end_in(after, last)
        if i < 0 or j < 0:
            return None
        mine, theirs = before[i:], after[j:]
        answered = last["role"] == "assistant"
        if not theirs.startswith(mine):
            if not answered:
                return None
            mine = self.seams.shared(mine, theirs)
        kept = windows.before_answer(before[:i]) if answered else i
        rewritten = before[:kept] != after[:kept]
        return _Split(before[:i] + mine, self._close(last, mine), theirs[len(mine) :], rewritten)

    def _body(self, messages: Sequence[Message]) -> str:
        """Return the text of messages without what only ends a text that nothing follows."""
        text, kind = self.render(messages), windows.kind_of(messages[-1])
        if kind not in self._trailers:
            opened = self.render(messages, generation_prompt=True)
            if not opened.startswith(text):
                self._trailers[kind] = text[len(self.seams.shared(text, opened)) :]
            else:
                self._trailers[kind] = self._unasked(kind) if kind in ("assistant", "calls") else ""
        return text.removesuffix(self._trailers[kind])

    def _unasked(self, kind: str) -> str:
        """Return the next answer's beginning, where a template prints that unasked (Command A)."""
        window = self._named(windows.window_for(kind))
        group = windows.group_for("tool" if kind == "calls" else "user")
        with suppress(TemplateError):
            texts = self.render(window), self.render([*window, *group])
            mine, theirs = (t[max(0, windows.end_in(t, window[-1])) :] for t in texts)
            return mine[len(self.seams.shared(mine, theirs)) :]
        return ""

    def _rendered(self, window: Sequence[Message]) -> str:
        """Return a window's text; calls without ids of their own make the same window again."""
        key = json.dumps(window, default=repr)
        if key not in self._windows:
            if len(self._windows) >= _KEPT:
                self._windows.clear()
            self._windows[key] = self._body(window)
        return self._windows[key]

    def _close(self, last: Message, tail: str) -> str:
        """Return the end of a text that the template, not the assistant, wrote after an answer.

        Args:
            last: The message that ends it.
            tail: The text behind its own words.
        """
        kind = windows.kind_of(last)
        if kind == "calls":
            own = self.seams.shared_end(self._own_close, tail)
            return max(own, self.seams.last_special(tail), key=len)
        return tail if kind == "assistant" else ""

    @cached_property
    def _own_close(self) -> str:
        return self._body(windows.PLAIN).rpartition(windows.MARK)[2]

    @cached_property
    def plain_close(self) -> str:
        """What the template writes behind an answer that nothing follows."""
        return self.render(windows.PLAIN).rpartition(windows.MARK)[2]

    def _trusts(self, window: Sequence[Message], group: Sequence[Message]) -> bool:
        """Return whether a window stands for longer conversations; tried once for each shape."""
        key = windows.shape_of(window), windows.shape_of(group)
        if key not in self._trusted:
            self._trusted[key] = self._try(window, windows.tried(group))
        return self._trusted[key]

    def _try(self, window: Sequence[Message], group: Sequence[Message]) -> bool:
        short = None
        with suppress(TemplateError):
            short = self._split(window, group)
        if short is None:
            return False
        rest = short.added
        for message in group:
            if message["content"] not in rest:
                raise TemplateError(
                    f"the chat template prints nothing of a message of role {message['role']!r} "
                    f"behind one of role {window[-1]['role']!r}"
                )
            rest = rest.replace(message["content"], "")
        if not short._replace(added=rest).is_real():
            return False
        more = windows.longer(window)
        try:
            long = short if more == window else self._split(more, group)
        except TemplateError:
            return True  # there are no such conversations
        return long is not None and (long.close, long.added) == (short.close, short.added)

    # Which tokens end a turn.

    @cached_property
    def ends(self) -> frozenset[int]:
        """Ids with which a policy ends its turn: EOS, the template's own, the next turn's first."""
        found = set(self.codec.eos_ids)
        for last, new in (("assistant", "user"), ("calls", "tool")):
            window = self._named(windows.window_for(last))
            with suppress(TemplateError):
                if split := self._split(window, windows.group_for(new)):
                    token = self.seams.first_special(split.close or split.added)
                    found |= {self.codec.specials[token]} if token else set()
        return frozenset(found)
