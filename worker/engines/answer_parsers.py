"""Parsers of answers: which an engine has by name, and what they make of a text.

vLLM and SGLang bring parsers for the formats of many models; `vllm_parsers` and `sglang_parsers` call them as the engines'
own servers do for an answer that is not streamed. Which part of a text a parser gets, and what becomes of text that it
can't parse, is decided in `openai/answer_reading.py`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_worker.engine import EngineError

HERMES_MARKS = ("<tool_call>", "</tool_call>")
TEMPLATE_PARSER = "response_template"
"""transformers' own parser, by the description of answers that a tokenizer may have."""
MARK_TOKENS = 32
"""As many as a mark of reasoning may be, with the white space behind it."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function; `arguments` is JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """The parts of a text."""

    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerOrigin:
    """What an answer belongs to: the `tools` offered, as OpenAI's; the ids of its prompt and its own; variables of the template."""

    tools: Sequence[Mapping[str, Any]] = ()
    prompt_ids: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    variables: Mapping[str, Any] | None = None

    def as_request(self) -> dict[str, Any]:
        """Return what parsers of the engines want of the request, as OpenAI's body."""
        return {
            "model": "",
            "messages": [{"role": "user", "content": ""}],
            "tools": list(self.tools) or None,
            "chat_template_kwargs": dict(self.variables or {}),
        }

    def prompt_end(self, tokenizer: Any) -> str:
        """Return the last text of the prompt, in which a template opens or closes the answer's reasoning."""
        text: str = tokenizer.decode(list(self.prompt_ids[-MARK_TOKENS:]))
        return text.rstrip()


@dataclass(frozen=True, slots=True)
class ParserNames:
    """The parsers that a worker's flags name; None: none."""

    engine: str
    tool: str | None = None
    reasoning: str | None = None


ParseText = Callable[[str, AnswerOrigin], ParsedAnswer]
"""Parses a text with its special tokens; may raise anything, and leave out what it does not understand."""


@dataclass(frozen=True, slots=True)
class EngineParsers:
    """The parsers of one engine.

    Attributes:
        tools: Names that `--tool-call-parser` takes.
        reasoning: Names that `--reasoning-parser` takes.
        make: Returns the parser of (tools, reasoning, tokenizer), of which one name may be None; raises anything if the
            tokenizer lacks what it needs.
    """

    tools: Sequence[str]
    reasoning: Sequence[str]
    make: Callable[[str | None, str | None, Any], ParseText]

    def check_names(self, names: ParserNames) -> None:
        """Refuse names that this engine does not know.

        Raises:
            EngineError: names the flag and the names that it takes.
        """
        for flag, name, known in (
            ("--tool-call-parser", names.tool, self.tools),
            ("--reasoning-parser", names.reasoning, self.reasoning),
        ):
            if name is not None and name not in (*known, TEMPLATE_PARSER):
                usable = ", ".join(sorted({*known, TEMPLATE_PARSER}))
                raise EngineError(
                    f"{flag} {name!r}: the {names.engine} engine has no such parser: use one of {usable}"
                )

    def make_parser(self, tool: str | None, reasoning: str | None, tokenizer: Any) -> ParseText:
        """Return the parser of these names.

        Raises:
            EngineError: it can't be used with this tokenizer.
        """
        flags = {"--tool-call-parser": tool, "--reasoning-parser": reasoning}
        given = " ".join(f"{flag} {name}" for flag, name in flags.items() if name is not None)
        try:
            if tokenizer is None:
                raise ValueError("its folder holds none")
            if TEMPLATE_PARSER in (tool, reasoning):
                if {tool, reasoning} - {TEMPLATE_PARSER, None}:
                    raise ValueError(f"{TEMPLATE_PARSER} parses both: leave the other one out")
                return make_template_parser(tokenizer)
            return self.make(tool, reasoning, tokenizer)
        except Exception as error:  # a library's parsers raise anything
            raise EngineError(
                f"{given} can't be used with the tokenizer of this model: {error}"
            ) from error


def silence_loggers(*names: str) -> None:
    """Keep an engine's parsers from logging: they write the text of each answer that they can't parse."""
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)


def make_template_parser(tokenizer: Any) -> ParseText:
    """Return transformers' parser; raise `ValueError` if the tokenizer does not describe answers."""
    if getattr(tokenizer, "response_template", None) is None:
        raise ValueError("it has no response_template: choose a parser by another name")

    def parse(text: str, origin: AnswerOrigin) -> ParsedAnswer:
        prefix = tokenizer.decode(list(origin.prompt_ids))
        parser = tokenizer.get_response_parser(prefix=prefix, tools=list(origin.tools) or None)
        events = parser.feed(text)
        message, last = parser.finalize()
        # Its message has only the last of several pieces of text.
        pieces = [each for each in [*events, *last] if each["type"] == "region_chunk"]
        content, thought = (
            "".join(each["text"] for each in pieces if each["field"] in fields).strip()
            for fields in (("content",), ("reasoning_content", "reasoning", "thinking"))
        )
        calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
        found = (ToolCall(call["name"], arguments_text(call.get("arguments"))) for call in calls)
        return ParsedAnswer(content, thought, tuple(found))

    return parse


def make_hermes_parser(tool: str | None, reasoning: str | None, tokenizer: Any) -> ParseText:
    """Return the parser of one `<tool_call>{"name": …, "arguments": …}</tool_call>`, the only one that needs no library."""
    return parse_hermes_call


def parse_hermes_call(text: str, origin: AnswerOrigin) -> ParsedAnswer:
    """Parse one call in its marks; anything else stays text."""
    try:
        said = json.loads(text.removeprefix(HERMES_MARKS[0]).removesuffix(HERMES_MARKS[1]))
        call = ToolCall(said["name"], arguments_text(said.get("arguments")))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return ParsedAnswer(text)
    return ParsedAnswer("", calls=(call,))


def arguments_text(arguments: Any) -> str:
    """Return a call's arguments as JSON text, whether they are an object or text already."""
    if isinstance(arguments, str):
        return arguments
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)


HERMES_ONLY = EngineParsers(("hermes",), (), make_hermes_parser)
"""What an engine without parsers of its own has, such as hf."""
