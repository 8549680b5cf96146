"""Failures and restarts over time: of replicas, asleep and awake, and of the operator itself."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.unit.poolspecs import spec_of, target
from tests.support.unit.world import World

STATES = ("Active", "Paused", "Asleep")


def conditions(world: World) -> dict[str, tuple[str, str]]:
    return {c.type: (c.status, c.reason) for c in world.status.conditions}


def steps(world: World, count: int) -> None:
    for _ in range(count):
        world.step()


def count(world: World) -> int:
    """Failures noted on the pod that replaces a failed one."""
    name = "pool-0-0"
    failed = world.pods[name].uid
    for _ in range(400):
        world.step()
        if name in world.pods and world.pods[name].uid != failed:
            return world.pods[name].restarts
    raise AssertionError("it was not replaced")


def one_failure(**spec: Any) -> World:
    """A pool of one replica that has failed once."""
    world = World(spec_of(replicas=1, **spec))
    world.run()
    world.fail("pool-0-0")
    assert count(world) == 1
    return world


def test_each_failure_is_told_once_even_the_first_which_waits_for_nothing() -> None:
    world = World(spec_of(replicas=2))
    world.run()
    world.fail("pool-1-0")
    told = []
    for _ in range(60):
        plan = world.step()
        told += [note.message for note in plan.notes if note.reason == "ReplicaFailed"]
    assert told == ["replica 1 failed and restarts: exit code 137"]
    assert world.status.last_errors[0].message == told[0]
    assert world.status.restarts == 1


def test_failures_in_a_row_add_up() -> None:
    world = one_failure()
    steps(world, 590)
    world.fail("pool-0-0")
    assert count(world) == 2


@pytest.mark.parametrize("state", STATES)
def test_ten_minutes_of_doing_what_is_asked_reset_the_count(state: str) -> None:
    world = one_failure(state=state)
    steps(world, 610)
    world.fail("pool-0-0")
    assert count(world) == 1


def test_sleep_cycles_reset_the_count_as_well() -> None:
    world = one_failure()
    for state in ("Asleep", "Active") * 5:
        world.set(state=state)
        steps(world, 62)
    world.set(state="Asleep")
    steps(world, 20)
    world.fail("pool-0-0")
    assert count(world) == 1


def test_ten_minutes_of_loading_prove_nothing() -> None:
    world = World(spec_of(replicas=1))
    world.run()
    world.autoload = False
    world.fail("pool-0-0")
    assert count(world) == 1
    steps(world, 700)
    world.fail("pool-0-0")
    assert count(world) == 2


def test_failures_outlive_an_operator_that_ends_at_any_moment() -> None:
    world = World(spec_of(replicas=1, restartPolicy={"baseDelaySeconds": 1}))
    world.run()
    for failures in range(1, 5):
        world.fail("pool-0-0")
        failed = world.pods["pool-0-0"].uid
        for _ in range(40):
            world.step()
            world.forget()
        assert world.pods["pool-0-0"].uid != failed
        assert world.pods["pool-0-0"].restarts == failures
    assert world.status.restarts == 4
    assert world.status.replacing == ()


@pytest.mark.parametrize("state", STATES)
def test_a_worker_that_says_nothing_yet_has_not_changed(state: str) -> None:
    """After a restart of the operator some workers have not been asked, or do not answer."""
    world = World(spec_of(replicas=3, weights=target(1, 1)))
    world.run()
    world.set(state=state)
    world.run()
    before = conditions(world)
    assert before["WeightsSynced"] == ("True", "Synced")
    world.forget()
    world.worker(0).unasked = True
    world.worker(1).silent = True
    steps(world, 3)
    assert conditions(world) == before
    assert world.status.phase == ("Ready" if state == "Active" else state)


def test_a_worker_of_which_nothing_is_known_counts_for_nothing() -> None:
    world = World(spec_of(replicas=2, state="Asleep"))
    world.run()
    world.autoload = False
    world.kill("pool-0-0")
    steps(world, 2)
    world.worker(0).unasked = True
    steps(world, 2)
    found = conditions(world)
    assert found["WeightsSynced"][0] == "False"
    assert found["Asleep"] == ("False", "PartlyAsleep")


def test_silence_hides_no_newer_target() -> None:
    world = World(spec_of(replicas=2, state="Asleep"))
    world.run()
    for replica in range(2):
        world.worker(replica).silent = True
    world.set(weights=target(1, 1))
    steps(world, 3)
    assert conditions(world)["WeightsSynced"][0] == "False"


def test_what_is_wrong_stays_told_while_a_write_is_not_seen_yet() -> None:
    world = World(spec_of(replicas=2, restartPolicy={"maxRestarts": 0}))
    world.run()
    world.fail("pool-0-0")
    steps(world, 2)
    assert conditions(world)["Degraded"] == ("True", "RestartsExhausted")
    world.lag = 20.0
    world.kill("pool-1-0")
    for _ in range(30):
        world.step()
        assert conditions(world)["Degraded"] == ("True", "RestartsExhausted")


def test_a_stuck_pod_costs_its_own_replica_only() -> None:
    world = World(spec_of(replicas=2))
    world.run()
    world.held.add(world.pods["pool-0-0"].uid)
    world.kill("pool-0-0")
    world.fail("pool-1-0")
    failed = world.pods["pool-1-0"].uid
    steps(world, 10)
    assert world.pods["pool-1-0"].uid != failed
    assert world.pods["pool-0-0"].is_deleting
    world.log.clear()
    steps(world, 300)
    assert 9 <= world.log.count("delete pool-0-0") <= 10
    world.held.clear()
    steps(world, 40)
    assert conditions(world)["Ready"] == ("True", "Serving")


def test_a_pool_that_is_made_again_waits_for_its_predecessors_pods() -> None:
    world = World(spec_of(replicas=2))
    world.run()
    world.grace = 20.0
    world.recreate()
    world.log.clear()
    steps(world, 10)
    assert not world.log, "nothing is tried while the names are taken"
    assert conditions(world)["Degraded"] == ("False", "AsExpected")
    assert "pod 'pool-0-0' of a deleted RolloutReplica of this name is still terminating" in (
        world.status.message
    )
    steps(world, 20)
    assert conditions(world)["Ready"] == ("True", "Serving")
