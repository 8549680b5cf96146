"""Recorded answers, read with the parsers of vLLM and SGLang in their own environments."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import answer_reading_job
from tests.support.engine.engine_kinds import CACHE
from tests.support.engine.engine_programs import EnginePrograms
from tests.support.engine.recorded_answers import (
    ANSWERS,
    ARGUMENTS,
    CALLS,
    HOSTILE,
    OTHERS,
    PARSERS,
    SPECIALS,
    TOOLS,
    Recorded,
    write_tokenizer,
)

RECORDED = {**ANSWERS, **OTHERS}
VOCABULARY = "lib/python3.*/site-packages/tml_renderers/data"
"""In SGLang's environment: has the file of gpt-oss' tokens, which vLLM would download."""
REASONING = {"vllm": ("deepseek_r1", "qwen3"), "sglang": ("deepseek-r1", "qwen3")}
WORDS = (
    *"a é\n.",
    "<",
    "{",
    "[",
    "]",
    '"',
    "think>",
    "\U0001f600",
    "<tool",
    "python_tag|>",
    "[TOOL",
)


def random_texts(family: str, count: int) -> list[tuple[str, str]]:
    """Texts around calls of a format, and their content: what is no call."""
    rng = random.Random(family)
    texts = []
    for _ in range(count):
        before, after = ("".join(rng.choices(WORDS, k=rng.randint(0, 12))) for _ in range(2))
        texts.append((f"{before}{CALLS[family]} z{after}", before + "\n z" + after))
    return texts


def plain_texts(count: int) -> list[str]:
    """Texts of pieces of marks, without a call."""
    rng = random.Random(count)
    parts = (*WORDS, "<tool_call>", "</tool_call>", "<function=", *SPECIALS[:2], "}", '{"name": ')
    return ["".join(rng.choices(parts, k=rng.randint(1, 30))) for _ in range(count)]


def long_text(family: str) -> str:
    """A call with a page of HTML of 40 KB, as agents write files by calls."""
    return CALLS[family].replace("\U0001f600", "<b>a > b</b>{x}[y] " * 2000, 1)


def cases(engine: str) -> dict[str, dict[str, Any]]:
    """What the job reads, by a name."""
    parsers = PARSERS[engine]
    found: dict[str, dict[str, Any]] = {
        family: {"tool": parsers.get(family, family), "texts": [each.text for each in answers]}
        for family, answers in RECORDED.items()
    }
    for family in CALLS:
        around = [*(text for text, _ in random_texts(family, 25)), *plain_texts(40)]
        found |= {
            f"around {family}": {"tool": parsers[family], "texts": around},
            f"long {family}": {"tool": parsers[family], "texts": [long_text(family)]},
            f"hostile {family}": {"tool": parsers[family], "texts": HOSTILE, "sizes": [1]},
        }
    thoughts = ["Hm é.</think>\n\nWell.", "<think>Hm é.</think>Well.", "Hm é."]
    both = [f"Hm.</think>Well.\n{ANSWERS['hermes'][1].text}"]
    for name in REASONING[engine]:
        opened = {"reasoning": name, "prompt": "a<think>\n"}
        closed = {"reasoning": name, "prompt": "<think>\n\n</think>\n\n"}
        found |= {
            f"hostile {name}": {"reasoning": name, "texts": HOSTILE, "sizes": [1]},
            f"opened {name}": {**opened, "texts": thoughts},
            f"closed {name}": {**closed, "texts": ["Well."]},
            f"both {name}": {**opened, "tool": "hermes", "texts": both},
        }
    names = [{"tool": "odd"}, {"reasoning": "odd"}, {"tool": "response_template"}]
    return {**found, **{f"refused {number}": each for number, each in enumerate(names)}}


@dataclass(frozen=True)
class Results:
    """What came of the cases of one engine."""

    engine: str
    answers: dict[str, dict[str, Any]]

    def found(self, name: str) -> list[list[list[Any]]]:
        """For each text of a case what was read, whole and in pieces."""
        answer = self.answers[name]
        assert "error" not in answer, answer
        found: list[list[list[Any]]] = answer["found"]
        return found


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    programs: EnginePrograms = request.getfixturevalue(f"{request.param}_programs")
    [vocabulary] = (CACHE / "env-sglang").glob(VOCABULARY)
    answers = programs.read_answer(
        Path(answer_reading_job.__file__),
        request.param,
        write_tokenizer(tmp_path_factory.mktemp("marks")),
        asked={"tools": TOOLS, "cases": cases(request.param)},
        TIKTOKEN_ENCODINGS_BASE=str(vocabulary),
    )
    return Results(request.param, answers)


def expected(answer: Recorded) -> list[Any]:
    content = answer.content
    if content is None:
        content = answer.text
        for mark in SPECIALS:
            content = content.replace(mark, "")
    return [content, answer.reasoning, [[name, ARGUMENTS] for name in answer.calls]]


@pytest.mark.parametrize("family", RECORDED)
def test_recorded_answers_are_read_whole_and_in_pieces(results: Results, family: str) -> None:
    for answer, reads in zip(RECORDED[family], results.found(family), strict=True):
        for content, reasoning, calls in reads:
            said = [[name, json.loads(arguments)] for name, arguments in calls]
            assert [content, reasoning, said] == expected(answer), answer.text


@pytest.mark.parametrize("family", CALLS)
def test_no_text_outside_of_calls_is_lost(results: Results, family: str) -> None:
    texts, plain = random_texts(family, 25), plain_texts(40)
    found = results.found(f"around {family}")
    for (text, content), reads in zip(texts, found, strict=False):
        for read in reads:
            assert "".join(read[0].split()) == "".join(content.split()), text
            assert len(read[2]) == 2, text
    for text, reads in zip(plain, found[len(texts) :], strict=True):
        clean = text
        for mark in SPECIALS:
            clean = clean.replace(mark, "")
        assert [read[0] for read in reads if not read[2]] == [clean] * 4, text


@pytest.mark.parametrize("family", CALLS)
def test_long_arguments_take_no_time(results: Results, family: str) -> None:
    [reads] = results.found(f"long {family}")
    assert [[call[0] for call in read[2]] for read in reads] == [["add", "mul"]] * 4
    assert results.answers[f"long {family}"]["seconds"] < 4, "four times"


def test_hostile_texts_take_little_time(results: Results) -> None:
    for name in (*CALLS, *REASONING[results.engine]):
        assert results.answers[f"hostile {name}"]["seconds"] < 3, name


def test_reasoning_is_apart(results: Results) -> None:
    for name in REASONING[results.engine]:
        opened = results.found(f"opened {name}")
        assert [[part.strip() for part in read[:2]] for read in opened[0]] == [
            ["Well.", "Hm é."]
        ] * 4
        assert [read[:2] for read in opened[1]] == [["Well.", "Hm é."]] * 4
        assert [read[:2] for read in opened[2]] == [["", "Hm é."]] * 4, "cut off"
        assert [read[:2] for read in results.found(f"closed {name}")[0]] == [["Well.", ""]] * 4
        [both] = results.found(f"both {name}")
        for content, reasoning, calls in both:
            assert (reasoning, [call[0] for call in calls]) == ("Hm.", ["add", "mul"])
            assert content.split() == ["Well.", "a", "b", "c"]


def test_names_that_an_engine_does_not_have_are_refused(results: Results) -> None:
    tool, reasoning, template = (results.answers[f"refused {n}"]["error"] for n in range(3))
    known = f"the {results.engine} engine has no such parser: use one of"
    assert f"--tool-call-parser 'odd': {known}" in tool
    assert "hermes" in tool
    assert "--reasoning-parser 'odd'" in reasoning
    assert "it has no response_template" in template
