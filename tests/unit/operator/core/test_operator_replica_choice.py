"""Which replicas a scale-down leaves, and which numbers a scale-up takes."""

from __future__ import annotations

import time
from dataclasses import replace

from rollout_operator.core.observed_pool import UNKNOWN_WORKER
from rollout_operator.core.pass_planning import plan_pass
from rollout_operator.core.replica_heads import ReplicaHead, WeightsVersion
from rollout_operator.core.replicas.replica_choice import choose_wanted_replicas
from rollout_worker.schemas import WeightsId, WeightsSource
from tests.support.unit.poolspecs import NOW, a_pod, colocated_spec, pushed, spec_of
from tests.support.unit.world import World, settled_world


def replicas_of(world: World) -> set[int]:
    return {pod.replica for pod in world.pods.values() if not pod.is_deleting}


def test_the_one_with_least_to_do_goes_and_among_equals_the_highest() -> None:
    world = settled_world(replicas=4)
    for replica, running in enumerate((9, 3, 5, 3)):
        world.worker(replica).in_flight = running
    for left in ({0, 1, 2}, {0, 2}, {0}):
        world.run_with(replicas=len(left))
        assert replicas_of(world) == left
        assert [member.name for member in world.status.members] == [f"pool-{i}-0" for i in left]
        assert world.status.phase == "Ready"


def test_a_choice_stands_though_the_load_moves() -> None:
    """While the chosen one drains, clients send its work to the others, and to it nothing."""
    world = settled_world(replicas=3)
    world.grace = 9.0
    world.worker(0).in_flight = world.worker(2).in_flight = 1
    world.set(replicas=2)
    world.step()
    assert replicas_of(world) == {0, 2}
    world.worker(0).in_flight = 0
    world.run()
    assert replicas_of(world) == {0, 2}


def test_one_that_is_down_goes_before_an_idle_one() -> None:
    world = settled_world(replicas=3)
    world.worker(0).in_flight = 1
    world.refuses = lambda kind: kind == "create"
    world.kill("pool-1-0")
    world.step()
    world.set(replicas=2)
    world.refuses = lambda kind: False
    world.run()
    assert replicas_of(world) == {0, 2}


def test_the_only_copy_of_pushed_weights_stays_though_it_is_idle() -> None:
    world = settled_world(replicas=2)
    for worker in world.workers.values():
        assert worker.push(WeightsId(epoch=0, version=1))
    world.run_with(weights=pushed(0, 1))
    world.worker(0).kept, world.worker(0).in_flight = None, 5
    world.run_with(replicas=1)
    assert replicas_of(world) == {1}


def test_numbers_that_are_free_are_taken_again_from_the_lowest() -> None:
    world = settled_world(replicas=4)
    world.worker(3).in_flight = 1
    world.run_with(replicas=1)
    assert replicas_of(world) == {3}
    world.run_with(replicas=3)
    assert replicas_of(world) == {0, 1, 3}
    world.kill("pool-3-0")
    world.run()
    assert replicas_of(world) == {0, 1, 2}
    assert world.status.phase == "Ready"


def test_a_surge_takes_a_free_number_and_ends() -> None:
    world = settled_world(replicas=3, updateStrategy={"maxUnavailable": 0, "maxSurge": 1})
    world.worker(0).in_flight = world.worker(2).in_flight = 1
    world.run_with(replicas=2)
    world.set(podTemplate={"labels": {"a": "b"}})
    seen = set()
    for _ in range(60):
        world.step()
        seen |= {pod.name for pod in world.pods.values() if pod.is_surge}
        assert sum(pod.ready for pod in world.pods.values()) >= 2
    assert "pool-1-0" in seen
    assert len(replicas_of(world)) == 2
    assert not any(pod.is_surge for pod in world.pods.values())
    assert world.status.updated_replicas == 2


def test_a_stranger_that_says_it_is_a_surge_adds_no_replica() -> None:
    world = settled_world(replicas=2)
    for _ in range(20):
        world.intrude(2, 0)
        world.step()
    assert replicas_of(world) == {0, 1}


def test_where_devices_go_by_number_the_lowest_stay() -> None:
    world = settled_world(replicas=3)
    for replica in (1, 2):
        world.worker(replica).in_flight = 9
    plan = plan_pass(colocated_spec(replicas=1), world.observed(), world.status, NOW)
    assert plan.replicas == {0}


def test_the_failures_of_a_replica_stay_with_its_number() -> None:
    world = settled_world(replicas=3)
    world.worker(2).in_flight = 1
    world.run_with(replicas=1)
    assert replicas_of(world) == {2}
    world.fail("pool-2-0")
    world.refuses = lambda kind: kind == "create"
    world.run(20)
    assert not replicas_of(world)
    assert [each.replica for each in world.status.replacing] == [2]
    world.refuses = lambda kind: False
    world.run()
    assert [(pod.name, pod.restarts) for pod in world.pods.values()] == [("pool-2-0", 1)]


def test_as_many_as_the_crd_allows_are_chosen_quickly() -> None:
    spec = spec_of(replicas=5_000)
    seen = replace(World(spec).observed(), pods=tuple(a_pod(spec, n) for n in range(9_999)))
    began = time.process_time()
    heads = [ReplicaHead(pod, UNKNOWN_WORKER) for pod in seen.pods]
    served = WeightsVersion(WeightsId(epoch=0, version=0), WeightsSource(path="/models/tiny"))
    wanted = choose_wanted_replicas(spec, seen, heads, frozenset(range(4_000, 9_999)), served)
    assert time.process_time() - began < 1.0, "it takes 0.05 s"
    assert wanted == frozenset(range(4_000, 9_000))
