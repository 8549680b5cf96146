"""Pushed weights: the operator brings no bytes, waits for those of the trainer, and shares copies."""

from __future__ import annotations

import pytest

from rollout_operator.core.observed_pool import ObservedWorker
from rollout_operator.core.pass_plan import ControlVerb
from rollout_operator.core.replica_heads import ReplicaHead, WeightsVersion
from rollout_operator.core.updates.pushed_copies import MAX_PEERS, assign_peers
from rollout_operator.core.updates.weights_plan import WeightsPlan, committed_weights
from rollout_worker.schemas import KeptWeights, Pushed, WeightsId, WeightsSource
from tests.support.unit.poolspecs import a_pod, pushed, spec_of, target
from tests.support.unit.simworker import SimWorker, root_hash
from tests.support.unit.world import World, settled_world

V1, V2, V3 = (WeightsId(epoch=0, version=v) for v in (1, 2, 3))


def a_world(replicas: int = 2, strategy: str = "AllAtOnce", **weights: object) -> World:
    """A pool at rest that serves the checkpoint."""
    world = settled_world(replicas=replicas, weights={"strategy": strategy, **weights})
    assert world.status.phase == "Ready"
    return world


def push(world: World, identity: WeightsId, *replicas: int) -> None:
    """A trainer stages on these replicas, or on all of them."""
    for replica in replicas or range(world.spec.replicas):
        assert world.worker(replica).push(identity)


def publish(world: World, identity: WeightsId, *replicas: int) -> None:
    """Stage, then move the pointer, and let the pool come to rest."""
    push(world, identity, *replicas)
    world.set(weights=pushed(identity.epoch, identity.version))
    world.log.clear()
    world.run()


def phase_of(world: World) -> tuple[int, str]:
    return world.update.version, world.update.phase.value


def serve(world: World, identity: WeightsId) -> list[bool]:
    """Which replicas serve this, in the Service."""
    return [
        world.pods[f"pool-{i}-0"].ready and world.worker(i).active == identity
        for i in range(world.spec.replicas)
    ]


@pytest.mark.parametrize("strategy", ["AllAtOnce", "Rolling", "Eager"])
def test_what_all_have_staged_is_committed_and_the_operator_stages_nothing(strategy: str) -> None:
    world = a_world(3, strategy)
    publish(world, V1)
    assert [e.split()[0] for e in world.log if e[:4] not in ("gate", "requ")] == ["commit"] * 3
    assert phase_of(world) == (1, "Complete")
    assert world.committed.source == WeightsSource(pushed=Pushed())
    assert world.committed.root_hash == root_hash(V1)
    assert serve(world, V1) == [True] * 3
    publish(world, V2)
    assert serve(world, V2) == [True] * 3, "pushed after pushed"


def test_the_barrier_waits_for_the_trainers_bytes_and_says_for_whose() -> None:
    world = a_world(3)
    publish(world, V1, 0)
    assert phase_of(world) == (1, "Staging")
    assert world.status.message == (
        "1 of 3 replicas have staged (0, 1); waiting for the trainer to push them to pool-1-0 and 1 more"
    )
    assert world.verdict("Degraded") == ("False", "AsExpected")
    assert serve(world, V1) == [False] * 3
    assert world.log == []
    push(world, V1, 1, 2)
    world.run()
    assert serve(world, V1) == [True] * 3


@pytest.mark.parametrize("strategy", ["Rolling", "Eager"])
def test_without_a_barrier_who_lost_the_bytes_fetches_them_from_who_has_committed(
    strategy: str,
) -> None:
    world = a_world(3, strategy)
    publish(world, V1, 1)
    assert serve(world, V1) == [True] * 3
    assert sorted(entry for entry in world.log if entry.startswith("stage")) == [
        "stage pool-0-0",
        "stage pool-2-0",
    ]


@pytest.mark.parametrize("strategy", ["AllAtOnce", "Rolling", "Eager"])
def test_bytes_that_nobody_has_are_never_committed_and_a_newer_target_takes_their_place(
    strategy: str,
) -> None:
    world = a_world(2, strategy, deadlineSeconds=600)
    world.run_with(weights=pushed(0, 1))
    assert phase_of(world) == (1, "Staging")
    assert world.status.message == (
        "0 of 2 replicas have staged (0, 1); no replica has the bytes: publish again, under a higher "
        "version"
    )
    assert serve(world, WeightsId(epoch=0, version=0)) == [True, True]
    publish(world, V2)
    assert serve(world, V2) == [True, True]
    assert phase_of(world) == (2, "Complete")


def test_one_member_without_bytes_is_enough_for_a_newer_target() -> None:
    world = a_world(2)
    publish(world, V1, 0)
    publish(world, V2)
    assert serve(world, V2) == [True, True]
    assert [w.commits for w in world.workers.values()] == [[V2], [V2]]


def test_a_joiner_fetches_what_the_others_keep_and_the_trainer_need_not_live() -> None:
    world = a_world(2)
    publish(world, V1)
    world.set(replicas=4)
    world.log.clear()
    world.run()
    assert serve(world, V1) == [True] * 4
    assert {w.active_hash for w in world.workers.values()} == {root_hash(V1)}
    assert world.log.count("stage pool-2-0") == 1


def test_a_pool_that_lost_every_copy_says_so_and_heals_with_the_next_publish() -> None:
    world = a_world(2)
    publish(world, V1)
    for name in list(world.pods):
        world.kill(name)
    world.run()
    assert world.verdict("Degraded") == ("True", "NoLiveCopy")
    assert world.status.message == (
        "pool-0-0 can't get weights (0, 1): they were pushed, and no replica has a copy to give any "
        "more: publish again, under a higher version"
    )
    assert not any(pod.ready for pod in world.pods.values()), "never below what was committed"
    publish(world, V2, 1)
    assert serve(world, V2) == [True, True], "one worker that takes it is enough"
    assert world.verdict("Degraded") == ("False", "AsExpected")


def leave_on_node(world: World, identity: WeightsId, content: str) -> None:
    """From now on workers start with this, which a former one has left on their node."""
    world.left_on_node = KeptWeights(**identity.model_dump(), root_hash=content, bytes=1)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("strategy", ["AllAtOnce", "Rolling", "Eager"])
@pytest.mark.parametrize("end", ["deleted", "crashed", "rolled", "suspended"])
def test_new_pods_serve_what_former_ones_left_on_their_nodes_without_any_other_copy(
    replicas: int, strategy: str, end: str
) -> None:
    world = a_world(replicas, strategy)
    publish(world, V1)
    leave_on_node(world, V1, root_hash(V1))
    if end == "rolled":
        world.set(podTemplate={"annotations": {"a": "b"}})
    elif end == "suspended":
        world.run_with(suspend=True)
        world.set(suspend=False)
    for name in list(world.pods) if end in ("deleted", "crashed") else ():
        (world.kill if end == "deleted" else world.fail)(name)
    reasons = set()
    for _ in range(100):
        world.step()
        reasons.add(world.verdict("Degraded")[1])
    assert "NoLiveCopy" not in reasons
    assert serve(world, V1) == [True] * replicas
    assert committed_of(world) == (V1, root_hash(V1))


@pytest.mark.parametrize(
    ("identity", "content"),
    [
        (V1, root_hash(V1)),
        (V3, root_hash(V3)),
        (WeightsId(epoch=1, version=2), root_hash(V2)),
        (V2, "other bytes"),
    ],
    ids=["older", "newer, never committed", "another epoch", "another run's"],
)
def test_what_a_former_worker_left_of_other_weights_serves_nowhere(
    identity: WeightsId, content: str
) -> None:
    world = a_world(1)
    publish(world, V2)
    leave_on_node(world, identity, content)
    world.kill("pool-0-0")
    world.run()
    assert world.verdict("Degraded") == ("True", "NoLiveCopy")
    assert serve(world, V2) == [False]
    assert not world.worker(0).commits
    later = WeightsId(epoch=0, version=9)
    publish(world, later)
    assert serve(world, later) == [True]


def test_a_pool_that_knows_no_content_takes_none_that_was_left_on_a_node() -> None:
    """It is a new pool, and a former one of its name had a version of this number."""
    world = a_world(2)
    leave_on_node(world, V1, "other bytes")
    world.reboot(0)
    world.run()
    world.set(weights=pushed(0, 1))
    world.log.clear()
    world.run()
    assert phase_of(world) == (1, "Staging")
    assert not [entry for entry in world.log if entry.startswith("stage")]


def test_replicas_that_serve_and_keep_no_copy_go_on_while_a_joiner_waits() -> None:
    world = a_world(2)
    publish(world, V1)
    world.let_workers(kept=None)
    world.run_with(replicas=3)
    assert serve(world, V1) == [True, True, False]
    assert world.verdict("Degraded") == ("True", "NoLiveCopy")
    publish(world, V2)
    assert serve(world, V2) == [True] * 3


@pytest.mark.parametrize("state", ["Paused", "Asleep", "held"])
def test_a_rolling_update_at_rest_leaves_a_copy(state: str) -> None:
    """A new pod is at rest before it has fetched anything."""
    world = a_world(3)
    publish(world, V1)
    if state == "held":
        world.let_workers(foreign_hold="Paused")
    else:
        world.set(state=state)
    world.run()
    world.seconds_of[ControlVerb.STAGE] = 30.0
    world.set(podTemplate={"annotations": {"a": "b"}})
    reasons = set()
    for _ in range(80):
        world.step()
        reasons.add(world.verdict("Degraded")[1])
        for worker in world.workers.values():
            worker.foreign_hold = "Paused" if state == "held" and not worker.loading else None
    world.let_workers(foreign_hold=None)
    world.set(state="Active")
    world.steps(120)
    assert "NoLiveCopy" not in reasons
    assert serve(world, V1) == [True] * 3
    assert world.status.updated_replicas == 3


def test_a_silent_worker_may_have_the_last_copy() -> None:
    world = a_world(2)
    publish(world, V1)
    world.reboot(0)
    world.worker(1).silent = True
    world.run()
    assert world.verdict("Degraded")[1] != "NoLiveCopy"
    world.worker(1).silent = False
    world.run()
    assert serve(world, V1) == [True, True]


@pytest.mark.parametrize(
    "rest", [{"state": "Asleep"}, {"suspend": True}], ids=["asleep", "suspended"]
)
def test_a_pushed_target_is_not_committed_at_rest_and_the_old_weights_come_back(
    rest: dict[str, object],
) -> None:
    world = a_world(2)
    world.run_with(weights=target(0, 1))
    world.run_with(**rest)
    world.run_with(weights=pushed(0, 2))
    assert world.committed.version == 1
    assert world.verdict("WeightsSynced") == ("False", "NoLiveCopy")
    world.run_with(state="Active", suspend=False)
    assert serve(world, V1) == [True, True]
    assert phase_of(world) == (2, "Staging")
    publish(world, V3)
    assert serve(world, V3) == [True, True]


def fall_asleep(world: World) -> None:
    world.run_with(state="Asleep")
    assert world.status.phase == "Asleep"


def wake_up(world: World) -> None:
    world.set(state="Active", suspend=False)
    world.log.clear()
    world.run()


def committed_of(world: World) -> tuple[WeightsId, str | None]:
    return world.committed.identity, world.committed.root_hash


@pytest.mark.parametrize("lent", [False, True], ids=["pushed", "lent"])
@pytest.mark.parametrize("strategy", ["AllAtOnce", "Rolling", "Eager"])
def test_what_is_pushed_to_a_sleeping_pool_is_committed_and_serves_when_it_wakes(
    strategy: str, lent: bool
) -> None:
    world = a_world(2, strategy)
    publish(world, V1)
    fall_asleep(world)
    if lent:
        world.log.clear()
        assert [worker.lend(V2) for worker in world.workers.values()] == [True, True]
        world.run_with(weights=pushed(0, 2))
        assert not [entry for entry in world.log if entry.startswith("sleep")]
    else:
        publish(world, V2)
    assert phase_of(world) == (2, "Complete")
    assert committed_of(world) == (V2, root_hash(V2))
    assert [worker.active for worker in world.workers.values()] == [V1, V1], "they sleep"
    assert world.status.phase == "Asleep"
    wake_up(world)
    assert serve(world, V2) == [True, True]
    assert [worker.reads for worker in world.workers.values()] == [[], []], "V1 is not read again"
    assert not [entry for entry in world.log if entry.startswith("stage")]


def test_a_sleeping_replica_without_the_bytes_fetches_them_from_one_that_has_woken() -> None:
    world = a_world(3)
    fall_asleep(world)
    publish(world, V1, 1)
    assert committed_of(world) == (V1, root_hash(V1))
    wake_up(world)
    assert serve(world, V1) == [True] * 3
    assert sorted(entry for entry in world.log if entry.startswith("stage")) == [
        "stage pool-0-0",
        "stage pool-2-0",
    ]


def test_bytes_that_differ_between_sleeping_replicas_are_bound_to_one_content() -> None:
    world = a_world(2)
    fall_asleep(world)
    world.worker(1).other_bytes = "-odd"
    publish(world, V1)
    world.worker(1).other_bytes = ""
    assert committed_of(world) == (V1, root_hash(V1))
    wake_up(world)
    assert serve(world, V1) == [True, True]
    assert {worker.active_hash for worker in world.workers.values()} == {root_hash(V1)}


def test_the_next_push_to_a_sleeping_pool_replaces_the_last_and_waits_for_its_pointer() -> None:
    world = a_world(2)
    fall_asleep(world)
    publish(world, V1)
    push(world, V2)
    world.set(state="Active")
    world.steps(4)
    assert serve(world, V2) == [False, False]
    world.run_with(weights=pushed(0, 2))
    assert serve(world, V2) == [True, True]
    assert [worker.commits for worker in world.workers.values()] == [[V2], [V2]]


@pytest.mark.parametrize("state", ["Active", "Paused"])
def test_a_trainer_that_died_after_it_pushed_keeps_no_sleeping_pool_from_waking(state: str) -> None:
    world = a_world(2, deadlineSeconds=10)
    publish(world, V1)
    fall_asleep(world)
    push(world, V3)
    world.set(weights=target(0, 2), state=state)
    world.steps(4)
    assert {worker.lifecycle.value for worker in world.workers.values()} == {state}
    world.set(state="Active")
    world.steps(20)
    assert serve(world, V2) == [True, True], "the slot gave way after the deadline"


def test_what_is_staged_asleep_is_not_committed_when_its_pods_are_about_to_go() -> None:
    world = a_world(2)
    publish(world, V1)
    fall_asleep(world)
    push(world, V2)
    world.run_with(weights=pushed(0, 2), suspend=True)
    assert committed_of(world) == (V1, root_hash(V1))


def test_later_bytes_of_a_trainer_that_died_give_way_after_the_deadline() -> None:
    world = a_world(2, deadlineSeconds=10)
    publish(world, V1)
    world.reboot(1)
    world.settle()
    push(world, V2, 1)
    world.log.clear()
    world.steps(10)
    assert serve(world, V1) == [True, False]
    assert not [entry for entry in world.log if "discard" in entry or "stage" in entry]
    world.run()
    assert serve(world, V1) == [True, True]
    assert "discard pool-1-0" in world.log


def test_later_bytes_stay_where_nothing_could_take_their_place() -> None:
    world = a_world(2, deadlineSeconds=10)
    publish(world, V1)
    world.worker(0).kept = None
    world.reboot(1)
    world.settle()
    push(world, V2, 1)
    world.log.clear()
    world.steps(30)
    assert not [entry for entry in world.log if "discard" in entry]


def test_while_one_replica_commits_the_next_push_may_take_the_others_slot() -> None:
    """It can't commit the version under way any more: it gets the next one, which it has."""
    world = a_world(2)
    push(world, V1)
    world.set(weights=pushed(0, 1))
    world.worker(1).broken_commit = True
    world.steps(4)
    push(world, V2)
    world.worker(1).broken_commit = False
    world.run()
    world.run_with(weights=pushed(0, 2))
    assert serve(world, V2) == [True, True]
    assert world.worker(1).commits == [V2]


def test_bytes_that_all_lost_before_they_committed_fail_and_expel_nobody() -> None:
    world = a_world(2)
    push(world, V1)
    world.set(weights=pushed(0, 1))
    world.let_workers(broken_commit=True)
    world.steps(4)
    for worker in world.workers.values():
        worker.staged, worker.broken_commit = None, False
    world.run()
    assert phase_of(world) == (1, "Failed")
    assert world.verdict("Degraded") == ("True", "NoLiveCopy")
    assert serve(world, WeightsId(epoch=0, version=0)) == [True, True]
    publish(world, V2)
    assert serve(world, V2) == [True, True]


def test_pushed_bytes_count_for_a_target_that_names_the_folder_they_were_spooled_to() -> None:
    world = a_world(2)
    push(world, V1)
    world.set(weights=target(0, 1))
    world.log.clear()
    world.run()
    assert serve(world, V1) == [True, True]
    assert not [entry for entry in world.log if entry.startswith("stage")]
    world.reboot(1)
    world.worker(0).kept = None
    world.run()
    assert serve(world, V1) == [True, True], "from the folder"


@pytest.mark.parametrize("spooled", [True, False])
def test_what_a_trainer_is_bringing_is_not_staged_beside_it(spooled: bool) -> None:
    world = a_world(2)
    push(world, V1)
    worker = world.worker(1)
    assert worker.staged is not None
    worker.staged = worker.staged.model_copy(update={"phase": "Staging", "root_hash": None})
    world.set(weights=target(0, 1) if spooled else pushed(0, 1))
    world.log.clear()
    world.run()
    assert world.log == []
    push(world, V1, 1)
    world.run()
    assert serve(world, V1) == [True, True]


def test_a_few_peers_are_asked_who_serve_first_and_each_joiner_begins_with_another_one() -> None:
    spec = spec_of(replicas=8)
    version = WeightsVersion(V1, WeightsSource(pushed=Pushed()), root_hash(V1))
    heads = {}
    for i in range(8):
        worker = SimWorker(f"b{i}", required=V1, loading=False)
        if i < 6:
            worker.jump(V1)
            hashed = root_hash(V1) if i else "other bytes"
            worker.kept = KeptWeights(epoch=0, version=1, root_hash=hashed, bytes=1)
        pod = a_pod(spec, i, ip=f"10.0.0.{i}", gate=i != 1)
        heads[pod.uid] = ReplicaHead(pod, ObservedWorker(worker.state()))
    plan = WeightsPlan(committed_weights(World(spec).status.weights), None)
    joiners = [uid for uid, head in heads.items() if head.pod.replica > 5]
    plan.version_for = dict.fromkeys(joiners, version)
    assign_peers(plan, heads)
    asked = [plan.peers[uid] for uid in joiners]
    assert asked == [("10.0.0.4", "10.0.0.5", "10.0.0.2"), ("10.0.0.5", "10.0.0.2", "10.0.0.3")]
    assert {len(each) for each in asked} == {MAX_PEERS}
