"""What changes the logits of a batch before a token is drawn; only rows that ask for it pay.

The parameters of all rows are put into tensors once, when the batch changes. The functions work in
place on `work` [B, V] float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from rollout_worker.engines.drawing import MAX_BIAS, penalise
from rollout_worker.schemas import SamplingParams

_ALL, _NEVER = 2**62, 2.0
"""No `top_k`, and a `top_p` that no sum reaches."""

HEAD = 512
"""How many of the likeliest tokens are looked at first for `top_p`; the rest is rarely needed."""


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
        self.stops = sorted(stop_ids) if sampling.min_tokens else []
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

    @property
    def cuts(self) -> bool:
        """Whether the distribution is truncated; greedy ones are left alone."""
        p = self.sampling
        return p.temperature > 0 and (p.min_p > 0 or p.top_k > 0 or p.top_p < 1)

    @property
    def changes(self) -> bool:
        """Whether anything but the temperature makes it another distribution than the model's."""
        penalised = self.counts is not None
        biased = bool(self.sampling.logit_bias) or self.allowed is not None
        return penalised or biased or bool(self.stops) or self.cuts


class Processing:
    """The processing of one batch."""

    def __init__(self, rows: Sequence[SamplerState], device: torch.device) -> None:
        self._device = device
        self._before: list[Callable[[Tensor], None]] = []
        self._penalties: _Penalties | None = None
        self._stops = self._find_stops(rows)
        self._cuts: _Cuts | None = None
        self._add_bias(rows)
        self._add_allowed(rows)
        if any(row.counts is not None for row in rows):
            self._penalties = _Penalties(rows, device)
            self._before.append(self._penalties.apply)
        if any(row.cuts for row in rows):
            self._cuts = _Cuts(rows, device)

    def before_heat(self, work: Tensor, positions: np.ndarray) -> None:
        """Apply what comes before the temperature."""
        for apply in self._before:
            apply(work)
        if self._stops is not None:
            at, ids, until = self._stops
            early = positions[at] < until
            if early.any():
                where = torch.from_numpy(at[early]), torch.from_numpy(ids[early])
                work[where[0].to(self._device), where[1].to(self._device)] = -torch.inf

    def after_heat(self, work: Tensor) -> None:
        """Apply what comes after it; the maximum of each row is 0."""
        if self._cuts is not None:
            self._cuts.apply(work)

    def count(self, tokens: Tensor) -> None:
        """Note the tokens [B] that were drawn."""
        if self._penalties is not None:
            self._penalties.count(tokens)

    @staticmethod
    def _find_stops(
        rows: Sequence[SamplerState],
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """What would end an output (row, token) and up to which length it must not."""
        found = [
            (index, token, row.sampling.min_tokens)
            for index, row in enumerate(rows)
            for token in row.stops
        ]
        if not found:
            return None
        at, ids, until = np.array(found, dtype=np.int64).T
        return at, ids, until

    def _add_bias(self, rows: Sequence[SamplerState]) -> None:
        found = [
            (index, token, max(-MAX_BIAS, min(MAX_BIAS, value)))
            for index, row in enumerate(rows)
            for token, value in row.sampling.logit_bias.items()
        ]
        if not found:
            return
        at = torch.tensor([index for index, _, _ in found], device=self._device)
        ids = torch.tensor([token for _, token, _ in found], device=self._device)
        values = torch.tensor([value for _, _, value in found], device=self._device)

        def bias(work: Tensor) -> None:
            work[at, ids] += values

        self._before.append(bias)

    def _add_allowed(self, rows: Sequence[SamplerState]) -> None:
        masks = [(index, row.allowed) for index, row in enumerate(rows) if row.allowed is not None]
        if not masks:
            return
        at = torch.tensor([index for index, _ in masks], device=self._device)
        banned = ~torch.stack([mask for _, mask in masks])

        def allow(work: Tensor) -> None:
            work[at] = work[at].masked_fill_(banned, -torch.inf)

        self._before.append(allow)


class _Penalties:
    """Repetition, presence and frequency; keeps the counts of its rows."""

    def __init__(self, rows: Sequence[SamplerState], device: torch.device) -> None:
        found = [
            (index, row.counts, row.in_prompt)
            for index, row in enumerate(rows)
            if row.counts is not None and row.in_prompt is not None
        ]
        self._at = torch.tensor([index for index, _, _ in found], device=device)
        self._made = torch.stack([counts for _, counts, _ in found])
        self._prompts = torch.stack([prompt for _, _, prompt in found])
        for place, (index, _, _) in enumerate(found):
            rows[index].counts = self._made[place]  # so that counting goes on after the batch
        params = [rows[index].sampling for index, _, _ in found]
        factors = [
            # 0 in float32 would make NaN of the logits of ids that are not allowed.
            (max(1 / MAX_BIAS, p.repetition_penalty), p.presence_penalty, p.frequency_penalty)
            for p in params
        ]
        repetition, presence, frequency = (
            torch.tensor(factors, device=device).unsqueeze(2).unbind(1)
        )
        self._factors = (repetition, presence, frequency)

    def apply(self, work: Tensor) -> None:
        work[self._at] = penalise(work[self._at], self._prompts, self._made, self._factors)

    def count(self, tokens: Tensor) -> None:
        places = torch.arange(len(self._at), device=tokens.device)
        self._made[places, tokens[self._at]] += 1


class _Cuts:
    """`min_p`, then `top_k`, then `top_p`."""

    def __init__(self, rows: Sequence[SamplerState], device: torch.device) -> None:
        params = [(index, row.sampling) for index, row in enumerate(rows) if row.cuts]
        least = [(index, p.min_p) for index, p in params if p.min_p > 0]
        self._least_at = torch.tensor([index for index, _ in least], device=device)
        # The maximum is 0 after the shift, so `min_p` of its probability is a bound on the logit.
        self._least = torch.tensor([value for _, value in least], device=device).log().unsqueeze(1)
        ordered = [(index, p) for index, p in params if p.top_k > 0 or p.top_p < 1]
        self._at = torch.tensor([index for index, _ in ordered], device=device)
        top_k = [p.top_k or _ALL for _, p in ordered]
        top_p = [p.top_p if p.top_p < 1 else _NEVER for _, p in ordered]
        self._top_k = torch.tensor(top_k, device=device).unsqueeze(1)
        self._top_p = torch.tensor(top_p, dtype=torch.float64, device=device).unsqueeze(1)
        self._head = max((k if k < _ALL else HEAD for k in top_k), default=0)

    def apply(self, work: Tensor) -> None:
        if len(self._least_at):
            part = work[self._least_at]
            work[self._least_at] = part.masked_fill_(part < self._least, -torch.inf)
        if len(self._at):
            work[self._at] = self._cut(work[self._at])

    def _cut(self, part: Tensor) -> Tensor:
        vocab = part.shape[1]
        whole = part.exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
        kept, ids, beyond = self._ordered(part, min(self._head, vocab), whole)
        # Complete is a row that was cut within the head, or can't have more than it.
        complete = beyond[:, -1:] | (self._top_k <= kept.shape[1])
        if kept.shape[1] < vocab and not bool(complete.all()):
            kept, ids, beyond = self._ordered(part, vocab, whole)
        out = torch.full_like(part, -torch.inf)
        return out.scatter_(1, ids, kept.masked_fill_(beyond, -torch.inf))

    def _ordered(self, part: Tensor, head: int, whole: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the `head` largest, their ids, and which of them are cut off."""
        kept, ids = part.topk(head, dim=-1)
        beyond = torch.arange(head, device=part.device) >= self._top_k
        mass = kept.double().exp_().masked_fill_(beyond, 0.0)
        total = torch.where(self._top_k <= head, mass.sum(dim=-1, keepdim=True), whole)
        before = mass.cumsum(dim=-1) - mass
        return kept, ids, beyond | (before >= self._top_p * total)
