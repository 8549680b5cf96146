"""The sampler that runs inside SGLang, against the one of the hf engine; needs no SGLang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from engines import request
from rollout_worker.engine import EngineRequest
from rollout_worker.engines.fitting import stop_ids
from rollout_worker.engines.sglang.draws import Row, Rows, draw, pick, uniform
from rollout_worker.engines.sglang.streams import child_request
from rollout_worker.schemas import WeightsId

VOCAB = 320
EOS = frozenset({2})
CPU = torch.device("cpu")


@dataclass
class Wanted:
    """One row and what its logits, [V] before any of it, come to by the contract's words."""

    asked: EngineRequest
    output: tuple[int, ...] = ()

    def row(self) -> Row:
        sent = child_request(self.asked, EOS, "0", WeightsId(epoch=0, version=0))
        asks: Mapping[str, Any] = sent["sampling_params"]["custom_params"]
        return Row(asks, self.asked.token_ids, self.output)

    @property
    def temperature(self) -> float:
        return self.asked.sampling.temperature or 1.0

    def logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """Token by token in plain Python and float64, as API.md orders the operations."""
        asked = self.asked.sampling
        values = [float(value) for value in logits]
        for token, bias in asked.logit_bias.items():
            values[token] += bias
        if asked.allowed_token_ids is not None:
            values = [v if t in asked.allowed_token_ids else -1e300 for t, v in enumerate(values)]
        for token in {*self.asked.token_ids, *self.output}:
            value, factor = values[token], asked.repetition_penalty
            values[token] = value / factor if value > 0 else value * factor
        for token in set(self.output):
            values[token] -= asked.presence_penalty
            values[token] -= asked.frequency_penalty * self.output.count(token)
        if len(self.output) < asked.min_tokens:
            for token in stop_ids(asked, EOS):
                values[token] = -1e300
        scaled = torch.tensor(values, dtype=torch.float64) / self.temperature
        if asked.temperature > 0:
            scaled = truncate(scaled, asked.min_p, asked.top_k, asked.top_p)
        return scaled.log_softmax(dim=-1)


def truncate(scaled: torch.Tensor, min_p: float, top_k: int, top_p: float) -> torch.Tensor:
    probabilities = scaled.softmax(dim=-1)
    kept = {t for t in range(VOCAB) if probabilities[t] >= min_p * probabilities.max()}
    ranked = sorted(kept, key=lambda t: -float(scaled[t]))[: top_k or VOCAB]
    total, mass, nucleus = sum(float(probabilities[t]) for t in ranked), 0.0, []
    for token in ranked:
        if mass / total >= top_p:
            break
        nucleus.append(token)
        mass += float(probabilities[token])
    masked = torch.full_like(scaled, -torch.inf)
    masked[nucleus] = scaled[nucleus]
    return masked


CASES = [
    Wanted(request(temperature=0)),
    Wanted(request(temperature=1.0)),
    Wanted(request(temperature=2.0, top_p=0.7)),
    Wanted(request(temperature=0.5, top_k=3)),
    Wanted(request(temperature=1.3, min_p=0.2, top_k=20, top_p=0.9)),
    Wanted(request(temperature=0.8, repetition_penalty=1.4), (9, 9, 10)),
    Wanted(request(temperature=1.0, presence_penalty=0.7, frequency_penalty=0.3), (9, 9, 11)),
    Wanted(request(temperature=0, frequency_penalty=1.5, repetition_penalty=0.7), (9, 12, 9)),
    Wanted(request(temperature=1.0, logit_bias={3: 4.0, 60: -2.0}, repetition_penalty=1.2), (3,)),
    Wanted(request(temperature=1.0, allowed_token_ids=[4, 9, 33])),
    Wanted(request(temperature=1.0, min_tokens=3, stop_token_ids=[7], max_tokens=9), (1, 1)),
    Wanted(request(temperature=1.0, min_tokens=2, stop_token_ids=[7], max_tokens=9), (1, 1)),
    Wanted(request(temperature=0.7, top_k=5, seed=11)),
]


def batch(cases: Sequence[Wanted]) -> tuple[Rows, torch.Tensor, torch.Tensor]:
    """Rows, temperatures and positions as SGLang would have them."""
    rows = Rows([case.row() for case in cases], CPU)
    heat = torch.tensor([[case.temperature] for case in cases])
    lengths = [len(case.asked.token_ids) + len(case.output) - 1 for case in cases]
    return rows, heat, torch.tensor(lengths)


def test_each_row_of_a_mixed_batch_is_drawn_from_its_own_distribution() -> None:
    torch.manual_seed(3)
    for _ in range(30):
        logits = torch.randn(len(CASES), VOCAB) * 3
        rows, heat, positions = batch(CASES)
        tokens, logprobs = draw(logits.clone(), rows, heat, positions)
        for index, case in enumerate(CASES):
            want = case.logprobs(logits[index])
            token = int(tokens[index])
            assert float(logprobs[index]) == pytest.approx(float(want[token]), abs=1e-5), index
            if case.asked.sampling.temperature == 0:
                assert token == int(want.argmax())


def test_raw_logprobs_are_the_models_own() -> None:
    cases = [
        Wanted(request(logprobs="raw", temperature=1.7, top_p=0.5, repetition_penalty=1.3), (9,)),
        Wanted(request(logprobs="sampling", temperature=1.0)),
    ]
    logits = torch.randn(2, VOCAB)
    rows, heat, positions = batch(cases)
    tokens, logprobs = draw(logits.clone(), rows, heat, positions)
    want = logits.log_softmax(dim=-1)[torch.arange(2), tokens]
    assert torch.allclose(logprobs, want, atol=1e-5)


def test_penalties_count_what_is_drawn_and_survive_filter_and_merge() -> None:
    case = Wanted(request(temperature=0, frequency_penalty=2.0))
    other = Wanted(request(temperature=0))
    rows, heat, positions = batch([other, case])
    logits = torch.zeros(2, VOCAB)
    logits[:, 40], logits[:, 41] = 3.0, 2.5
    first, _ = draw(logits.clone(), rows, heat, positions)
    later = rows.kept([1]).with_rows(rows.kept([0]))
    second, _ = draw(logits.clone(), later, heat, positions + 1)
    assert first.tolist() == [40, 40]
    assert second.tolist() == [41, 40]


def test_seeds_give_the_same_tokens_whatever_else_is_in_the_batch() -> None:
    seeded = Wanted(request(temperature=1.0, seed=7))
    noise = Wanted(request(temperature=1.0))
    logits = torch.randn(1, VOCAB)
    drawn = set()
    for others in ([], [noise], [noise, noise]):
        rows, heat, positions = batch([*others, seeded])
        tokens, _ = draw(logits.repeat(len(others) + 1, 1), rows, heat, positions)
        drawn.add(int(tokens[-1]))
    assert len(drawn) == 1


def test_the_numbers_of_a_seed_are_spread_evenly() -> None:
    seeds = torch.arange(200).repeat_interleave(50)
    produced = torch.arange(50).repeat(200)
    numbers = uniform(seeds, produced)
    assert ((numbers >= 0) & (numbers < 1)).all()
    counts = torch.histc(numbers, bins=20, min=0, max=1)
    # 10 000 numbers in 20 bins: chi-square with 19 degrees of freedom is below 43.8 at p = 0.001.
    assert float(((counts - 500) ** 2 / 500).sum()) < 43.8
    assert len(set(numbers.tolist())) == 10_000


@pytest.mark.parametrize("vocab", [5, 128, 320, 1000])
def test_tokens_are_picked_as_often_as_their_weights_say(vocab: int) -> None:
    weights = torch.rand(1, vocab, generator=torch.Generator().manual_seed(5))
    weights[:, ::3] = 0
    weights[:, 1] = weights[:, -1] = weights.max() if vocab > 5 else 1.0
    weights = weights / weights.sum()
    count = 20_000
    numbers = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    picked = torch.bincount(pick(weights.expand(count, -1), numbers), minlength=vocab)
    # Evenly spread numbers leave no room for chance: each token is off by what its ends cut.
    assert (picked - weights[0] * count).abs().max() <= 1
    assert not picked[weights[0] == 0].any()


def test_no_number_picks_an_impossible_token() -> None:
    weights = torch.zeros(2, 300)
    weights[:, [131, 140]] = torch.tensor([1e-30, 1.0])
    assert pick(weights, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)).tolist() == [
        131,
        140,
    ]
