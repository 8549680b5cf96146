"""How tokens are drawn from a batch of logits; through a worker, tests/contract compares them with transformers."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from rollout_worker.engine import EngineRequest
from rollout_worker.engines.hf.sequence import BatchSampler, OutputSequence
from rollout_worker.engines.request_checks import StopChecker
from rollout_worker.engines.sampling.asks import sampling_asks
from rollout_worker.engines.sampling.batch_rows import SampledRow
from rollout_worker.engines.sampling.token_draw import seeded_uniform
from rollout_worker.schemas import SamplingParams
from tests.support.engine.reference import distribution


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


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 2}, {"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.2, "temperature": 0.7}],
    ids=str,
)
def test_draws_follow_the_distribution(sampling: dict[str, Any]) -> None:
    """Chi-square over 20 000 draws; seeds are fixed, so it cannot flake."""
    count, vocab = 20_000, 12
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 1.5
    drawn, _ = BatchSampler().draw_tokens(logits.expand(count, vocab), rows(count, **sampling))
    params = SamplingParams.model_validate(sampling)
    expected = distribution(logits, [], [], params).exp() * count
    counts = Counter(drawn)
    assert sum(counts.values()) == count
    assert set(counts) <= {i for i in range(vocab) if expected[i] > 0}
    kept = [i for i in range(vocab) if expected[i] > 0]
    chi2 = sum((counts[i] - float(expected[i])) ** 2 / float(expected[i]) for i in kept)
    assert chi2 < 35  # 99.9 % of 11 degrees of freedom is 31.3


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


@pytest.mark.parametrize("vocab", [63, 64, 65, 1000])
def test_any_vocabulary_is_drawn_from_to_its_ends(vocab: int) -> None:
    logits = torch.full((400, vocab), -torch.inf)
    logits[:, 0] = logits[:, -1] = 0.0
    tokens, logprobs = BatchSampler().draw_tokens(logits, rows(400))
    assert set(tokens) == {0, vocab - 1}
    assert logprobs == pytest.approx([-math.log(2)] * 400)


@pytest.mark.parametrize("top_p", [0.3, 0.999, 0.9999999])
def test_top_p_beyond_the_likeliest_few_looks_at_all(top_p: float) -> None:
    """A flat distribution needs more tokens than are looked at first."""
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(1)) * 0.1
    _, (got,) = BatchSampler().draw_tokens(logits[None], rows(1, top_p=top_p))
    params = SamplingParams.model_validate({"top_p": top_p})
    expected = distribution(logits, [], [], params)
    kept = expected[expected > -torch.inf]
    assert min(abs(kept - got)) < 1e-5


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


def test_uniform_numbers_depend_on_seed_and_position() -> None:
    seeds = torch.arange(50)
    numbers = torch.cat([seeded_uniform(seeds, torch.full((50,), at)) for at in range(50)])
    assert len(set(numbers.tolist())) == 2500
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert float(numbers.mean()) == pytest.approx(0.5, abs=0.02)
