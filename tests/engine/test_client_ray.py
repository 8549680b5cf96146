"""A real Ray job whose processes share one pool, and with it one balancer."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.engine.rays import run_job
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import in_process

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("ROLLOUT_CACHE", ROOT / ".cache"), "env-ray", "bin", "python")
JOB = ROOT / "tests" / "support" / "engine" / "ray_job.py"


@pytest.mark.skipif(not PYTHON.exists(), reason="no environment with Ray: make test makes it")
def test_processes_of_a_ray_job_share_one_pool(tiny_models: TinyModels, tmp_path: Path) -> None:
    model = tiny_models.model(1)
    with in_process(model) as one, in_process(model) as two:
        sampling = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
        alone = one.generate(token_ids=[5, 6, 7, 8], sampling=sampling).json()
        printed = run_job(
            [PYTHON, JOB, one.url, two.url], tmp_path, 240, PYTHONPATH=str(ROOT / "src")
        )
    said = json.loads(printed.splitlines()[-1])
    tokens = alone["outputs"][0]["token_ids"]
    turns = [*said["first"], *said["second"]]
    assert [turn[0] for turn in turns] == [tokens] * 4
    assert len({turn[1] for turn in turns}) == 1, "the conversation stayed, whoever asked"
    assert len(said["spread"]) == 2
    assert "too-long" in said["error"] or "length" in said["error"]
    assert set(said["load"].values()) == {0}
