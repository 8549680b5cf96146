"""What is refused, with the status and the field that the contract gives it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engine.contracts import VOCAB, Served, outputs_of
from tests.support.engine.workers import slug

COLD_AND_HOT = (1e-300, 1e-8, 0.005, 100)
"""Temperatures that the schema lets through and numbers of an engine may not hold."""
EXTREMES: list[dict[str, Any]] = [
    {"top_p": 1e-300},
    {"top_k": 2**31 - 1},
    {"min_p": 1},
    {"repetition_penalty": 1e-300},
    {"repetition_penalty": 1e-300, "allowed_token_ids": [9, 9, 10]},
    {"repetition_penalty": 1e-300, "logit_bias": {"5": 1e300, "9": -1e300}, "temperature": 0.01},
    {"repetition_penalty": 10, "logit_bias": {"5": -1e300}},
    {"repetition_penalty": 10, "frequency_penalty": -2, "presence_penalty": -2},
    {"allowed_token_ids": [9], "logit_bias": {"9": -1e300}},
    {"logit_bias": dict.fromkeys(map(str, range(VOCAB)), -1e300)},
    {"stop_token_ids": list(range(3, 259))},
    {"seed": 2**63 - 1, "n": 2},
]
"""What else the schema lets through at its edges, or beyond what numbers of an engine hold."""
BAD: list[tuple[dict[str, Any], int, str, str]] = [
    ({"token_ids": [VOCAB]}, 422, "unsupported", "token_ids"),
    ({"token_ids": [5] * 2048}, 413, "too-long", "token_ids"),
    ({"sampling": {"max_tokens": 2041}}, 413, "too-long", "token_ids"),
    ({"sampling": {"stop_token_ids": [VOCAB]}}, 422, "unsupported", "sampling.stop_token_ids"),
    ({"sampling": {"allowed_token_ids": [VOCAB]}}, 422, "unsupported", "sampling.allowed"),
    ({"sampling": {"logit_bias": {str(VOCAB): 1}}}, 422, "unsupported", "sampling.logit_bias"),
]
"""What only an engine knows; the schema's own refusals are in tests/unit/common/wire/test_worker_wire.py."""


@pytest.mark.parametrize(
    ("fields", "status", "problem", "field"),
    BAD,
    ids=[f"{status} {str(fields)[:40]}" for fields, status, _, _ in BAD],
)
def test_bad_requests_name_the_field(
    worker: Served, fields: dict[str, Any], status: int, problem: str, field: str
) -> None:
    answer = worker.generate(**fields)
    assert (answer.status_code, slug(answer)) == (status, problem)
    assert answer.json()["errors"][0]["field"].startswith(field)


@pytest.mark.parametrize("temperature", COLD_AND_HOT)
def test_extreme_temperatures_are_served_as_asked_or_refused(
    worker: Served, temperature: float
) -> None:
    """None may end the engine, or be drawn at another temperature."""
    sampling = {"max_tokens": 3, "ignore_eos": True, "temperature": temperature}
    answer = worker.generate(sampling=sampling)
    if answer.status_code == 422:
        assert slug(answer) == "unsupported"
        assert answer.json()["errors"][0]["field"] == "sampling.temperature"
        return
    [output] = outputs_of(answer)
    assert output["abort_reason"] is None
    if temperature < 1:  # all but greedy
        assert output["logprobs"] == pytest.approx([0] * 3, abs=1e-3)


@pytest.mark.parametrize("extreme", EXTREMES, ids=[str(each)[:40] for each in EXTREMES])
def test_extremes_are_served_or_refused(worker: Served, extreme: dict[str, Any]) -> None:
    """No request may end the engine or lead to numbers that are none."""
    answer = worker.generate(sampling={"max_tokens": 3, "ignore_eos": True, **extreme})
    if answer.status_code == 422:
        assert slug(answer) == "unsupported"
        assert answer.json()["errors"][0]["field"].removeprefix("sampling.") in extreme
        return
    for output in outputs_of(answer):
        assert output["abort_reason"] is None


def test_the_longest_request_is_served(worker: Served) -> None:
    [output] = worker.outputs({"max_tokens": 1, "ignore_eos": True}, token_ids=[5] * 2047)
    assert output["stop_reason"] == "length"
