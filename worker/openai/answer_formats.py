"""Formats of tool calls: where in a text a call begins and ends, and how one can be forced."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass

from rollout_worker.engines.answer_parsers import HERMES_MARKS

MAX_BROKEN_CALLS = 64
"""Of an answer: after so many beginnings of calls that are none, the rest stays text. Each costs a parse."""
MAX_CALLS = 64
"""Between two marks. Patterns of parsers take time with the square of their number, and hold up the whole process."""
MAX_VALUES_TRIED = 8
"""Places behind an opening mark at which a call's JSON may begin: names, ids and marks come before it."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Where the calls of a format are.

    Attributes:
        opens: What may begin a call; the text before the first of them is content. An empty one: the whole text is parsed.
        closes: What ends it.
        ends: `value`: a call ends behind its JSON value, and the closing mark may be missing; `mark`: at its closing mark;
            `text`: nobody knows where, so the parser gets the rest of the text.
        each: What begins each call of several between the marks.
        between: What separates calls, besides white space.
        can_force: A call is a JSON object with `name` and `arguments`, between the marks if it has a closing one.
    """

    opens: tuple[str, ...]
    closes: str = ""
    ends: str = "value"
    each: str = ""
    between: str = ""
    can_force: bool = False

    def find_open(self, text: str, start: int = 0) -> tuple[int, str]:
        """Return where the next call may begin, and with which mark; the text's length if nowhere."""
        found = [(at, mark) for mark in self.opens if (at := text.find(mark, start)) >= 0]
        return min(found, default=(len(text), ""))

    def find_end(self, text: str, begin: int, mark: str) -> int | None:
        """Return where the call that begins here ends; None: it is none."""
        inside = begin + len(mark)
        if self.ends == "text":
            return len(text)
        if self.ends == "mark":
            at = text.find(self.closes, inside)
            return None if at < 0 else at + len(self.closes)
        if mark == "{":
            end = _value_end(text, begin, inside)
        else:
            again = text.find(mark, inside)
            end = _value_end(text, inside, len(text) if again < 0 else again)
        if end is None or not self.closes:
            return end
        close = re.compile(rf"\s*{re.escape(self.closes)}").match(text, end)
        return close.end() if close else end


def _value_end(text: str, start: int, limit: int) -> int | None:
    """Return where the first JSON object or array ends that begins in this range; None if none does."""
    decoder = json.JSONDecoder()
    places = re.compile(r"[\[{]").finditer(text, start, limit)
    for place in itertools.islice(places, MAX_VALUES_TRIED):
        try:
            return decoder.raw_decode(text, place.start())[1]
        except (ValueError, RecursionError):
            continue
    return None


WHOLE = CallFormat(("",), ends="text")
OTHER = CallFormat(("<", "[", "{", "`", "functools", "function call"), ends="text")
"""For parsers that are not listed here: one of these begins the calls of each."""
HERMES = CallFormat(HERMES_MARKS[:1], HERMES_MARKS[1], can_force=True)
TAGGED = CallFormat(HERMES_MARKS[:1], HERMES_MARKS[1], ends="mark")
LLAMA = CallFormat(("<|python_tag|>", "{"), between=";", can_force=True)
MISTRAL = CallFormat(("[TOOL_CALLS]",))
_DEEPSEEKS = "<\N{FULLWIDTH VERTICAL LINE}tool▁%s\N{FULLWIDTH VERTICAL LINE}>"
DEEPSEEK = CallFormat(
    (_DEEPSEEKS % "calls▁begin",),
    _DEEPSEEKS % "calls▁end",
    ends="mark",
    each=_DEEPSEEKS % "call▁begin",
)

FORMATS = {
    **dict.fromkeys(("hermes", "qwen", "qwen25", "qwen3_json"), HERMES),
    **dict.fromkeys(("qwen3_coder", "qwen3_xml", "nanbeige", "glm45", "glm47"), TAGGED),
    **dict.fromkeys(("llama3", "llama3_json", "llama4_json"), LLAMA),
    "mistral": MISTRAL,
    **dict.fromkeys(("deepseek_v3", "deepseek_v31", "deepseekv3", "deepseekv31"), DEEPSEEK),
    **dict.fromkeys(
        ("gpt-oss", "openai", "openai_gptoss", "response_template", "hf", "kimi_k3", "minicpmv"),
        WHOLE,
    ),
    **dict.fromkeys(("cohere_command3", "cohere_command4"), WHOLE),
}
"""By names of parsers, of tools and of reasoning: those of vLLM, SGLang and transformers."""
