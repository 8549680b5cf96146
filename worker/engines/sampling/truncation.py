"""`min_p`, `top_k` and `top_p` on the rows of a batch: what they cut off is masked.

The most likely tokens are looked at first, which settles nearly every row; only what is left is sorted whole, some rows
at a time. To know which rows those are, a step waits for the device once, and not at all if every row has a small `top_k`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SORT_LOGITS = 1 << 22
"""Logits that are sorted at once, which takes ten times their memory."""
TOP_TOKENS = 1024
"""Most likely tokens that are looked at first."""


@dataclass(frozen=True, slots=True)
class TruncationParams:
    """What is cut off of rows, [B, 1] each in double; `sure`: every row has a small `top_k`."""

    min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    sure: bool = False

    def select_rows(self, rows: Tensor) -> TruncationParams:
        """Return those of these rows."""
        return TruncationParams(self.min_p[rows], self.top_k[rows], self.top_p[rows])


def truncate_logits(work: Tensor, at: Tensor, cuts: TruncationParams) -> None:
    """Mask in the rows `at` of `work` [B, V] what is cut off, in place; the maximum of each row is 0."""
    part = work[at]
    exact = (
        _truncate_top(part, cuts)
        if work.shape[1] > TOP_TOKENS
        else torch.zeros_like(at, dtype=torch.bool)
    )
    work[at] = part
    if cuts.sure and work.shape[1] > TOP_TOKENS:
        return  # its tokens are among the most likely ones: nothing to look at, nothing to wait for
    left = exact.logical_not().nonzero().squeeze(1)
    for some in torch.split(left, max(1, SORT_LOGITS // work.shape[1])):
        work[at[some]] = _truncate_sorted(part[some], cuts.select_rows(some))


def _truncate_top(part: Tensor, cuts: TruncationParams) -> Tensor:
    """Mask rows whose kept tokens are among the `TOP_TOKENS` most likely ones; return which are, [B]."""
    top, order = part.topk(TOP_TOKENS, dim=-1)
    order, by_id = order.sort(dim=-1)
    top, by_value = top.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    floor = cuts.min_p.log()
    likely = part.exp().masked_fill_(part < floor, 0).sum(dim=-1, keepdim=True, dtype=torch.float64)
    kept = _kept_mask(top, cuts, likely)
    # What is as likely as the last one may go on behind it, and so may the sum of a large top_k.
    exact = ~(kept & (top == top[:, -1:])).any(dim=-1) & (cuts.top_k.squeeze(1) <= TOP_TOKENS)
    if cuts.sure:
        exact = torch.ones_like(exact)
    cut = torch.full_like(part, -torch.inf)
    cut.scatter_(1, order.gather(1, by_value), top.masked_fill(~kept, -torch.inf))
    part.copy_(torch.where(exact.unsqueeze(1), cut, part))
    return exact


def _truncate_sorted(part: Tensor, cuts: TruncationParams) -> Tensor:
    """Return the rows with what is cut off masked, whatever is kept: all tokens are sorted."""
    ordered, order = part.sort(dim=-1, descending=True, stable=True)
    ordered.masked_fill_(~_kept_mask(ordered, cuts, None), -torch.inf)
    return torch.empty_like(ordered).scatter_(1, order, ordered)


def _kept_mask(ordered: Tensor, cuts: TruncationParams, likely: Tensor | None) -> Tensor:
    """Return which tokens stay of those that are in order; the first one always does.

    `likely`: [B, 1] mass of all that `min_p` leaves where these are not all tokens.
    """
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    kept = (ordered >= cuts.min_p.log()) & ((rank < cuts.top_k) | (cuts.top_k <= 0))
    kept &= ordered > -torch.inf
    mass = ordered.exp().masked_fill_(~kept, 0).to(torch.float64)
    total = mass.sum(dim=-1, keepdim=True)
    if likely is not None:
        total = torch.where(cuts.top_k > 0, total, likely)
    before = mass.cumsum(dim=-1) - mass
    return kept & ((before < cuts.top_p * total) | (cuts.top_p >= 1))
