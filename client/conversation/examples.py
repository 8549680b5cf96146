"""Windows: short stand-ins for a conversation that end as it ends. Pure.

A template sees the example instead of the whole conversation, with words that no model writes in
place of the contents, so that what it adds can be recognized. An example keeps what templates
look at: whether there is a system message, whether tools were called before, one earlier round, one
earlier step since the last question, and the last answer with all its calls and results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .template_messages import Message

REPLY_STAND_IN = "zqxreplyzqx"
"""Content of a stand-in for an answer."""

TOOL_STAND_IN = "zqxtoolzqx"
_END_STAND_IN = "zqx"
_ASK, _GOT, _SYSTEM, _GIVEN = "zqxaskzqx", "zqxgotzqx", "zqxsystemzqx", "zqxgivenzqx"
_USER_MESSAGE: Message = {"role": "user", "content": _ASK}
_REPLY_MESSAGE: Message = {"role": "assistant", "content": REPLY_STAND_IN}
_CALL_ARGUMENTS = {"zqxnamezqx": _GIVEN}
_TOOL_CALL = {
    "id": "zqxcall01",
    "type": "function",
    "function": {"name": TOOL_STAND_IN, "arguments": _CALL_ARGUMENTS},
}

_CALLS_MESSAGE: Message = {"role": "assistant", "content": "", "tool_calls": [_TOOL_CALL]}

PLAIN_EXAMPLE: tuple[Message, ...] = (_USER_MESSAGE, _REPLY_MESSAGE)
"""A question and its answer."""


def message_kind(message: Message) -> str:
    """Return the role of a message, or `calls` for an answer that calls tools."""
    role = str(message["role"])
    return "calls" if role == "assistant" and message.get("tool_calls") else role


def message_kinds(messages: Sequence[Message]) -> tuple[str, ...]:
    """Return the kinds of messages: what a template may treat differently."""
    return tuple(map(message_kind, messages))


def example_of(history: Sequence[Message], group: Sequence[Message] = ()) -> list[Message]:
    """Return an example for a conversation.

    Args:
        history: The conversation.
        group: What is to follow it: results of tools need calls that they answer.
    """
    lead = int(history[0]["role"] == "system" and len(history) > 1)
    asked = _last_index(history, "user")
    start = max(asked, lead)
    kept = [*range(lead), *_earlier_round(history, lead, start)]
    kept += [start, *_last_step(history, start + 1)]
    example = [stand_in_message(history[index]) for index in kept]
    tools = [message for message in group if message["role"] == "tool"]
    if tools and message_kind(example[-1]) == "assistant":
        example[-1] = {**_CALLS_MESSAGE, "tool_calls": [_call_of_result(tool) for tool in tools]}
    return example


def _last_index(
    history: Sequence[Message], role: str, start: int = 0, stop: int | None = None
) -> int:
    """Return where the last message of a role stands; -1: there is none."""
    indexes = range((len(history) if stop is None else stop) - 1, start - 1, -1)
    return next((index for index in indexes if history[index]["role"] == role), -1)


def _earlier_round(history: Sequence[Message], start: int, stop: int) -> list[int]:
    """Return one earlier round: a question, calls and results if there were any, an answer."""
    indexes = range(start, stop)
    called = next((index for index in indexes if history[index].get("tool_calls")), None)
    if called is None:
        answered = next((i for i in indexes if history[i]["role"] == "assistant"), None)
        return [] if answered is None else [answered - 1, answered] if answered > start else []
    asked = max(start, _last_index(history, "user", start, called))
    after = called + 1
    while after < stop and history[after]["role"] == "tool":
        after += 1
    rest = range(after, stop)
    again = next((i for i in rest if history[i]["role"] == "user"), stop)
    answers = [i for i in range(after, again) if message_kind(history[i]) == "assistant"]
    return [asked, *range(called, after), *answers[:1]]


def _last_step(history: Sequence[Message], start: int) -> list[int]:
    """Return what follows the last question: the step before the last answer, it, and the rest."""
    answer = _last_index(history, "assistant", start)
    if answer < 0:
        return list(range(start, len(history)))
    before = _last_index(history, "assistant", start, answer)
    return list(range(before if before >= 0 else answer, len(history)))


def stand_in_message(message: Message) -> Message:
    """Return a message of the same kind with words that no model writes."""
    role = str(message["role"])
    if role == "assistant":
        calls = message.get("tool_calls")
        return (
            {**_CALLS_MESSAGE, "tool_calls": [_stand_in_call(call) for call in calls]}
            if calls
            else _REPLY_MESSAGE
        )
    if role == "tool":
        names: Message = {key: message[key] for key in ("tool_call_id", "name") if key in message}
        return {"role": role, "content": _GOT, **names}
    return {"role": role, "content": _ASK if role == "user" else _SYSTEM}


def with_call_contents(example: Sequence[Message]) -> list[Message]:
    """Return an example for a template that prints no calls: answers that call have words, too."""
    return [{**m, "content": REPLY_STAND_IN} if m.get("tool_calls") else m for m in example]


def _stand_in_call(call: Message) -> Message:
    function = call.get("function")
    if function is None:
        return call
    # Their names stay: a template may print, or ask for, some of them only.
    given = function.get("arguments")
    named = (
        dict.fromkeys(given, _GIVEN) if isinstance(given, Mapping) and given else _CALL_ARGUMENTS
    )
    return {**call, "function": {**function, "arguments": named}}


def _call_of_result(tool: Message) -> Message:
    """Return the call that a result without one answers."""
    name = tool.get("name", TOOL_STAND_IN)
    function = {"name": name, "arguments": _CALL_ARGUMENTS}
    return {**_TOOL_CALL, "id": tool.get("tool_call_id", _TOOL_CALL["id"]), "function": function}


def longer_example(example: Sequence[Message]) -> list[Message]:
    """Return an example with more of what it already has: the same one if nothing can be more."""
    lead = int(example[0]["role"] == "system" and len(example) > 1)
    start = max(_last_index(example, "user"), lead)
    answer = _last_index(example, "assistant", start + 1)
    first = next(
        (i for i in range(start + 1, len(example)) if example[i]["role"] == "assistant"), answer
    )
    earlier, step = example[lead:start], example[first:answer] if first < answer else []
    more = [*earlier, *PLAIN_EXAMPLE] if earlier else []
    return [*example[:lead], *more, *earlier, example[start], *step, *example[start + 1 :]]


def example_ending_with(kind: str) -> list[Message]:
    """Return an example that ends with a message of a kind."""
    tool = {
        "role": "tool",
        "content": _GOT,
        "tool_call_id": _TOOL_CALL["id"],
        "name": TOOL_STAND_IN,
    }
    ends: dict[str, list[Message]] = {
        "user": [], "assistant": [_REPLY_MESSAGE], "calls": [_CALLS_MESSAGE], "tool": [_CALLS_MESSAGE, tool],
    }  # fmt: skip
    return [_USER_MESSAGE, *ends[kind]]


def stand_in_group(group: Sequence[Message]) -> list[Message]:
    """Return a group with words in place of its contents, each its own."""
    return [
        {**stand_in_message(message), "content": f"zqxnext{index}zqx"}
        for index, message in enumerate(group)
    ]


def group_of_role(kind: str) -> list[Message]:
    """Return what a turn of a kind adds, to try a template with."""
    return stand_in_group([{"role": kind, "tool_call_id": _TOOL_CALL["id"], "name": TOOL_STAND_IN}])


def with_stand_in_end(history: Sequence[Message]) -> list[Message]:
    """Return a conversation whose end alone is stand-ins, by which a text is taken apart.

    The system message is never one: a template may print it in any later turn.
    """
    before = (m if m["role"] == "system" else stand_in_message(m) for m in history[-2:-1])
    return [*history[:-2], *before, stand_in_message(history[-1])]


def end_of_words(text: str, message: Message) -> int:
    """Return where a stand-in's own words end in a text, the last time; -1: they are not there."""
    words = {"assistant": (REPLY_STAND_IN, _GIVEN), "user": (_ASK,), "tool": (_GOT,)}
    ends = [
        at + len(word)
        for word in words.get(str(message["role"]), (_SYSTEM,))
        if (at := text.rfind(word)) >= 0
    ]
    return max(ends, default=-1)


def end_before_answer(text: str) -> int:
    """Return where what precedes the last answer ends: the last words of a user or a tool."""
    return max(text.rfind(_ASK), text.rfind(_GOT), text.rfind(_SYSTEM)) + len(_END_STAND_IN)


def with_real_end(rendered: str, last: Message) -> str:
    """Return an example's text with the real last content, if that borders on what follows."""
    content: Any = last.get("content")
    return content if rendered.endswith(_END_STAND_IN) and isinstance(content, str) else rendered
