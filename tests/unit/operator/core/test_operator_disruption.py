"""What a pool's PodDisruptionBudget leaves, and when it leaves everything."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_operator.core.disruption import budget_difference, disruption_budget
from rollout_operator.core.pass_plan import DisruptionBudget
from rollout_worker.schemas import WeightsId
from tests.support.unit.poolspecs import pushed, spec_of, target
from tests.support.unit.world import World

GANG: dict[str, Any] = {
    "engine": {"type": "vllm"},
    "parallelism": {"tensor": 2, "nodes": 2},
    "accelerator": {"resource": "nvidia.com/gpu"},
}


def budget_of(world: World) -> DisruptionBudget:
    budget = world.step().budget
    assert budget is not None
    return budget


@pytest.mark.parametrize(
    ("spec", "left"),
    [
        ({"replicas": 3}, 2),
        ({"replicas": 1}, 0),
        ({"replicas": 0}, 0),
        ({"replicas": 3, "suspend": True}, 0),
        ({"replicas": 3, "disruption": {"maxUnavailable": 2}}, 1),
        ({"replicas": 3, "disruption": {"maxUnavailable": 0}}, 3),
        ({"replicas": 3, "disruption": {"maxUnavailable": 9}}, 0),
        ({"replicas": 3, **GANG}, 5),
    ],
    ids=["three", "one", "none", "suspended", "two may go", "none may go", "all may go", "gangs"],
)
def test_as_many_pods_stay_as_replicas_must(spec: dict[str, Any], left: int) -> None:
    world = World(spec_of(**spec))
    world.run()
    assert budget_of(world) == DisruptionBudget(left, unready_go=True)


def test_none_may_go_while_a_commit_runs() -> None:
    world = World(spec_of(replicas=3))
    world.run()
    world.set(weights=target(1, 1))
    left = [budget_of(world).min_available for _ in range(20)]
    assert left[0] == 2, "while weights are staged"
    assert 3 in left
    assert left[-1] == 2


def test_the_last_copy_of_pushed_weights_stays() -> None:
    world = World(spec_of(replicas=2, disruption={"maxUnavailable": 2}))
    world.run()
    for worker in world.workers.values():
        assert worker.push(WeightsId(epoch=0, version=1))
    world.set(weights=pushed(0, 1))
    world.run()
    assert budget_of(world) == DisruptionBudget(1, unready_go=False)
    world.kill("pool-1-0")
    assert budget_of(world).min_available == 2


def test_the_only_sleeping_replica_with_the_next_weights_stays() -> None:
    world = World(spec_of(replicas=2, disruption={"maxUnavailable": 2}))
    world.run()
    world.set(state="Asleep")
    world.run()
    assert world.worker(1).push(WeightsId(epoch=0, version=1))
    world.set(weights=pushed(0, 1))
    world.run()
    assert budget_of(world) == DisruptionBudget(2, unready_go=False)


def test_what_somebody_changed_is_named() -> None:
    want = disruption_budget("pool", "ns", "uid", DisruptionBudget(2, unready_go=True))
    assert budget_difference(want, want) is None
    for field, value in (("minAvailable", 1), ("maxUnavailable", 1), ("selector", {})):
        have = {**want, "spec": {**want["spec"], field: value}}
        assert budget_difference(want, have) == f"spec.{field}"
