"""Tensors that several ranks of a trainer have parts of: one publishes, all take part."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.support.unit import rank_process
from tests.support.unit.ranks import ranks


def test_shards_are_gathered_one_by_one_and_a_failure_leaves_no_rank_waiting(
    tmp_path: Path,
) -> None:
    with ranks(rank_process.main, 2, tmp_path) as started:
        for rank in started:
            assert rank.status(200) == 0, rank.said
    found = json.loads((tmp_path / "content").read_text())
    assert found == {
        name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex()
        for name, tensor in rank_process.state().items()
    }
    count = len(found)
    assert [(tmp_path / f"taken-{rank}").read_text() for rank in range(2)] == [str(2 * count)] * 2
    assert "'columns' has no plain values" in (tmp_path / "error").read_text()
