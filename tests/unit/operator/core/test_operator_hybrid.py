"""A pool whose pods are the trainer's own: who is a member, who gets requests, what is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rollout_operator.api.objects import Obj
from rollout_operator.api.spec import RolloutReplicaSpec
from rollout_operator.api.status import RolloutReplicaStatus
from rollout_operator.core.observed_pool import Pod
from rollout_operator.core.pass_plan import SetGate
from rollout_operator.core.replicas.hybrid import (
    MemberCandidate,
    foreign_pod_messages,
    parse_candidate,
    select_members,
)
from rollout_operator.core.services import (
    ENDPOINTS_PER_SLICE,
    EndpointGate,
    pool_slices,
    read_gates,
    slice_difference,
    with_gates,
)
from rollout_worker.schemas import WeightsId
from tests.support.unit.poolspecs import NOW, condition_of, spec_of, target
from tests.support.unit.simhybrid import STRANGER
from tests.support.unit.world import World


def hybrid(**changes: Any) -> RolloutReplicaSpec:
    """A pool in the trainer's pods."""
    colocation = {"trainerSelector": {"matchLabels": {"job": "grpo"}}}
    return spec_of(mode="Hybrid", colocation=colocation, replicas=1, **changes)


def running(name: str = "t-0", **changes: Any) -> Obj:
    """A trainer's pod as the API server has it, with one container that runs."""
    ran: Obj = {
        "name": "train",
        "restartCount": 1,
        "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
    }
    status: Obj = {
        "phase": "Running",
        "podIP": "10.0.0.7",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [ran],
    }
    status |= changes.pop("status", {})
    meta = {"name": name, "uid": f"uid of {name}", "labels": {"job": "grpo"}}
    spec = {
        "nodeName": "n1",
        "serviceAccountName": "rollout-worker",
        "containers": [{"name": "train"}],
    }
    return {
        "metadata": meta | changes.pop("metadata", {}),
        "spec": spec | changes,
        "status": status,
    }


def candidate(obj: Obj) -> MemberCandidate:
    found = parse_candidate(obj)
    assert found is not None
    return found


def member(name: str, **fields: Any) -> Pod:
    """One member of a pool, with these fields."""
    (found,) = select_members(hybrid(), [candidate(running(name))], {})
    return replace(found, **fields)


def ready(world: World) -> list[str]:
    """Pods that the data Service leads to."""
    assert world.hybrid is not None
    found = (e for e in world.hybrid.endpoints() if e["conditions"]["ready"])
    return [each["targetRef"]["name"] for each in found]


def told(status: RolloutReplicaStatus, kind: str) -> tuple[str, str]:
    found = condition_of(status, kind)
    return found.reason, found.message


# Who is a member.


def test_a_pod_of_the_trainer_is_read_as_a_member() -> None:
    found = candidate(running())
    assert found == MemberCandidate(
        Pod(
            name="t-0",
            uid="uid of t-0",
            replica=0,
            rank=0,
            revision="",
            phase="Running",
            owned=False,
            started=True,
            ready=True,
            ip="10.0.0.7",
            node="n1",
            restarts=1,
        ),
        "rollout-worker",
    )
    assert candidate(running(serviceAccountName=None)).account == "default"


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
def test_who_has_ended_is_no_member(phase: str) -> None:
    assert parse_candidate(running(status={"phase": phase})) is None


DEAD = {"terminated": {"exitCode": 137, "reason": "Error"}}
LOOP = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
RUNS = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}


@pytest.mark.parametrize(
    ("states", "control", "ended"),
    [
        ({"train": {"state": DEAD}}, None, True),
        ({"train": {"state": LOOP, "lastState": DEAD}}, None, True),
        ({"train": {"state": RUNS, "lastState": DEAD}}, None, False),
        ({"train": {"state": {"waiting": {"reason": "ContainerCreating"}}}}, None, False),
        ({"train": {"state": DEAD}, "logs": {"state": RUNS}}, None, False),
        ({"train": {"state": DEAD}, "logs": {"state": RUNS}}, "train", True),
        ({"train": {"state": RUNS}, "logs": {"state": DEAD}}, "train", False),
    ],
    ids=["ended", "to start again", "started again", "not yet", "who knows", "worker", "beside it"],
)
def test_a_process_is_gone_once_its_container_has_ended(
    states: dict[str, Obj], control: str | None, ended: bool
) -> None:
    containers = [
        {"name": name} | ({"ports": [{"containerPort": 8001}]} if name == control else {})
        for name in states
    ]
    statuses = [{"name": name, **state} for name, state in states.items()]
    found = candidate(running(containers=containers, status={"containerStatuses": statuses})).pod
    assert found.ended == found.is_finished == ended


def test_members_are_numbered_by_name_and_keep_their_gates() -> None:
    found = select_members(
        hybrid(),
        [candidate(running(name)) for name in ("t-10", "t-2", "t-1")],
        {"uid of t-2": EndpointGate(True, "b", 5.0, 4.0)},
    )
    assert [(pod.name, pod.replica) for pod in found] == [("t-1", 0), ("t-2", 1), ("t-10", 2)]
    assert [pod.gate for pod in found] == [False, True, False]
    assert (found[1].gate_boot, found[1].gate_since, found[1].proven_since) == ("b", 5.0, 4.0)


def test_who_has_another_service_account_is_never_called() -> None:
    stranger = candidate(running("t-0-debug", serviceAccountName="other"))
    found = select_members(hybrid(), [stranger, candidate(running("t-1"))], {})
    assert [(pod.name, pod.replica) for pod in found] == [("t-1", 0)], "no member, no token"
    assert foreign_pod_messages(hybrid(), [stranger, candidate(running("t-1"))]) == (
        "t-0-debug: it runs under service account 'other', so it is not a member and gets no calls: give the "
        "trainer's pods 'rollout-worker', set spec.serviceAccountName, or remove the labels of "
        "spec.colocation.trainerSelector from it",
    )
    (trusted,) = select_members(
        hybrid(serviceAccountName="other"), [candidate(running(serviceAccountName="other"))], {}
    )
    assert trusted.ip == "10.0.0.7"


# EndpointSlices.


def slices(*pods: Pod, stored: tuple[Obj, ...] = ()) -> dict[str, Obj]:
    made = pool_slices("pool", "ns", "owner", pods, stored)
    return {each["metadata"]["name"]: each for each in made}


def test_the_data_service_leads_to_who_serves_and_the_other_to_all_by_name() -> None:
    serving = member("t-0", replica=0, gate=True, gate_boot="b", gate_since=5.0, proven_since=5.0)
    asleep = member("t-1", replica=1, ip="10.0.0.8")
    made = slices(serving, asleep)
    data, heads = made["pool-ipv4-0"], made["pool-heads-ipv4-0"]
    assert data["metadata"]["labels"]["kubernetes.io/service-name"] == "pool"
    assert heads["metadata"]["labels"]["kubernetes.io/service-name"] == "pool-heads"
    for each in made.values():
        assert each["metadata"]["labels"]["endpointslice.kubernetes.io/managed-by"] == (
            "rollout-operator"
        )
        assert each["metadata"]["ownerReferences"][0]["uid"] == "owner"
        assert each["addressType"] == "IPv4"
    assert [port["port"] for port in data["ports"]] == [8000]
    assert [port["port"] for port in heads["ports"]] == [8000, 8001, 8002]
    assert [e["conditions"]["ready"] for e in data["endpoints"]] == [True, False]
    assert [e["conditions"]["ready"] for e in heads["endpoints"]] == [True, True]
    assert [e["hostname"] for e in heads["endpoints"]] == ["pool-0-0", "pool-1-0"]
    assert read_gates(made.values(), "pool", "owner") == {
        "uid of t-0": EndpointGate(True, "b", 5.0, 5.0)
    }


@pytest.mark.parametrize("change", [{"deletion_at": 1.0}, {"ended": True}, {"gate": False}])
def test_who_goes_or_has_ended_gets_no_requests(change: dict[str, Any]) -> None:
    pod = member("t-0", gate=True, gate_boot="b")
    (endpoint,) = slices(replace(pod, **change))["pool-ipv4-0"]["endpoints"]
    assert endpoint["conditions"]["ready"] is False
    assert endpoint["conditions"]["serving"] is False


def test_what_no_member_is_in_becomes_empty() -> None:
    before = slices(*(member(f"t-{i}", replica=i) for i in range(ENDPOINTS_PER_SLICE + 1)))
    assert sorted(before) == [
        "pool-heads-ipv4-0",
        "pool-heads-ipv4-1",
        "pool-ipv4-0",
        "pool-ipv4-1",
    ]
    after = slices(member("t-0"), stored=tuple(before.values()))
    assert [len(after[name]["endpoints"]) for name in sorted(after)] == [1, 0, 1, 0]
    assert slice_difference(after["pool-ipv4-1"], before["pool-ipv4-1"]) == "endpoints"


def test_addresses_of_either_family_have_slices_of_their_own() -> None:
    made = slices(member("t-0"), member("t-1", ip="fd00::7"))
    assert {n: s["addressType"] for n, s in made.items() if "heads" not in n} == {
        "pool-ipv4-0": "IPv4",
        "pool-ipv6-0": "IPv6",
    }


def test_a_member_without_an_address_is_in_no_slice() -> None:
    assert not slices(member("t-0", ip=None))


@pytest.mark.parametrize(
    "text", ["", "{", "5", '{"u": 5}', '{"u": {"since": "x"}}', '{"u": {"a": 1}}']
)
def test_an_annotation_of_somebody_else_says_nothing(text: str) -> None:
    (data, _) = slices(member("t-0", gate=True, gate_boot="b")).values()
    data["metadata"]["annotations"] = {"rollout.dev/gates": text}
    assert read_gates([data], "pool", "owner") == {"uid of t-0": EndpointGate(True)}


def test_slices_of_others_say_nothing() -> None:
    made = slices(member("t-0", gate=True, gate_boot="b")).values()
    assert not read_gates(made, "pool", "another uid")


def test_a_gate_that_stays_keeps_its_time() -> None:
    pod = member("t-0", gate=True, gate_boot="b", gate_since=5.0)
    (same,) = with_gates([pod], [SetGate("t-0", pod.uid, True, "c", "Serving", 7.0)], NOW)
    assert (same.gate_boot, same.gate_since, same.proven_since) == ("c", 5.0, 7.0)
    (off,) = with_gates([pod], [SetGate("t-0", pod.uid, False, "b", "why")], NOW)
    assert (off.gate, off.gate_since) == (False, NOW)


# The life of a pool.


def test_a_pool_waits_for_its_trainer_and_serves_in_its_pods() -> None:
    world = World(hybrid())
    assert world.hybrid is not None
    world.hybrid.wanted = []
    status = world.step().status
    assert status.phase == "Pending"
    assert told(status, "Progressing") == (
        "WaitingForTrainer",
        "replica 0 waits for a pod that spec.colocation.trainerSelector selects: job=grpo",
    )
    assert told(status, "Ready")[0] == "NotServing"
    world.hybrid.wanted = ["t-0", "t-1"]
    status = world.run()
    assert (status.phase, status.desired_replicas, status.ready_replicas) == ("Ready", 2, 2)
    assert (status.replicas, status.updated_replicas) == (2, 2)
    assert status.selector == "job=grpo"
    assert [m.name for m in status.members] == ["t-0", "t-1"]
    assert ready(world) == ["t-0", "t-1"]


def test_weights_are_committed_and_sleep_empties_the_service() -> None:
    world = World(hybrid())
    world.run()
    world.set(weights=target(1, 1))
    assert world.run().weights.committed is not None
    assert {w.active for w in world.workers.values()} == {WeightsId(epoch=1, version=1)}
    assert not any("gate" in line for line in world.log)
    world.set(state="Asleep")
    assert world.run().phase == "Asleep"
    assert ready(world) == []
    world.set(state="Active")
    assert world.run().phase == "Ready"
    assert ready(world) == ["t-0", "t-1"]


def test_who_ends_leaves_and_comes_back_by_itself_at_the_pools_weights() -> None:
    world = World(hybrid())
    world.run_with(weights=target(1, 1))
    assert world.hybrid is not None
    world.hybrid.end("t-0")
    status = world.step().status
    assert ready(world) == ["t-1"]
    assert told(status, "Degraded") == ("PodTrouble", "t-0: exit code 137")
    for _ in range(5):  # the kubelet waits for a while
        world.step()
    status = world.run()
    assert status.phase == "Ready"
    assert ready(world) == ["t-0", "t-1"]
    assert world.workers[world.pods["t-0"].uid].active == WeightsId(epoch=1, version=1)
    assert status.restarts == 0, "nothing was restarted by us"


def test_who_may_not_be_called_holds_up_nobody() -> None:
    world = World(hybrid())
    assert world.hybrid is not None
    world.hybrid.wanted = ["t-0", STRANGER]
    world.run()
    world.set(weights=target(1, 1))
    status = world.run()
    assert status.weights.committed is not None
    assert status.weights.committed.identity == WeightsId(epoch=1, version=1)
    assert ready(world) == ["t-0"]
    assert told(status, "Degraded")[0] == "PodTrouble"
    assert told(status, "Ready") == ("Serving", "1 of 1 replicas serve")
    assert told(status, "WeightsSynced")[0] == "Synced"
    assert status.desired_replicas == 1
    assert world.step().requeue is None, "nobody waits for an answer that nobody asks for"


def test_a_pod_that_goes_leaves_at_once_and_is_waited_for() -> None:
    world = World(hybrid())
    world.run()
    world.grace = 5.0
    world.ask_to_go("t-1")
    status = world.step().status
    assert ready(world) == ["t-0"]
    assert status.desired_replicas == 2
    assert told(status, "Ready")[0] == "NotServing"


def test_who_is_silent_leaves_as_long_as_another_one_answers() -> None:
    world = World(hybrid())
    world.run()
    world.workers[world.pods["t-0"].uid].silent = True
    world.step()
    assert ready(world) == ["t-1"]
    world.workers[world.pods["t-1"].uid].silent = True
    world.step()
    assert ready(world) == ["t-1"], "it may be the operator who hears nobody"
    world.let_workers(silent=False)
    world.run()
    assert ready(world) == ["t-0", "t-1"]


def test_a_pod_that_is_not_ready_gets_no_requests() -> None:
    world = World(hybrid())
    world.run()
    world.pods["t-0"] = replace(world.pods["t-0"], ready=False)
    world.step()
    assert ready(world) == ["t-1"]


def test_a_new_operator_knows_from_the_slices_who_served() -> None:
    world = World(hybrid())
    world.run()
    world.forget()
    world.let_workers(unasked=True)
    world.step()
    assert ready(world) == ["t-0", "t-1"]


def test_another_engine_than_spec_says_is_told() -> None:
    world = World(hybrid(engine={"type": "vllm"}))
    reason, message = told(world.run(), "Degraded")
    assert reason == "OtherEngine"
    assert message.startswith("t-0 runs engine hf, spec.engine.type is vllm: start that engine in")
