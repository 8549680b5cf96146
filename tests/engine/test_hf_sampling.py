"""How tokens are drawn from a batch of logits; through a worker, tests/contract compares them with transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rollout_worker.engine import EngineRequest
from rollout_worker.engines.hf.sequence import BatchSampler, OutputSequence
from rollout_worker.engines.request_checks import StopChecker
from rollout_worker.engines.sampling.asks import sampling_asks
from rollout_worker.engines.sampling.batch_rows import SampledRow
from rollout_worker.schemas import SamplingParams


def sampled(
    seed: int, produced: int, stops: frozenset[int] = frozenset(), **asked: Any
) -> OutputSequence:
    params = SamplingParams.model_validate({"seed": seed, **asked})
    wanted = EngineRequest("r", (0,), params, "sampling")
    row = SampledRow(sampling_asks(wanted, stops), (0,), ())
    made = OutputSequence(wanted, row, StopChecker(params, stops, None), 0, lambda _: None)
    made.tokens += [0] * produced
    return made


def rows(count: int, **sampling: Any) -> list[OutputSequence]:
    return [sampled(seed, seed % 7, **sampling) for seed in range(count)]


def test_logits_that_are_not_finite_give_no_logprob() -> None:
    logits = torch.zeros(3, 5)
    logits[1, 2] = torch.nan
    logits[2, 2] = torch.inf
    tokens, (first, second, third) = BatchSampler().draw_tokens(logits, rows(3))
    assert all(0 <= token < 5 for token in tokens)
    assert first == pytest.approx(-math.log(5))
    assert not math.isfinite(second)
    assert not math.isfinite(third)


@pytest.mark.parametrize("temperature", [1e-8, 1e-45, 1e-300])
def test_the_smallest_temperatures_take_the_likeliest_token(temperature: float) -> None:
    """They would be 0 in float32, and 0 / 0 no number."""
    logits = torch.randn(200, generator=torch.Generator().manual_seed(5))
    tokens, logprobs = BatchSampler().draw_tokens(
        logits.expand(50, 200), rows(50, temperature=temperature)
    )
    assert set(tokens) == {int(logits.argmax())}
    assert logprobs == pytest.approx([0.0] * 50)


def test_a_batch_that_stays_counts_on() -> None:
    """Three tokens in a row of one batch: positions, penalties and `min_tokens` move along."""
    state = {"frequency_penalty": 2.0, "min_tokens": 2, "temperature": 0}
    row = sampled(1, 0, frozenset({3}), **state)
    sampler, logits = BatchSampler(), torch.tensor([[0.0, 3.0, 2.5, 9.0, -9.0]])
    drawn = []
    for _ in range(4):
        drawn += sampler.draw_tokens(logits, [row])[0]
        row.tokens.append(drawn[-1])
    assert drawn == [1, 2, 3, 3]


def test_draws_leave_the_generator_of_torch_alone() -> None:
    """The process may be a trainer's."""
    before = torch.get_rng_state()
    BatchSampler().draw_tokens(torch.zeros(3, 5), rows(3))
    assert torch.equal(torch.get_rng_state(), before)
