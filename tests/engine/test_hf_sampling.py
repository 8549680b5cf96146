"""What is drawn and which log-probabilities are recorded, against transformers' own processors."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from engines import PROMPT, request, run, run_all, serving
from reference import Reference, distribution
from rollout_worker.engines.hf.sampling import SamplerState, draw, uniform
from rollout_worker.schemas import LogprobsOf, SamplingParams, StopReason
from tinymodels import TinyModels

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy ignores truncation": {"temperature": 0, "top_k": 1, "top_p": 0.1, "min_p": 0.9},
    "greedy penalised": {"temperature": 0, "repetition_penalty": 1.5, "presence_penalty": 0.5},
    "cold": {"temperature": 0.5},
    "plain": {"temperature": 1},
    "hot": {"temperature": 2},
    "top_p": {"temperature": 1, "top_p": 0.7},
    "top_k": {"temperature": 2, "top_k": 7},
    "min_p": {"temperature": 1.5, "min_p": 0.05},
    "all truncations": {"temperature": 0.5, "top_p": 0.8, "top_k": 20, "min_p": 0.01},
    "repetition": {"temperature": 0.8, "repetition_penalty": 1.4},
    "presence and frequency": {
        "temperature": 0.7,
        "presence_penalty": 1.1,
        "frequency_penalty": -0.3,
    },
    "bias": {"temperature": 1, "logit_bias": {17: 6.0, 18: 6.5, 4095: -3}},
    "allowed": {"temperature": 1, "allowed_token_ids": [3, 5, 8, 1000]},
    "min_tokens": {
        "temperature": 1,
        "allowed_token_ids": [3, 5, 8],
        "stop_token_ids": [5],
        "min_tokens": 10,
    },
    "everything": {
        "temperature": 1.3,
        "top_p": 0.95,
        "top_k": 200,
        "min_p": 0.002,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "logit_bias": {40: 2.0},
    },
}


@pytest.mark.parametrize("kind", ["sampling", "raw"])
async def test_logprobs_are_of_the_distribution_drawn_from(
    tiny_models: TinyModels, reference: Reference, kind: LogprobsOf
) -> None:
    """All cases in one batch, so that none leaks into another."""
    wanted = [
        request(name, logprobs=kind, max_tokens=16, seed=index, **case)
        for index, (name, case) in enumerate(CASES.items())
    ]
    async with serving(tiny_models.model(1)) as (engine, _):
        outputs = await run_all(engine, wanted)
    for each, output in zip(wanted, outputs, strict=True):
        if kind == "raw":
            expected = reference.raw_logprobs(PROMPT, output.token_ids)
        else:
            expected = reference.sampling_logprobs(PROMPT, output.token_ids, each.sampling)
        assert output.logprobs == pytest.approx(expected, abs=1e-4), each.request_id


async def test_no_logprobs_unless_asked_for(tiny_models: TinyModels) -> None:
    async with serving(tiny_models.model(1)) as (engine, _):
        output = await run(engine, request(logprobs=None))
    assert output.logprobs is None
    assert len(output.token_ids) == 8


async def test_a_seed_is_reproducible_in_any_company(tiny_models: TinyModels) -> None:
    def seeded(name: str, seed: int | None) -> Any:
        return request(name, temperature=1, seed=seed, max_tokens=30)

    async with serving(tiny_models.model(1)) as (engine, _):
        alone = await run(engine, seeded("alone", 5))
        crowd = await run_all(engine, [seeded(f"c{i}", [5, 6, None][i % 3]) for i in range(12)])
    by_seed = [crowd[i::3] for i in range(3)]
    assert all(output.token_ids == alone.token_ids for output in by_seed[0])
    assert all(output.token_ids == by_seed[1][0].token_ids for output in by_seed[1])
    assert len({tuple(output.token_ids) for output in [alone, by_seed[1][0], *by_seed[2]]}) == 6


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6, 100])
async def test_extreme_temperatures_stay_finite(
    tiny_models: TinyModels, reference: Reference, temperature: float
) -> None:
    async with serving(tiny_models.model(1)) as (engine, _):
        output = await run(engine, request(temperature=temperature))
    assert output.stop_reason is StopReason.LENGTH
    assert all(math.isfinite(value) for value in output.logprobs or ())
    if temperature < 1:
        assert output.token_ids == reference.greedy(PROMPT, 8)


@pytest.mark.parametrize(
    "extreme",
    [
        {"logit_bias": {7: 1e308}},
        {"logit_bias": {7: -1e308, 8: 1e300}},
        {"repetition_penalty": 1e-40},
        {"repetition_penalty": 10, "frequency_penalty": -2, "presence_penalty": -2},
        {"allowed_token_ids": [9], "logit_bias": {9: -1e308}},
        {"top_p": 1e-300, "min_p": 1, "top_k": 2**40},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["sampling", "raw"])
async def test_extreme_parameters_stay_finite(
    tiny_models: TinyModels, extreme: dict[str, Any], kind: LogprobsOf
) -> None:
    async with serving(tiny_models.model(1)) as (engine, _):
        output = await run(engine, request(temperature=1, logprobs=kind, **extreme))
    assert output.stop_reason is StopReason.LENGTH
    assert all(math.isfinite(value) for value in output.logprobs or ())


@dataclass
class Row:
    sampler: SamplerState
    seed: int
    produced: int
    logprobs_of: LogprobsOf | None = "sampling"


def rows(count: int, vocab: int, **sampling: Any) -> list[Row]:
    params = SamplingParams.model_validate(sampling)
    state = SamplerState(params, [0], frozenset(), vocab, torch.device("cpu"))
    return [Row(state, seed, seed % 7) for seed in range(count)]


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 2}, {"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.2, "temperature": 0.7}],
    ids=str,
)
def test_draws_follow_the_distribution(sampling: dict[str, Any]) -> None:
    """Chi-square over 20 000 draws; seeds are fixed, so it cannot flake."""
    count, vocab = 20_000, 12
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 1.5
    drawn = draw(logits.expand(count, vocab), rows(count, vocab, **sampling))
    params = SamplingParams.model_validate(sampling)
    expected = distribution(logits, [], [], params).exp() * count
    counts = Counter(choice.token for choice in drawn if choice is not None)
    assert sum(counts.values()) == count
    assert set(counts) <= {i for i in range(vocab) if expected[i] > 0}
    kept = [i for i in range(vocab) if expected[i] > 0]
    chi2 = sum((counts[i] - float(expected[i])) ** 2 / float(expected[i]) for i in kept)
    assert chi2 < 35  # 99.9 % of 11 degrees of freedom is 31.3


def test_logits_that_are_not_finite_give_no_token() -> None:
    logits = torch.zeros(3, 5)
    logits[1, 2] = torch.nan
    logits[2, 2] = torch.inf
    first, second, third = draw(logits, rows(3, 5))
    assert first is not None
    assert first.logprob == pytest.approx(-math.log(5))
    assert second is third is None


def test_uniform_numbers_depend_on_seed_and_position() -> None:
    numbers = [uniform(seed, position) for seed in range(50) for position in range(50)]
    assert len(set(numbers)) == 2500
    assert all(0 <= number < 1 for number in numbers)
    assert sum(numbers) / 2500 == pytest.approx(0.5, abs=0.02)
    assert uniform(2**64 + 3, 0) == uniform(3, 0)
