"""The public contract's case table, walked through `plan_pass`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rollout_operator.api.status import RolloutReplicaStatus, UpdatePhase
from rollout_operator.core.observed_pool import FailedCall, ObservedWorker, Pod
from rollout_operator.core.pass_plan import ControlVerb, PassPlan
from rollout_operator.core.pass_planning import plan_pass
from rollout_worker.schemas import WeightsId
from tests.support.unit.poolspecs import GANG, NOW, a_pod, spec_of, target
from tests.support.unit.world import World, settled_world


def ready(world: World) -> bool:
    return world.verdict("Ready")[0] == "True"


def committed(world: World) -> tuple[int, int]:
    return world.committed.identity.as_tuple()


def phase(world: World) -> UpdatePhase | None:
    update = world.status.weights.last_update
    return update.phase if update else None


def until(world: World, wanted: UpdatePhase, steps: int = 30) -> None:
    for _ in range(steps):
        world.step()
        if phase(world) is wanted:
            return
    raise AssertionError(f"never {wanted}, but {phase(world)}")


def test_a_settled_pool_plans_nothing(world: World) -> None:
    before = world.status
    plan = world.step()
    acted = (plan.create, plan.delete, plan.gates, plan.calls, plan.notes)
    assert not any(acted)
    assert world.status == before


def test_target_rises_while_active(world: World) -> None:
    world.set(weights=target(1, 1))
    world.step()
    assert phase(world) is UpdatePhase.STAGING
    assert world.verdict("WeightsSynced") == ("False", "Staging")
    until(world, UpdatePhase.COMMITTING)
    assert not world.worker(0).commits, "the decision is persisted before the first commit call"
    world.run()
    assert committed(world) == (1, 1)
    assert phase(world) is UpdatePhase.COMPLETE
    assert not [line for line in world.log[-20:] if "False" in line], "no gate flips"
    assert world.verdict("WeightsSynced") == ("True", "Synced")
    assert world.committed.root_hash == "hash(1, 1)"


def test_staging_different_bytes_is_told_and_nobody_commits(world: World) -> None:
    world.worker(1).other_bytes = " of a stale cache"
    world.set(weights=target(1, 1))
    reasons = set()
    for _ in range(12):
        world.step()
        assert not any(w.commits for w in world.workers.values())
        reasons.add(world.verdict("Degraded"))
    assert reasons == {("False", "AsExpected"), ("True", "ContentMismatch")}
    assert world.verdict("Degraded") == ("True", "ContentMismatch"), "and it stays"
    assert "pool-1-0" in world.status.message
    assert phase(world) is UpdatePhase.STAGING
    assert ready(world)
    world.worker(1).other_bytes = ""
    world.run()
    assert committed(world) == (1, 1)
    assert {w.active_hash for w in world.workers.values()} == {"hash(1, 1)"}
    assert world.verdict("Degraded")[0] == "False"


def test_what_an_engine_can_not_do_fails_before_staging(world: World) -> None:
    world.worker(0).policies = ("Drain", "Abort", "Recompute")
    world.set(weights={**target(1, 1), "inFlight": {"policy": "Keep"}})
    since = len(world.log)
    world.run()
    assert world.log[since:] == [], "nothing is staged"
    assert phase(world) is UpdatePhase.FAILED
    for kind in ("Progressing", "WeightsSynced"):
        assert world.verdict(kind) == ("False", "Unsupported")
    assert world.verdict("Degraded") == ("True", "Unsupported")
    assert world.status.message == (
        "spec.weights.inFlight.policy: engine hf can't do Keep in pool-0-0: use one of Drain, "
        "Abort, Recompute"
    )
    assert ready(world)
    world.run_with(weights={"inFlight": {"policy": "Recompute"}})
    assert committed(world) == (1, 1)
    assert world.verdict("Degraded")[0] == "False"


def test_staging_deadline_reports_and_goes_on(world: World) -> None:
    world.frozen.add("stage")
    world.set(weights={**target(1, 1), "deadlineSeconds": 5})
    world.steps(8)
    assert phase(world) is UpdatePhase.FAILED
    assert world.verdict("Progressing") == ("False", "DeadlineExceeded")
    assert ready(world), "the old weights serve"
    world.frozen.clear()
    world.run()
    assert committed(world) == (1, 1)
    assert phase(world) is UpdatePhase.COMPLETE


def test_committing_what_everybody_refuses_fails_and_expels_nobody(world: World) -> None:
    world.set(weights=target(1, 1))
    world.let_workers(broken_commit=True)
    until(world, UpdatePhase.FAILED)
    for _ in range(8):
        world.step()
        assert phase(world) is UpdatePhase.FAILED
        assert all(pod.gate for pod in world.pods.values())
        assert all(w.serving and w.active.version == 0 for w in world.workers.values())
    assert ready(world)
    assert world.verdict("Degraded") == ("True", "WeightsFailed")
    for kind in ("Progressing", "WeightsSynced"):
        assert world.verdict(kind) == ("False", "WeightsFailed")
    assert world.update.attempts > 2, "it goes on trying"
    world.let_workers(broken_commit=False)
    world.run()
    assert committed(world) == (1, 1)
    assert world.verdict("WeightsSynced")[0] == "True"


def test_committing_ends_before_the_calls_return(world: World) -> None:
    world.set(weights=target(1, 1))
    world.frozen.add("commit")
    until(world, UpdatePhase.COMMITTING)
    world.step()
    for worker in world.workers.values():
        worker.jump(WeightsId(epoch=1, version=1))
    for _ in range(3):
        world.step()
        assert world.verdict("Degraded")[0] == "False"
    assert committed(world) == (1, 1)


@pytest.mark.parametrize("state", ["Active", "Paused"])
@pytest.mark.parametrize("level", [1, 2])
def test_who_sleeps_through_a_publish_wakes_with_it_alone(
    world: World, state: str, level: int
) -> None:
    """What it had is not read for nothing, and the KV cache comes after the new weights."""
    world.run_with(state="Asleep", sleep={"level": level})
    world.run_with(weights=target(1, 1))
    assert committed(world) == (1, 1)
    assert {w.hold for w in world.workers.values()} == {"Asleep"}, "nobody is woken for it"
    world.log.clear()
    world.run_with(state=state)
    assert world.status.phase == ("Ready" if state == "Active" else state)
    worker = world.worker(0)
    assert (worker.reads, worker.active) == ([], WeightsId(epoch=1, version=1))
    last = "wake" if state == "Active" else "pause"
    called = [line.split()[0] for line in world.log if line.endswith(" pool-0-0")]
    assert called == ["wake", "stage", "commit", last]


@pytest.mark.parametrize("knows", [True, False], ids=["nothing new", "knows no empty waking"])
def test_who_can_not_wake_with_other_weights_reads_what_it_had(world: World, knows: bool) -> None:
    world.let_workers(wakes_empty=knows)
    world.run_with(state="Asleep")
    world.run_with(weights={} if knows else target(1, 1), state="Active")
    assert ready(world)
    assert [w.reads for w in world.workers.values()] == [[WeightsId(epoch=0, version=0)]] * 2


@pytest.mark.parametrize("broken", ["stage", "commit"])
def test_a_pool_is_paused_though_its_weights_can_t_be_had(world: World, broken: str) -> None:
    world.run_with(state="Asleep")
    world.run_with(weights=target(1, 1))
    setattr(world.worker(0), f"broken_{broken}", True)
    world.run_with(state="Paused")
    assert [w.lifecycle for w in world.workers.values()] == ["Paused", "Paused"]
    assert world.worker(0).reads == [WeightsId(epoch=0, version=0)]
    assert world.worker(1).reads == []


def test_a_pool_whose_weights_woke_is_asleep_again_once_they_sleep(world: World) -> None:
    world.run_with(state="Asleep")
    world.run_with(weights=target(1, 1))
    world.frozen.add(ControlVerb.STAGE)
    world.run_with(state="Active")
    assert world.worker(0).woken
    world.frozen.add(ControlVerb.SLEEP)
    world.run_with(state="Asleep")
    assert world.status.asleep_replicas == 0
    assert world.verdict("Asleep") == ("False", "Awake")
    world.frozen.clear()
    world.run()
    assert world.verdict("Asleep") == ("True", "Asleep")
    assert not world.worker(0).woken


def test_nobody_serving_commits_at_once() -> None:
    world = World(spec_of(weights=target(3, 7)))
    world.step()
    assert committed(world) == (3, 7)
    world.run()
    assert all(w.commits == [WeightsId(epoch=3, version=7)] for w in world.workers.values())
    assert ready(world)


@pytest.mark.parametrize(("strategy", "reached"), [("Rolling", [1, 0, 0]), ("Eager", [1, 0, 1])])
def test_rolling_stops_at_a_failing_member_and_eager_goes_on(
    strategy: str, reached: list[int]
) -> None:
    world = settled_world(replicas=3, weights={"strategy": strategy})
    world.worker(1).broken_commit = True
    world.run_with(weights=target(1, 1))
    assert [w.active.version for w in world.workers.values()] == reached
    assert committed(world) == (0, 0)
    assert all(w.serving for w in world.workers.values())
    world.worker(1).broken_commit = False
    world.run()
    assert committed(world) == (1, 1)


@pytest.mark.parametrize("strategy", ["Rolling", "Eager"])
def test_a_joiner_commits_the_target_once_that_is_decided(strategy: str) -> None:
    """The first commit of all may be its own: a crash must not lose which bytes it has."""
    world = settled_world(weights={"strategy": strategy, **target(1, 1)})
    world.worker(0).broken_stage = True
    world.reboot(1)
    world.set(weights=target(1, 2))
    for _ in range(20):
        before = world.status.weights.last_update
        if any(call.verb is ControlVerb.COMMIT for call in world.step().calls):
            break
    assert before is not None
    assert (before.phase, before.version) == (UpdatePhase.COMMITTING, 2)
    assert before.root_hash == world.worker(1).active_hash == "hash(1, 2)"
    assert world.worker(1).active.version == 2


@pytest.mark.parametrize("state", ["Paused", "Asleep"])
@pytest.mark.parametrize("strategy", ["Rolling", "Eager"])
def test_a_commit_that_somebody_refuses_keeps_no_pool_awake(strategy: str, state: str) -> None:
    """Nobody is sent away for it, so it is never finished: the trainer would wait for ever."""
    world = settled_world(weights={"strategy": strategy})
    world.worker(1).broken_commit = True
    world.run_with(weights=target(1, 1))
    assert phase(world) is UpdatePhase.COMMITTING
    world.set(state=state)
    world.steps(10)
    assert {w.lifecycle for w in world.workers.values()} == {state}
    world.worker(1).broken_commit = False
    world.run_with(state="Active")
    assert committed(world) == (1, 1)
    assert all(w.serving and w.active.version == 1 for w in world.workers.values())
    assert ready(world)


@pytest.mark.parametrize("rest", [{"state": "Asleep"}, {"suspend": True}, {}])
@pytest.mark.parametrize("broken", ["broken_stage", "broken_commit"])
@pytest.mark.parametrize("strategy", ["AllAtOnce", "Rolling", "Eager"])
def test_what_no_worker_can_load_is_not_committed_while_nobody_serves(
    strategy: str, broken: str, rest: dict[str, Any]
) -> None:
    """Else the pool could not wake: the weights that it is to load are those that all have refused."""
    if (strategy, broken) == ("Rolling", "broken_commit") and "state" not in rest:
        return  # nobody answers any more: one that was not asked by the last answer may have it
    world = settled_world(weights={"strategy": strategy})
    world.let_workers(**{broken: True})
    world.set(weights=target(1, 1))
    world.steps(12)
    if rest:
        world.run_with(**rest)
    else:
        world.reboot(0)
        world.reboot(1)
        world.steps(1)
    assert (phase(world), committed(world)) == (UpdatePhase.FAILED, (0, 0))
    assert "pool-0-0: " in world.update.message
    world.forget()
    world.set(state="Active", suspend=False)
    for _ in range(15):
        world.let_workers(**{broken: True})
        world.step()
    assert committed(world) == (0, 0)
    assert ready(world), "it serves its old weights"
    world.let_workers(**{broken: False})
    world.run()
    assert (phase(world), committed(world)) == (UpdatePhase.COMPLETE, (1, 1))


@pytest.mark.parametrize("verb", [ControlVerb.STAGE, ControlVerb.COMMIT])
def test_an_error_of_any_length_fits_into_status(world: World, verb: ControlVerb) -> None:
    """The API server would refuse the status, and nothing of the pool goes on without it."""
    world.set(weights=target(1, 1))
    until(world, UpdatePhase.STAGING if verb is ControlVerb.STAGE else UpdatePhase.COMMITTING)
    uid = world.pods["pool-0-0"].uid
    about = WeightsId(epoch=1, version=1)
    world.failures[uid, verb] = FailedCall("x" * 5000, 1, world.tick + 99, about=about)
    world.frozen = {ControlVerb.STAGE, ControlVerb.COMMIT}
    world.worker(0).staged = None
    document = plan_of(world).status.to_document()
    assert "xxx" in document["weights"]["lastUpdate"]["message"]
    assert document == RolloutReplicaStatus.model_validate(document).to_document()


@pytest.mark.parametrize("strategy", ["Rolling", "Eager"])
def test_quick_publishes_leave_no_replica_behind(strategy: str) -> None:
    world = settled_world(replicas=3, weights={"strategy": strategy})
    world.seconds_of = {ControlVerb.STAGE: 3.0, ControlVerb.COMMIT: 2.0}
    for version in range(1, 101):
        world.set(weights=target(1, version))
        world.step()
    assert all(len(w.commits) >= 5 for w in world.workers.values())
    behind = 100 - min(w.active.version for w in world.workers.values())
    assert behind < 40, "each turns to the newest once it has finished"
    world.run()
    assert committed(world) == (1, 100)


def fail_until_limit(world: World, limit: int) -> None:
    for _ in range(limit + 1):
        world.fail("pool-0-0")
        world.steps(10)
    assert world.status.phase == "Failed"
    assert world.verdict("Degraded") == ("True", "RestartsExhausted")


@pytest.mark.parametrize("limit", [0, 1])
def test_restarts_end_at_the_limit(limit: int) -> None:
    world = settled_world(replicas=1, restartPolicy={"maxRestarts": limit, "baseDelaySeconds": 1})
    fail_until_limit(world, limit)
    assert world.pods["pool-0-0"].is_finished, "kept for its logs"
    world.retry = "1"
    world.run()
    assert ready(world)
    fail_until_limit(world, limit)
    world.run_with(podTemplate={"labels": {"a": "b"}})
    assert ready(world)


@pytest.mark.parametrize(
    ("rest", "verb"), [("Asleep", ControlVerb.WAKE), ("Paused", ControlVerb.RESUME)]
)
def test_rest_is_not_reached_while_a_call_that_ends_it_is_under_way(
    rest: str, verb: ControlVerb
) -> None:
    """The last answer still says what the worker did before that call."""
    world = settled_world(replicas=1)
    world.run_with(state=rest)
    world.seconds_of[verb] = 3.0
    world.set(state="Active")
    world.step()
    world.set(state=rest)
    for _ in range(10):
        world.step()
        if world.transition.completed_at is not None:
            break
    assert not any(kind is verb for _, kind in world.flights)
    assert world.worker(0).state().lifecycle.value == rest
    for _ in range(10):
        assert not world.step().calls, "nothing else comes"


@pytest.mark.parametrize("more", [{}, GANG], ids=["one pod each", "gangs"])
def test_a_surge_lets_a_rolling_update_miss_no_replica(more: dict[str, Any]) -> None:
    strategy = {"maxUnavailable": 0, "maxSurge": 2}
    world = settled_world(replicas=3, updateStrategy=strategy, **more)
    first = {p.uid for p in world.pods.values()}
    world.set(podTemplate={"labels": {"a": "b"}})
    serving, seen = [], set[int]()
    for _ in range(120):
        world.step()
        serving.append(sum(p.ready for p in world.pods.values() if p.rank == 0))
        seen |= {p.replica for p in world.pods.values()}
        if world.status.phase == "Updating":
            assert "more run until it is over" in world.status.message
    assert min(serving) == 3
    assert max(serving) == 5
    assert seen == {0, 1, 2, 3, 4}
    assert {p.replica for p in world.pods.values()} == {0, 1, 2}
    assert not first & {p.uid for p in world.pods.values()}
    assert ready(world)
    world.run_with(replicas=5)
    world.run_with(replicas=2)
    assert {p.replica for p in world.pods.values()} == {0, 1}


def test_a_partition_keeps_lower_replicas_as_they_are() -> None:
    world = settled_world(replicas=3, updateStrategy={"partition": 2, "maxSurge": 1})
    first = {p.name: p.uid for p in world.pods.values()}
    world.run_with(podTemplate={"labels": {"a": "b"}})
    now = {p.name: p.uid for p in world.pods.values()}
    assert {name for name in now if now[name] == first[name]} == {"pool-0-0", "pool-1-0"}
    assert ready(world)
    assert world.status.updated_replicas == 1
    assert world.status.phase == "Ready"
    world.kill("pool-0-0")
    world.run()
    assert world.status.updated_replicas == 2, "no former template is kept"
    world.run_with(updateStrategy={"partition": 0})
    assert world.status.updated_replicas == 3


def plan_of(world: World, **pods: Pod) -> PassPlan:
    """One pass over the world with these pods shown besides, or instead."""
    seen = world.observed()
    shown = {p.name: p for p in seen.pods} | {p.name: p for p in pods.values()}
    workers = {**seen.workers, **dict.fromkeys((p.uid for p in pods.values()), ObservedWorker())}
    seen = replace(seen, pods=tuple(shown.values()), workers=workers)
    return plan_pass(world.spec, seen, world.status, world.now)


@pytest.mark.parametrize(
    "fields",
    [{"owned": False}, {"rank": 1}, {"deletion_at": NOW + 500}, {"replica": 2}],
    ids=["a stranger's", "a member", "on its way out", "surplus"],
)
def test_only_living_heads_of_ours_that_are_wanted_count(
    world: World, fields: dict[str, Any]
) -> None:
    gang = a_pod(
        world.spec, **{"replica": 1, "gate": True, "name": "other", "uid": "other", **fields}
    )
    plan = plan_of(world, other=gang)
    assert [m.name for m in plan.status.members] == ["pool-0-0", "pool-1-0"]
    assert plan.status.ready_replicas == 2
    assert "other" not in {c.uid for c in plan.calls}


def test_a_surplus_head_leaves_the_service_once(world: World) -> None:
    def turned(**fields: Any) -> list[tuple[str, bool, str]]:
        surplus = a_pod(world.spec, 2, **fields)
        return [(g.name, g.serving, g.boot) for g in plan_of(world, surplus=surplus).gates]

    assert turned(gate=True, gate_boot="b7") == [("pool-2-0", False, "b7")]
    assert turned(gate=True) == [("pool-2-0", False, "")]
    assert turned(gate=False) == []
    assert turned(gate=True, deletion_at=NOW) == [], "it is going, no Service sends it anything"


@pytest.mark.parametrize(
    ("state", "held"),
    [("Active", "Paused"), ("Active", "Asleep"), ("Paused", None), ("Paused", "Asleep"), ("Asleep", None)],
)  # fmt: skip
def test_a_pool_at_rest_is_rolled_one_by_one_too(state: str, held: str | None) -> None:
    """Whether its spec says so, or a trainer holds it."""
    world = settled_world(replicas=4, state=state)
    world.let_workers(foreign_hold=held)
    world.run()
    world.set(podTemplate={"labels": {"a": "b"}})
    assert [d.name for d in plan_of(world).delete] == ["pool-3-0"]
    world.let_workers(silent=True)
    assert not plan_of(world).delete, "nobody can see whether they rest"
    world.let_workers(silent=False)
    if state != "Active":
        world.worker(0).hold = world.worker(0).foreign_hold = None
        assert [d.name for d in plan_of(world).delete] == ["pool-0-0"], "the one not at rest"


@pytest.mark.parametrize("forgotten", [False, True])
@pytest.mark.parametrize("state", ["Paused", "Asleep"])
def test_a_pool_at_rest_that_is_silent_is_not_replaced_at_once(state: str, forgotten: bool) -> None:
    """Nobody can see whether they rest, and the one who looks may be the one that is cut off."""
    world = settled_world(replicas=4, state=state)
    world.let_workers(silent=True)
    if forgotten:
        world.forget()
    world.set(podTemplate={"labels": {"a": "b"}})
    assert not plan_of(world).delete
    for index in range(3):
        world.worker(index).silent = False
    assert [d.name for d in plan_of(world).delete] == ["pool-3-0"]
    world.fail("pool-2-0")
    world.worker(1).silent = True
    assert [d.name for d in plan_of(world).delete] == ["pool-2-0"], (
        "the one that is known to be gone"
    )


@pytest.mark.parametrize(
    ("before", "after"), [("Active", "Active"), ("Active", "Paused"), ("Asleep", "Active")]
)
def test_a_pool_on_its_way_is_not_replaced_at_once(before: str, after: str) -> None:
    world = settled_world(replicas=4, state=before)
    least = 4
    world.set(state=after, podTemplate={"labels": {"a": "b"}})
    for _ in range(80):
        world.step()
        least = min(least, sum(w.required is not None for w in world.workers.values()))
    assert least == 3
    assert world.status.updated_replicas == 4


def test_a_head_that_the_kubelet_never_calls_ready_is_broken(world: World) -> None:
    world.set(podTemplate={"labels": {"a": "b"}})
    for name, pod in world.pods.items():
        world.pods[name] = replace(pod, ready=False, gate_since=world.now)
    plan = plan_of(world)
    assert not plan.delete, "the kubelet takes a moment"
    assert plan.requeue == 30
    world.failures[world.pods["pool-0-0"].uid, "wake"] = FailedCall("no memory", 1, world.tick)
    assert [d.name for d in plan_of(world).delete] == ["pool-0-0"], "something is wrong with it"
    world.tick += 30
    assert [d.name for d in plan_of(world).delete] == ["pool-1-0", "pool-0-0"]
    for name, pod in world.pods.items():
        world.pods[name] = replace(pod, gate_since=None)
    assert len(plan_of(world).delete) == 2, "nobody knows since when"


def test_a_head_that_can_not_come_to_the_committed_weights_is_broken(world: World) -> None:
    world.run_with(weights=target(1, 1))
    for worker in world.workers.values():
        worker.jump(WeightsId(epoch=0, version=0))
    for name, pod in world.pods.items():
        world.pods[name] = replace(pod, ready=False, gate=False)
    world.set(podTemplate={"labels": {"a": "b"}})
    assert len(plan_of(world).delete) == 2, "perhaps the new template brings them the volume"


def test_who_has_yet_to_pause_is_not_at_rest(world: World) -> None:
    world.set(state="Paused", podTemplate={"labels": {"a": "b"}})
    assert not plan_of(world).delete


def test_a_pass_says_when_to_look_again(world: World) -> None:
    assert plan_of(world).requeue is None
    world.set(weights={**target(1, 1), "deadlineSeconds": 90})
    plan = plan_of(world)
    assert plan.requeue == 90
    assert plan.barrier == frozenset(w.boot for w in world.workers.values())
    assert [(n.type, n.reason) for n in plan.notes] == [("Normal", "WeightsStaging")]
