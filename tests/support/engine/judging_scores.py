"""Scores of prompts and rows of the most likely tokens, against plain transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.support.engine.reference import Reference

CLOSE = 1e-3


def prompt_logprobs(judge: Reference, prompt: Sequence[int]) -> torch.Tensor:
    """Log-probabilities [P - 1, V] of positions 1 and later."""
    return judge.logits(prompt[:1], prompt[1:]).log_softmax(-1)


def check_rows(top: dict[str, Any], expected: torch.Tensor, k: int) -> None:
    """Each row has the k likeliest tokens of `expected` [T, V], in their order up to rounding."""
    assert len(top["token_ids"]) == len(top["logprobs"]) == len(expected)
    best = expected.topk(k, dim=-1).values
    for ids, values, row, want in zip(
        top["token_ids"], top["logprobs"], expected, best, strict=True
    ):
        assert len(set(ids)) == len(ids) == len(values) == int((want > -torch.inf).sum()), (
            ids,
            values,
            want,
        )
        found = torch.tensor(values)
        assert torch.allclose(found, want[: len(values)], atol=CLOSE)
        assert torch.allclose(row[ids], found, atol=CLOSE)


def check_scores(
    scored: dict[str, Any], judge: Reference, prompt: Sequence[int], start: int, end: int, k: int
) -> None:
    """The scores of positions [start, end) are those of transformers."""
    assert set(scored) == {"start", "logprobs", "weights"} | ({"top_logprobs"} if k else set())
    assert (scored["start"], len(scored["logprobs"])) == (start, end - start)
    values, top = scored["logprobs"], scored.get("top_logprobs")
    if start == 0:
        assert values[0] is None
        values = values[1:]
        if top is not None:
            assert (top["token_ids"][0], top["logprobs"][0]) == ([], [])
            top = {name: rows[1:] for name, rows in top.items()}
    if end == 1:
        return
    rows = prompt_logprobs(judge, prompt)[max(0, start - 1) : end - 1]
    tokens = torch.tensor(prompt[max(1, start) : end]).unsqueeze(1)
    expected = rows.gather(1, tokens).squeeze(1).tolist()
    assert values == pytest.approx(expected, abs=CLOSE)
    if top is not None:
        check_rows(top, rows, k)
