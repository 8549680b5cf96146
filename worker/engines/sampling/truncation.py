"""`min_p`, `top_k` and `top_p` on the rows of a batch: the tokens that they cut off are masked.

The most likely tokens alone decide nearly every row; only the other rows are sorted as a whole, some at a time.
To know which rows those are, a step waits for the device once, or not at all if every row has a small `top_k`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SORT_LOGITS = 1 << 22
"""Logits sorted at once, which takes ten times their memory."""
TOP_TOKENS = 1024
"""How many of the most likely tokens are looked at first."""


@dataclass(frozen=True, slots=True)
class TruncationParams:
    """The parameters of rows, [B, 1] each in double; `sure`: every row has a small `top_k`."""

    min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    sure: bool = False

    def select_rows(self, rows: Tensor) -> TruncationParams:
        """Return the parameters of these rows."""
        return TruncationParams(self.min_p[rows], self.top_k[rows], self.top_p[rows])


def truncate_logits(work: Tensor, at: Tensor, cuts: TruncationParams) -> None:
    """Mask in place what is cut off in the rows `at` of `work` [B, V], whose maximum is 0 each."""
    part = work[at]
    exact = (
        _truncate_top(part, cuts)
        if work.shape[1] > TOP_TOKENS
        else torch.zeros_like(at, dtype=torch.bool)
    )
    work[at] = part
    if cuts.sure and work.shape[1] > TOP_TOKENS:
        return  # all kept tokens are among the most likely ones: the step need not wait for the device
    left = exact.logical_not().nonzero().squeeze(1)
    for some in torch.split(left, max(1, SORT_LOGITS // work.shape[1])):
        work[at[some]] = _truncate_sorted(part[some], cuts.select_rows(some))


def _truncate_top(part: Tensor, cuts: TruncationParams) -> Tensor:
    """Mask the rows whose kept tokens are among the `TOP_TOKENS` most likely ones; return which rows, [B]."""
    top, order = part.topk(TOP_TOKENS, dim=-1)
    order, by_id = order.sort(dim=-1)
    top, by_value = top.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    floor = cuts.min_p.log()
    likely = part.exp().masked_fill_(part < floor, 0).sum(dim=-1, keepdim=True, dtype=torch.float64)
    kept = _kept_mask(top, cuts, likely)
    # Tokens as likely as the last one may follow it, and so may more of the sum of a large top_k.
    exact = ~(kept & (top == top[:, -1:])).any(dim=-1) & (cuts.top_k.squeeze(1) <= TOP_TOKENS)
    if cuts.sure:
        exact = torch.ones_like(exact)
    cut = torch.full_like(part, -torch.inf)
    cut.scatter_(1, order.gather(1, by_value), top.masked_fill(~kept, -torch.inf))
    part.copy_(torch.where(exact.unsqueeze(1), cut, part))
    return exact


def _truncate_sorted(part: Tensor, cuts: TruncationParams) -> Tensor:
    """Return the rows with what is cut off masked, however much is kept: all tokens are sorted."""
    ordered, order = part.sort(dim=-1, descending=True, stable=True)
    ordered.masked_fill_(~_kept_mask(ordered, cuts, None), -torch.inf)
    return torch.empty_like(ordered).scatter_(1, order, ordered)


def _kept_mask(ordered: Tensor, cuts: TruncationParams, likely: Tensor | None) -> Tensor:
    """Return which of the tokens, in descending order, are kept; the first one always is.

    `likely`: [B, 1] mass of all tokens that `min_p` keeps, if these are not all tokens.
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
