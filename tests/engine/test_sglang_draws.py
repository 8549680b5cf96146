"""The sampler that runs inside SGLang, against the one of the hf engine; needs no SGLang."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rollout_worker.engine import EngineRequest
from rollout_worker.engines.request_checks import stop_ids
from rollout_worker.engines.sampling import token_draw, truncation
from rollout_worker.engines.sampling.asks import sampling_asks
from rollout_worker.engines.sampling.batch_rows import SampledRow, SampledRows
from rollout_worker.engines.sampling.token_draw import draw_tokens, pick_tokens, seeded_uniform
from tests.support.engine.engines import request

VOCAB = 320
EOS = frozenset({2})
CPU = torch.device("cpu")


@dataclass
class Wanted:
    """One row and what its logits, [V] before any of it, come to by the contract's words."""

    asked: EngineRequest
    output: tuple[int, ...] = ()

    def row(self) -> SampledRow:
        asks = sampling_asks(self.asked, stop_ids(self.asked.sampling, EOS))
        return SampledRow(asks, self.asked.token_ids, self.output)

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
    values = scaled.tolist()
    most = max(values)
    masses = [math.exp(value - most) for value in values]
    kept = [token for token, mass in enumerate(masses) if mass >= min_p]
    ranked = sorted(kept, key=lambda t: -values[t])[: top_k or len(values)]
    total, mass, nucleus = math.fsum(masses[t] for t in ranked), 0.0, []
    for token in ranked:
        if mass / total >= top_p:
            break
        nucleus.append(token)
        mass += masses[token]
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


def batch(cases: Sequence[Wanted]) -> tuple[SampledRows, torch.Tensor, torch.Tensor]:
    """Rows, temperatures and positions as SGLang would have them."""
    rows = SampledRows([case.row() for case in cases], CPU)
    heat = torch.tensor([[case.temperature] for case in cases])
    lengths = [len(case.asked.token_ids) + len(case.output) - 1 for case in cases]
    return rows, heat, torch.tensor(lengths)


def test_each_row_of_a_mixed_batch_is_drawn_from_its_own_distribution() -> None:
    torch.manual_seed(3)
    for _ in range(30):
        logits = torch.randn(len(CASES), VOCAB) * 3
        rows, heat, positions = batch(CASES)
        tokens, logprobs = draw_tokens(logits.clone(), rows, heat, positions)
        for index, case in enumerate(CASES):
            want = case.logprobs(logits[index])
            token = int(tokens[index])
            assert float(logprobs[index]) == pytest.approx(float(want[token]), abs=1e-5), index
            if case.asked.sampling.temperature == 0:
                assert token == int(want.argmax())


WIDE = 3000
"""More tokens than are looked at first."""
CUTS: list[dict[str, Any]] = [
    {"top_p": 0.1}, {"top_p": 0.9}, {"top_p": 0.999}, {"min_p": 0.3}, {"min_p": 1e-4}, {"min_p": 1e-4, "top_p": 0.9},
    {"top_k": 1}, {"top_k": 40}, {"top_k": 1023}, {"top_k": 1024}, {"top_k": 2500}, {"top_k": 2500, "top_p": 0.8},
    {"top_k": 300, "min_p": 1e-3, "top_p": 0.95}, {"allowed_token_ids": [5, 2999], "top_p": 0.9}, {"top_p": 1.0},
    {"logit_bias": {"7": 30.0}, "top_p": 0.999}, {"top_k": 40, "top_p": 0.5, "allowed_token_ids": [8, 9, 10]},
]  # fmt: skip


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 12.0], ids=lambda spread: f"spread {spread}")
@pytest.mark.parametrize("rounded", [False, True], ids=["float32", "bfloat16"])
def test_what_is_cut_off_is_what_exact_arithmetic_cuts_off(
    spread: float, rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flat and peaked rows, and such with many equal tokens, in pieces; the nucleus may differ by its last token."""
    monkeypatch.setattr(token_draw, "PIECE_LOGITS", 5 * WIDE)
    monkeypatch.setattr(truncation, "SORT_LOGITS", 2 * WIDE)
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(len(CUTS), WIDE, generator=generator) * spread
    logits = logits.bfloat16() if rounded else logits
    cases = [Wanted(request(temperature=1.0, **cut)) for cut in CUTS]
    rows, _, positions = batch(cases)
    work = logits.to(torch.float32, copy=True)
    rows.edit_logits(work, positions)
    work -= work.amax(dim=-1, keepdim=True)
    assert rows.truncated_rows is not None
    truncation.truncate_logits(work, *rows.truncated_rows)
    for at, case in enumerate(cases):
        want = case.logprobs(logits[at])
        stays, should = set(kept(work[at])), set(kept(want))
        odd = stays ^ should
        assert len(odd) <= (1 if "top_p" in CUTS[at] else 0), (CUTS[at], len(stays), len(should))
        got = work[at].double().log_softmax(dim=-1)
        both = sorted(stays & should)
        assert torch.allclose(got[both], want[both], atol=2e-3 if odd else 1e-5), CUTS[at]
    tokens, logprobs = draw_tokens(logits, rows, torch.ones(len(cases), 1), positions)
    got = work.log_softmax(dim=-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    assert torch.equal(logprobs, got), "a step in pieces draws from the same"


def kept(row: torch.Tensor) -> list[int]:
    return (row > -1e200).nonzero().squeeze(1).tolist()


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what a device would be waited for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name in ("aten::_local_scalar_dense", "aten::nonzero")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("asks", "most"),
    [
        ({"repetition_penalty": 1.2, "frequency_penalty": 0.5}, 0),
        ({"logit_bias": {"4": 1.0}, "allowed_token_ids": [4, 5]}, 0),
        ({"min_tokens": 2, "stop_token_ids": [7], "max_tokens": 9}, 0),
        ({"top_k": 50, "top_p": 0.9, "seed": 3}, 0),
        ({"top_p": 0.9}, 1),
    ],
)
def test_no_step_waits_for_the_device_row_by_row(asks: dict[str, Any], most: int) -> None:
    rows, heat, positions = batch([Wanted(request(temperature=1.0, **asks))] * 9)
    with Waits() as waits:
        for _ in range(2):
            draw_tokens(torch.randn(9, WIDE), rows, heat, positions)
    assert waits.count <= 2 * most


def test_long_lists_of_allowed_ids_cost_a_new_batch_little() -> None:
    """A list per row of every batch, in Python, took seconds of the step loop."""
    vocab, one, other = 100_000, tuple(range(0, 100_000, 2)), tuple(range(99_999))
    cases = [Wanted(request(allowed_token_ids=ids)) for ids in (one, None, other, one) * 4]
    rows, _, positions = batch(cases)
    work = torch.zeros(len(cases), vocab)
    rows.edit_logits(work, positions)
    assert [int(row.isfinite().sum()) for row in work[:4]] == [50_000, vocab, 99_999, 50_000]
    assert work[0, 1::2].isinf().all()
    assert work[2, -1].isinf()
    fewer = rows.select_rows(range(15))
    began = time.process_time()
    assert fewer._allowed is not None
    assert time.process_time() - began < 0.1


def test_a_step_takes_memory_for_a_piece_however_many_rows_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_draw, "PIECE_LOGITS", 8 * WIDE)
    monkeypatch.setattr(truncation, "SORT_LOGITS", 2 * WIDE)
    peaks = [peak(count) for count in (8, 64)]
    assert peaks[1] < 1.2 * peaks[0]
    assert peaks[0] / (8 * WIDE) < 32, "bytes a logit of a piece"


def peak(count: int) -> int:
    """Bytes at most that a step takes beside its logits."""
    rows, heat, positions = batch([Wanted(request(temperature=1.0, top_p=0.9))] * count)
    logits = torch.randn(count, WIDE) * 4
    draw_tokens(logits, rows, heat, positions)
    with torch.profiler.profile(profile_memory=True) as profile:
        draw_tokens(logits, rows, heat, positions)
    events: Any = profile.profiler.kineto_results.events()
    taken = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return int(max(itertools.accumulate(nbytes for _, nbytes in taken)))


def test_raw_logprobs_are_the_models_own() -> None:
    cases = [
        Wanted(request(logprobs="raw", temperature=1.7, top_p=0.5, repetition_penalty=1.3), (9,)),
        Wanted(request(logprobs="sampling", temperature=1.0)),
    ]
    logits = torch.randn(2, VOCAB)
    rows, heat, positions = batch(cases)
    tokens, logprobs = draw_tokens(logits.clone(), rows, heat, positions)
    want = logits.log_softmax(dim=-1)[torch.arange(2), tokens]
    assert torch.allclose(logprobs, want, atol=1e-5)


def test_penalties_count_what_is_drawn_and_survive_filter_and_merge() -> None:
    case = Wanted(request(temperature=0, frequency_penalty=2.0))
    other = Wanted(request(temperature=0))
    rows, heat, positions = batch([other, case])
    logits = torch.zeros(2, VOCAB)
    logits[:, 40], logits[:, 41] = 3.0, 2.5
    first, _ = draw_tokens(logits.clone(), rows, heat, positions)
    later = rows.select_rows([1]).with_rows(rows.select_rows([0]))
    second, _ = draw_tokens(logits.clone(), later, heat, positions + 1)
    assert first.tolist() == [40, 40]
    assert second.tolist() == [41, 40]


def test_seeds_give_the_same_tokens_whatever_else_is_in_the_batch() -> None:
    seeded = Wanted(request(temperature=1.0, seed=7))
    noise = Wanted(request(temperature=1.0))
    logits = torch.randn(1, VOCAB)
    drawn = set()
    for others in ([], [noise], [noise, noise]):
        rows, heat, positions = batch([*others, seeded])
        tokens, _ = draw_tokens(logits.repeat(len(others) + 1, 1), rows, heat, positions)
        drawn.add(int(tokens[-1]))
    assert len(drawn) == 1


def test_the_numbers_of_a_seed_are_spread_evenly() -> None:
    seeds = torch.arange(200).repeat_interleave(50)
    produced = torch.arange(50).repeat(200)
    numbers = seeded_uniform(seeds, produced)
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
    picked = torch.bincount(pick_tokens(weights.expand(count, -1), numbers), minlength=vocab)
    # Evenly spread numbers leave no room for chance: each token is off by what its ends cut.
    assert (picked - weights[0] * count).abs().max() <= 1
    assert not picked[weights[0] == 0].any()


def test_no_number_picks_an_impossible_token() -> None:
    weights = torch.zeros(2, 300)
    weights[:, [131, 140]] = torch.tensor([1e-30, 1.0])
    assert pick_tokens(weights, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)).tolist() == [
        131,
        140,
    ]
