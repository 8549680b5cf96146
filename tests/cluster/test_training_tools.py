"""A policy learns to ask a calculator while its pool grows and loses a worker.

`TASK=tools make demo-train` with fewer steps. The trainer itself checks every token that it learned
from (examples/grpo/check.py, whose own test is tests/unit/tools/test_training_check.py).
"""

from __future__ import annotations

import csv
import json

import pytest

import rollout_local
from demo import train
from demo.scene import Scene
from demo.stage import Stage
from localkube import Cluster
from localkube.home import cache

pytestmark = pytest.mark.timeout(900)
STEPS, CONVERSATIONS = 7, 128
"""It grows after the first and loses a worker after the fourth."""
RISE = 0.2
"""Above the teacher's policy, which guesses every other time; 7 steps reached 0.87."""


def test_every_token_is_right_while_the_pool_grows_and_loses_a_worker(cluster: Cluster) -> None:
    folder = rollout_local.make_models(cache() / "models" / train.NAMESPACE, *train.SHAPE)
    rollout_local.claims(cluster, train.NAMESPACE, folder)
    stage = Stage(cluster.environment(), train.NAMESPACE)
    try:
        result = train.tell(Scene(stage, models=folder), train.TASKS["tools"], STEPS)
        pool = stage.get("rr", train.POOL)
    finally:
        stage.kubectl("delete", "rr", train.POOL, "--ignore-not-found", "--wait=false")
    report = json.loads((result / "report.json").read_text())
    assert report["faults"] == []
    assert report["unchecked_tokens"] == 0
    assert report["conversations"] == STEPS * CONVERSATIONS
    assert report["versions"] == STEPS + 1  # the teacher's, too
    assert report["logprob_difference"] <= 1e-3
    # It all did happen: several turns, updates and a death in the middle, a third worker.
    assert report["turns"] == report["conversations"] + report["tool_calls"]
    assert report["tool_calls"] > STEPS * CONVERSATIONS / 4
    assert report["of_two_versions"] > 0
    assert report["attempts"]["broken"] > 0
    assert {f"{train.POOL}-{n}-0" for n in range(3)} <= {
        name.split(".")[0] for name, count in report["replicas"].items() if count
    }
    assert pool["spec"]["replicas"] == pool["status"]["readyReplicas"] == 3
    assert pool["status"]["restarts"] == 1
    with (result / "table.csv").open() as file:
        earned = [float(row["reward"]) for row in csv.DictReader(file)]
    assert sum(earned[-3:]) / 3 > earned[0] + RISE
