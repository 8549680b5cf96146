"""Positions of tokens for models that place a picture's tokens in a grid (mRoPE)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .picture_model import PlacedPicture


def grid_positions(
    length: int, placed: Sequence[PlacedPicture], grids: Sequence[Sequence[int]], merge: int
) -> tuple[Tensor, int]:
    """Return the positions of a prompt, and what is added to the positions of the tokens after it.

    As `get_rope_index` of transformers computes them: text counts on; a picture begins where text would, its tokens go by
    time, row and column, and the text behind it follows the longest side.

    Args:
        length: P, of the prompt.
        placed: Its pictures, in order.
        grids: Of each: patches over time, over the height and over the width.
        merge: Patches on a side of the square that is one token.

    Returns:
        [3, P] int64 and a number that is 0 or less.
    """
    parts, end, following = [], 0, 0
    for each, (frames, height, width) in zip(placed, grids, strict=True):
        parts.append(_text_positions(each.offset - end, following))
        following += each.offset - end
        sides = frames, height // merge, width // merge
        parts.append(torch.cartesian_prod(*(torch.arange(side) for side in sides)).T + following)
        following += max(sides[1:])
        end = each.offset + each.length
    parts.append(_text_positions(length - end, following))
    following += length - end
    return torch.cat(parts, dim=1), following - length


def _text_positions(count: int, first: int) -> Tensor:
    return (torch.arange(count) + first).expand(3, -1)
