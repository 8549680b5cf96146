"""Greedy tokens and logprobs of both kinds, against plain transformers."""

from __future__ import annotations

from functools import partial

import pytest

from tests.support.engine.contracts import Served
from tests.support.engine.judging import CLOSE, SHAPES, TEMPERATURES, check
from tests.support.engine.reference import Reference
from tests.support.engine.workers import PROMPT


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_logprobs_of_the_sampling_distribution(
    worker: Served, reference: dict[int, Reference], temperature: float
) -> None:
    check(worker, "sampling", temperature, reference[1])


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_raw_logprobs_where_sampling_ones_are_the_default(
    worker: Served, reference: dict[int, Reference], temperature: float
) -> None:
    check(worker, "raw", temperature, reference[1])


def test_no_logprobs_go_with_everything_declared(worker: Served) -> None:
    for fields in SHAPES.values():
        lack = set(fields) - set(worker.able["sampling"])
        if not lack:
            [output] = worker.outputs({**fields, "max_tokens": 2}, logprobs="none")
            assert "logprobs" not in output


def test_greedy_tokens_are_those_of_transformers(
    worker: Served, reference: dict[int, Reference]
) -> None:
    """In a batch of prompts of many lengths, too."""
    prompts = [PROMPT, PROMPT[:1], list(range(40, 300)), [7] * 33, list(range(900, 1700))]
    sampling = {"temperature": 0, "max_tokens": 32, "ignore_eos": True}
    calls = [
        worker.in_background(partial(worker.outputs, sampling, token_ids=prompt))
        for prompt in prompts
    ]
    for prompt, call in zip(prompts, calls, strict=True):
        [output] = call.result(60)
        assert output["token_ids"] == reference[1].greedy(prompt, 32)
        expected = reference[1].raw_logprobs(prompt, output["token_ids"])
        assert output["logprobs"] == pytest.approx(expected, abs=CLOSE)
