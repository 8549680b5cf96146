"""Tensors that several ranks of a trainer have parts of: one publishes, all take part."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

import rank_process


def test_shards_are_gathered_one_by_one_and_a_failure_leaves_no_rank_waiting(
    tmp_path: Path,
) -> None:
    environment = {"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, rank_process.__file__, str(rank), "2", str(tmp_path)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, said = rank.communicate(timeout=200)
            assert rank.returncode == 0, said
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    found = json.loads((tmp_path / "content").read_text())
    assert found == {
        name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex()
        for name, tensor in rank_process.state().items()
    }
    count = len(found)
    assert [(tmp_path / f"taken-{rank}").read_text() for rank in range(2)] == [str(2 * count)] * 2
    assert "'columns' has no plain values" in (tmp_path / "error").read_text()
