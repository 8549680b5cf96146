"""Read answers: their content, reasoning and tool calls, by the parsers of the engine. No output is lost.

A parser may leave text out, in a stream even text outside of calls. So it gets one call at a time, found by the marks of
its format, once the answer is complete; what it makes no call of stays text.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import traceback
import uuid
from collections.abc import Callable, Collection, Sequence

from rollout_worker.engines.answer_parsers import (
    HERMES_MARKS,
    AnswerOrigin,
    ParsedAnswer,
    ParserNames,
    ParseText,
    ToolCall,
)

from .answer_formats import FORMATS, MAX_BROKEN_CALLS, MAX_CALLS, MISTRAL, OTHER, WHOLE, CallFormat

logger = logging.getLogger(__name__)

HARMONY_PAIRS = (("gpt-oss", "gpt-oss"), ("openai", "openai_gptoss"))
"""Parsers of tools and of reasoning that are one: a call ends reasoning, so either name means both."""
THOUGHT_MARKS = re.compile(r"(?:<[^<>\s]{1,40}>|\[/?[A-Z_]{1,20}\]|◁/?think▷|\s)*")
"""What a parser of reasoning may leave out: marks and white space."""
MOST_MARKS = 80
"""How many characters of marks and white space may stand before reasoning."""
FUNCTION_NAME = re.compile(r"[^\s<>]+")
"""Names that are believed to be one in an answer, so tools have no others."""
HARMONY_BODY = re.compile(
    r"<\|message\|>(.*?)(?=<\|(?:end|call|return|start|channel)\|>|$)", re.DOTALL
)


def choose_parsers(names: ParserNames, template: str) -> tuple[str | None, str | None]:
    """Return the parsers of tools and of reasoning: those that flags name, else Hermes' if the template shows its format."""
    for pair in HARMONY_PAIRS:
        if names.tool == pair[0] or names.reasoning == pair[1]:
            return pair
    whole = FORMATS.get(names.reasoning or "") is WHOLE
    shown = HERMES_MARKS[0] in template and "tools" in template
    return names.tool or ("hermes" if shown and not whole else None), names.reasoning


class AnswerReader:
    """Reads the answers of one model.

    Args:
        tool: The parser of calls; None: calls stay text.
        reasoning: The parser of reasoning; None: it stays text.
        make: Returns the parser of these names, of which one may be None.
        specials: The tokenizer's special tokens.

    Raises:
        EngineError: the parsers can't be used with this tokenizer.
    """

    def __init__(
        self,
        tool: str | None,
        reasoning: str | None,
        make: Callable[[str | None, str | None], ParseText],
        specials: Collection[str],
    ) -> None:
        self.format = OTHER if tool is None else FORMATS.get(tool, OTHER)
        self._whole = self._calls = self._thoughts = None
        if WHOLE in (self.format, FORMATS.get(reasoning or "")):
            self.format, self._whole = WHOLE, make(tool, reasoning)
        else:
            self._calls = None if tool is None else make(tool, None)
            self._thoughts = None if reasoning is None else make(None, reasoning)
        longest_first = sorted(specials, key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._logged, self._tool = False, tool

    @property
    def is_whole(self) -> bool:
        """Whether one parser reads the whole text, and wants to see the token that ended it."""
        return self._whole is not None

    def first_marks(self, *, tools: bool, thinks: bool) -> tuple[str, ...]:
        """Return what may begin something else than content; an empty text: anything may."""
        if thinks and (self.is_whole or self._thoughts is not None):
            return ("",)
        return self.format.opens if tools and self._calls is not None else ()

    def call_id(self, name: str, number: int) -> str:
        """Return an id for the call of this number in a conversation, as the format's templates want it."""
        if self._tool == "kimi_k2":
            return f"functions.{name}:{number}"
        some = uuid.uuid4().hex
        return some[:9] if self.format is MISTRAL else f"call_{some[:24]}"

    def clean_text(self, text: str) -> str:
        """Return a text without special tokens."""
        return self._specials.sub("", text)

    def read_text(self, text: str, origin: AnswerOrigin, *, thinks: bool) -> ParsedAnswer:
        """Return the parts of a complete text; `thinks`: it may begin with reasoning. Takes long for long texts."""
        if self._whole is not None:
            return self._read_whole(self._whole, text, origin)
        found = ParsedAnswer(text)
        if thinks and self._thoughts is not None:
            found = self._split_reasoning(self._thoughts, text, origin)
        if not origin.tools or self._calls is None:
            return found
        content, calls = self._take_calls(self._calls, found.content, origin)
        return ParsedAnswer(content, found.reasoning, calls)

    def _read_whole(self, parse: ParseText, text: str, origin: AnswerOrigin) -> ParsedAnswer:
        found = self._try_parse(parse, text, origin)
        if found is None or (found.calls and not (origin.tools and _are_sound(found.calls))):
            return ParsedAnswer(text)
        empty = not (found.content or found.reasoning or found.calls)
        if empty or not all(_has_part(found, body) for body in HARMONY_BODY.findall(text)):
            return ParsedAnswer(text)
        return found

    def _split_reasoning(self, parse: ParseText, text: str, origin: AnswerOrigin) -> ParsedAnswer:
        found, whole = self._try_parse(parse, text, origin), text.rstrip()
        if found is None or not whole.endswith(found.content.rstrip()):
            return ParsedAnswer(text)
        before = whole.removesuffix(found.content.rstrip())
        return found if _is_framed(found.reasoning.strip(), before) else ParsedAnswer(text)

    def _take_calls(
        self, parse: ParseText, text: str, origin: AnswerOrigin
    ) -> tuple[str, tuple[ToolCall, ...]]:
        form: CallFormat = self.format
        kept: list[str] = []
        calls: list[ToolCall] = []
        begin = done = broken = 0
        while broken < MAX_BROKEN_CALLS:
            begin, mark = form.find_open(text, begin)
            if not mark:
                break
            end = form.find_end(text, begin, mark)
            found = None if end is None else self._parse_part(parse, text[begin:end], origin)
            if end is None or found is None:
                broken += MAX_BROKEN_CALLS if form.ends == "text" else 1
                begin = end or begin + len(mark)
                continue
            before = text[done:begin]
            kept.append("" if calls and form.between and before.strip() == form.between else before)
            if form.ends == "text":
                kept.append(found.content)
            calls += found.calls
            begin = done = end
        content = "".join((*kept, text[done:]))
        return content.rstrip() if calls else content, tuple(calls)

    def _parse_part(self, parse: ParseText, text: str, origin: AnswerOrigin) -> ParsedAnswer | None:
        """Return what is found between marks, None if that is not a call."""
        form = self.format
        each = text.count(form.each) if form.each else 1
        nested = form.ends == "mark" and text.count(form.opens[0]) > 1
        if nested or each > MAX_CALLS:
            return None
        found = self._try_parse(parse, text, origin)
        return found if found and len(found.calls) >= each and _are_sound(found.calls) else None

    def _try_parse(self, parse: ParseText, text: str, origin: AnswerOrigin) -> ParsedAnswer | None:
        try:
            return parse(text, origin)
        except Exception as error:  # noqa: BLE001  # libraries raise anything
            if not self._logged:
                place = traceback.extract_tb(error.__traceback__)[-1]
                # Without its message, which may quote the answer.
                logger.error(  # noqa: TRY400
                    "a parser failed, so answers stay text (said once): %s at %s:%s",
                    type(error).__name__,
                    place.filename,
                    place.lineno,
                )
            self._logged = True
            return None


class TextGate:
    """Passes streamed text on until one of the marks may begin; white space before it is held back, too."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        self._marks, self._starts = marks, _mark_starts(marks)
        self._is_open = True
        # Pieces: a text would be copied with every token of a long call.
        self._held: list[str] = []

    @property
    def held(self) -> str:
        """What was not passed on."""
        return "".join(self._held)

    def push_text(self, text: str) -> str:
        """Add new text and return what is certainly content."""
        if not self._marks:
            return text
        self._held.append(text)
        if not self._is_open:
            return ""
        held = self.held
        found = [at for mark in self._marks if (at := held.find(mark)) >= 0]
        self._is_open = not found
        # For every token: one call sees that most texts do not end with the start of a mark.
        begun = begun_length(held, self._marks) if held.endswith(self._starts) else 0
        end = min(found) if found else len(held) - begun
        certain = held[:end].rstrip()
        self._held = [held[len(certain) :]]
        return certain


def begun_length(text: str, marks: Sequence[str]) -> int:
    """How many trailing characters may be the start of one of these marks, which may be a caller's."""
    # Called for every token: most texts end with a character that no mark holds, which is cheap to see.
    last = text[-1:]
    begun = (
        size
        for mark in marks
        if last in mark
        for size in range(1, len(mark))
        if text.endswith(mark[:size])
    )
    return max(begun, default=0)


@functools.cache
def _mark_starts(marks: tuple[str, ...]) -> tuple[str, ...]:
    """Return what may be the start of one of a format's marks, each of which is short."""
    return tuple({mark[:size] for mark in marks for size in range(1, len(mark))})


def _is_framed(thought: str, text: str) -> bool:
    """Whether a text is this thought, with nothing around it but marks and white space."""
    limit = MOST_MARKS + len(thought)
    at = text.find(thought, 0, limit)
    while at >= 0:
        sides = text[:at], text[at + len(thought) :]
        if all(THOUGHT_MARKS.fullmatch(side) for side in sides):
            return True
        at = text.find(thought, at + 1, limit)
    return False


def _are_sound(calls: tuple[ToolCall, ...]) -> bool:
    """Whether all calls have a name of one word, and JSON that can be sent: it can escape half of a surrogate pair."""
    try:
        for call in calls:
            json.loads(call.arguments)
            (call.name + call.arguments).encode()
    except (ValueError, TypeError, RecursionError):
        return False
    return all(FUNCTION_NAME.fullmatch(call.name) for call in calls)


def _has_part(found: ParsedAnswer, body: str) -> bool:
    """Whether a message of gpt-oss is in what was found."""
    text = body.strip()
    if text in found.reasoning or text in found.content:
        return True
    try:
        said = json.loads(text)
        return any(json.loads(call.arguments) == said for call in found.calls)
    except (ValueError, RecursionError):
        return False
