"""Outputs whose text must match a schema, an expression, a grammar or one of several texts; the same for every engine."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.support.engine.contracts import EOS, VOCAB, Output, Served, made_by, outputs_of, pieces
from tests.support.engine.reference import Reference
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import PROMPT, slug

PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Gr\u00fcn"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
COLORS = ["red", "green", 'a "strange" one', "gr\u00fcn"]
FORMS: dict[str, Any] = {
    "json_schema": PERSON,
    "regex": r"[0-9]{3}-(cat|dog)s?",
    "grammar": 'start: "(" start ")" | "x"{1,3}',
    "choice": COLORS,
}
BITS = 300
LONG = {"regex": f"[01]{{{BITS}}}"}


@pytest.fixture(scope="module")
def tokenizer(tiny_models: TinyModels) -> Any:
    return AutoTokenizer.from_pretrained(tiny_models.model(1))


@pytest.fixture(scope="module")
def words(tokenizer: Any) -> list[str]:
    """The text of each token, alone."""
    return [tokenizer.decode([token]) for token in range(VOCAB)]


def text_of(output: Output, tokenizer: Any) -> str:
    return str(tokenizer.decode([token for token in output["token_ids"] if token not in EOS]))


def matches(form: str, text: str) -> bool:
    if form == "json_schema":
        found = json.loads(text)
        assert list(found) == ["name", "age", "tags"], text
        assert found["name"] in ("Ada", "Gr\u00fcn")
        assert 0 <= found["age"] <= 120
        assert all(isinstance(tag, bool) for tag in found["tags"])
        return len(found["tags"]) <= 3
    if form == "choice":
        return text in COLORS
    expression = FORMS["regex"] if form == "regex" else r"\(*x{1,3}\)*"
    return re.fullmatch(expression, text) is not None and text.count("(") == text.count(")")


@pytest.mark.parametrize("form", FORMS)
def test_the_text_matches(worker: Served, tokenizer: Any, form: str) -> None:
    """Whole and streamed, next to outputs without a grammar, which are what they are without it."""
    others = worker.busy(4, 60, sampling={"temperature": 0})
    asked = {"structured": {form: FORMS[form]}}
    # Brackets that a random model opens may need as many tokens to be closed.
    sampling = {"max_tokens": 600, "temperature": 1.0, "seed": 5, "n": 6, "stop_token_ids": []}
    outputs = worker.outputs(sampling, **asked)
    events = worker.stream(token_ids=PROMPT, sampling=sampling, **asked)
    streamed = [pieces(events, index) for index in range(6)]
    assert [o["token_ids"] for o in streamed] == [o["token_ids"] for o in outputs]
    ended = [output for output in outputs if output["stop_reason"] == "stop"]
    assert len(ended) >= (6 if form != "grammar" else 3)
    for output in ended:
        assert output["stop_match"]["token_id"] == output["token_ids"][-1]
        assert matches(form, text_of(output, tokenizer)), output
    # One token can't be the whole text, so a limit leaves its beginning.
    [cut] = worker.outputs({"max_tokens": 1, "temperature": 0}, **asked)
    assert cut["stop_reason"] == "length"
    plain = {tuple(answer.json()["outputs"][0]["token_ids"]) for answer in others()}
    [alone] = worker.outputs({"max_tokens": 60, "temperature": 0, "ignore_eos": True})
    assert plain == {tuple(alone["token_ids"])}


def masked_logprobs(
    judge: Reference, words: list[str], ids: list[int], ends: Collection[int], temperature: float
) -> list[float]:
    """The logprobs of tokens of `LONG` under the model's distribution, masked by the text so far."""
    logits = judge.logits(PROMPT, ids)
    expected, made = [], 0
    for row, token in zip(logits, ids, strict=True):
        fits = [
            index in ends
            if made == BITS
            else bool(word) and set(word) <= {"0", "1"} and len(word) <= BITS - made
            for index, word in enumerate(words)
        ]
        masked = (row / temperature).masked_fill(~torch.tensor(fits), -torch.inf)
        expected.append(float(masked.log_softmax(-1)[token]))
        made += 0 if token in EOS else len(words[token])
    return expected


def test_logprobs_are_those_of_the_masked_distribution(
    worker: Served, reference: dict[int, Reference], words: list[str], tokenizer: Any
) -> None:
    """And `raw` ones the model's own, where an engine has both."""
    sampling = {"max_tokens": 400, "temperature": 0.7, "top_k": 0, "seed": 3}
    [output] = worker.outputs(sampling, structured=LONG, logprobs="sampling", top_logprobs=3)
    assert output["stop_reason"] == "stop"
    ids = output["token_ids"]
    # vLLM knows the tokenizer's own EOS only.
    ends = {tokenizer.eos_token_id} if worker.kind.engine == "vllm" else EOS
    expected = masked_logprobs(reference[1], words, ids, ends, 0.7)
    assert output["logprobs"] == pytest.approx(expected, abs=2e-3)
    for row, values in zip(
        output["top_logprobs"]["token_ids"], output["top_logprobs"]["logprobs"], strict=True
    ):
        finite = [token for token, value in zip(row, values, strict=True) if value > -1e9]
        assert all(token in EOS or set(words[token]) <= {"0", "1"} for token in finite)
    answer = worker.generate(token_ids=PROMPT, sampling=sampling, structured=LONG, logprobs="raw")
    if worker.kind.engine == "vllm":
        assert (answer.status_code, slug(answer)) == (422, "unsupported")
        assert answer.json()["errors"][0]["field"] == "logprobs"
        return
    [raw] = answer.json()["outputs"]
    assert raw["token_ids"] == ids
    own = reference[1].raw_logprobs(PROMPT, ids)
    assert raw["logprobs"] == pytest.approx(own, abs=2e-3)


@pytest.mark.parametrize("policy", ["Drain", "Abort", "Keep", "Recompute"])
def test_new_weights_below_a_structured_output(
    worker: Served, words: list[str], policy: str
) -> None:
    if policy not in worker.able["in_flight"]:
        pytest.skip(f"{worker.kind} declares no {policy}")
    epoch, new = worker.stage_next(2)
    sampling = {"max_tokens": 400, "temperature": 1.0}
    running = [
        worker.in_background(
            lambda: worker.generate(token_ids=PROMPT, sampling=sampling, structured=LONG)
        )
        for _ in range(8)
    ]
    worker.makes(40)
    worker.commit(epoch, new, in_flight=policy, deadline_seconds=60)
    spanning = 0
    for future in running:
        answer = future.result(120)
        [output] = outputs_of(answer)
        text = "".join(words[token] for token in output["token_ids"] if token not in EOS)
        assert set(text) <= {"0", "1"}, text
        if output["stop_reason"] == "stop":
            assert len(text) == BITS
        else:
            assert (policy, output["abort_reason"]) == ("Abort", "weights")
        spanning += len(made_by(output)) == 2
    assert spanning == 0 or policy in ("Keep", "Recompute")


def test_what_cant_be_followed_is_refused_and_nothing_else_suffers(worker: Served) -> None:
    """More of what is refused, and grammars without end: tests/engine/test_grammars.py."""
    others = worker.busy(4, 100)
    for form, value in (
        ("regex", "(unclosed"),
        ("json_schema", {"type": "strange"}),
        ("grammar", "start: missing"),
    ):
        answer = worker.generate(token_ids=PROMPT, structured={form: value})
        assert answer.status_code == 422, answer.text
        assert answer.json()["errors"][0]["field"] == f"structured.{form}"
    for answer in others():
        outputs_of(answer)


def test_a_structured_output_can_be_aborted_at_any_time(worker: Served) -> None:
    """Also while its grammar is checked or compiled: at once, or some milliseconds later."""
    for number in range(6):
        name = f"early-{number}"
        schema = {"enum": [f"value {number} {index}" for index in range(2000)]}
        running = worker.in_background(
            lambda: worker.generate(
                request_id=name,  # noqa: B023
                token_ids=PROMPT,
                structured={"json_schema": schema},  # noqa: B023
                sampling={"max_tokens": 300},
            )
        )
        for _ in range(200):
            if running.done():
                break
            worker.post("abort", request_ids=[name])
        answer = running.result(60)
        assert answer.status_code == 200, answer.text
        [output] = answer.json()["outputs"]
        assert output["abort_reason"] == "control" or output["stop_reason"] == "stop"
