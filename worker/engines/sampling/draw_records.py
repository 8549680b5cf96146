"""What a draw records of the rows that ask for it: the most likely tokens, and which tokens could be drawn."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollout_common.wire.rich_requests import mask_row_bytes

MIN_LOGPROB = -104.0
"""Below it a probability is 0 in float32, so that no sampler draws the token: a large negative bias excludes it."""

LikeliestTokens = dict[int, tuple[Tensor, Tensor]]
"""Ids [k] and logprobs [k] of the most likely tokens, by row."""


@dataclass(slots=True)
class DrawRecords:
    """The records of one batch, by row; `allowed` [V] bool: which tokens could be drawn."""

    top: LikeliestTokens = field(default_factory=dict)
    allowed: dict[int, Tensor] = field(default_factory=dict)

    def note_allowed(self, rows: list[int], start: int, logprobs: Tensor) -> None:
        """Note what could be drawn in these rows of `logprobs` [B, V]; `start`: the batch's number of the first row."""
        if rows:
            at = torch.tensor(rows, device=logprobs.device)
            possible = (logprobs[at] > MIN_LOGPROB).cpu()
            self.allowed |= {start + row: part for row, part in zip(rows, possible, strict=True)}


def pack_mask_row(allowed: Tensor) -> tuple[int, bytes]:
    """Return how many tokens `allowed` [V] has, and its row of a `wire.SamplingMask`."""
    count, size = int(allowed.sum()), len(allowed)
    length = mask_row_bytes(count, size)
    if length == 0:
        return count, b""
    if length == 4 * count:
        return count, allowed.nonzero().squeeze(1).to(torch.int32).numpy().tobytes()
    bits = torch.nn.functional.pad(allowed, (0, -size % 8)).view(-1, 8).to(torch.uint8)
    weights = 1 << torch.arange(8, dtype=torch.uint8)
    return count, (bits * weights).sum(dim=1, dtype=torch.uint8).numpy().tobytes()
