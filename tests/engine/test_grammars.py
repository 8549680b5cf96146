"""Grammars of requests: what the checking process accepts, refuses and is killed for; masks against the tokens."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from rollout_common.wire import MAX_GRAMMAR_LENGTH, GenerateRequest, StructuredOutput
from rollout_common.wire.problems import ProblemError
from rollout_worker.engine import InvalidRequest
from rollout_worker.engines.grammars import grammar_checker
from rollout_worker.engines.grammars.grammar_checker import GrammarChecker, supports_grammars
from rollout_worker.engines.grammars.grammar_state import (
    GrammarCompiler,
    apply_masks,
    fill_masks,
)
from rollout_worker.engines.settings import MAX_WAITING_GRAMMARS
from tests.support.engine.tinymodels import TinyModels
from tests.support.waiting import until

EOS = (0, 2)
HEAVY = {
    "allOf": [{"type": "string", "pattern": f".*{chr(97 + i)}.{{{10 + i}}}"} for i in range(20)]
}
"""A schema that compiles for minutes, whatever the library's own limits."""
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def chain(length: int) -> str:
    """A grammar of rules that are nested in each other: thousands overflow the stack of a thread."""
    rules = [f"r{index}: r{index + 1} r{index + 1}" for index in range(length)]
    return "\n".join(["start: r0", *rules, f'r{length}: "a"'])


@pytest.fixture(scope="module")
def folder(tiny_models: TinyModels) -> Path:
    return tiny_models.model(1)


@pytest.fixture
async def checker(folder: Path) -> AsyncIterator[GrammarChecker]:
    made = GrammarChecker(lambda: folder)
    yield made
    await made.stop()


async def refusal(checker: GrammarChecker, **structured: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        await checker.check_structured(StructuredOutput(**structured), EOS)
    return caught.value


async def stop_process(pid: int) -> None:
    """Freeze a process; until all its threads have stopped it may still answer."""
    os.kill(pid, signal.SIGSTOP)
    stat = Path(f"/proc/{pid}/stat")
    await until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", 10, what="the stop")


async def test_each_kind_is_compiled_and_remembered(checker: GrammarChecker) -> None:
    for structured in (
        {"json_schema": PERSON},
        {"regex": "[0-9]{3}-[a-z]+"},
        {"grammar": 'start: "yes" | "no" " indeed"?'},
        {"grammar": 'root ::= "yes" | "no"'},  # GBNF
        {"choice": ["red", 'a "quoted" one', "gr\u00fcn\n"]},
    ):
        asked = StructuredOutput(**structured)
        found = await checker.check_structured(asked, EOS)
        assert found.source == asked
        assert found.compiled
    process = checker._process
    assert process is not None
    process.kill()
    again = await checker.check_structured(StructuredOutput(json_schema=PERSON), EOS)
    assert again.source.json_schema == PERSON


async def test_a_grammar_that_cant_be_followed_is_refused(checker: GrammarChecker) -> None:
    """And it goes on with the same process."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({"regex": "(unclosed"}, "regex"),
        ({"regex": "(" * 20_000 + ")" * 20_000}, "regex"),
        ({"grammar": "start: nothing_here"}, "nothing_here"),
        ({"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000}, "nested"),
        ({"json_schema": {"type": "strange"}}, "strange"),
        ({"json_schema": {"$ref": "#"}}, ""),
        ({"json_schema": {"enum": []}}, ""),
        ({"grammar": chain(3000)}, "too much"),  # it would overflow the stack
        ({"regex": "((a{1000}){1000}){1000}"}, ""),
    ]
    for structured, word in cases:
        error = await refusal(checker, **structured)
        assert error.field == f"structured.{next(iter(structured))}", structured
        assert word in str(error)
        assert len(str(error)) < 700
    await checker.check_structured(StructuredOutput(choice=["a"]), EOS)


async def test_a_grammar_without_end_is_killed_while_the_loop_goes_on(
    checker: GrammarChecker,
) -> None:
    await checker.check_structured(StructuredOutput(choice=["a"]), EOS)
    began, turns = time.monotonic(), 0
    checking = asyncio.create_task(refusal(checker, json_schema=HEAVY))
    waiting = asyncio.create_task(
        checker.check_structured(StructuredOutput(regex="b+"), EOS)  # queued behind it
    )
    while not checking.done():
        await asyncio.sleep(0.01)
        turns += 1
    assert "too much time or memory" in str(await checking)
    assert turns > 50
    await waiting
    assert time.monotonic() - began < 25
    began = time.monotonic()
    await refusal(checker, json_schema=HEAVY)
    assert time.monotonic() - began < 1, "its verdict is remembered"


async def test_a_cancelled_check_leaves_no_answer_for_the_next(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await checker.check_structured(StructuredOutput(choice=["a"]), EOS)
    monkeypatch.setattr(grammar_checker, "GRAMMAR_CHECK_SECONDS", 1.5)
    checking = asyncio.create_task(
        checker.check_structured(StructuredOutput(json_schema=HEAVY), EOS)
    )
    await asyncio.sleep(0.2)
    checking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await checking
    found = await checker.check_structured(StructuredOutput(regex="c+"), EOS)
    assert "c+" in found.compiled
    began = time.monotonic()
    await refusal(checker, json_schema=HEAVY)
    assert time.monotonic() - began < 1, "the check went on, and its verdict is remembered"


async def test_so_many_grammars_wait_and_no_more(checker: GrammarChecker) -> None:
    known, *others = (StructuredOutput(choice=[str(n)]) for n in range(MAX_WAITING_GRAMMARS + 3))
    await checker.check_structured(known, EOS)
    assert checker._process is not None
    os.kill(checker._process.pid, signal.SIGSTOP)
    waiting = [
        asyncio.create_task(checker.check_structured(each, EOS))
        for each in [*others[:-2], others[3]]
    ]
    await asyncio.sleep(0)
    with pytest.raises(ProblemError) as full:
        await checker.check_structured(others[-2], EOS)
    assert (full.value.slug, full.value.retry_after) == ("queue-full", 1)
    assert await checker.check_structured(known, EOS)
    waiting.pop(5).cancel()
    await asyncio.sleep(0)
    waiting.append(asyncio.create_task(checker.check_structured(others[-1], EOS)))
    os.kill(checker._process.pid, signal.SIGCONT)
    assert all(await asyncio.gather(*waiting))


async def test_a_stopped_process_is_noticed(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await checker.check_structured(StructuredOutput(choice=["a"]), EOS)
    assert checker._process is not None
    await stop_process(checker._process.pid)
    monkeypatch.setattr(grammar_checker, "GRAMMAR_CHECK_SECONDS", 0.5)
    error = await refusal(checker, choice=["b"])
    assert "too much time" in str(error)


async def test_a_check_that_is_stopped_before_it_begins_hinders_no_other(
    checker: GrammarChecker,
) -> None:
    checking = asyncio.create_task(checker.check_structured(StructuredOutput(choice=["a"]), EOS))
    await asyncio.sleep(0)
    await checker.stop()
    with pytest.raises(asyncio.CancelledError):
        await checking
    async with asyncio.timeout(60):
        assert await checker.check_structured(StructuredOutput(choice=["a"]), EOS)


@pytest.mark.parametrize("holds", [True, False])
async def test_the_refusal_of_a_killed_check_holds_for_a_while(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch, *, holds: bool
) -> None:
    """The kernel may have killed it for want of memory that others took."""
    monkeypatch.setattr(grammar_checker, "LATE_VERDICT_SECONDS", 60 if holds else 0)
    await checker.check_structured(StructuredOutput(choice=["a"]), EOS)
    assert checker._process is not None
    await stop_process(checker._process.pid)
    checking = asyncio.create_task(refusal(checker, choice=["b"]))
    await asyncio.sleep(0.1)
    os.kill(checker._process.pid, signal.SIGKILL)
    assert "too much time or memory" in str(await checking)
    if holds:
        assert "too much time or memory" in str(await refusal(checker, choice=["b"]))
    else:
        assert (await checker.check_structured(StructuredOutput(choice=["b"]), EOS)).compiled


@pytest.mark.parametrize(
    ("structured", "word"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "choice": ["a"]}, "exactly one"),
        ({"regex": ""}, "at least 1"),
        ({"choice": []}, "at least 1"),
        ({"choice": ["a"] * 1001}, "at most 1000"),
        ({"regex": "a" * (MAX_GRAMMAR_LENGTH + 1)}, "at most"),
        ({"choice": ["a" * 1000] * 200}, "make it smaller"),
        ({"json_schema": {"enum": ["a" * MAX_GRAMMAR_LENGTH]}}, "make it smaller"),
        ({"json_schema": {"const": float("nan")}}, "JSON"),
        ({"regex": "a\0"}, "NUL"),
        ({"json_schema": {"const": "\ud800"}}, "surrogate"),
        ({"jsonschema": {}}, "extra"),
        ({"json_schema": "{}"}, "dictionary"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_field_is_named(structured: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=f"(?i){word}"):
        GenerateRequest.model_validate({"token_ids": [1], "structured": structured})


@pytest.mark.parametrize(
    "sampling",
    [{"ignore_eos": True}, {"min_tokens": 2}, {"allowed_token_ids": [5]}],
    ids=lambda value: next(iter(value)),
)
def test_what_leaves_no_token_to_draw_is_refused(sampling: dict[str, Any]) -> None:
    field = next(iter(sampling))
    with pytest.raises(ValueError, match=f"sampling.{field}[\\s\\S]*with structured"):
        GenerateRequest.model_validate(
            {"token_ids": [1], "sampling": sampling, "structured": {"regex": "a"}}
        )


async def test_masks_allow_exactly_the_tokens_that_continue_the_text(
    checker: GrammarChecker, folder: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert supports_grammars(tokenizer, EOS)
    assert not supports_grammars(tokenizer, ())
    assert not supports_grammars(None, EOS)
    # Logits with more columns than there are tokens, as padded embeddings have them.
    vocab = len(tokenizer) + 77
    compiler = GrammarCompiler(tokenizer, vocab, EOS)
    texts = ["green", "grey", "red"]
    found = await checker.check_structured(StructuredOutput(choice=texts), EOS)
    state = compiler.compile_grammar(found.compiled)
    other = compiler.compile_grammar(found.compiled)
    words = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    text = ""
    while True:
        masks = fill_masks([None, state, other], torch.device("cpu"))
        assert masks is not None
        assert masks.within_rows(0, 1) is None
        last = masks.within_rows(2, 3)
        assert last is not None
        assert (last.rows, len(last.masks)) == ([0], 1)
        logits = torch.zeros(3, vocab)
        apply_masks(logits, masks)
        assert torch.isfinite(logits[0]).all()
        allowed = set(torch.isfinite(logits[1]).nonzero().flatten().tolist())
        if text in texts:
            assert allowed == set(EOS)
            break
        wanted = {
            token
            for token, word in enumerate(words)
            if word and token not in EOS and any(each.startswith(text + word) for each in texts)
        }
        assert allowed == wanted
        token = max(allowed, key=lambda each: len(words[each]))
        assert state.accept_token(token) is None
        text += words[token]
    assert state.accept_token(EOS[1]) is None
    # Another output of the same grammar is still at its beginning.
    assert other.accept_token(tokenizer.encode("r", add_special_tokens=False)[0]) is None


async def test_a_token_that_the_mask_excludes_ends_the_grammar(
    checker: GrammarChecker, folder: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = await checker.check_structured(StructuredOutput(choice=["red"]), EOS)
    state = GrammarCompiler(tokenizer, len(tokenizer), EOS).compile_grammar(found.compiled)
    assert state.accept_token(tokenizer.encode("x", add_special_tokens=False)[0])
