"""Messages as chat templates expect them: plain text, tool call arguments as objects."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_common.wire.problems import ProblemError


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Join text parts and parse the arguments of earlier tool calls.

    Raises:
        ProblemError: 422 that names the message: it has no role, or a part that is not text.
    """
    return [_plain_message(f"messages.{number}", each) for number, each in enumerate(messages)]


def _plain_message(field: str, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise bad_field(f"{field}.role", "every message needs a role")
    kept = {key: value for key, value in message.items() if value is not None}
    kept["content"] = _join_text(f"{field}.content", message.get("content"))
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise bad_field(f"{field}.tool_calls", "must be a list")
        kept["tool_calls"] = [_plain_tool_call(f"{field}.tool_calls", call) for call in calls]
    return kept


def _join_text(field: str, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_field(field, "must be a string or a list of parts")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise bad_field(field, f"parts of type {kind!r} are not supported: send text")
    return "".join(str(part.get("text", "")) for part in content)


def _plain_tool_call(field: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_field(field, "every tool call needs a function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # Templates print arguments as JSON; a string would be quoted twice.
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise bad_field(
                field, f"arguments of {function['name']!r} are not valid JSON"
            ) from None
    return {**call, "function": {**function, "arguments": arguments or {}}}


def bad_field(field: str, detail: str) -> ProblemError:
    """A 422 that names the field."""
    said = f"{field}: {detail}"
    return ProblemError("invalid-request", said, errors=[{"field": field, "message": detail}])
