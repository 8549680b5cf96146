"""Replicas that are silent, fail again and again, or find no node: told, and until when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollout_operator.core.pass_plan import PassPlan
from rollout_operator.core.settings import FAILURE_RESET_SECONDS
from tests.support.unit.poolspecs import condition_of, spec_of
from tests.support.unit.world import World

OOM = "container 'worker' ended: OOMKilled, exit code 137"


@pytest.fixture
def world() -> World:
    made = World(spec_of())
    made.run()
    return made


def degraded(world: World) -> tuple[str, str, str]:
    found = condition_of(world.status, "Degraded")
    return found.status, found.reason, found.message


def progressing(world: World) -> tuple[str, str, str]:
    found = condition_of(world.status, "Progressing")
    return found.status, found.reason, found.message


def steps(world: World, count: int) -> PassPlan:
    for _ in range(count):
        plan = world.step()
    return plan


def test_a_silent_control_port_is_told_after_a_minute_though_the_pod_is_ready(world: World) -> None:
    world.worker(1).silent = True
    plan = steps(world, 60)
    assert degraded(world)[:2] == ("False", "AsExpected")
    assert plan.requeue is not None
    assert plan.requeue <= 2, "nothing else would wake the pool when the minute is over"
    plan = steps(world, 3)
    status, reason, message = degraded(world)
    assert (status, reason) == ("True", "Unreachable")
    assert message.startswith(
        "the control port of pool-1-0 on node 'node-1' has not answered for more than 60 s, its last "
        "answer was at "
    )
    assert "no answer within 3 s" in message
    assert "its process hangs" in message
    assert (world.status.phase, world.status.message) == ("Degraded", message)
    assert world.status.ready_replicas == 2, "what serves goes on serving"
    told = world.status.members[0]
    assert (told.name, told.state) == ("pool-1-0", "Unreachable")
    assert told.message.startswith("the control port of pool-1-0")
    assert plan.unreachable == 1
    before = world.status
    steps(world, 300)
    assert world.status.last_errors == before.last_errors, "one silence is one error"
    assert world.status.message == message, "a duration would be a write of status each second"
    world.worker(1).silent = False
    plan = steps(world, 3)
    assert degraded(world)[:2] == ("False", "AsExpected")
    assert plan.unreachable == 0


def test_others_that_are_silent_are_counted(world: World) -> None:
    for replica in range(2):
        world.worker(replica).silent = True
    steps(world, 70)
    assert degraded(world)[2].endswith(" (and 1 more of 2 replicas)")


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ("GET http://10.0.0.1:8001/v1/state: Connection refused", "nothing listens on port 8001"),
        ("401 unauthenticated: bad token", "--auth kubernetes"),
        ("503 auth-unavailable: forbidden", "tokenreviews"),
        ("GET https://10.0.0.1:8001/v1/state: certificate verify failed", "--control-ca-file"),
        (
            "GET https://10.0.0.1:8001/v1/state: [SSL: WRONG_VERSION_NUMBER] wrong version number",
            "made before TLS was set for control ports: delete it",
        ),
        ("no connection within 3 s", "NetworkPolicy"),
        ("no answer within 3 s", "its process hangs"),
    ],
)
def test_the_error_says_what_to_check(world: World, error: str, advice: str) -> None:
    world.worker(1).silent, world.silent_error = True, error
    steps(world, 70)
    message = degraded(world)[2]
    assert error in message
    assert advice in message


def test_a_process_that_imports_its_libraries_is_not_unreachable() -> None:
    world = World(spec_of(replicas=1))
    world.step()
    world.worker(0).silent = True
    world.pods["pool-0-0"] = replace(world.pods["pool-0-0"], is_booting=True)
    steps(world, 200)
    assert degraded(world)[0] == "False"
    assert "pool-0-0 does not answer yet (no answer within 3 s)" in world.status.message
    assert "no failure is known; 1 of 1 replicas do not serve yet" in degraded(world)[2]
    world.pods["pool-0-0"] = replace(world.pods["pool-0-0"], is_booting=False)
    steps(world, 2)
    assert degraded(world)[1] == "Unreachable", "its startup probe has passed"
    assert ", it has been asked since 1970-01-" in degraded(world)[2]


def fail(world: World, log: str = "") -> None:
    """The head of replica 1 ends, as soon as it is there."""
    while "pool-1-0" not in world.pods or world.pods["pool-1-0"].is_finished:
        world.step()
    world.fail("pool-1-0")
    world.pods["pool-1-0"] = replace(world.pods["pool-1-0"], trouble=OOM, last_log=log)


def test_a_crash_loop_is_told_until_the_head_has_worked_for_ten_minutes(world: World) -> None:
    fail(world)
    steps(world, 5)
    assert degraded(world)[0] == "False", "once is told by an event, and forgotten"
    fail(world)
    reasons, reset = set(), 0
    for _ in range(int(FAILURE_RESET_SECONDS) + 30):
        world.step()
        reasons.add(degraded(world)[1])
        reset += degraded(world)[0] == "False"
        if "pool-1-0" in world.pods and world.pods["pool-1-0"].restarts == 2 and reset == 0:
            last = degraded(world)[2]
    assert reasons == {"CrashLooping", "AsExpected"}
    assert 10 < reset < 30, "it began to work some seconds after it had failed"
    assert last == (
        "replica 1 failed 2 times in a row and has not yet done its work for 10 minutes; last cause: "
        + OOM
    )


@pytest.mark.parametrize("load", [60, int(FAILURE_RESET_SECONDS) + 50])
def test_no_recovery_is_told_between_two_crashes(load: int) -> None:
    world = World(spec_of())
    world.run()
    fail(world)
    fail(world)
    in_a_row, seen = [], set()
    for _ in range(5):
        world.autoload = False
        for _ in range(load):
            plan = world.step()
            seen.add(degraded(world)[:2])
            in_a_row.append(plan.in_a_row)
        fail(world)
    world.step()
    assert seen == {("True", "CrashLooping")}
    assert in_a_row == sorted(in_a_row)
    assert in_a_row[-1] >= 6
    causes = [e.message for e in world.status.last_errors]
    assert causes == [f"replica 1 failed and restarts: {OOM}"], "each cause is listed once"


def test_a_new_spec_ends_a_crash_loop(world: World) -> None:
    for _ in range(3):
        fail(world)
    world.step()
    assert degraded(world)[1] == "CrashLooping"
    world.set(podTemplate={"labels": {"a": "b"}})
    steps(world, 30)
    assert degraded(world)[0] == "False"


def test_the_log_of_the_first_crash_stays(world: World) -> None:
    fail(world, log="the first words")
    steps(world, 5)
    for _ in range(8):
        fail(world, log="later ones")
    steps(world, 5)
    assert [e.log for e in world.status.last_errors] == ["the first words"]


ROOM = (
    "provide nodes with free nvidia.com/gpu (spec.accelerator.resource), lower spec.replicas, or "
    "change what spec.resources, spec.podTemplate.nodeSelector and tolerations ask for"
)
CLAIM = "create the claim, or see why it is not bound: kubectl describe pvc"


@pytest.mark.parametrize(
    ("why", "advice"),
    [
        ("3 Insufficient nvidia.com/gpu.", ROOM),
        ('persistentvolumeclaim "models" not found. not found', CLAIM),
        ("pod has unbound immediate PersistentVolumeClaims.", CLAIM),
    ],
)
def test_a_pod_that_finds_no_node_is_told_after_a_minute(why: str, advice: str) -> None:
    world = World(
        spec_of(replicas=1, accelerator={"resource": "nvidia.com/gpu"}, engine={"type": "vllm"})
    )
    world.step()
    words = f"Unschedulable: 0/3 nodes are available: {why}"
    world.pods["pool-0-0"] = replace(
        world.pods["pool-0-0"],
        phase="Pending", node=None, started=False, ip=None, trouble=words,
        unscheduled_since=world.now, lacks_node=True,
    )  # fmt: skip
    world.workers.clear()
    plan = steps(world, 50)
    assert progressing(world)[1] == "Starting"
    assert plan.requeue is not None
    steps(world, 20)
    status, reason, message = progressing(world)
    assert (status, reason) == ("True", "Unschedulable")
    assert message == f"pool-0-0: {words}; {advice}"
    assert (world.status.phase, world.status.message) == ("Pending", message)


def test_that_a_replica_no_longer_serves_is_told_with_its_name_and_the_cause(world: World) -> None:
    world.pods["pool-1-0"] = replace(world.pods["pool-1-0"], trouble="NodeLost")
    world.worker(1).foreign_hold = "Asleep"
    steps(world, 2)
    found = condition_of(world.status, "Ready")
    assert (found.status, found.reason) == ("False", "NotServing")
    assert found.message == "1 of 2 replicas serve: pool-1-0: NodeLost"


def test_restarts_of_a_trainers_containers_are_counted() -> None:
    colocation = {"trainerSelector": {"matchLabels": {"job": "grpo"}}}
    hybrid = World(spec_of(mode="Hybrid", replicas=1, colocation=colocation))
    hybrid.run()
    assert hybrid.status.restarts == 0
    for count in (1, 3):
        hybrid.pods["t-0"] = replace(hybrid.pods["t-0"], restarts=count)
        steps(hybrid, 3)
    assert hybrid.status.restarts == 3
