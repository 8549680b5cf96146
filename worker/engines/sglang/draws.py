"""What single outputs ask of the sampler, as tensors over the rows of a batch.

Order of application: bias and allowed ids, penalties, `min_tokens`, temperature, `min_p`, `top_k`,
`top_p`. SGLang's own penalties leave the prompt out and forget the output when a request is
retracted, and its own logprobs ignore truncation; hence all of it is done here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rollout_worker.engines.drawing import MAX_BIAS, invert, penalise

BLOCK = 128
"""Tokens that are summed first when one is drawn; usual vocabularies are multiples of it."""


@dataclass(slots=True, eq=False)
class Row:
    """One output: `asks` as `streams.child_request` wrote it, its prompt, what it has produced."""

    asks: Mapping[str, Any]
    prompt: Sequence[int]
    output: Sequence[int]
    counts: Tensor | None = None  # [V] how often each token was produced
    in_prompt: Tensor | None = None  # [V]
    greedy: bool = field(init=False)
    raw: bool = field(init=False)

    def __post_init__(self) -> None:
        self.greedy = bool(self.asks.get("greedy"))
        self.raw = bool(self.asks.get("raw"))

    @property
    def penalised(self) -> bool:
        """Whether earlier tokens matter."""
        return "penalties" in self.asks

    def prepare(self, vocab: int, device: torch.device) -> None:
        """Make the counts when they are needed first."""
        if self.counts is not None:
            return
        output = torch.tensor(self.output, dtype=torch.long, device=device)
        self.counts = torch.bincount(output, minlength=vocab)
        self.in_prompt = torch.zeros(vocab, dtype=torch.bool, device=device)
        self.in_prompt[torch.tensor(self.prompt, dtype=torch.long, device=device)] = True


class Rows:
    """The rows of one batch; made anew when its composition changes."""

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        self.rows = list(rows)
        self._device = device

    def __len__(self) -> int:
        return len(self.rows)

    def kept(self, indices: Sequence[int]) -> Rows:
        """Return the rows at these indices."""
        return Rows([self.rows[index] for index in indices], self._device)

    def with_rows(self, other: Rows) -> Rows:
        """Return these rows, then the others."""
        return Rows([*self.rows, *other.rows], self._device)

    @cached_property
    def greedy(self) -> Tensor:
        """[B] rows that take the most likely token."""
        return torch.tensor([row.greedy for row in self.rows], device=self._device)

    @cached_property
    def all_greedy(self) -> bool:
        """Whether nothing is left to chance."""
        return all(row.greedy for row in self.rows)

    @cached_property
    def any_greedy(self) -> bool:
        """Whether any row takes the most likely token."""
        return any(row.greedy for row in self.rows)

    @cached_property
    def raw(self) -> Tensor | None:
        """[B] rows whose logprobs are the model's own; None if there are none."""
        marks = [row.raw for row in self.rows]
        return torch.tensor(marks, device=self._device) if any(marks) else None

    @cached_property
    def prompts(self) -> Tensor:
        """[B] lengths of the prompts."""
        return torch.tensor([len(row.prompt) for row in self.rows], device=self._device)

    @cached_property
    def seeded(self) -> tuple[Tensor, Tensor] | None:
        """Indices of rows with a seed, and their seeds."""
        at = self._where(lambda row: "seed" in row.asks)
        if not at:
            return None
        seeds = [self.rows[index].asks["seed"] for index in at]
        return self._index(at), torch.tensor(seeds, dtype=torch.long, device=self._device)

    @cached_property
    def truncated(self) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """Indices of rows that are cut off, and their `min_p`, `top_k`, `top_p` as columns."""
        at = self._where(lambda row: "cut" in row.asks)
        if not at:
            return None
        cuts = [self.rows[index].asks["cut"] for index in at]
        min_p, top_k, top_p = (
            torch.tensor(column, dtype=torch.float64, device=self._device).unsqueeze(1)
            for column in zip(*cuts, strict=True)
        )
        return self._index(at), min_p, top_k, top_p

    def edit(self, logits: Tensor, positions: Tensor) -> None:
        """Apply what comes before the temperature to `logits` [B, V], in place."""
        for index in self._biased:
            asks = self.rows[index].asks
            ids = torch.tensor(asks["bias_ids"], dtype=torch.long, device=self._device)
            values = torch.tensor(asks["bias_values"], device=self._device)
            logits[index, ids] += values.clamp(-MAX_BIAS, MAX_BIAS)
        for index in self._restricted:
            allowed = torch.tensor(self.rows[index].asks["allowed"], device=self._device)
            part = torch.full_like(logits[index], -torch.inf)
            part[allowed] = logits[index, allowed]
            logits[index] = part
        self._penalise(logits)
        self._withhold(logits, positions)

    def _penalise(self, logits: Tensor) -> None:
        if not self._penalised:
            return
        rows = [self.rows[index] for index in self._penalised]
        for row in rows:
            row.prepare(logits.shape[1], self._device)
        at = self._index(self._penalised)
        made = torch.stack([row.counts for row in rows if row.counts is not None])
        prompts = torch.stack([row.in_prompt for row in rows if row.in_prompt is not None])
        factors = torch.tensor([row.asks["penalties"] for row in rows], device=self._device)
        repetition, presence, frequency = factors.unsqueeze(2).unbind(1)
        logits[at] = penalise(logits[at], prompts, made, (repetition, presence, frequency))

    def _withhold(self, logits: Tensor, positions: Tensor) -> None:
        """Forbid what would end an output that has not reached `min_tokens` yet."""
        for index in self._delayed:
            asks = self.rows[index].asks
            produced = positions[index] + 1 - self.prompts[index]
            stops = torch.tensor(asks["stops"], dtype=torch.long, device=self._device)
            early = produced < asks["min_tokens"]
            logits[index, stops] = torch.where(early, -torch.inf, logits[index, stops])

    def count(self, tokens: Tensor) -> None:
        """Note the tokens [B] just drawn."""
        for index in self._penalised:
            counts = self.rows[index].counts
            if counts is not None:
                counts[tokens[index]] += 1

    @cached_property
    def _biased(self) -> list[int]:
        return self._where(lambda row: "bias_ids" in row.asks)

    @cached_property
    def _restricted(self) -> list[int]:
        return self._where(lambda row: "allowed" in row.asks)

    @cached_property
    def _penalised(self) -> list[int]:
        return self._where(lambda row: row.penalised)

    @cached_property
    def _delayed(self) -> list[int]:
        return self._where(lambda row: "min_tokens" in row.asks)

    def _where(self, has: Callable[[Row], bool]) -> list[int]:
        return [index for index, row in enumerate(self.rows) if has(row)]

    def _index(self, indices: Sequence[int]) -> Tensor:
        return torch.tensor(indices, dtype=torch.long, device=self._device)


def draw(
    logits: Tensor, rows: Rows, temperatures: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw a token for each row of `logits` [B, V]; return tokens [B] and their logprobs [B].

    `temperatures` [B, 1], 1 for greedy rows; `positions` [B] of each row's last token.
    """
    work = logits.float()
    own = work.clone() if rows.raw is not None else None
    rows.edit(work, positions)
    # Shifting by the maximum first keeps the quotient in range however small the temperature.
    work = work.sub_(work.amax(dim=-1, keepdim=True)).div_(temperatures)
    _truncate(work, rows)
    logprobs = work.log_softmax(dim=-1)
    if rows.all_greedy:
        tokens = logprobs.argmax(dim=-1)
    else:
        tokens = pick(logprobs.exp(), _numbers(rows, positions))
        if rows.any_greedy:
            tokens = torch.where(rows.greedy, logprobs.argmax(dim=-1), tokens)
    chosen = _at(logprobs, tokens)
    if rows.raw is not None and own is not None:
        chosen = torch.where(rows.raw, _at(own, tokens) - own.logsumexp(dim=-1), chosen)
    rows.count(tokens)
    return tokens, chosen


def _at(values: Tensor, tokens: Tensor) -> Tensor:
    return values.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _truncate(work: Tensor, rows: Rows) -> None:
    """Mask what `min_p`, `top_k` and `top_p` cut off; the maximum of each row is 0."""
    if rows.truncated is None:
        return
    at, min_p, top_k, top_p = rows.truncated
    ordered, order = work[at].sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(work.shape[1], device=work.device)
    cut = (ordered < min_p.log()) | ((rank >= top_k) & (top_k > 0))
    ordered = ordered.masked_fill(cut, -torch.inf)
    mass = ordered.softmax(dim=-1, dtype=torch.float64)
    beyond = (mass.cumsum(dim=-1) - mass >= top_p) & (top_p < 1)
    ordered = ordered.masked_fill(beyond, -torch.inf)
    work[at] = torch.empty_like(ordered).scatter_(1, order, ordered)


def _numbers(rows: Rows, positions: Tensor) -> Tensor:
    """Return what decides each row, [B] in [0, 1): by its seed if it has one."""
    numbers = torch.rand(len(rows), dtype=torch.float64, device=positions.device)
    if rows.seeded is not None:
        at, seeds = rows.seeded
        numbers[at] = uniform(seeds, positions[at] + 1 - rows.prompts[at])
    return numbers


def pick(weights: Tensor, numbers: Tensor) -> Tensor:
    """Return the tokens [B] at these places `numbers` [B] of the cumulated `weights` [B, V].

    Sums whole blocks first and adds up only the chosen one, in double precision: on a CPU many
    times quicker than `torch.multinomial`, which draws a number for every token.
    """
    count = weights.shape[1]
    if count % BLOCK:
        weights = torch.nn.functional.pad(weights, (0, -count % BLOCK))
    blocks = weights.reshape(len(weights), -1, BLOCK)
    return invert(blocks, blocks.sum(dim=-1).double().cumsum(dim=-1), numbers)


def uniform(seeds: Tensor, produced: Tensor) -> Tensor:
    """Return numbers in [0, 1) of these seeds [S] at these lengths of the output [S].

    A hash of both (SplitMix64), hence the same whatever else is in the batch, on every device, and
    after a prefix was computed again.
    """
    mixed = _mix(_mix(seeds) + produced.long() * -7046029254386353131)
    return ((mixed >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * -4658895280553007687
    x = (x ^ _shifted(x, 27)) * -7723592293110705685
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift to the right without the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
