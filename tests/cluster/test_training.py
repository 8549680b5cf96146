"""A policy learns on the cluster: `make demo-train` with fewer steps.

The trainer of the conversations itself checks every token that it learned from (examples/grpo/check.py, whose own
test is tests/unit/tools/test_training_check.py).
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

import rollout_local
from demo import train
from demo.scene import Scene
from demo.stage import Stage
from localkube import Cluster
from localkube.home import cache

pytestmark = pytest.mark.timeout(900)
TOOL_STEPS, CONVERSATIONS = 7, 128
"""The pool grows after the first step and loses a worker after the fourth."""


def trained(
    cluster: Cluster, task: str, steps: int
) -> tuple[Path, list[dict[str, str]], dict[str, Any]]:
    """Tell the story; return the folder with the results, the rows of their table and the pool at the end."""
    folder = rollout_local.make_models(cache() / "models" / train.NAMESPACE, *train.SHAPE)
    rollout_local.claims(cluster, train.NAMESPACE, folder)
    stage, pools = Stage(cluster.environment(), train.NAMESPACE), train.TASKS[task].pools
    try:
        result = train.tell(Scene(stage, models=folder), train.TASKS[task], steps)
        pool = stage.get("rr", pools[0])
    finally:
        stage.kubectl("delete", "rr", *pools, "--ignore-not-found", "--wait=false")
    with (result / "table.csv").open() as file:
        return result, list(csv.DictReader(file)), pool


@pytest.mark.soak
def test_grpo_on_a_pool_raises_the_reward(cluster: Cluster) -> None:
    """Every day the next test shows the same with conversations, and more."""
    _, rows, _ = trained(cluster, "counting", steps=12)
    assert len(rows) == 12
    # An untrained policy earns 0.1; 40 steps reach 0.99.
    assert float(rows[0]["reward"]) < 0.25
    assert float(rows[-1]["reward"]) > float(rows[0]["reward"]) + 0.3
    # The trainer itself stops when its logprobs differ; here it counts that versions did move.
    assert all(f"1.{step}" in " ".join(row["versions"] for row in rows) for step in range(1, 10))


@pytest.mark.soak
def test_an_adapter_that_is_published_alone_raises_the_reward(cluster: Cluster) -> None:
    _, rows, pool = trained(cluster, "lora", steps=15)
    # 10 steps reached 0.53.
    assert float(rows[-1]["reward"]) > float(rows[0]["reward"]) + 0.2
    assert {row["transport"] for row in rows} <= {
        "memory (shm)",
        "memory (shm+tcp)",
        "memory (tcp)",
    }
    assert (
        pool["status"]["weights"]["committed"]["version"] == 16
    )  # the first one changes nothing yet


@pytest.mark.soak
@pytest.mark.parametrize(
    ("task", "steps", "chance", "earns"), [("vision", 10, 0.4, 0.7), ("distill", 15, 0.2, 0.6)]
)
def test_the_other_examples_learn(
    cluster: Cluster, task: str, steps: int, chance: float, earns: float
) -> None:
    _, rows, pool = trained(cluster, task, steps)
    earned = [float(row["reward"]) for row in rows]
    assert len(earned) == steps
    assert earned[0] < chance
    assert max(earned) > earns, earned
    if task == "vision":
        assert pool["status"]["weights"]["committed"]["version"] == steps


def test_every_token_is_right_while_the_pool_grows_and_loses_a_worker(cluster: Cluster) -> None:
    """A policy learns to ask a calculator."""
    result, rows, pool = trained(cluster, "tools", TOOL_STEPS)
    report = json.loads((result / "report.json").read_text())
    assert report["faults"] == []
    assert report["unchecked_tokens"] == 0
    assert report["conversations"] == TOOL_STEPS * CONVERSATIONS
    assert report["versions"] == TOOL_STEPS + 1  # the teacher's, too
    assert report["logprob_difference"] <= 1e-3
    # It all did happen: several turns, updates and a death in the middle, a third worker.
    assert report["turns"] == report["conversations"] + report["tool_calls"]
    assert report["tool_calls"] > TOOL_STEPS * CONVERSATIONS / 4
    assert report["of_two_versions"] > 0
    assert report["attempts"]["broken"] > 0
    assert {f"{train.POOL}-{n}-0" for n in range(3)} <= {
        name.split(".")[0] for name, count in report["replicas"].items() if count
    }
    assert pool["spec"]["replicas"] == pool["status"]["readyReplicas"] == 3
    assert pool["status"]["restarts"] == 1
    # The teacher's policy guesses every other time; 7 steps reached 0.87.
    earned = [float(row["reward"]) for row in rows]
    assert sum(earned[-3:]) / 3 > earned[0] + 0.2
