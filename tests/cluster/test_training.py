"""A policy learns on the cluster: `make demo-train` with fewer steps.

For `make soak`: every day test_training_tools shows the same with conversations, and more.
"""

from __future__ import annotations

import csv

import pytest

import rollout_local
from demo import train
from demo.scene import Scene
from demo.stage import Stage
from localkube import Cluster
from localkube.home import cache

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
STEPS = 12
RISE = 0.3
"""Above an untrained policy, which earns 0.1; 40 steps reach 0.99."""


def test_grpo_on_a_pool_raises_the_reward(cluster: Cluster) -> None:
    folder = rollout_local.make_models(cache() / "models" / train.NAMESPACE, *train.SHAPE)
    rollout_local.claims(cluster, train.NAMESPACE, folder)
    stage = Stage(cluster.environment(), train.NAMESPACE)
    try:
        result = train.tell(Scene(stage, models=folder), train.TASKS["counting"], STEPS)
    finally:
        stage.kubectl("delete", "rr", train.POOL, "--ignore-not-found", "--wait=false")
    with (result / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == STEPS
    assert float(rows[0]["reward"]) < 0.25
    assert float(rows[-1]["reward"]) > float(rows[0]["reward"]) + RISE
    # The trainer itself stops when its logprobs differ; here it counts that versions did move.
    assert all(f"1.{step}" in " ".join(row["versions"] for row in rows) for step in range(1, 10))
