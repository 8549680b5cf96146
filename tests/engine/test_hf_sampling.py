"""What is drawn and which log-probabilities are recorded, against transformers' own processors."""

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
from rollout_worker.schemas import LogprobsOf, SamplingParams, StopReason
from tests.support.engine.engines import PROMPT, request, run, run_all, serving
from tests.support.engine.reference import Reference, distribution
from tests.support.engine.tinymodels import TinyModels

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
        {"repetition_penalty": 1e-300, "allowed_token_ids": [9, 10]},
        {"repetition_penalty": 10, "frequency_penalty": -2, "presence_penalty": -2},
        {"allowed_token_ids": [9], "logit_bias": {9: -1e308}},
        {"top_p": 1e-300, "min_p": 1, "top_k": 2**31 - 1},
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
