"""Answers read: content, reasoning, calls, with the parser of Hermes and with parsers that misbehave."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from rollout_common.wire.problems import ProblemError
from rollout_worker.engine import EngineError
from rollout_worker.engines.answer_parsers import (
    HERMES_ONLY,
    AnswerOrigin,
    ParsedAnswer,
    ParserNames,
    ToolCall,
    parse_hermes_call,
)
from rollout_worker.openai.answer_formats import FORMATS
from rollout_worker.openai.answer_reading import AnswerReader, TextGate, choose_parsers
from rollout_worker.openai.openai_structured import tool_call_structure

TOOLS = [{"type": "function", "function": {"name": "add"}}]
ORIGIN = AnswerOrigin(TOOLS)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
SPECIALS = ("<|im_end|>", "<|im_end|>x")


def own_parser(tool: str | None, reasoning: str | None) -> Any:
    return HERMES_ONLY.make_parser(tool, reasoning, tokenizer=object())


HERMES = AnswerReader("hermes", None, own_parser, SPECIALS)


def parsed(text: str, reader: AnswerReader = HERMES) -> tuple[str, list[dict[str, Any]]]:
    found = reader.read_text(text, ORIGIN, thinks=True)
    return found.content, [json.loads(call.arguments) for call in found.calls]


def test_tool_calls_are_taken_out() -> None:
    said = {"a": 1, "b": "é"}
    assert parsed(f"Let me see.\n{CALL}\n{CALL}") == ("Let me see.", [said, said])
    assert parsed(f"a {CALL} b") == ("a  b", [said])
    assert parsed(CALL.removesuffix("</tool_call>")) == ("", [said]), (
        "a stop string cut the mark off"
    )
    inside = json.dumps({"name": "add", "arguments": {"b": CALL}})
    assert parsed(f"<tool_call>{inside}</tool_call>") == ("", [{"b": CALL}])
    assert parsed(f"<tool_call>{{ {CALL}") == ("<tool_call>{", [said])


@pytest.mark.parametrize(
    "text",
    [
        *("no call ", "<tool_call>{broken</tool_call>", '<tool_call>{"arguments": {}}'),
        *("<tool_call>[]", "<tool_call>" + "[" * 10**5, '<tool_call>{"name": "f"'),
        r'<tool_call>{"name": "f", "arguments": {"a": "\ud83d"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "odd"}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "two words", "arguments": {}}</tool_call>',
    ],
    ids=lambda text: text[:40],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert parsed(text) == (text, [])


@pytest.mark.parametrize("text", ["<tool_call>" * 9000, '<tool_call>{"a":' * 6000, "{" * 90000])
@pytest.mark.parametrize("tool", ["hermes", "llama3", "mistral"])
def test_hostile_texts_take_no_time(text: str, tool: str) -> None:
    reader = AnswerReader(tool, None, lambda *_: lambda text, _: ParsedAnswer(text), ())
    began = time.process_time()
    assert parsed(text, reader) == (text, [])
    assert time.process_time() - began < 0.15


def stream(text: str, sizes: Sequence[int], reader: AnswerReader = HERMES) -> tuple[str, int]:
    gate, seen = TextGate(reader.first_marks(tools=True, thinks=True)), ""
    for size in [*sizes, len(text)]:
        seen += gate.push_text(text[:size])
        text = text[size:]
    found = reader.read_text(gate.held, ORIGIN, thinks=True)
    return seen + found.content, len(found.calls)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 9), max_size=60))
def test_a_gate_lets_nothing_of_a_call_through(sizes: list[int]) -> None:
    assert stream(f"so <tool < it is\n{CALL}", sizes) == ("so <tool < it is", 1)


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", CALL, "{", "}", '"', "é", " ", "\n", "<to"]
)


@settings(max_examples=40)
@given(st.lists(PIECES, max_size=12).map("".join), st.lists(st.integers(1, 9), max_size=30))
def test_a_stream_says_what_the_whole_answer_says(text: str, sizes: list[int]) -> None:
    content, calls = parsed(text)
    assert stream(text, sizes) == (content, len(calls))


@settings(max_examples=40)
@given(st.lists(st.one_of(st.text(max_size=9), st.just(CALL)), max_size=9))
def test_no_character_outside_of_calls_is_lost(parts: list[str]) -> None:
    text = "".join(part for part in parts if part != CALL)
    content, calls = parsed("".join(parts))
    assert len(calls) == parts.count(CALL)
    assert content == (text.rstrip() if calls else text)


def test_a_gate_without_marks_holds_nothing_back_and_one_for_any_text_everything() -> None:
    gate = TextGate(())
    assert [gate.push_text("a "), gate.push_text("<"), gate.held] == ["a ", "<", ""]
    gate = TextGate(("",))
    assert [gate.push_text("a"), gate.push_text("b"), gate.held] == ["", "", "ab"]


def test_special_tokens_are_taken_out_the_longest_first() -> None:
    assert HERMES.clean_text("a<|im_end|>b<|im_end|>xc") == "abc"
    assert AnswerReader(None, None, own_parser, ()).clean_text("a") == "a"


def test_a_parser_that_fails_leaves_the_text_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(text: str, origin: AnswerOrigin) -> ParsedAnswer:
        raise ZeroDivisionError("secret")

    for tool, reasoning in (("hermes", "qwen3"), ("gpt-oss", "gpt-oss")):
        reader = AnswerReader(tool, reasoning, lambda *_: fail, ())
        with caplog.at_level(logging.ERROR):
            for _ in range(2):
                assert parsed(CALL, reader) == (CALL, [])
        assert len(caplog.records) == 1
        assert "ZeroDivisionError at" in caplog.text
        assert "secret" not in caplog.text
        caplog.clear()


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        (ParsedAnswer("Well.", "Hm"), True),
        (ParsedAnswer("", "Hm"), False),
        (ParsedAnswer("Well.", "H"), False),
        (ParsedAnswer("Well.", ""), False),
        (ParsedAnswer("<think>Hm</think>\nWell."), True),
        (ParsedAnswer("\nWell.", "<think>Hm"), True),
        (ParsedAnswer("Well.", "m"), False),
    ],
    ids=str,
)
def test_a_parser_of_reasoning_that_loses_text_is_not_believed(
    found: ParsedAnswer, kept: bool
) -> None:
    text = "<think>Hm</think>\nWell."
    reader = AnswerReader(None, "odd", lambda *_: lambda *_: found, ())
    said = reader.read_text(text, AnswerOrigin(), thinks=True)
    assert said == (found if kept else ParsedAnswer(text))
    assert reader.read_text(text, AnswerOrigin(), thinks=False) == ParsedAnswer(text)
    assert reader.first_marks(tools=False, thinks=True) == ("",)
    assert reader.first_marks(tools=False, thinks=False) == ()


def test_reasoning_may_say_what_its_marks_say() -> None:
    found = ParsedAnswer("think", "think")
    reader = AnswerReader(None, "odd", lambda *_: lambda *_: found, ())
    said = reader.read_text("<think>think</think>think", AnswerOrigin(), thinks=True)
    assert said == found


@pytest.mark.parametrize(
    "found",
    [
        *(ParsedAnswer(""), ParsedAnswer("", "Hm"), ParsedAnswer("", "Hm", (ToolCall("f", "{}"),))),
        ParsedAnswer("", "", (ToolCall("f", '{"a": 1}'),)),
        ParsedAnswer("", "Hm", (ToolCall("f", "odd"),)),
    ],
    ids=str,
)
def test_a_parser_of_whole_texts_that_loses_a_message_is_not_believed(found: ParsedAnswer) -> None:
    text = '<|channel|>analysis<|message|>Hm<|end|><|channel|>commentary to=f<|message|>{"a":1}<|call|>'
    reader = AnswerReader("gpt-oss", "gpt-oss", lambda *_: lambda *_: found, ())
    assert reader.read_text(text, ORIGIN, thinks=True) == ParsedAnswer(text)
    good = ParsedAnswer("", "Hm", (ToolCall("f", '{"a": 1}'),))
    reader = AnswerReader("gpt-oss", "gpt-oss", lambda *_: lambda *_: good, ())
    assert reader.read_text(text, ORIGIN, thinks=True) == good
    assert reader.read_text(text, AnswerOrigin(), thinks=True).content == text, "no tools offered"


def test_of_an_unknown_format_the_parser_gets_the_rest_once() -> None:
    seen = []

    def parse(text: str, origin: AnswerOrigin) -> ParsedAnswer:
        seen.append(text)
        return ParsedAnswer(" tail", calls=(ToolCall("f", "{}"),) if "call" in text else ())

    reader = AnswerReader("jamba", None, lambda *_: parse, ())
    assert parsed("a [1] <call>", reader) == ("a  tail", [{}])
    assert parsed("a [1] <", reader) == ("a [1] <", [])
    assert seen == ["[1] <call>", "[1] <"]


@pytest.mark.parametrize(
    ("names", "template", "chosen"),
    [
        (ParserNames("vllm"), "{% if tools %}…<tool_call>…", ("hermes", None)),
        (ParserNames("vllm"), "{{ messages }}", (None, None)),
        (ParserNames("vllm", "xlam"), "{% if tools %}…<tool_call>…", ("xlam", None)),
        (ParserNames("vllm", None, "qwen3"), "tools <tool_call>", ("hermes", "qwen3")),
        (ParserNames("vllm", None, "hf"), "tools <tool_call>", (None, "hf")),
        (ParserNames("sglang", "gpt-oss"), "", ("gpt-oss", "gpt-oss")),
        (ParserNames("vllm", None, "openai_gptoss"), "", ("openai", "openai_gptoss")),
    ],
    ids=str,
)
def test_parsers_are_chosen_by_flags_then_by_the_template(
    names: ParserNames, template: str, chosen: tuple[str | None, str | None]
) -> None:
    assert choose_parsers(names, template) == chosen


def test_names_that_the_engine_does_not_have_are_refused() -> None:
    for names, said in (
        (
            ParserNames("hf", "odd"),
            "--tool-call-parser 'odd': the hf engine has no such parser: use",
        ),
        (
            ParserNames("hf", None, "qwen3"),
            "--reasoning-parser 'qwen3'.*use one of response_template",
        ),
    ):
        with pytest.raises(EngineError, match=said):
            HERMES_ONLY.check_names(names)
    HERMES_ONLY.check_names(ParserNames("hf", "hermes", "response_template"))


@pytest.mark.parametrize(
    ("pair", "tokenizer", "said"),
    [
        (
            ("hermes", None),
            None,
            "--tool-call-parser hermes can't be used .*: its folder holds none",
        ),
        (("response_template", None), object(), "it has no response_template"),
        (("hermes", "response_template"), object(), "leave the other one out"),
    ],
)
def test_parsers_that_a_tokenizer_does_not_fit_are_refused(
    pair: tuple[str | None, str | None], tokenizer: object, said: str
) -> None:
    with pytest.raises(EngineError, match=said):
        HERMES_ONLY.make_parser(*pair, tokenizer)


@pytest.mark.parametrize(
    ("tool", "shape"),
    [
        ("hermes", "call_[0-9a-f]{24}"),
        ("mistral", "[0-9a-z]{9}"),  # its templates refuse any other length
        ("kimi_k2", "functions.add:3"),
    ],
)
def test_ids_of_calls_are_what_the_formats_templates_take(tool: str, shape: str) -> None:
    reader = AnswerReader(tool, None, lambda *_: lambda text, _: ParsedAnswer(text), ())
    assert re.fullmatch(shape, reader.call_id("add", 3))


def test_formats_that_can_be_forced_are_json_objects() -> None:
    forced = {name for name, form in FORMATS.items() if form.can_force}
    assert forced == {
        *("hermes", "qwen", "qwen25", "qwen3_json", "llama3", "llama3_json", "llama4_json")
    }


def forced_text_is_accepted(tool: str, text: str, *, several: bool = True) -> bool:
    """Whether the grammar of a forced call takes a text, and its end."""
    function = {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    }
    return is_accepted(tool_call_structure(FORMATS[tool], [function], (), several=several), text)


def is_accepted(asked: dict[str, Any], text: str) -> bool:
    """Whether a grammar takes a text, and its end."""
    matcher = LLMatcher(LLTokenizer("byte"), asked["grammar"])
    taken = matcher.try_consume_tokens(list(text.encode()))
    return taken == len(text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize("kept", ["$defs", "definitions"])
def test_a_tool_may_refer_to_parts_of_its_own_schema(kept: str) -> None:
    """As what pydantic writes of nested models; each tool has its own names, and a tree refers to its root."""

    def tool(name: str, kind: str) -> dict[str, Any]:
        part = {"$ref": f"#/{kept}/Part"}
        fields = {"part": part, "$ref": {"type": "string"}, "more": {"$ref": "#"}}
        return {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": fields,
                "additionalProperties": False,
                kept: {"Part": {"type": kind}},
            },
        }

    tools = [tool("add", "integer"), tool("say", "string")]
    asked = tool_call_structure(FORMATS["llama3_json"], tools, (), several=False)
    for name, value, taken in (("add", "1", True), ("add", '"x"', False), ("say", '"x"', True)):
        inner = f'{{"part": {value}, "$ref": "y", "more": {{"part": {value}}}}}'
        assert is_accepted(asked, f'{{"name": "{name}", "arguments": {inner}}}') is taken


def test_tools_whose_schemas_are_too_long_are_refused_by_name() -> None:
    tools = [{"name": "add", "parameters": {"enum": ["x" * 1000] * 200}}]
    with pytest.raises(ProblemError, match=r"tools.* more than 131072 characters"):
        tool_call_structure(FORMATS["hermes"], tools, (), several=False)


@pytest.mark.parametrize("tool", ["hermes", "llama3_json"])
def test_a_forced_call_is_what_the_parser_reads(tool: str) -> None:
    call = '{"name": "add", "arguments": {"a": 1}}'
    if tool == "hermes":
        call = f"<tool_call>\n{call}\n</tool_call>"
    between = ";\n" if tool == "llama3_json" else "\n"
    assert forced_text_is_accepted(tool, call)
    assert forced_text_is_accepted(tool, call + between + call)
    assert not forced_text_is_accepted(tool, call + between + call, several=False)
    for wrong in ("", "Well.", call.replace("add", "mul"), call.replace("1", '"x"'), call + "."):
        assert not forced_text_is_accepted(tool, wrong), wrong
    reader = AnswerReader(tool, None, lambda *_: parse_hermes_call, ())
    assert parsed(call + between + call, reader) == ("", [{"a": 1}, {"a": 1}])
