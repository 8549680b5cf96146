"""In which form a chat template takes contents and calls: found out once by trying, never guessed.

Some templates print only text, some only a list of content items; given the other form they print
nothing, or the list itself. Some want the arguments of a call as a mapping, some as text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from .codec import TemplateError
from .examples import TOOL_STAND_IN
from .template_messages import Message

_PROBE_WORD = "zqxformzqx"
_PROBE_KEY = "zqxkeyzqx"
_PROBE_ITEMS = [{"type": "text", "text": _PROBE_WORD}]
_PRINTED_LIST_MARKS = ("'type': 'text'", '"type": "text"', '"type":"text"')
"""How the list looks in a text, if a template prints the list itself."""

ContentForm = Literal["text", "items"]


class ContentForms:
    """What one template takes, for one set of tools and options; `render` renders messages as they are."""

    def __init__(self, render: Callable[[Sequence[Message]], str]) -> None:
        self._render = render
        self._printed_forms: dict[tuple[str, ContentForm], bool | None] = {}

    def shape_message(self, message: Message) -> Message:
        """Return a message in the form that the template prints; raise TemplateError if none is."""
        role, content = str(message["role"]), message.get("content")
        if isinstance(content, str):
            if self._prints_form(role, "text") is not True:
                message = {**message, "content": self._printed_content(role, content)}
        elif (
            isinstance(content, Sequence)
            and self._prints_form(role, "items") is not True
            and self._prints_form(role, "text") is True
        ):
            message = {**message, "content": _join_texts(role, content)}
        if message.get("tool_calls"):
            message = {**message, "tool_calls": [*map(self._shape_call, message["tool_calls"])]}
        return message

    def _printed_content(self, role: str, content: str) -> str | list[Message]:
        if self._prints_form(role, "items"):
            return [{"type": "text", "text": content}]
        if self._prints_form(role, "text") is None:
            return content  # rendering it raises the template's own error
        raise TemplateError(
            f"the chat template prints nothing of a message of role {role!r}, neither of text nor "
            "of a list of content items: use another role, or another template"
        )

    def _prints_form(self, role: str, form: ContentForm) -> bool | None:
        """Return whether a content of this form is printed; None: the template rejects all probes."""
        if (role, form) not in self._printed_forms:
            # If the probe itself needs this answer, its message goes to the template unchanged.
            self._printed_forms[role, form] = None
            probe = _PROBE_WORD if form == "text" else _PROBE_ITEMS
            self._printed_forms[role, form] = self._try_form(role, probe)
        return self._printed_forms[role, form]

    def _try_form(self, role: str, content: Any) -> bool | None:
        conversations = self._conversations_with(role, content)
        texts = [text for each in conversations if (text := self._render_or_empty(each))]
        if not texts:
            return None
        return any(
            _PROBE_WORD in text and not any(mark in text for mark in _PRINTED_LIST_MARKS)
            for text in texts
        )

    def _render_or_empty(self, messages: Sequence[Message]) -> str:
        try:
            return self._render(messages)
        except TemplateError:
            return ""

    def _conversations_with(self, role: str, content: Any) -> list[list[Message]]:
        """Return short conversations that may hold such a message."""
        new: Message = {"role": role, "content": content}
        if role == "user":
            return [[new]]
        ask = self._filler_message("user", "zqxaskzqx")
        if role == "assistant":
            return [[ask, new]]
        if role == "tool":
            calls = self._filler_call({})
            calls["tool_calls"] = [*map(self._shape_call, calls["tool_calls"])]
            return [[ask, calls, {**new, "tool_call_id": "zqxcall01", "name": TOOL_STAND_IN}]]
        return [[new, ask], [ask, self._filler_message("assistant", "zqxsaidzqx"), new]]

    def _filler_message(self, role: str, text: str) -> Message:
        items = self._prints_form(role, "text") is not True and self._prints_form(role, "items")
        return {"role": role, "content": [{"type": "text", "text": text}] if items else text}

    # Calls.

    def _filler_call(self, arguments: object) -> Message:
        function = {"name": TOOL_STAND_IN, "arguments": arguments}
        call = {"id": "zqxcall01", "type": "function", "function": function}
        return {**self._filler_message("assistant", ""), "tool_calls": [call]}

    def _shape_call(self, call: Message) -> Message:
        function = call.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
            return call
        if self._takes_mappings():
            return call
        text = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "function": {**function, "arguments": text}}

    @property
    def prints_calls(self) -> bool:
        """Whether calls are printed at all, next to an empty content."""
        return any(_PROBE_WORD in text for text in self._printed_calls)

    def _takes_mappings(self) -> bool:
        parsed, text = self._printed_calls
        return (
            _PROBE_WORD in parsed and f"'{_PROBE_KEY}'" not in parsed
        ) or f'"{_PROBE_KEY}"' not in text

    @cached_property
    def _printed_calls(self) -> tuple[str, str]:
        """How a call is printed whose arguments are a mapping, and one whose arguments are text."""
        ask, arguments = self._filler_message("user", "zqxaskzqx"), {_PROBE_KEY: _PROBE_WORD}
        mapping = self._render_or_empty([ask, self._filler_call(arguments)])
        return mapping, self._render_or_empty([ask, self._filler_call(json.dumps(arguments))])


def _join_texts(role: str, content: Sequence[Any]) -> str:
    texts = [item.get("text") if isinstance(item, Mapping) else item for item in content]
    found = [text for text in texts if isinstance(text, str)]
    if len(found) < len(texts):
        raise TemplateError(
            f"the chat template prints only text in a message of role {role!r}: it has no place "
            "for media"
        )
    return "".join(found)
