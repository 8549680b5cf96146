"""What a chat template adds for a turn, without rendering the conversation again.

A turn is rendered behind a short stand-in of its conversation (a *window*), and the text that it
adds is tokenized alone, with a check of the seam. Whether that is what the template does in a longer
conversation, too, is tried once for every kind of turn; where it is not, the whole conversation is
rendered, and the turn says so. Nothing here knows a model's name: Qwen, Llama, GLM, Gemma and
Mistral differ only in what their templates answer.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from .messages import Media, Message
from .processing import Codec, TemplateError

_MARK = "zqxreplyzqx"
_USER: Message = {"role": "user", "content": "zqxaskzqx"}
_REPLY: Message = {"role": "assistant", "content": _MARK}
_CALL = {"id": "zqxcall01", "type": "function", "function": {"name": "zqxtool", "arguments": {}}}
_CONTEXT = 64
_KEPT = 32


@dataclass(slots=True)
class Turn:
    """What a turn adds to the ids.

    Attributes:
        close: Ends the assistant's turn before it; of use only if the policy did not write it.
        body: The turn itself.
        inputs: Tensors of its media.
        full: The whole conversation had to be rendered.
        rewritten: The template prints earlier turns otherwise than before.
        merged: The tokenizer would merge over a seam; the text is right, the ids are not the
            ones of a whole render.
        header: First tokens of `body` that stand for an open generation prompt.
    """

    close: list[int] = field(default_factory=list)
    body: list[int] = field(default_factory=list)
    inputs: dict[str, Any] = field(default_factory=dict)
    full: bool = False
    rewritten: bool = False
    merged: bool = False
    header: int = 0


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
        self._clean: set[tuple[str, str]] = set()

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
        generation, _ = self._encode(text, opened[len(text) :])
        return Prompt(ids, generation, inputs)

    def generation_prompt(self, history: Sequence[Message]) -> list[int]:
        """Return the ids that open the assistant's turn; none if the template has none."""
        kind = _kind(history[-1])
        if kind not in self._generation:
            window = _window(history) or list(history)
            text, opened = self.render(window), self.render(window, generation_prompt=True)
            if not opened.startswith(text):
                raise TemplateError(f"the generation prompt after {kind!r} does not end the text")
            self._generation[kind], _ = self._encode(text, opened[len(text) :])
        return self._generation[kind]

    def splits(self, history: Sequence[Message], new: Message) -> bool:
        """Return whether such a turn can be rendered alone."""
        return _window(history) is not None and self._trusts(_kind(history[-1]), _kind(new))

    # A turn.

    def turn(
        self, history: Sequence[Message], group: Sequence[Message], media: Media,
        mm: Mapping[str, Any],
    ) -> Turn:  # fmt: skip
        """Return what messages of user, tool or system add to a conversation.

        Raises:
            TemplateError: The template refuses them, or rewrites the conversation past repair.
        """
        window = _window(history, group)
        split = self._split(window, group) if window else None
        if split and window and self._trusts(_kind(history[-1]), _kind(group[0])):
            close = self._close(window, split.before)
            split = split._replace(before=_real(split.before, history[-1]))
            return self._tokenized(close, split, media, mm)
        before, after = self.render(history), self.render([*history, *group])
        if after.startswith(before):
            close = self._close(window, before) if window else ""
            whole = _Split(before, after[len(before) :])
            return self._tokenized(close, whole, media, mm, full=True)
        last = history[-1]
        if last["role"] == "assistant" and not last.get("tool_calls"):
            text = self.render([*history[:-1], {**last, "content": _MARK}, *group])
            if text.count(_MARK) == 1:
                added = text.partition(_MARK)[2]
                close = self.plain_close if added.startswith(self.plain_close) else ""
                seam = _Split(_MARK + close, added.removeprefix(close))
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
        window = _window(history)
        trusted = window and self._trusts(_kind(history[-1]), "assistant")
        base = window if window and trusted else list(history)
        opened, plain = self.render(base, generation_prompt=True), self.render(base)
        whole = self.render([*base, message])
        full = base is not window
        for before in (opened, plain):
            if whole.startswith(before):
                body, clean = self._encode(before, whole[len(before) :])
                header = 0 if before is opened else _common(body, self.generation_prompt(history))
                return Turn(body=body, full=full, merged=not clean, header=header)
        raise TemplateError("the chat template prints the conversation anew before an answer")

    def closing(self, history: Sequence[Message]) -> Turn:
        """Return what ends the last answer, for another answer right behind it."""
        window = _window(history)
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
            turn.body, clean = self._encode(split.before, split.added)
            turn.merged = not clean
        return turn

    def _encode(self, before: str, text: str) -> tuple[list[int], bool]:
        """Tokenize a text that follows another; whether a seam is clean is remembered."""
        begins = self._special.match(text)
        if begins is None:
            return self.codec.encode_after(self._context(before), text)
        context = self._context(before)
        ids = self.codec.encode(text)
        if (context, begins[0]) not in self._clean:
            joined, clean = self.codec.encode_after(context, text)
            if not clean or joined != ids:
                return joined, clean
            self._clean.add((context, begins[0]))
        return ids, True

    def _context(self, text: str) -> str:
        """The end of a text, from a special token on where there is one."""
        tail = text[-_CONTEXT:]
        found = [match.start() for match in self._special.finditer(tail)]
        return tail[found[-1] :] if found else tail

    @cached_property
    def _special(self) -> re.Pattern[str]:
        texts = sorted(self.codec.specials, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) if texts else "(?!)")

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
        specials = list(self._special.finditer(rendered[-_CONTEXT:]))
        return rendered[-_CONTEXT:][specials[-1].start() :] if specials else ""

    @cached_property
    def plain_close(self) -> str:
        """What the template writes behind an answer."""
        return self.render([_USER, _REPLY]).rpartition(_MARK)[2]

    def _trusts(self, last: str, new: str) -> bool:
        """Return whether a window stands for longer conversations; tried once for each kind."""
        key = last, new
        if key not in self._trusted:
            self._trusted[key] = self._try(*key)
        return self._trusted[key]

    def _try(self, last: str, new: str) -> bool:
        window, group = _stand_in(last), _group(new)
        short = self._split(window, group)
        if short is None:
            return False
        longer = [{"role": "user", "content": "zqxfirst"}, {**_REPLY, "content": "zqxsecond"}]
        for before in ([{"role": "system", "content": "zqxsystem"}, *longer], longer):
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
            window = _stand_in(last)
            split = self._split(window, _group(new))
            if split is None:
                continue
            close = self._close(window, split.before)
            found |= set(self.codec.encode(close or split.added)[:1]) & self.codec.special_ids
        return frozenset(found)


def join(tail: Sequence[int], turn: Turn, template: Template, stopped: int | None) -> int:
    """Fit a turn behind sampled ids, in place; return how many of them must go.

    What the policy wrote of the turn's beginning is not written twice: it ends with the template's
    closing token, or (GLM) with the first token of the next turn. Another end (Llama's `<|eom_id|>`)
    stands for the template's. Where a turn has no closing token, an end that the next turn does not
    begin with (GLM expected another role) is taken back.

    Args:
        tail: The last sampled ids.
        turn: Its `close` becomes what is left to write of it.
        template: Knows which ids end a turn.
        stopped: Id that the engine named as the end, if any.
    """
    whole, special = [*turn.close, *turn.body], template.codec.special_ids
    for count in range(min(len(tail), len(turn.close) + 1, len(whole)), 0, -1):
        same = list(tail[-count:]) == whole[:count]
        if same and (special.intersection(whole[:count]) or whole[count - 1] == stopped):
            turn.body = turn.body[max(0, count - len(turn.close)) :]
            turn.close = turn.close[count:]
            return 0
    if not tail or (tail[-1] not in template.ends and tail[-1] != stopped):
        return 0
    if turn.close:
        first = next((i for i, token in enumerate(turn.close) if token in special), -1)
        turn.close = turn.close[first + 1 :] if first >= 0 else turn.close
        return 0
    return int(bool(turn.body) and turn.body[0] in special)


def _real(rendered: str, last: Message) -> str:
    """Return a window's text with the real end, where a content borders on what follows."""
    content = last.get("content")
    return content if rendered.endswith("zqx") and isinstance(content, str) else rendered


def _kind(message: Message) -> str:
    role = str(message["role"])
    return "calls" if role == "assistant" and message.get("tool_calls") else role


def _window(history: Sequence[Message], group: Sequence[Message] = ()) -> list[Message] | None:
    """Return a short stand-in with the same end; None: there is none for such an end."""
    last = history[-1]
    if last["role"] == "user":
        return [_USER]
    if last["role"] == "assistant":
        tools = [m for m in group if m["role"] == "tool"]
        return [_USER, _answer(last, tools)]
    if last["role"] != "tool":
        return None
    first = len(history) - 1
    while first and history[first - 1]["role"] == "tool":
        first -= 1
    tools = [{**message, "content": "zqxgotzqx"} for message in history[first:]]
    before = history[first - 1] if first else _REPLY
    return [_USER, _answer(before, tools), *tools] if before["role"] == "assistant" else None


def _answer(message: Message, tools: Sequence[Message]) -> Message:
    """Return a stand-in of an answer, with the calls that tools answer."""
    calls = message.get("tool_calls")
    if not calls and tools:
        calls = [
            {
                **_CALL,
                "id": tool.get("tool_call_id", _CALL["id"]),
                "function": {"name": tool.get("name", "zqxtool"), "arguments": {}},
            }
            for tool in tools
        ]
    return {"role": "assistant", "content": "", "tool_calls": calls} if calls else _REPLY


def _stand_in(kind: str) -> list[Message]:
    answer = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    return {
        "user": [_USER],
        "assistant": [_USER, _REPLY],
        "calls": [_USER, answer],
        "tool": [_USER, answer, *_group("tool")],
    }.get(kind, [])


def _group(kind: str) -> list[Message]:
    tool = {"role": "tool", "content": "zqxgotzqx"}
    if kind == "tool":
        return [{**tool, "tool_call_id": _CALL["id"], "name": "zqxtool"}]
    if kind == "calls":
        return [{"role": "assistant", "content": "", "tool_calls": [_CALL]}]
    return [{"role": kind, "content": "zqxnextzqx"}]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common beginning."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


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
