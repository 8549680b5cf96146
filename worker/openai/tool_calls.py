"""Extract tool calls from a model's text, in OpenAI's format.

The one supported format is that of Hermes and Qwen models: `<tool_call>{"name": …, "arguments":
{…}}</tool_call>`. Whatever does not parse stays text, so no output is lost.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def tool_parser_of(template: str) -> str | None:
    """Name of the tool call format in a chat template; None if it is unknown."""
    return "hermes" if OPEN in template and "tools" in template else None


def parse_tool_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the text without its tool calls, and the calls."""
    before, *rest = text.split(OPEN)
    kept, calls = [before], []
    for part in rest:
        body, _, after = part.partition(CLOSE)
        call = _parse_call(body)
        if call is None:
            kept.append(OPEN + part)
        else:
            calls.append(call)
            kept.append(after)
    content = "".join(kept)
    return (content.strip() if calls else content), calls


def _parse_call(body: str) -> dict[str, Any] | None:
    try:
        said = json.loads(body)
        if not isinstance(said, dict) or not isinstance(said.get("name"), str):
            return None
        arguments = said.get("arguments", {})
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        # JSON can escape half of a surrogate pair, but it can't be sent as UTF-8.
        (said["name"] + arguments).encode()
    except (ValueError, RecursionError):
        return None
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": said["name"], "arguments": arguments},
    }


class ToolCallFilter:
    """Passes streamed text through until a tool call may have started."""

    def __init__(self) -> None:
        self._held = ""

    def push_text(self, text: str) -> str:
        """Add new text and return what is certainly not part of a tool call."""
        self._held += text
        at = self._held.find(OPEN)
        if at < 0:
            at = len(self._held) - begun_length(self._held, OPEN)
        certain, self._held = self._held[:at], self._held[at:]
        return certain

    def take_rest(self) -> tuple[str, list[dict[str, Any]]]:
        """What was held back: text that is not a call, and the calls."""
        return parse_tool_calls(self._held)


def begun_length(text: str, mark: str) -> int:
    """How many trailing characters may be the start of `mark`."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
