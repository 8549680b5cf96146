"""Windows: short stand-ins for a conversation that end as it ends. Pure.

A template sees the window instead of the whole conversation, with words that no model writes in
place of the contents, so that what it adds behind can be told apart. A window keeps what templates
look at: whether there is a system message, whether tools were called before, one earlier round, one
earlier step since the last question, and the last answer with all its calls and results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .messages import Message

MARK = "zqxreplyzqx"
"""Content of a stand-in for an answer."""

TOOL = "zqxtoolzqx"
_END = "zqx"
_ASK, _GOT, _SYSTEM, _GIVEN = "zqxaskzqx", "zqxgotzqx", "zqxsystemzqx", "zqxgivenzqx"
_USER: Message = {"role": "user", "content": _ASK}
_REPLY: Message = {"role": "assistant", "content": MARK}
_ARGUMENTS = {"zqxnamezqx": _GIVEN}
_CALL = {
    "id": "zqxcall01",
    "type": "function",
    "function": {"name": TOOL, "arguments": _ARGUMENTS},
}

_CALLS: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}

PLAIN: tuple[Message, ...] = (_USER, _REPLY)
"""A question and its answer."""


def kind_of(message: Message) -> str:
    """Return the role of a message, or `calls` for an answer that calls tools."""
    role = str(message["role"])
    return "calls" if role == "assistant" and message.get("tool_calls") else role


def shape_of(messages: Sequence[Message]) -> tuple[str, ...]:
    """Return the kinds of messages: what a template may treat differently."""
    return tuple(map(kind_of, messages))


def window_of(history: Sequence[Message], group: Sequence[Message] = ()) -> list[Message]:
    """Return a window for a conversation.

    Args:
        history: The conversation.
        group: What is to follow it: results of tools need calls that they answer.
    """
    lead = int(history[0]["role"] == "system" and len(history) > 1)
    asked = _last(history, "user")
    start = max(asked, lead)
    kept = [*range(lead), *_round(history, lead, start)]
    kept += [start, *_end(history, start + 1)]
    window = [stand_in(history[index]) for index in kept]
    tools = [message for message in group if message["role"] == "tool"]
    if tools and kind_of(window[-1]) == "assistant":
        window[-1] = {**_CALLS, "tool_calls": [_call_for(tool) for tool in tools]}
    return window


def _last(history: Sequence[Message], role: str, start: int = 0, stop: int | None = None) -> int:
    """Return where the last message of a role stands; -1: there is none."""
    indexes = range((len(history) if stop is None else stop) - 1, start - 1, -1)
    return next((index for index in indexes if history[index]["role"] == role), -1)


def _round(history: Sequence[Message], start: int, stop: int) -> list[int]:
    """Return one earlier round: a question, calls and results if there were any, an answer."""
    indexes = range(start, stop)
    called = next((index for index in indexes if history[index].get("tool_calls")), None)
    if called is None:
        answered = next((i for i in indexes if history[i]["role"] == "assistant"), None)
        return [] if answered is None else [answered - 1, answered] if answered > start else []
    asked = max(start, _last(history, "user", start, called))
    after = called + 1
    while after < stop and history[after]["role"] == "tool":
        after += 1
    rest = range(after, stop)
    again = next((i for i in rest if history[i]["role"] == "user"), stop)
    answers = [i for i in range(after, again) if kind_of(history[i]) == "assistant"]
    return [asked, *range(called, after), *answers[:1]]


def _end(history: Sequence[Message], start: int) -> list[int]:
    """Return what follows the last question: the step before the last answer, it, and the rest."""
    answer = _last(history, "assistant", start)
    if answer < 0:
        return list(range(start, len(history)))
    before = _last(history, "assistant", start, answer)
    return list(range(before if before >= 0 else answer, len(history)))


def stand_in(message: Message) -> Message:
    """Return a message of the same kind with words that no model writes."""
    role = str(message["role"])
    if role == "assistant":
        calls = message.get("tool_calls")
        return {**_CALLS, "tool_calls": [_call_like(call) for call in calls]} if calls else _REPLY
    if role == "tool":
        names: Message = {key: message[key] for key in ("tool_call_id", "name") if key in message}
        return {"role": role, "content": _GOT, **names}
    return {"role": role, "content": _ASK if role == "user" else _SYSTEM}


def named(window: Sequence[Message]) -> list[Message]:
    """Return a window for a template that prints no calls: answers that call have words, too."""
    return [{**m, "content": MARK} if m.get("tool_calls") else m for m in window]


def _call_like(call: Message) -> Message:
    function = call.get("function")
    if function is None:
        return call
    # Their names stay: a template may print, or ask for, some of them only.
    given = function.get("arguments")
    named = dict.fromkeys(given, _GIVEN) if isinstance(given, Mapping) and given else _ARGUMENTS
    return {**call, "function": {**function, "arguments": named}}


def _call_for(tool: Message) -> Message:
    """Return the call that a result without one answers."""
    name = tool.get("name", TOOL)
    function = {"name": name, "arguments": _ARGUMENTS}
    return {**_CALL, "id": tool.get("tool_call_id", _CALL["id"]), "function": function}


def longer(window: Sequence[Message]) -> list[Message]:
    """Return a window with more of what it already has: the same one if nothing can be more."""
    lead = int(window[0]["role"] == "system" and len(window) > 1)
    start = max(_last(window, "user"), lead)
    answer = _last(window, "assistant", start + 1)
    first = next(
        (i for i in range(start + 1, len(window)) if window[i]["role"] == "assistant"), answer
    )
    earlier, step = window[lead:start], window[first:answer] if first < answer else []
    more = [*earlier, *PLAIN] if earlier else []
    return [*window[:lead], *more, *earlier, window[start], *step, *window[start + 1 :]]


def window_for(kind: str) -> list[Message]:
    """Return a window that ends with a message of a kind."""
    tool = {"role": "tool", "content": _GOT, "tool_call_id": _CALL["id"], "name": TOOL}
    ends: dict[str, list[Message]] = {
        "user": [], "assistant": [_REPLY], "calls": [_CALLS], "tool": [_CALLS, tool],
    }  # fmt: skip
    return [_USER, *ends[kind]]


def tried(group: Sequence[Message]) -> list[Message]:
    """Return a group with words in place of its contents, each its own."""
    return [
        {**stand_in(message), "content": f"zqxnext{index}zqx"}
        for index, message in enumerate(group)
    ]


def group_for(kind: str) -> list[Message]:
    """Return what a turn of a kind adds, to try a template with."""
    return tried([{"role": kind, "tool_call_id": _CALL["id"], "name": TOOL}])


def whole_of(history: Sequence[Message]) -> list[Message]:
    """Return a conversation whose end alone is stand-ins, by which a text is taken apart.

    The system message is never one: a template may print it in any later turn.
    """
    before = (m if m["role"] == "system" else stand_in(m) for m in history[-2:-1])
    return [*history[:-2], *before, stand_in(history[-1])]


def end_in(text: str, message: Message) -> int:
    """Return where a stand-in's own words end in a text, the last time; -1: they are not there."""
    words = {"assistant": (MARK, _GIVEN), "user": (_ASK,), "tool": (_GOT,)}
    ends = [
        at + len(word)
        for word in words.get(str(message["role"]), (_SYSTEM,))
        if (at := text.rfind(word)) >= 0
    ]
    return max(ends, default=-1)


def before_answer(text: str) -> int:
    """Return where what precedes the last answer ends: the last words of a user or a tool."""
    return max(text.rfind(_ASK), text.rfind(_GOT), text.rfind(_SYSTEM)) + len(_END)


def with_real_end(rendered: str, last: Message) -> str:
    """Return a window's text with the real last content, if that borders on what follows."""
    content: Any = last.get("content")
    return content if rendered.endswith(_END) and isinstance(content, str) else rendered
