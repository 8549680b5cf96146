"""Logprobs of tokens that are given, and the most likely ones at their positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollout_common.wire import WeightsId
from rollout_worker.token_scores import PromptScores, TopTokens


def score_tokens(
    logits: Tensor, tokens: Sequence[int], top: int
) -> tuple[list[float], TopTokens | None]:
    """Return the logprobs [S] of `tokens` under `logits` [S, V], and the `top` most likely tokens of each row."""
    work = logits.to(torch.float32, copy=True)
    # Shifted by the maximum, the sum loses no digits however large the logits are.
    work -= work.amax(dim=-1, keepdim=True)
    norm = work.logsumexp(dim=-1, keepdim=True)
    wanted = torch.tensor(tokens, device=work.device).unsqueeze(1)
    chosen = (work.gather(1, wanted) - norm).squeeze(1).tolist()
    if not top:
        return chosen, None
    values, ids = work.topk(min(top, work.shape[1]), dim=-1)
    found = TopTokens(ids.shape[1])
    found.token_ids.extend(ids.flatten().tolist())
    found.logprobs.extend((values - norm).flatten().tolist())
    return chosen, found


@dataclass(slots=True)
class PromptScoring:
    """The scores of a prompt's positions [start, end) while it goes through the model, piece by piece."""

    start: int
    end: int
    top_logprobs: int
    logprobs: list[float] = field(default_factory=list)
    top: TopTokens | None = None

    def forget_scores(self) -> None:
        """Begin again: the prompt goes through the model once more, perhaps with other weights."""
        self.logprobs, self.top = [], None

    def wanted_in(self, begin: int, end: int) -> range:
        """Return which of the prompt's tokens [begin, end) are followed by a position to score."""
        return range(max(begin, self.start - 1), max(begin, min(end, self.end - 1)))

    def add_scores(self, logits: Tensor, tokens: Sequence[int]) -> None:
        """Add the next positions: their tokens [S], and the logits [S, V] before each."""
        chosen, top = score_tokens(logits, tokens, self.top_logprobs)
        if self.top is None:
            self.top = top
        elif top is not None:
            self.top.extend(top)
        self.logprobs += chosen

    def finish_scores(self, weights: WeightsId) -> PromptScores:
        """Return the whole."""
        return PromptScores.from_computed(
            self.start, self.logprobs, self.top, weights, self.top_logprobs
        )
