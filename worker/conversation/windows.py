"""Windows: short stand-ins for a conversation that end as it ends. Pure.

A template sees the window instead of the whole conversation, with words that no model writes in
place of the contents, so that what it adds behind can be told apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from .messages import Message

MARK = "zqxreplyzqx"
"""Content of a stand-in for an answer."""

_END = "zqx"
_USER: Message = {"role": "user", "content": "zqxaskzqx"}
_REPLY: Message = {"role": "assistant", "content": MARK}
_CALL = {"id": "zqxcall01", "type": "function", "function": {"name": "zqxtool", "arguments": {}}}
_TOOL: Message = {"role": "tool", "content": "zqxgotzqx"}

PLAIN: tuple[Message, ...] = (_USER, _REPLY)
"""A question and its answer."""

_TURNS: tuple[Message, ...] = (
    {"role": "user", "content": "zqxfirst"},
    {"role": "assistant", "content": "zqxsecond"},
)
LONGER: tuple[tuple[Message, ...], ...] = (
    ({"role": "system", "content": "zqxsystem"}, *_TURNS),
    _TURNS,
)
"""Beginnings of longer conversations; some templates refuse the one with a system message."""


def kind_of(message: Message) -> str:
    """Return the role of a message, or `calls` for an answer that calls tools."""
    role = str(message["role"])
    return "calls" if role == "assistant" and message.get("tool_calls") else role


def window_of(history: Sequence[Message], group: Sequence[Message] = ()) -> list[Message] | None:
    """Return a window for a conversation; None: there is none for such an end.

    Args:
        history: The conversation.
        group: What is to follow it: results of tools need calls that they answer.
    """
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
    tools = [{**message, "content": _TOOL["content"]} for message in history[first:]]
    before = history[first - 1] if first else _REPLY
    return [_USER, _answer(before, tools), *tools] if before["role"] == "assistant" else None


def _answer(message: Message, tools: Sequence[Message]) -> Message:
    """Return a stand-in for an answer, with the calls that tools answer."""
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


def window_for(kind: str) -> list[Message]:
    """Return a window that ends with a message of a kind; empty: there is none."""
    answer = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    return {
        "user": [_USER],
        "assistant": [_USER, _REPLY],
        "calls": [_USER, answer],
        "tool": [_USER, answer, *group_for("tool")],
    }.get(kind, [])


def group_for(kind: str) -> list[Message]:
    """Return what a turn of a kind adds, to try a template with."""
    if kind == "tool":
        return [{**_TOOL, "tool_call_id": _CALL["id"], "name": "zqxtool"}]
    if kind == "calls":
        return [{"role": "assistant", "content": "", "tool_calls": [_CALL]}]
    return [{"role": kind, "content": "zqxnextzqx"}]


def with_real_end(rendered: str, last: Message) -> str:
    """Return a window's text with the real last content, if that borders on what follows."""
    content = last.get("content")
    return content if rendered.endswith(_END) and isinstance(content, str) else rendered
