"""Examples: short stand-ins for a conversation that end as it ends. Pure.

A template gets the example instead of the whole conversation, with words that no model writes in
place of the contents, so that the text it adds can be recognized. An example keeps what templates
look at: a system message, one earlier round (with calls if there were any), one earlier step since
the last question, and the last answer with all its calls and results.
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
_RESULT_NAMES = {"tool_call_id": _TOOL_CALL["id"], "name": TOOL_STAND_IN}
_CALLS_MESSAGE: Message = {"role": "assistant", "content": "", "tool_calls": [_TOOL_CALL]}

PLAIN_EXAMPLE: tuple[Message, ...] = (_USER_MESSAGE, _REPLY_MESSAGE)
"""A question and its answer."""


def message_kind(message: Message) -> str:
    """Return the role of a message, or `calls` for an answer that calls tools."""
    role = str(message["role"])
    return "calls" if role == "assistant" and message.get("tool_calls") else role


def message_kinds(messages: Sequence[Message]) -> tuple[str, ...]:
    """Return the kinds of messages, by which a template may tell conversations apart."""
    return tuple(map(message_kind, messages))


def example_of(history: Sequence[Message], group: Sequence[Message] = ()) -> list[Message]:
    """Return an example of a conversation, with the calls that tool results in `group` answer."""
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
    """Return the index of the last message of a role in `[start, stop)`; -1: there is none."""
    indexes = range(len(history))[start:stop]
    return next((index for index in reversed(indexes) if history[index]["role"] == role), -1)


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
    """Return the last answer, the step before it, and all that follows."""
    answer = _last_index(history, "assistant", start)
    before = _last_index(history, "assistant", start, max(answer, start))
    begin = next((index for index in (before, answer) if index >= 0), start)
    return list(range(begin, len(history)))


def stand_in_message(message: Message) -> Message:
    """Return a message of the same kind with words that no model writes."""
    role = str(message["role"])
    if role == "assistant":
        calls = [_stand_in_call(call) for call in message.get("tool_calls") or ()]
        return {**_CALLS_MESSAGE, "tool_calls": calls} if calls else _REPLY_MESSAGE
    if role == "tool":
        names: Message = {key: message[key] for key in ("tool_call_id", "name") if key in message}
        return {"role": role, "content": _GOT, **names}
    return {"role": role, "content": _ASK if role == "user" else _SYSTEM}


def with_call_contents(example: Sequence[Message]) -> list[Message]:
    """Return an example for a template that prints no calls: answers with calls get words, too."""
    return [{**m, "content": REPLY_STAND_IN} if m.get("tool_calls") else m for m in example]


def _stand_in_call(call: Message) -> Message:
    function = call.get("function")
    if function is None:
        return call
    # The arguments' names stay: a template may print, or require, certain ones.
    given = function.get("arguments")
    named = dict.fromkeys(given, _GIVEN) if isinstance(given, Mapping) else {}
    return {**call, "function": {**function, "arguments": named or _CALL_ARGUMENTS}}


def _call_of_result(tool: Message) -> Message:
    """Make the call that a tool's result answers."""
    name = tool.get("name", TOOL_STAND_IN)
    function = {"name": name, "arguments": _CALL_ARGUMENTS}
    return {**_TOOL_CALL, "id": tool.get("tool_call_id", _TOOL_CALL["id"]), "function": function}


def longer_example(example: Sequence[Message]) -> list[Message]:
    """Return an example with more rounds and steps; the same one if it has none to repeat."""
    lead = int(example[0]["role"] == "system" and len(example) > 1)
    start = max(_last_index(example, "user"), lead)
    answers = [i for i in range(start + 1, len(example)) if example[i]["role"] == "assistant"]
    step = example[answers[0] : answers[-1]] if answers else []
    earlier = example[lead:start]
    more = [*earlier, *PLAIN_EXAMPLE] if earlier else []
    return [*example[:lead], *more, *earlier, example[start], *step, *example[start + 1 :]]


def example_ending_with(kind: str) -> list[Message]:
    """Return an example that ends with a message of a kind."""
    result = {"role": "tool", "content": _GOT, **_RESULT_NAMES}
    ends: dict[str, list[Message]] = {
        "user": [],
        "assistant": [_REPLY_MESSAGE],
        "calls": [_CALLS_MESSAGE],
        "tool": [_CALLS_MESSAGE, result],
    }
    return [_USER_MESSAGE, *ends[kind]]


def stand_in_group(group: Sequence[Message]) -> list[Message]:
    """Return a group with a word of its own in place of each content."""
    return [{**stand_in_message(m), "content": f"zqxnext{i}zqx"} for i, m in enumerate(group)]


def group_of_role(kind: str) -> list[Message]:
    """Return what a turn of a kind adds, to try a template with."""
    return stand_in_group([{"role": kind, **_RESULT_NAMES}])


def with_stand_in_end(history: Sequence[Message]) -> list[Message]:
    """Return a conversation with stand-ins in place of its last two messages.

    A system message stays: a template may print it in any later turn.
    """
    before = (m if m["role"] == "system" else stand_in_message(m) for m in history[-2:-1])
    return [*history[:-2], *before, stand_in_message(history[-1])]


def end_of_words(text: str, message: Message) -> int:
    """Return where the last words of a stand-in end in a text; -1: there are none."""
    words = {"assistant": (REPLY_STAND_IN, _GIVEN), "user": (_ASK,), "tool": (_GOT,)}
    of_role = words.get(str(message["role"]), (_SYSTEM,))
    return max((text.rfind(word) + len(word) for word in of_role if word in text), default=-1)


def end_before_answer(text: str) -> int:
    """Return where the last words before an answer end: those of a user, a tool or the system."""
    return max(text.rfind(_ASK), text.rfind(_GOT), text.rfind(_SYSTEM)) + len(_END_STAND_IN)


def with_real_end(rendered: str, last: Message) -> str:
    """Return the real last content instead of an example's text, if the stand-in ends that text."""
    content: Any = last.get("content")
    return content if rendered.endswith(_END_STAND_IN) and isinstance(content, str) else rendered
