"""The life of replicas of several pods, walked through `plan_pass`: who dies, who follows, what is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rollout_operator.api.status import MemberStatus, UpdatePhase
from rollout_operator.core.pass_plan import ControlVerb
from tests.support.unit.poolspecs import GANG, spec_of, target
from tests.support.unit.world import World


@pytest.fixture
def world() -> World:
    """Two gangs of two pods that serve; ranks notice each other's end after three seconds."""
    made = World(spec_of(**GANG))
    made.gang_seconds = 3.0
    assert made.run().ready_replicas == 2
    made.log.clear()
    return made


def member(world: World, name: str) -> MemberStatus:
    """A head's line in status."""
    return next(m for m in world.status.members if m.name == name)


def replaced(world: World) -> None:
    """Wait until replica 1 has new pods, and all serve."""
    before = {p.uid for p in world.pods.values() if p.replica == 1}
    for _ in range(60):
        world.step()
        new = len(world.pods) == 4 and not before & {p.uid for p in world.pods.values()}
        if new and world.status.ready_replicas == 2 and world.status.phase == "Ready":
            return
    raise AssertionError(world.status.message)


def test_status_counts_gangs_and_names_heads(world: World) -> None:
    status = world.status
    assert (status.replicas, status.ready_replicas, status.updated_replicas) == (2, 2, 2)
    assert [m.name for m in status.members] == ["pool-0-0", "pool-1-0"]
    assert len(world.pods) == 4


@pytest.mark.parametrize("name", ["pool-1-0", "pool-1-1"])
@pytest.mark.parametrize("replicas", [2, 1])
def test_a_rank_without_labels_is_found_and_ends_no_gang(
    world: World, name: str, replicas: int
) -> None:
    uids = {p.uid for p in world.pods.values()}
    world.unlabelled.add(world.pods[name].uid)
    world.run_with(replicas=replicas)
    if replicas == 2:
        assert {p.uid for p in world.pods.values()} == uids
        assert world.status.ready_replicas == 2
    else:
        assert sorted(world.pods) == ["pool-0-0", "pool-0-1"], "nothing of it is left behind"


ENDS: dict[str, Callable[[World], None]] = {
    "member-dies": lambda world: world.fail("pool-1-1"),
    "head-dies": lambda world: world.fail("pool-1-0"),
    "member-is-silent": lambda world: world.freeze("pool-1-1"),
    "head-is-silent": lambda world: world.freeze("pool-1-0"),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("grace", [0.0, 5.0])
def test_a_gang_that_breaks_is_replaced_once(
    world: World, end: Callable[[World], None], grace: float
) -> None:
    world.grace = grace
    end(world)
    replaced(world)
    assert world.status.restarts == 1
    assert sorted(line for line in world.log if line.startswith("create")) == [
        "create pool-1-0",
        "create pool-1-1",
    ]
    assert {p.restarts for p in world.pods.values() if p.replica == 1} == {1}
    assert not [line for line in world.log if line.endswith(("pool-0-0", "pool-0-1"))]


@pytest.mark.parametrize("name", ["pool-1-0", "pool-1-1"])
def test_a_pod_that_is_waited_for_is_named(world: World, name: str) -> None:
    """Nothing is wrong with the operator while a gang drains."""
    world.grace = 5.0
    world.ask_to_go(name)
    world.step()
    world.step()
    assert world.status.message.endswith(
        "replicas to serve: pod 'pool-1-0' is still terminating on node 'node-1': its "
        "replacement waits for the name"
    )


def test_a_head_leaves_the_service_with_its_first_rank(world: World) -> None:
    """Its own process may not have noticed yet; nothing that it says counts any more."""
    world.gang_seconds = 30.0
    world.pods = {n: replace(p, restarts=1) for n, p in world.pods.items()}
    world.fail("pool-1-1")
    world.step()
    pod = world.pods["pool-1-0"]
    assert (pod.gate, pod.is_finished, pod.is_deleting) == (False, False, False)
    world.step()
    assert world.status.ready_replicas == 1
    told = member(world, "pool-1-0")
    assert (told.ready, told.message) == (False, "lost pool-1-1: exit code 137")
    assert world.status.message.startswith("replica 1 failed 2 times in a row and restarts at ")
    assert world.status.message.endswith(" UTC: pool-1-1: exit code 137")


def test_a_broken_gang_leaves_the_barrier(world: World) -> None:
    world.seconds_of = {ControlVerb.STAGE: 4.0}
    world.gang_seconds = 30.0
    world.pods = {n: replace(p, restarts=1) for n, p in world.pods.items()}
    world.set(weights=target(1, 1))
    world.step()
    world.fail("pool-1-1")
    world.steps(12)
    assert world.update.phase is UpdatePhase.COMPLETE
    assert "commit pool-1-0" not in world.log


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"trouble": "no GPU", "lacks_node": True}, "waits for pool-1-1: no GPU"),
        ({"node": None}, "waits for pool-1-1, which is not scheduled yet"),
        ({}, "waits for pool-1-1, which is waiting for its container"),
    ],
)
def test_a_head_says_which_of_its_members_it_waits_for(
    world: World, state: dict[str, Any], said: str
) -> None:
    shown: dict[str, dict[str, Any]] = {"pool-1-0": {}, "pool-1-1": {"started": False, **state}}
    for name, fields in shown.items():
        world.pods[name] = replace(world.pods[name], ready=False, gate=False, **fields)
    world.worker(1).silent = True
    world.answers.clear()
    world.step()
    assert member(world, "pool-1-0").message == said
    assert f"pool-1-0 {said}" in world.status.message
