"""Recorded answers, read with the parsers of vLLM and SGLang in their own environments; each is imported once."""

from __future__ import annotations

import json
import os
import random
import subprocess
from typing import Any

import pytest

from tests.support.engine.engine_kinds import CACHE, KINDS, ROOT, left_out
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

JOB = ROOT / "tests" / "support" / "engine" / "answer_reading_job.py"
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


def cases(engine: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"tool": PARSERS[engine][family], "texts": [each.text for each in answers], "tools": TOOLS}
        for family, answers in ANSWERS.items()
    ]
    found += [
        {"tool": name, "texts": [each.text for each in answers], "tools": TOOLS}
        for name, answers in OTHERS.items()
    ]
    found += [
        {
            "tool": PARSERS[engine][family],
            "texts": [*(text for text, _ in random_texts(family, 60)), *plain_texts(100)],
            "tools": TOOLS,
        }
        for family in CALLS
    ]
    found += [
        {"tool": PARSERS[engine][family], "texts": [long_text(family)], "tools": TOOLS}
        for family in CALLS
    ]
    found += [
        {"tool": PARSERS[engine][family], "texts": HOSTILE, "tools": TOOLS} for family in CALLS
    ]
    found += [{"reasoning": name, "texts": HOSTILE, "tools": []} for name in REASONING[engine]]
    for name in REASONING[engine]:
        for prompt in ("a<think>\n", "a"):
            texts = ["Hm é.</think>\n\nWell.", "<think>Hm é.</think>Well.", "Hm é."]
            found.append({"reasoning": name, "tools": [], "texts": texts, "prompt": prompt})
        closed = {
            "reasoning": name,
            "tools": [],
            "texts": ["Well."],
            "prompt": "<think>\n\n</think>\n\n",
        }
        both = f"Hm.</think>Well.\n{ANSWERS['hermes'][1].text}"
        found += [
            closed,
            {
                "tool": "hermes",
                "reasoning": name,
                "tools": TOOLS,
                "texts": [both],
                "prompt": "<think>\n",
            },
        ]
    return [*found, {"tool": "odd"}, {"reasoning": "odd"}, {"tool": "response_template"}]


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[dict[str, Any]]]:
    engine = request.param
    if reason := left_out(KINDS[engine]):
        pytest.skip(reason)
    [vocabulary] = (CACHE / "env-sglang").glob(VOCABULARY)
    folder = write_tokenizer(tmp_path_factory.mktemp("marks"))
    ours = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [str(KINDS[engine].python), str(JOB), engine, str(folder)],
        env={**os.environ, **ours, "TIKTOKEN_ENCODINGS_BASE": str(vocabulary)},
        input=json.dumps(cases(engine)),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "Traceback" not in run.stderr, "parsers log the text of answers"
    return engine, json.loads(run.stdout.splitlines()[-1])


def found_of(results: tuple[str, list[dict[str, Any]]], **wanted: Any) -> list[list[list[Any]]]:
    engine, answers = results
    for case, answer in zip(cases(engine), answers, strict=True):
        if all(case.get(key) == value for key, value in wanted.items()):
            assert "error" not in answer, answer
            found: list[list[list[Any]]] = answer["found"]
            return found
    raise AssertionError(f"no case {wanted}")


def expected(answer: Recorded) -> list[Any]:
    content = answer.content
    if content is None:
        content = answer.text
        for mark in SPECIALS:
            content = content.replace(mark, "")
    return [content, answer.reasoning, [[name, ARGUMENTS] for name in answer.calls]]


@pytest.mark.parametrize("family", [*ANSWERS, *OTHERS])
def test_recorded_answers_are_read_whole_and_in_pieces(
    results: tuple[str, list[dict[str, Any]]], family: str
) -> None:
    answers = {**ANSWERS, **OTHERS}[family]
    texts = [each.text for each in answers]
    for answer, reads in zip(answers, found_of(results, texts=texts), strict=True):
        for content, reasoning, calls in reads:
            said = [[name, json.loads(arguments)] for name, arguments in calls]
            assert [content, reasoning, said] == expected(answer), answer.text


@pytest.mark.parametrize("family", CALLS)
def test_no_text_outside_of_calls_is_lost(
    results: tuple[str, list[dict[str, Any]]], family: str
) -> None:
    texts = random_texts(family, 60)
    plain = plain_texts(100)
    found = found_of(results, texts=[*(text for text, _ in texts), *plain])
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
def test_long_arguments_take_no_time(
    results: tuple[str, list[dict[str, Any]]], family: str
) -> None:
    engine, answers = results
    for case, answer in zip(cases(engine), answers, strict=True):
        if case.get("texts") == [long_text(family)]:
            assert [[call[0] for call in read[2]] for read in answer["found"][0]] == [
                ["add", "mul"]
            ] * 4
            assert answer["seconds"] < 4, "four times"
            return
    raise AssertionError(family)


def test_hostile_texts_take_little_time(results: tuple[str, list[dict[str, Any]]]) -> None:
    engine, answers = results
    taken = {
        case.get("tool") or case["reasoning"]: answer["seconds"]
        for case, answer in zip(cases(engine), answers, strict=True)
        if case.get("texts") == HOSTILE
    }
    assert len(taken) == 7
    assert max(taken.values()) < 12, taken


def test_reasoning_is_apart(results: tuple[str, list[dict[str, Any]]]) -> None:
    for name in REASONING[results[0]]:
        opened = found_of(results, reasoning=name, prompt="a<think>\n")
        assert [[part.strip() for part in read[:2]] for read in opened[0]] == [
            ["Well.", "Hm é."]
        ] * 4
        assert [read[:2] for read in opened[1]] == [["Well.", "Hm é."]] * 4
        assert [read[:2] for read in opened[2]] == [["", "Hm é."]] * 4, "cut off"
        closed = found_of(results, reasoning=name, prompt="<think>\n\n</think>\n\n")
        assert [read[:2] for read in closed[0]] == [["Well.", ""]] * 4
        [both] = found_of(results, reasoning=name, tool="hermes")
        for content, reasoning, calls in both:
            assert (reasoning, [call[0] for call in calls]) == ("Hm.", ["add", "mul"])
            assert content.split() == ["Well.", "a", "b", "c"]


def test_names_that_an_engine_does_not_have_are_refused(
    results: tuple[str, list[dict[str, Any]]],
) -> None:
    engine, answers = results
    tool, reasoning, template = (answer["error"] for answer in answers[-3:])
    assert f"--tool-call-parser 'odd': the {engine} engine has no such parser: use one of" in tool
    assert "hermes" in tool
    assert "--reasoning-parser 'odd'" in reasoning
    assert "it has no response_template" in template
