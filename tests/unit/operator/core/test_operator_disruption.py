"""What a pool's PodDisruptionBudget leaves, and when it leaves everything."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_operator.core.pass_plan import ControlVerb, DisruptionBudget
from rollout_operator.core.replicas.disruption import budget_difference, disruption_budget
from rollout_worker.schemas import WeightsId
from tests.support.unit.poolspecs import GANG, pushed, target
from tests.support.unit.world import World, settled_world


def budget_of(world: World) -> DisruptionBudget:
    budget = world.step().budget
    assert budget is not None
    return budget


def pushed_pool(**spec: Any) -> World:
    """A pool that serves pushed weights."""
    world = settled_world(**spec)
    for worker in world.workers.values():
        assert worker.push(WeightsId(epoch=0, version=1))
    world.run_with(weights=pushed(0, 1))
    return world


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
    world = settled_world(**spec)
    assert budget_of(world) == DisruptionBudget(left, unready_go=True)


def test_none_may_go_while_a_commit_runs() -> None:
    world = settled_world(replicas=3)
    world.set(weights=target(1, 1))
    left = [budget_of(world).min_available for _ in range(20)]
    assert left[0] == 2, "while weights are staged"
    assert 3 in left
    assert left[-1] == 2


def test_the_last_copy_of_pushed_weights_stays() -> None:
    world = pushed_pool(replicas=2, disruption={"maxUnavailable": 2})
    assert budget_of(world) == DisruptionBudget(1, unready_go=False)
    world.kill("pool-1-0")
    assert budget_of(world).min_available == 2


def test_the_only_sleeping_replica_with_the_next_weights_stays() -> None:
    world = settled_world(replicas=2, disruption={"maxUnavailable": 2})
    world.run_with(state="Asleep")
    assert world.worker(1).push(WeightsId(epoch=0, version=1))
    world.run_with(weights=pushed(0, 1))
    assert budget_of(world) == DisruptionBudget(2, unready_go=False)


@pytest.mark.parametrize("most", [1, 0])
def test_the_only_copy_stays_while_its_replica_is_silent(most: int) -> None:
    world = pushed_pool(replicas=1, disruption={"maxUnavailable": most})
    world.worker(0).silent = True
    for _ in range(3):
        assert budget_of(world) == DisruptionBudget(1, unready_go=most == 0)


def test_none_goes_while_it_is_unknown_which_silent_replica_has_the_copy() -> None:
    world = pushed_pool(replicas=2)
    world.let_workers(silent=True)
    assert budget_of(world) == DisruptionBudget(2, unready_go=False)
    world.worker(1).silent = False
    assert budget_of(world) == DisruptionBudget(2, unready_go=False), "one is known to have it"


@pytest.mark.parametrize("more", [{}, GANG], ids=["one pod", "gang"])
def test_a_drain_does_not_take_all_sleeping_copies_at_once(more: dict[str, Any]) -> None:
    """Sleeping pods are unready: a budget that lets unready pods go would not count them."""
    world = pushed_pool(replicas=2, **more)
    for name in world.pods:
        world.place(name, f"{name}'s")
    for replica in range(2):
        world.place(f"pool-{replica}-{len(world.pods) // 2 - 1}", "shared")
    assert budget_of(world).unready_go, "they are ready"
    world.run_with(state="Asleep")
    assert not budget_of(world).unready_go
    world.place("pool-1-0", "other")
    world.place(f"pool-1-{len(world.pods) // 2 - 1}", "other")
    assert budget_of(world).unready_go, "no node has pods of both"


def live_pods(world: World) -> set[str]:
    return {pod.name for pod in world.pods.values() if not pod.is_deleting}


@pytest.mark.parametrize("more", [{}, GANG], ids=["one pod", "gang"])
@pytest.mark.parametrize("strategy", [{}, {"partition": 1}], ids=["plain", "partition"])
def test_the_only_copy_is_moved_before_a_drain_takes_it(
    more: dict[str, Any], strategy: dict[str, Any]
) -> None:
    world = pushed_pool(replicas=1, updateStrategy=strategy, **more)
    nodes, first = 1 + bool(more), set(world.pods)
    least = budget_of(world).min_available
    assert least == nodes, "nothing may take the only copy"
    world.place("pool-0-0", "leaving")
    world.cordoned = frozenset({"leaving"})
    said = set()
    for _ in range(30):
        said.add(world.step().status.message)
    assert any(
        "node 'leaving' is cordoned, and pool-0-0 on it has the only copy" in s for s in said
    )
    assert live_pods(world) > first
    assert world.status.phase == "Ready"
    budget = budget_of(world)
    assert budget.min_available == len(world.pods) - 1, "one of the two copies may go"
    world.kill("pool-0-0")
    serving = []
    for _ in range(60):
        world.step()
        serving.append(any(p.ready for p in world.pods.values() if p.rank == 0))
    assert all(serving)
    assert live_pods(world) == first
    assert world.worker(0).active == WeightsId(epoch=0, version=1)


def test_an_uncordoned_node_needs_no_second_copy() -> None:
    world = pushed_pool(replicas=1)
    world.cordoned = frozenset({"node-1"})
    world.run()
    assert live_pods(world) == {"pool-0-0", "pool-1-0"}
    world.cordoned = frozenset()
    world.run()
    assert live_pods(world) == {"pool-0-0"}


@pytest.mark.parametrize(
    "spec",
    [
        {"replicas": 2},
        {"replicas": 1, "disruption": {"maxUnavailable": 0}},
        {"replicas": 1, "state": "Asleep"},
    ],
    ids=["two copies", "none may be evicted", "it would sleep"],
)
def test_no_replica_is_added_where_a_drain_takes_no_last_copy(spec: dict[str, Any]) -> None:
    world = pushed_pool(**spec | {"state": "Active"})
    world.run_with(state=spec.get("state", "Active"))
    world.cordoned = frozenset({"node-1"})
    world.run()
    assert len(live_pods(world)) == spec["replicas"]


def test_a_scale_down_takes_the_only_copy_last() -> None:
    world = pushed_pool(replicas=4)
    for name in ("pool-0-0", "pool-1-0"):
        world.kill(name)
    world.refuses = lambda kind: kind == "create"
    world.set(replicas=1)
    world.steps(40)
    assert live_pods(world) == {"pool-2-0"}, "3 has a copy, too, and went"
    assert world.step().status.message == "1 of 1 replicas serve weights (0, 1)"
    world.refuses = lambda kind: False
    world.run()
    assert live_pods(world) == {"pool-2-0"}, "a replica's number says nothing of its worth"


@pytest.mark.parametrize("state", ["Active", "Asleep"])
def test_a_scale_down_leaves_a_silent_replica_with_the_only_copy(state: str) -> None:
    world = pushed_pool(replicas=2, state=state)
    world.kill("pool-1-0")
    world.seconds_of[ControlVerb.STAGE] = 1000.0
    world.steps(20)
    world.worker(0).silent = True
    world.step()
    world.set(replicas=1)
    world.step()
    assert live_pods(world) == {"pool-0-0"}


def test_a_gang_that_lost_a_member_is_not_kept_for_its_copy() -> None:
    world = pushed_pool(replicas=2, **GANG)
    world.gang_seconds = 1000.0  # its head has not noticed
    world.refuses = lambda kind: kind == "create"
    world.kill("pool-0-0")
    world.set(replicas=1)
    world.steps(10)
    assert "pool-1-0" in live_pods(world)
    world.fail("pool-1-1")
    world.steps(10)
    assert "pool-1-0" not in live_pods(world), "no engine goes on without one of its ranks"


def test_a_pool_that_is_scaled_to_zero_keeps_no_added_replica() -> None:
    world = pushed_pool(replicas=1)
    world.cordoned = frozenset({"node-1"})
    world.run()
    world.run_with(replicas=0)
    assert not live_pods(world)


def test_an_added_replica_that_has_the_only_copy_stays() -> None:
    world = pushed_pool(replicas=1)
    world.cordoned = frozenset({"node-1"})
    world.run()
    world.kill("pool-0-0")
    world.cordoned = frozenset()
    world.refuses = lambda kind: kind == "create"
    for _ in range(40):
        world.step()
        assert "pool-1-0" in live_pods(world)
    world.refuses = lambda kind: False
    world.run()
    assert live_pods(world) == {"pool-0-0"}
    assert world.worker(0).active == WeightsId(epoch=0, version=1)


def test_what_somebody_changed_is_named() -> None:
    want = disruption_budget("pool", "ns", "uid", DisruptionBudget(2, unready_go=True))
    assert budget_difference(want, want) is None
    for field, value in (("minAvailable", 1), ("maxUnavailable", 1), ("selector", {})):
        have = {**want, "spec": {**want["spec"], field: value}}
        assert budget_difference(want, have) == f"spec.{field}"
    unlabelled = {**want, "metadata": {**want["metadata"], "labels": {}}}
    assert budget_difference(want, unlabelled) == "metadata.labels[app.kubernetes.io/name]"
