"""Drawing one token for each row of a batch, and the log-probabilities of what was drawn.

Order of application: allowed ids and logit bias, penalties, `min_tokens`, temperature, `min_p`,
`top_k`, `top_p`. Randomness is counter-based: the uniform number of a token depends on the
request's seed and the token's position in the output, so a seed gives the same output whatever
else is in the batch, and also after a prefix was computed again. A token is found by inverting
the cumulative distribution, one number a token, the same on every device.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rollout_worker.schemas import LogprobsOf, SamplingParams

MAX_BIAS = 1e30
"""Beyond, sums leave the range of float32; it is as good as infinite already."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A drawn token and the log-probability asked for."""

    token: int
    logprob: float


class SamplerState:
    """What one output needs to have its logits processed; tensors only where it asks for them."""

    def __init__(
        self,
        sampling: SamplingParams,
        prompt: Sequence[int],
        stop_ids: frozenset[int],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.sampling = sampling
        self.counts: Tensor | None = None
        self.in_prompt: Tensor | None = None
        self.allowed: Tensor | None = None
        self.bias: tuple[Tensor, Tensor] | None = None
        self.stops = torch.tensor(sorted(stop_ids), dtype=torch.long, device=device)
        if (
            sampling.repetition_penalty != 1
            or sampling.presence_penalty != 0
            or sampling.frequency_penalty != 0
        ):
            self.counts = torch.zeros(vocab_size, dtype=torch.int32, device=device)
            self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.in_prompt[torch.tensor(prompt, device=device)] = True
        if sampling.allowed_token_ids is not None:
            self.allowed = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.allowed[torch.tensor(sampling.allowed_token_ids, device=device)] = True
        if sampling.logit_bias:
            ids = torch.tensor(list(sampling.logit_bias), device=device)
            values = [max(-MAX_BIAS, min(MAX_BIAS, v)) for v in sampling.logit_bias.values()]
            self.bias = (ids, torch.tensor(values, dtype=torch.float32, device=device))

    def count(self, token: int) -> None:
        """Note a token of the output."""
        if self.counts is not None:
            self.counts[token] += 1


class Row(Protocol):
    """What the sampler must know of an output."""

    sampler: SamplerState
    seed: int

    @property
    def produced(self) -> int:
        """Length of the output so far."""
        ...

    @property
    def logprobs_of(self) -> LogprobsOf | None:
        """Which log-probability to record."""
        ...


def draw(logits: Tensor, rows: Sequence[Row]) -> list[Choice | None]:
    """Draw a token for each row from `logits` [B, V]; None where the logits are not finite."""
    raw = logits.float()
    work = raw.clone()
    for apply in (_bias, _allow, _penalise, _withhold_stops):
        apply(work, rows)
    device = work.device
    heat = torch.tensor([row.sampler.sampling.temperature for row in rows], device=device)
    greedy = heat == 0
    # Shifting by the maximum first keeps the quotient in range however small the temperature.
    work = work - work.amax(dim=-1, keepdim=True)
    work /= torch.where(greedy, 1.0, heat).unsqueeze(1)
    _truncate(work, rows)
    logprobs = work.log_softmax(dim=-1)
    tokens = work.argmax(dim=-1)
    if not all(row.sampler.sampling.temperature == 0 for row in rows):
        tokens = torch.where(greedy, tokens, _invert(logprobs, rows))
    chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    if any(row.logprobs_of == "raw" for row in rows):
        wanted = torch.tensor([row.logprobs_of == "raw" for row in rows], device=device)
        own = raw.gather(1, tokens.unsqueeze(1)).squeeze(1) - raw.logsumexp(dim=-1)
        chosen = torch.where(wanted & chosen.isfinite(), own, chosen)
    drawn = zip(tokens.tolist(), chosen.tolist(), strict=True)
    return [Choice(token, value) if math.isfinite(value) else None for token, value in drawn]


def _where(rows: Sequence[Row], has: Callable[[SamplerState], bool]) -> list[int]:
    return [index for index, row in enumerate(rows) if has(row.sampler)]


def _pairs(
    work: Tensor, indices: Sequence[int], columns: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return (row, column) index vectors that address `columns[i]` in row `indices[i]`."""
    lengths = torch.tensor([len(column) for column in columns], device=work.device)
    at = torch.tensor(indices, device=work.device).repeat_interleave(lengths)
    return at, torch.cat(list(columns))


def _bias(work: Tensor, rows: Sequence[Row]) -> None:
    found = [(i, row.sampler.bias) for i, row in enumerate(rows) if row.sampler.bias is not None]
    if found:
        at = _pairs(work, [i for i, _ in found], [ids for _, (ids, _) in found])
        work[at] += torch.cat([values for _, (_, values) in found])


def _allow(work: Tensor, rows: Sequence[Row]) -> None:
    found = [(i, row.sampler.allowed) for i, row in enumerate(rows)]
    masks = [(i, mask) for i, mask in found if mask is not None]
    if masks:
        at = torch.tensor([i for i, _ in masks], device=work.device)
        allowed = torch.stack([mask for _, mask in masks])
        work[at] = work[at].masked_fill(~allowed, -torch.inf)


def _penalise(work: Tensor, rows: Sequence[Row]) -> None:
    at, counts, prompts, factors = [], [], [], []
    for index, row in enumerate(rows):
        state = row.sampler
        if state.counts is not None and state.in_prompt is not None:
            at.append(index)
            counts.append(state.counts)
            prompts.append(state.in_prompt)
            sampling = state.sampling
            factors.append(
                (
                    sampling.repetition_penalty,
                    sampling.presence_penalty,
                    sampling.frequency_penalty,
                )
            )
    if not at:
        return
    where = torch.tensor(at, device=work.device)
    made = torch.stack(counts)
    repetition, presence, frequency = (
        torch.tensor(factors, device=work.device).unsqueeze(2).unbind(1)
    )
    seen = torch.stack(prompts) | (made > 0)
    part = work[where]
    repeated = torch.where(part > 0, part / repetition, part * repetition)
    part = torch.where(seen, repeated, part) - presence * (made > 0) - frequency * made
    work[where] = part.clamp(max=MAX_BIAS)


def _withhold_stops(work: Tensor, rows: Sequence[Row]) -> None:
    """Forbid what would end an output that has not reached `min_tokens` yet."""
    early = [
        index
        for index, row in enumerate(rows)
        if row.produced < row.sampler.sampling.min_tokens and len(row.sampler.stops)
    ]
    if early:
        work[_pairs(work, early, [rows[index].sampler.stops for index in early])] = -torch.inf


def _truncate(work: Tensor, rows: Sequence[Row]) -> None:
    """Mask what `min_p`, `top_k` and `top_p` cut off; greedy rows are left alone."""

    def cuts(state: SamplerState) -> bool:
        params = state.sampling
        return params.temperature > 0 and (params.min_p > 0 or params.top_k > 0 or params.top_p < 1)

    at = _where(rows, cuts)
    if not at:
        return
    device, vocab = work.device, work.shape[1]
    params = [rows[index].sampler.sampling for index in at]
    where = torch.tensor(at, device=device)
    ordered, order = work[where].sort(dim=-1, descending=True, stable=True)
    # The maximum is 0 after the shift, so `min_p` of its probability is a bound on the logit.
    least = torch.tensor([p.min_p for p in params], device=device).log().unsqueeze(1)
    ordered = ordered.masked_fill(ordered < least, -torch.inf)
    top_k = torch.tensor([min(p.top_k or vocab, vocab) for p in params], device=device)
    rank = torch.arange(vocab, device=device)
    ordered = ordered.masked_fill(rank >= top_k.unsqueeze(1), -torch.inf)
    mass = ordered.softmax(dim=-1, dtype=torch.float64)
    before = mass.cumsum(dim=-1) - mass
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
    beyond = (before >= top_p.unsqueeze(1)) & (top_p < 1).unsqueeze(1)
    ordered = ordered.masked_fill(beyond, -torch.inf)
    work[where] = torch.empty_like(ordered).scatter_(1, order, ordered)


def _invert(logprobs: Tensor, rows: Sequence[Row]) -> Tensor:
    """Return for each row the token at its uniform number of the cumulative distribution."""
    numbers = [
        0.0 if row.sampler.sampling.temperature == 0 else uniform(row.seed, row.produced)
        for row in rows
    ]
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    total = cumulative[:, -1:]
    target = torch.tensor(numbers, dtype=torch.float64, device=logprobs.device).unsqueeze(1) * total
    # Strictly below the total, so that the first sum above it belongs to a possible token.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return found.clamp(max=logprobs.shape[1] - 1)


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) of this seed at this position of the output."""
    data = struct.pack("<QQ", seed & (2**64 - 1), position)
    bits = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    return (bits >> 11) * 2.0**-53
