"""Grammars that harm whoever compiles them."""

from __future__ import annotations

HEAVY = {
    "allOf": [{"type": "string", "pattern": f".*{chr(97 + i)}.{{{10 + i}}}"} for i in range(20)]
}
"""A schema that compiles for minutes, whatever the library's own limits."""


def chain(length: int) -> str:
    """A grammar of rules that are nested in each other: thousands overflow the stack of a thread."""
    rules = [f"r{index}: r{index + 1} r{index + 1}" for index in range(length)]
    return "\n".join(["start: r0", *rules, f'r{length}: "a"'])
