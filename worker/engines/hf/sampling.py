"""Drawing one token for each row of a batch of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from rollout_worker.engines.sampling.batch_rows import SampledRow, SampledRows
from rollout_worker.engines.sampling.token_draw import draw_tokens

LEAST_TEMPERATURE = 1e-30
"""Smaller ones leave the range of float32; these are greedy but for equal logits already."""


class SampledSequence(Protocol):
    """What the sampler must know of an output; its `row` has a seed."""

    row: SampledRow

    @property
    def temperature(self) -> float:
        """What its logits are divided by; 0: it takes the likeliest token."""
        ...

    @property
    def produced(self) -> int:
        """Length of the output so far."""
        ...


class BatchSampler:
    """Draws for a batch; what depends on the batch alone is kept until the batch changes."""

    def __init__(self) -> None:
        self._sequences: list[SampledSequence] = []
        self._rows = SampledRows([], torch.device("cpu"))
        self._temperatures = torch.empty(0, 1)

    def draw_tokens(
        self, logits: Tensor, sequences: Sequence[SampledSequence]
    ) -> tuple[list[int], list[float]]:
        """Draw a token for each row from `logits` [B, V].

        Returns tokens [B] and natural log-probabilities [B]; one that is not finite says that the
        row's logits were not, and its token means nothing.
        """
        if list(sequences) != self._sequences:
            self._sequences = list(sequences)
            self._rows = SampledRows([each.row for each in sequences], logits.device)
            values = [max(each.temperature, LEAST_TEMPERATURE) for each in sequences]
            heat = torch.tensor(values, device=logits.device)
            self._temperatures = heat.masked_fill_(self._rows.greedy_rows, 1).unsqueeze(1)
        last = [len(each.row.prompt) + each.produced - 1 for each in sequences]
        positions = torch.tensor(last, device=logits.device)
        work = logits.to(torch.float32, copy=True)
        tokens, logprobs = draw_tokens(work, self._rows, self._temperatures, positions)
        return tokens.tolist(), logprobs.tolist()
