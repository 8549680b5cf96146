"""What our samplers have in common: penalties, and a token by its place in the distribution."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_BIAS = 1e30
"""Beyond, sums leave the range of float32; it is as good as infinite already."""


def penalise(
    part: Tensor, prompts: Tensor, counts: Tensor, factors: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Return the logits `part` [B, V] with penalties for what was there before.

    Args:
        part: Left as it is.
        prompts: [B, V] whether a token is in the prompt.
        counts: [B, V] how often it was produced.
        factors: [B, 1] each: repetition, presence, frequency.
    """
    repetition, presence, frequency = factors
    made = counts > 0
    repeated = torch.where(part > 0, part / repetition, part * repetition)
    part = torch.where(prompts | made, repeated, part)
    return (part - presence * made - frequency * counts).clamp_(max=MAX_BIAS)


def invert(blocks: Tensor, cumulative: Tensor, numbers: Tensor) -> Tensor:
    """Return for each row the token at its number of the cumulative distribution, [B].

    Args:
        blocks: [B, N, size] masses of the tokens, block by block.
        cumulative: [B, N] their sums up to the end of each block, double.
        numbers: [B] in [0, 1), double.
    """
    size = blocks.shape[2]
    target = _below(numbers.unsqueeze(1) * cumulative[:, -1:], cumulative[:, -1:])
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[1] - 1)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inner = blocks.gather(1, block.unsqueeze(2).expand(-1, -1, size)).squeeze(1)
    inner = inner.double().cumsum(dim=-1)
    place = torch.searchsorted(inner, _below(target - before, inner[:, -1:]), right=True)
    return (block * size + place.clamp_(max=size - 1)).squeeze(1)


def _below(target: Tensor, total: Tensor) -> Tensor:
    """Keep strictly below the total, so that the first sum above is of a possible token."""
    return torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
