"""A pool beside a trainer, pass by pass: what is made, what is waited for, what follows its claim."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollout_operator.core.pass_plan import PassPlan
from rollout_operator.core.settings import FORCED_DELETION_SECONDS, TRAINERS_SETTLED_SECONDS
from rollout_operator.core.trainer_pods import ObservedTrainers, RecordedPlacement
from rollout_worker.schemas import Progress, TurnState, WeightsId
from tests.support.unit.poolspecs import colocated_spec, condition_of, pushed
from tests.support.unit.simtrainers import SimTrainers
from tests.support.unit.world import World


def world_beside(*, generated: bool, replicas: int = 2, tensor: int = 1, nodes: int = 1) -> World:
    spec = colocated_spec(replicas=replicas, tensor=tensor, nodes=nodes)
    world = World(spec)
    world.trainers = SimTrainers(world.spec, generated=generated)
    return world


def trainers_of(world: World) -> SimTrainers:
    assert world.trainers is not None
    return world.trainers


def told(plan: PassPlan, kind: str) -> tuple[str, str]:
    found = condition_of(plan.status, kind)
    return found.reason, found.message


def places(world: World) -> dict[str, RecordedPlacement | None]:
    return {name: pod.taken for name, pod in world.pods.items()}


def beside(world: World) -> list[str]:
    """The trainer's pod beside each pod of the pool, lowest replica first."""
    found = (world.pods[name].taken for name in sorted(world.pods))
    return [taken.trainer for taken in found if taken is not None]


@pytest.mark.parametrize("generated", [False, True])
def test_pods_are_made_beside_the_trainer_once_it_is_there(generated: bool) -> None:
    world = world_beside(generated=generated)
    sentences = []
    for _ in range(2):
        plan = world.step()
        sentences.append((plan.status.phase, *told(plan, "Progressing")))
        assert not any(g.serving for g in plan.gates)
    phases, reasons, texts = zip(*sentences, strict=True)
    assert set(phases) == {"Pending"}
    assert set(reasons) == {"WaitingForTrainer"}
    assert texts[0] == (
        "replica 0 waits for the ResourceClaim 'gpus' of the trainer's pod 't-0' to be made"
    )
    assert texts[1].startswith(
        "replica 0 waits for the trainer's pod 't-0' to be scheduled, which needs ResourceClaim 't-0-"
    )
    status = world.run()
    assert status.phase == "Ready"
    sim = trainers_of(world)
    for index, pod in enumerate(world.pods.values()):
        trainer = sim.pods[f"t-{index}"]
        claim = sim.claims[trainer.claims[0]]
        assert pod.node == trainer.node
        assert pod.taken == RecordedPlacement(trainer.name, claim.uid, (claim.devices[0].name,))


def test_a_pod_goes_with_a_generated_claim_and_comes_back_on_the_new_one() -> None:
    """Its gate goes off first, no other replica is touched, and nothing has failed."""
    world = world_beside(generated=True)
    world.run()
    before = {name: (pod.uid, pod.taken) for name, pod in world.pods.items()}
    trainers_of(world).restart("t-0")
    plan = world.step()
    (gone,) = plan.delete
    assert (gone.name, gone.grace, gone.forced) == ("pool-0-0", None, False)
    claim = gone.reason.rpartition("claim ")[2]
    assert gone.reason == f"the trainer's pod 't-0' goes, and takes its claim {claim}"
    assert [(g.name, g.serving) for g in plan.gates] == [("pool-0-0", False)]
    plan = world.step()
    assert told(plan, "Progressing") == (
        "WaitingForTrainer",
        "replica 0 waits for the trainer's pod 't-0' to go and come back",
    )
    status = world.run()
    assert (status.phase, status.restarts, status.last_errors) == ("Ready", 0, status.last_errors)
    after = {name: (pod.uid, pod.taken) for name, pod in world.pods.items()}
    assert after["pool-1-0"] == before["pool-1-0"]
    assert after["pool-0-0"][1] != before["pool-0-0"][1]
    assert {pod.restarts for pod in world.pods.values()} == {0}


def test_a_gang_has_a_pod_beside_each_trainer_and_follows_their_claims_as_one() -> None:
    world = world_beside(generated=True, replicas=1, tensor=4, nodes=2)
    sim = trainers_of(world)
    sim.wanted = ["t-0"]
    for _ in range(5):
        assert not world.step().create, "all of its pods, or none"
    sim.wanted = ["t-0", "t-1"]
    assert world.run().phase == "Ready"
    for rank in (0, 1):
        taken = world.pods[f"pool-0-{rank}"].taken
        claim = sim.claims[sim.pods[f"t-{rank}"].claims[0]]
        assert taken == RecordedPlacement(
            f"t-{rank}", claim.uid, tuple(d.name for d in claim.devices)
        )
        assert len(claim.devices) == 2
    before = {name: pod.uid for name, pod in world.pods.items()}
    sim.restart("t-1")
    assert world.run(200).phase == "Ready"
    after = {name: pod.uid for name, pod in world.pods.items()}
    assert not set(before.values()) & set(after.values()), "a gang restarts as a whole"
    assert world.status.restarts == 0


def test_an_engine_that_fails_beside_a_trainer_is_a_failure() -> None:
    world = world_beside(generated=False)
    world.run()
    world.fail("pool-0-0")
    plan = world.step()
    assert [(d.name, d.grace) for d in plan.delete] == [("pool-0-0", None)]
    status = world.run()
    assert (status.phase, status.restarts) == ("Ready", 1)


def test_while_a_trainer_is_missing_nothing_moves_and_the_numbers_are_told() -> None:
    world = world_beside(generated=False, replicas=3)
    sim = trainers_of(world)
    sim.wanted = ["t-0", "t-1", "t-2"]
    world.run()
    before = places(world)
    sim.wanted.remove("t-0")
    sim.restart("t-0")
    for _ in range(5):
        world.step()
    assert places(world) == before, "t-1 isn't the first for that"
    world.kill("pool-2-0")
    plan = world.step()
    assert told(plan, "Degraded") == (
        "TooFewTrainers",
        "the pool needs 3 of the trainer's pods for 3 of its own (spec.colocation.slots 1), and "
        "spec.colocation.trainerSelector (job=grpo) selects 2: start more of them or lower spec.replicas",
    )
    assert plan.status.phase == "Degraded"
    assert not plan.create
    sim.wanted.append("t-0")
    assert world.run().phase == "Ready"
    assert places(world) == before


def test_an_earlier_trainer_moves_those_behind_it() -> None:
    """Nobody gets a device before the pod that has it has gone."""
    world = world_beside(generated=False)
    world.run()
    world.grace = 3.0
    before = places(world)
    trainers_of(world).wanted.insert(0, "a")
    for _ in range(int(TRAINERS_SETTLED_SECONDS)):
        world.step()
        assert places(world) == before, "it may be another one's in a moment"
    for _ in range(40):
        world.step()
        living = [pod for pod in world.pods.values() if not pod.is_deleting]
        assert sum(pod.ready for pod in living) >= 1, "one after the other"
    status = world.run()
    assert status.phase == "Ready"
    assert [pod.taken.trainer for pod in world.pods.values() if pod.taken] == ["a", "t-0"]
    assert status.restarts == 0


@pytest.mark.parametrize("generated", [False, True])
@pytest.mark.parametrize("ends", ["deleted", "failed"])
def test_a_trainer_that_restarts_takes_along_no_engine_beside_another_one(
    generated: bool, ends: str
) -> None:
    """A pool of three beside four: t-0 is away for a while, so t-1 is the first of those that are there."""
    world = world_beside(generated=generated, replicas=3)
    sim = trainers_of(world)
    sim.wanted = ["t-0", "t-1", "t-2", "t-3"]
    world.run()
    before = {name: pod.uid for name, pod in world.pods.items()}
    sim.wanted.remove("t-0")
    if ends == "deleted":
        sim.restart("t-0")
    else:
        sim.lose("t-0")
    deleted = []
    for _ in range(30):
        deleted += [d.name for d in world.step().delete]
    sim.wanted.insert(0, "t-0")
    for _ in range(90):
        deleted += [d.name for d in world.step().delete]
    assert world.status.phase == "Ready"
    assert deleted == ["pool-0-0"] * generated, "at most the one that used its claim"
    after = {name: pod.uid for name, pod in world.pods.items()}
    kept = ("pool-1-0", "pool-2-0") if generated else tuple(before)
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert beside(world) == ["t-0", "t-1", "t-2"]


def test_an_engine_without_a_place_waits_for_its_trainer_to_come_back() -> None:
    """It would move once more, and load its model again, once that one is there."""
    world = world_beside(generated=True, replicas=1)
    sim = trainers_of(world)
    sim.wanted = ["t-0", "t-1"]
    world.run()
    sim.wanted.remove("t-0")
    sim.restart("t-0")
    for _ in range(30):
        plan = world.step()
    assert told(plan, "Progressing") == (
        "WaitingForTrainer",
        "replica 0 waits 60 s at most for the trainer's pod that has gone to come back",
    )
    sim.wanted.insert(0, "t-0")
    assert world.run().phase == "Ready"
    assert beside(world) == ["t-0"]
    sim.wanted.remove("t-0")
    sim.restart("t-0")
    assert world.run(120).phase == "Ready"
    assert beside(world) == ["t-1"], "it does not come back"


def test_a_trainer_that_stays_away_is_replaced_by_those_behind_it() -> None:
    world = world_beside(generated=True, replicas=3)
    sim = trainers_of(world)
    sim.wanted = ["t-0", "t-1", "t-2", "t-3"]
    world.run()
    sim.wanted.remove("t-0")
    sim.restart("t-0")
    for _ in range(10):
        plan = world.step()
    assert plan.requeue is not None, "it looks again by itself"
    assert plan.requeue <= TRAINERS_SETTLED_SECONDS
    status = world.run(200)
    assert (status.phase, status.restarts) == ("Ready", 0)
    assert beside(world) == ["t-1", "t-2", "t-3"]


@pytest.mark.parametrize("name", ["a-debug", "t-0-debug", "z"])
def test_a_label_on_a_foreign_pod_moves_nothing(name: str) -> None:
    """Somebody debugs a copy of a trainer's pod, or labels a dashboard: told, and nothing else."""
    world = world_beside(generated=False)
    world.run()
    before = {each: pod.uid for each, pod in world.pods.items()}
    sim = trainers_of(world)
    twin = replace(sim.pods["t-1"], name=name, uid="twin", created="2026-01-02T00:00:00Z")
    for stranger, why in ((replace(twin, claims=()), "has no ResourceClaim:"),
                          (twin, "has no ResourceClaim of its own but that of 't-1'")):  # fmt: skip
        sim.pods[name] = stranger
        for _ in range(2 * int(TRAINERS_SETTLED_SECONDS)):
            plan = world.step()
            assert not plan.delete
        reason, text = told(plan, "Degraded")
        assert (reason, why in text) == ("NoClaim", True), text
        assert told(plan, "Ready")[0] == "Serving"
    assert {each: pod.uid for each, pod in world.pods.items()} == before


def test_devices_are_waited_for_that_another_pod_has_yet_to_give_back() -> None:
    world = world_beside(generated=False)
    world.run()
    mine = world.pods["pool-0-0"]
    world.kill("pool-0-0")
    world.kill("pool-1-0")
    world.predecessors["pool-1-0"] = replace(
        mine, name="pool-1-0", replica=1, uid="old", deletion_at=world.tick + 9, grace=9.0
    )
    plan = world.step()
    device = mine.taken.devices[0] if mine.taken else ""
    assert (
        told(plan, "Progressing")[1] == f"replica 0 waits for pod 'pool-1-0' to give {device} back"
    )
    for _ in range(10):
        world.step()
    assert world.run().phase == "Ready"


def test_what_is_not_known_changes_nothing() -> None:
    world = world_beside(generated=True)
    world.run()
    trainers_of(world).restart("t-0")
    world.trainers = None
    plan = world.step()
    assert not plan.delete
    assert world.observed().trainers == ObservedTrainers()
    world.kill("pool-1-0")
    plan = world.step()
    assert not plan.create
    assert told(plan, "Progressing")[1] == (
        "replica 1 waits for the list of the trainer's pods and claims"
    )


def test_a_colocated_pod_that_does_not_go_is_told_and_never_forced() -> None:
    world = world_beside(generated=False)
    world.run()
    pod = world.pods["pool-0-0"]
    world.held.add(pod.uid)
    world.ask_to_go("pool-0-0")
    for _ in range(int(FORCED_DELETION_SECONDS) + 3):
        plan = world.step()
        assert not any(d.forced for d in plan.delete)
    assert told(plan, "Degraded") == (
        "PodStuck",
        "pod 'pool-0-0' on node 'node-t-0-0' outlived its grace period and is not removed by force, because "
        "its engine may hold the trainer's devices: mend the node, or delete the Node object once it is off",
    )
    world.held.clear()
    assert world.run().phase == "Ready"


def test_a_pod_that_lost_its_labels_is_sought_before_anything_is_waited_for() -> None:
    """It holds the claim that the trainer's next pod waits for."""
    world = world_beside(generated=True)
    world.run()
    world.unlabelled.add(world.pods["pool-0-0"].uid)
    trainers_of(world).restart("t-0")
    assert [(s.replica, s.rank) for s in world.step().seek] == [(0, 0)]
    assert world.run(80).phase == "Ready"
    assert not world.unlabelled


def test_pods_that_no_claim_knows_are_not_sought() -> None:
    world = world_beside(generated=True, replicas=9)
    for _ in range(5):
        assert not world.step().seek


def test_who_has_the_turn_is_told_of_each_member() -> None:
    world = world_beside(generated=False)
    world.run()
    assert [m.turn for m in world.status.members] == [None, None], "they share no devices"
    device = "gpu.example.com/node-t-0-0/gpu-0"
    first, second = world.worker(0), world.worker(1)
    second.turn = TurnState(state="Held", devices=("other",))
    first.turn = TurnState(state="Waiting", devices=(device,), waiting_for={device: "t-0"})
    first.progress = Progress(message=f"waiting for the turn: {device} is held by t-0")
    first.loading, world.autoload = True, False
    world.step()
    waiting, serving = world.step().status.members
    assert (waiting.state, waiting.turn, serving.turn) == ("Loading", "Waiting", "Held")
    assert waiting.message == f"is Loading: waiting for the turn: {device} is held by t-0"


@pytest.mark.parametrize("generated", [True, False])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("state", ["Active", "Paused", "Asleep"])
def test_the_last_copy_of_pushed_weights_is_not_moved(
    state: str, replicas: int, generated: bool
) -> None:
    world = world_beside(generated=generated, replicas=replicas)
    sim = trainers_of(world)
    sim.wanted = [f"t-{i}" for i in range(replicas + 1)]
    world.run()
    for replica in range(replicas):
        assert world.worker(replica).push(WeightsId(epoch=1, version=1))
    world.set(weights=pushed(1, 1))
    world.run()
    world.set(state=state)
    world.run()
    sim.wanted.remove("t-0")
    sim.restart("t-0")
    lost = set()
    for number in range(500):
        if number == 300:
            world.set(state="Active")
        world.step()
        found = world.status.find_condition("Degraded")
        lost |= {found.reason} if found is not None else set()
    # With its generated claim the only replica goes, and its weights with it.
    assert ("NoLiveCopy" in lost) == (generated and replicas == 1)
