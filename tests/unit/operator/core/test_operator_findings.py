"""What is said of a pool: which finding wins, in which words, and the status around it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rollout_operator.api.status import RolloutReplicaStatus, parse_status
from rollout_operator.core.observed_pool import FailedCall
from rollout_operator.core.pass_planning import plan_pass
from rollout_operator.core.status_report import (
    document_for_unreadable_status,
    status_for_invalid_spec,
)
from rollout_worker.schemas import Progress, StagedWeights, TurnState, WeightsId, WeightsSource
from tests.support.unit.poolspecs import GANG, condition_of, spec_of, target
from tests.support.unit.world import World, settled_world


def conditions(world: World) -> dict[str, tuple[str, str, str]]:
    return {c.type: (c.status, c.reason, c.message) for c in world.status.conditions}


def shown(world: World, **pod: Any) -> None:
    """Change what the API server shows of replica 1's pod, and look once."""
    world.pods["pool-1-0"] = replace(world.pods["pool-1-0"], **pod)


def test_a_pool_that_serves_says_so(world: World) -> None:
    assert conditions(world) == {
        "Ready": ("True", "Serving", "2 of 2 replicas serve"),
        "Progressing": ("False", "Complete", world.status.message),
        "Degraded": ("False", "AsExpected", "nothing is wrong"),
        "WeightsSynced": ("True", "Synced", "2 of 2 replicas have weights (0, 0)"),
        "Asleep": ("False", "Awake", "0 of 2 replicas are asleep"),
        "Suspended": ("False", "NotSuspended", "spec.suspend is false"),
    }
    assert world.status.message == "2 of 2 replicas serve weights (0, 0)"
    assert world.status.observed_generation == 1
    assert world.status.ready_replicas == world.status.updated_replicas == 2
    assert world.transition.completed_at is not None
    assert world.status.selector == "rollout.dev/pool=pool,rollout.dev/role=head"
    assert [m.model_dump(exclude_none=True) for m in world.status.members] == [
        {
            "name": f"pool-{i}-0", "node": "node-1", "state": "Active", "epoch": 0, "version": 0,
            "ready": True, "restarts": 0, "message": "",
        }
        for i in range(2)
    ]  # fmt: skip


def test_a_condition_keeps_its_time_until_it_turns(world: World) -> None:
    def since(kind: str) -> object:
        found = world.status.find_condition(kind)
        return found and found.last_transition_time

    before = since("Ready")
    world.set(weights=target(0, 1))
    world.step()
    assert since("Ready") == before
    turned = since("WeightsSynced")
    assert turned != before
    world.worker(0).foreign_hold = "Paused"
    world.step()
    world.step()
    assert since("Ready") != before
    found = condition_of(world.status, "Ready")
    assert found.observed_generation == 2


@pytest.mark.parametrize(
    ("spec", "phase", "ready"),
    [
        ({"state": "Paused"}, "Paused", "Paused"),
        ({"state": "Asleep"}, "Asleep", "Asleep"),
        ({"suspend": True}, "Suspended", "Suspended"),
    ],
)
def test_rest_is_told_on_the_way_and_there(
    world: World, spec: dict[str, Any], phase: str, ready: str
) -> None:
    world.grace = 3.0
    world.set(**spec)
    world.step()
    on_the_way = world.status
    assert on_the_way.phase == ("Suspended" if phase == "Suspended" else "Updating")
    assert conditions(world)["Progressing"][:2] == (
        "True", {"Paused": "Pausing", "Asleep": "FallingAsleep"}.get(phase, "ScalingDown"),
    )  # fmt: skip
    words = {
        "Paused": "waiting for 2 of 2 workers to pause",
        "Asleep": "waiting for 2 of 2 workers to fall asleep",
        "Suspended": "suspended: waiting for 2 pods to drain and terminate",
    }
    assert on_the_way.message == words[phase]
    assert world.transition.completed_at is None
    assert world.transition.from_ == "Active"
    assert world.transition.to == phase
    wanted, state = (0, "Active") if phase == "Suspended" else (2, phase)
    assert world.transition.message == f"bringing {wanted} replicas to state {state}"
    if phase == "Suspended":
        assert conditions(world)["Suspended"] == (
            "False", "Suspending", "waiting for 2 pods to drain and terminate",
        )  # fmt: skip
    world.run()
    assert world.status.phase == phase
    assert conditions(world)["Ready"][:2] == ("False", ready)
    assert conditions(world)["Progressing"][0] == "False"
    assert world.transition.completed_at is not None
    said = (
        "suspended: no pods run" if phase == "Suspended" else f"all 2 replicas are {ready.lower()}"
    )
    assert world.status.message == said
    assert world.status.asleep_replicas == (2 if phase == "Asleep" else 0)


def test_half_asleep_is_told(world: World) -> None:
    world.worker(0).foreign_hold = "Asleep"
    world.run()
    assert conditions(world)["Asleep"] == ("False", "PartlyAsleep", "1 of 2 replicas are asleep")
    assert conditions(world)["Progressing"][:2] == ("True", "Waking")
    assert world.status.message == (
        "waiting for 1 of 2 replicas to serve: pool-0-0 is Asleep, held by trainer"
    )


@pytest.mark.parametrize(
    ("change", "phase", "reason", "said"),
    [
        ({"replicas": 1}, "Ready", "ScalingDown", "scaled down: waiting for 1 pod to drain and terminate"),
        (
            {"podTemplate": {"labels": {"a": "b"}}}, "Updating", "RollingUpdate",
            "rolling update: 2 of 2 replicas have an old template",
        ),
        (
            {"weights": target(0, 1)}, "Updating", "StagingWeights",
            "0 of 2 replicas have staged (0, 1)",
        ),
    ],
    ids=["replicas", "template", "weights"],
)  # fmt: skip
def test_a_change_is_told_while_it_is_under_way(
    world: World, change: dict[str, Any], phase: str, reason: str, said: str
) -> None:
    world.grace = 3.0
    world.set(**change)
    world.step()
    assert conditions(world)["Progressing"] == ("True", reason, said)
    assert world.status.phase == phase
    wanted = world.spec.replicas
    assert world.status.updated_replicas == (0 if reason == "RollingUpdate" else wanted)
    world.run()
    assert world.status.replicas == world.status.updated_replicas == wanted


def test_committing_weights_is_told(world: World) -> None:
    world.set(weights=target(0, 1))
    world.steps(2)
    assert conditions(world)["Progressing"][1] == "CommittingWeights"
    assert conditions(world)["WeightsSynced"][:2] == ("False", "Committing")


@pytest.mark.parametrize(
    ("pod", "said"),
    [
        ({"started": False, "node": None}, "is not scheduled yet"),
        ({"started": False}, "is waiting for its container"),
        ({}, "is starting"),
        ({"trouble": "no room", "lacks_node": True}, "no room"),
    ],
)
def test_what_a_pod_without_an_answer_waits_for(
    world: World, pod: dict[str, Any], said: str
) -> None:
    world.worker(1).unasked = True
    shown(world, **{"ready": False, "gate": False, **pod})
    world.step()
    told = f"pool-1-0: {said}" if "trouble" in pod else f"pool-1-0 {said}"
    assert world.status.message == f"waiting for 1 of 2 replicas to serve: {told}"
    assert world.status.phase == "Loading"
    member = world.status.members[0]
    assert (member.name, member.message, member.ready) == ("pool-1-0", said, False)
    assert member.state == ("Pending" if pod.get("started") is False else "Unreachable")
    assert (member.epoch, member.version) == (None, None)


def test_what_a_worker_is_busy_with(world: World) -> None:
    worker = world.worker(1)
    shown(world, ready=False, gate=False)
    world.autoload = False
    said = {}
    worker.silent = True
    world.step()
    said["silent"] = world.status.members[0].message
    worker.silent, worker.loading = False, True
    world.step()
    said["loading"] = world.status.members[0].message
    worker.staged = StagedWeights(
        epoch=0, version=1, source=WeightsSource(path="/x"), phase="Staging"
    )
    world.step()
    said["staging"] = world.status.members[0].message
    assert said == {
        "silent": "does not answer (no answer within 3 s)",
        "loading": "is Loading but does not serve yet",
        "staging": "is staging weights (0, 1)",
    }


def test_a_missing_pod_is_told() -> None:
    world = World(spec_of())
    world.step()
    assert world.status.message == (
        "waiting for 2 of 2 replicas to serve: replica 0 has no pod yet"
    )
    assert world.status.phase == "Pending"


def test_troubles_of_pods_are_told_unless_they_only_wait_for_room(world: World) -> None:
    shown(world, trouble="container 'worker': ImagePullBackOff no such image")
    world.step()
    told = "pool-1-0: container 'worker': ImagePullBackOff no such image"
    assert conditions(world)["Degraded"] == ("True", "PodTrouble", told)
    assert world.status.phase == "Degraded"
    assert world.status.last_errors[0].message == told
    waiting = {"trouble": "no room", "lacks_node": True}
    for change in ({"deletion_at": world.now + 50}, waiting):
        shown(world, **change)
        world.step()
        assert conditions(world)["Degraded"][0] == "False"
    assert world.status.last_errors[0].message == told, "kept for later"


def test_a_failed_engine_is_told(world: World) -> None:
    world.worker(1).failed = True
    world.step()
    assert conditions(world)["Degraded"][1:] == ("EngineFailed", "pool-1-0: no reason given")
    world.worker(1).last_error = "out of memory"
    world.step()
    assert conditions(world)["Degraded"][1:] == ("EngineFailed", "pool-1-0: out of memory")


@pytest.mark.parametrize("verb", ["require", "pause", "resume", "sleep", "wake", "discard"])
def test_a_failed_call_is_told_until_the_pool_is_where_it_should_be(
    world: World, verb: str
) -> None:
    world.failures[world.pods["pool-1-0"].uid, verb] = FailedCall("no", 1, world.tick + 99)
    world.step()
    assert conditions(world)["Degraded"][0] == "False"
    world.worker(1).foreign_hold = "Paused"
    world.step()
    world.step()
    assert conditions(world)["Degraded"][1:] == ("ControlFailed", "pool-1-0: no")


def test_a_wake_that_waits_for_the_turn_is_no_failure(world: World) -> None:
    """A trainer may keep the devices for longer than any call lasts."""
    worker = world.worker(1)
    world.failures[world.pods["pool-1-0"].uid, "wake"] = FailedCall("no", 1, world.tick + 99)
    worker.foreign_hold = "Paused"
    worker.turn = TurnState(state="Waiting", devices=("gpu",), waiting_for={"gpu": "trainer"})
    world.step()
    world.step()
    assert conditions(world)["Degraded"][0] == "False"
    worker.turn = TurnState(state="Held", devices=("gpu",))
    world.step()
    assert conditions(world)["Degraded"][1:] == ("ControlFailed", "pool-1-0: no")


def test_a_load_that_fails_beside_an_update_is_told(world: World) -> None:
    world.run_with(weights=target(0, 1))
    world.kill("pool-1-0")
    world.step()
    world.worker(1).broken_stage = True
    world.steps(5)
    assert conditions(world)["Degraded"][1] == "WeightsFailed"
    assert "lm_head.weight" in world.status.message


def test_one_that_still_drains_for_an_old_commit_is_told(world: World) -> None:
    world.run_with(weights=target(0, 1))
    worker = world.worker(1)
    worker.jump(WeightsId(epoch=0, version=0))
    worker.required = WeightsId(epoch=0, version=0)
    uid = world.pods["pool-1-0"].uid
    world.frozen.add("commit")
    world.hung.add((uid, "commit"))
    seen = world.observed()
    assert seen.workers[uid].running == {"commit"}
    plan = plan_pass(world.spec, seen, world.status, world.now)
    assert plan.status.message == (
        "pool-1-0 gets no requests: it has not committed weights (0, 1) yet"
    )


def test_conflicts_come_first_then_refusals_then_failures(world: World) -> None:
    shown(world, trouble="broken")
    seen = replace(world.observed(), rejections={"pod/a": "refused"})
    plan = plan_pass(world.spec, seen, world.status, world.now)
    assert plan.status.message == "refused"
    found = condition_of(plan.status, "Degraded")
    assert found.reason == "Rejected"
    seen = replace(seen, conflicts={"pod/b": "taken"})
    plan = plan_pass(world.spec, seen, world.status, world.now)
    assert plan.status.message == "taken"


def test_a_worker_ahead_of_the_target_is_told(world: World) -> None:
    world.worker(0).jump(WeightsId(epoch=0, version=7))
    world.run()
    assert world.worker(0).active.version == 7
    assert conditions(world)["WeightsSynced"] == (
        "False",
        "AheadOfTarget",
        "a worker serves (0, 7), ahead of the target (0, 0); workers are never rolled back: raise the target",
    )


def test_weights_are_synced_only_where_all_have_them(world: World) -> None:
    world.run_with(suspend=True)
    assert conditions(world)["WeightsSynced"][:2] == ("False", "Suspended")
    world.run_with(suspend=False, state="Asleep")
    world.run_with(weights=target(0, 1))
    assert conditions(world)["WeightsSynced"][1:] == (
        "Asleep",
        "0 of 2 replicas have weights (0, 1)",
    )
    world.set(state="Active", replicas=3)
    world.autoload = False
    world.step()
    assert conditions(world)["WeightsSynced"][:2] == ("False", "Loading")


def test_only_failures_of_a_pool_that_serves_nothing_are_its_failure() -> None:
    world = settled_world(replicas=2, restartPolicy={"maxRestarts": 0})
    world.fail("pool-1-0")
    world.step()
    assert world.status.phase == "Degraded", "one serves"
    assert conditions(world)["Progressing"][:2] == ("False", "RestartsExhausted")
    world.fail("pool-0-0")
    world.step()
    assert world.status.phase == "Failed"


def test_errors_are_kept_newest_first_and_once(world: World) -> None:
    for trouble in ("a", "b", "a", "c", "d", "e", "f", "g", "h", "i", "j", "k"):
        shown(world, trouble=trouble)
        world.step()
    messages = [e.message for e in world.status.last_errors]
    assert messages[0] == "pool-1-0: k"
    assert len(messages) == len(set(messages)) == 5


def test_a_spec_that_can_not_be_read_changes_nothing_else(world: World) -> None:
    pool = {"metadata": {"generation": 7}}
    before = world.status
    status = status_for_invalid_spec(before, pool, "spec.x: no" + "!" * 2000, world.now)
    assert status.observed_generation == 7
    assert status.phase == "Degraded"
    assert len(status.message) == 1024
    kept = {c.type: c for c in before.conditions if c.type != "Degraded"}
    assert {c.type: c for c in status.conditions if c.type != "Degraded"} == kept
    found = condition_of(status, "Degraded")
    assert (found.status, found.reason, found.observed_generation) == ("True", "InvalidSpec", 7)
    later = status_for_invalid_spec(status, pool, "spec.y: no", world.now + 60)
    again = condition_of(later, "Degraded")
    assert again.last_transition_time == found.last_transition_time
    fresh = status_for_invalid_spec(RolloutReplicaStatus(), {"metadata": {}}, "no", world.now)
    assert fresh.observed_generation == 0
    assert [c.type for c in fresh.conditions] == ["Degraded"]


def test_a_status_that_can_not_be_read_is_kept(world: World) -> None:
    held = {"weights": {"committed": {"epoch": 1, "source": {"tape": "7"}}}, "novelty": [1]}
    foreign = {"type": "Mine", "status": "Unknown"}
    raw = {**held, "conditions": [foreign, {"type": "Degraded", "status": "False"}]}
    pool = {"metadata": {"generation": 7}, "status": raw}
    kept = document_for_unreadable_status(world.status, pool, "status.x: no", world.now)
    assert kept is not None
    conditions = kept.pop("conditions")
    assert kept == held
    assert conditions[0] == foreign
    assert len(conditions) == 2
    told = conditions[1]
    assert (told["type"], told["status"]) == ("Degraded", "True")
    assert (told["reason"], told["message"]) == ("UnreadableStatus", "status.x: no")
    assert told["observedGeneration"] == 7
    later = parse_status({"status": {"conditions": [told]}})[0]
    assert document_for_unreadable_status(later, pool, "status.x: no", world.now + 60) is None, (
        "said already"
    )
    turned = {**told, "status": "False", "lastTransitionTime": "2020-01-01T00:00:00Z"}
    before = parse_status({"status": {"conditions": [turned]}})[0]
    since = document_for_unreadable_status(before, pool, "status.x: no", world.now)
    assert since is not None
    assert since["conditions"][1] == told, "it turns now"
    again = document_for_unreadable_status(later, pool, "status.y: no", world.now + 60)
    assert again is not None
    assert again["conditions"][1]["lastTransitionTime"] == told["lastTransitionTime"]
    broken = {"metadata": {}, "status": {"conditions": "none"}}
    found = document_for_unreadable_status(RolloutReplicaStatus(), broken, "no", world.now)
    assert found is not None
    assert [c["type"] for c in found["conditions"]] == ["Degraded"]


@pytest.mark.parametrize(
    ("progress", "said"),
    [
        (Progress(message="loading weights 37%", fraction=0.37), "Loading: loading weights 37%"),
        (Progress(message="compiling", fraction=0.5), "Loading: compiling 50%"),
        (Progress(message="warming up"), "Loading: warming up"),
    ],
    ids=lambda value: value.message if isinstance(value, Progress) else "",
)
def test_the_start_of_a_worker_is_told(progress: Progress, said: str) -> None:
    world = World(spec_of(replicas=2))
    world.autoload = False
    world.run(5)
    world.worker(0).progress = progress
    world.run(5)
    expected = f"waiting for 2 of 2 replicas to serve: pool-0-0 is {said}"
    assert world.status.message == expected


def test_back_off_is_told_with_its_end(world: World) -> None:
    world.run()
    for _ in range(2):
        world.fail("pool-1-0")
        world.step()
        world.step()
    world.fail("pool-1-0")
    world.step()
    status, reason, message = conditions(world)["Degraded"]
    assert (status, reason) == ("True", "CrashLooping")
    assert message.startswith("replica 1 failed 2 times in a row and restarts at ")
    assert message.endswith(" UTC: exit code 137")


@pytest.mark.parametrize("fields", [{"ready": False}, {"gate": False}])
def test_ready_is_who_has_the_gate_and_is_ready(world: World, fields: dict[str, bool]) -> None:
    shown(world, **fields)
    plan = plan_pass(world.spec, world.observed(), world.status, world.now)
    assert plan.status.ready_replicas == 1
    member = plan.status.members[0]
    assert (member.name, member.ready, member.message) == ("pool-1-0", False, "is Active")


def test_who_is_ready_already_is_not_what_the_others_wait_for(world: World) -> None:
    world.set(replicas=3)
    shown(world, gate=False)
    plan = plan_pass(world.spec, world.observed(), world.status, world.now)
    assert plan.status.message == "waiting for 2 of 3 replicas to serve: replica 2 has no pod yet"


def test_one_replica_asleep_is_all_asleep() -> None:
    world = settled_world(replicas=1, state="Asleep")
    assert conditions(world)["Asleep"][:2] == ("True", "Asleep")
    assert world.transition.message == "done"
    world.run_with(replicas=0)
    assert conditions(world)["Asleep"][:2] == ("False", "Awake"), "nobody sleeps"


def test_a_gang_is_updated_when_all_of_it_is() -> None:
    world = settled_world(replicas=1, **GANG)
    assert world.status.updated_replicas == 1
    world.pods["pool-0-1"] = replace(world.pods["pool-0-1"], revision="old")
    plan = plan_pass(world.spec, world.observed(), world.status, world.now)
    assert plan.status.updated_replicas == 0
