"""Which pods come and go: strangers, back-off, gangs, stuck pods, the budget of a rolling update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rollout_operator.api.gangs import GangScheduler
from rollout_operator.api.spec import RolloutReplicaSpec
from rollout_operator.core.observed_pool import RECALLED_KEY, ObservedScheduling, Pod
from rollout_operator.core.pass_plan import CreatePod, DeletePod, RequeueAfter
from rollout_operator.core.pods.forced_deletion import stuck_message
from rollout_operator.core.replicas.pod_planning import (
    PodPlan,
    backoff_seconds,
    consecutive_failures,
    group_gangs,
    plan_pods,
)
from rollout_operator.core.replicas.replica_choice import fixed_choice
from rollout_operator.core.settings import FAILURE_RESET_SECONDS
from tests.support.unit.poolspecs import NOW, observed, spec_of
from tests.support.unit.poolspecs import a_pod as pod

GANG: dict[str, Any] = {
    "engine": {"type": "vllm"},
    "parallelism": {"tensor": 3, "nodes": 3},
    "accelerator": {"resource": "nvidia.com/gpu"},
}


def plan(
    spec: RolloutReplicaSpec, *pods: Pod, healthy: frozenset[int] = frozenset(), **seen: Any
) -> tuple[PodPlan, float | None]:
    """The plan, and when to look again."""
    wait = RequeueAfter()
    choice = fixed_choice(spec)
    return plan_pods(spec, observed(*pods, **seen), NOW, healthy, wait, choice=choice), wait.seconds


def deleted(found: PodPlan) -> list[tuple[str, int | None]]:
    return [(d.name, d.grace) for d in found.delete]


def test_a_strangers_pod_is_never_deleted() -> None:
    spec = spec_of(replicas=1)
    for change in ({"replicas": 0}, {"suspend": True}):
        found, _ = plan(spec_of(**change), pod(spec, owned=False))
        assert not found.delete
    found, _ = plan(spec, pod(spec, owned=False, deletion_at=NOW - 500))
    assert not found.delete, "not even one that is stuck"
    found, _ = plan(spec, pod(spec, owned=False, phase="Failed", finished_at=NOW))
    assert not found.delete


def test_scaling_down_deletes_the_highest_with_their_own_grace() -> None:
    spec = spec_of(replicas=1)
    dead = pod(spec, 2, phase="Failed", finished_at=NOW)
    found, _ = plan(spec, pod(spec, 0), pod(spec, 1), dead)
    assert deleted(found) == [("pool-1-0", None), ("pool-2-0", 0)]
    assert {d.reason for d in found.delete} == {"scaled down"}
    assert [d.uid for d in found.delete] == ["uid of pool-1-0", "uid of pool-2-0"]
    found, _ = plan(spec_of(replicas=1, suspend=True), pod(spec, 0))
    assert [d.reason for d in found.delete] == ["the pool is suspended"]
    assert not found.create


def test_a_deletion_grants_what_spec_says_now() -> None:
    spec = spec_of(replicas=0, drainSeconds=100)
    found, _ = plan(spec, pod(spec, 0, own_grace=45), pod(spec, 1, own_grace=115), pod(spec, 2))
    assert deleted(found) == [("pool-0-0", 115), ("pool-1-0", None), ("pool-2-0", None)]
    dead = pod(spec, 0, own_grace=45, phase="Failed", finished_at=NOW)
    assert deleted(plan(spec, dead)[0]) == [("pool-0-0", 0)]


def test_containers_that_outlive_their_worker_may_end_by_themselves() -> None:
    spec = spec_of(replicas=1)
    found, _ = plan(spec, pod(spec, phase="Failed", lingers=True, finished_at=NOW))
    assert deleted(found) == [("pool-0-0", None)]
    assert found.restarts == {0: 1}


@pytest.mark.parametrize(
    ("ends", "freed", "again"), [(-29.0, False, 1.0), (-30.0, True, 30.0), (10.0, False, 40.0)]
)
def test_a_stuck_pod_is_freed_after_its_grace(ends: float, freed: bool, again: float) -> None:
    spec = spec_of(replicas=1)
    found, seconds = plan(spec, pod(spec, deletion_at=NOW + ends))
    wanted = [DeletePod("pool-0-0", "uid of pool-0-0", 0, "it outlived its grace period", True)]
    assert found.delete == (wanted if freed else [])
    assert seconds == again


@pytest.mark.parametrize(("ago", "again"), [(0.0, 30.0), (29.0, 1.0), (30.0, None)])
def test_a_stuck_pod_is_freed_again_after_a_while(ago: float, again: float | None) -> None:
    spec = spec_of(replicas=2)
    stuck = pod(spec, deletion_at=NOW - 500, forced_ago=ago)
    dead = pod(spec, 1, phase="Failed", finished_at=NOW)
    found, seconds = plan(spec, stuck, dead)
    assert deleted(found) == [("pool-0-0", 0)] * (again is None) + [("pool-1-0", 0)]
    assert seconds == (again or 30)


@pytest.mark.parametrize(
    ("ends", "forced_ago", "told"), [(-29.0, None, False), (-30.0, None, True), (-90.0, 1.0, True)]
)
def test_a_finalizer_that_keeps_a_pod_is_named(
    ends: float, forced_ago: float | None, told: bool
) -> None:
    """Nothing but its controller, or a person, ends that: the pool waits for the name, and is Degraded."""
    spec = spec_of(replicas=1)
    kept = pod(spec, deletion_at=NOW + ends, forced_ago=forced_ago, finalizers=("a.example/x",))
    found, _ = plan(spec, kept)
    assert [
        ("(a.example/x)" in text, "kubectl patch pod pool-0-0" in text) for text in found.stuck
    ] == [(True, True)] * told
    assert not plan(spec, replace(kept, finalizers=()))[0].stuck


@pytest.mark.parametrize(("finished", "told"), [(None, "mend the node"), (NOW - 50, "a.example/x")])
def test_a_finalizer_is_named_once_nothing_runs_beside_a_trainer(
    finished: float | None, told: str
) -> None:
    kept = pod(spec_of(replicas=1), deletion_at=NOW - 90, finalizers=("a.example/x",))
    found = stuck_message(replace(kept, colocated=True, finished_at=finished), NOW)
    assert found is not None
    assert told in found


def test_a_clock_that_is_ahead_ends_no_drain() -> None:
    """Nor do the times of the API server, whose clock may be behind: only what this process saw counts."""
    spec = spec_of(replicas=1)
    drains = pod(spec, deletion_at=NOW - 3600, grace=45, seen_seconds=1)
    found, seconds = plan(spec, drains)
    assert (found.delete, seconds) == ([], 74)


def test_a_clock_that_is_set_back_holds_nobody() -> None:
    """What this process saw pass has passed, whatever the wall clock says of it."""
    spec = spec_of(replicas=1)
    hour = 3600.0
    stuck = pod(spec, deletion_at=NOW + hour, grace=45, seen_seconds=75)
    assert deleted(plan(spec, stuck)[0]) == [("pool-0-0", 0)]
    assert plan(spec, replace(stuck, seen_seconds=74.0))[1] == 1
    dead = pod(spec, phase="Failed", finished_at=NOW + hour, restarts=1, seen_seconds=10)
    assert deleted(plan(spec, dead)[0]) == [("pool-0-0", 0)]
    found, seconds = plan(spec, replace(dead, seen_seconds=4.0))
    assert (deleted(found), seconds) == ([], 6)


def test_what_a_deleted_pool_of_that_name_left_is_waited_for_and_freed() -> None:
    spec = spec_of(replicas=2)
    going = pod(spec, 0, uid="old", deletion_at=NOW + 5)
    found, seconds = plan(spec, predecessors=(going,))
    assert [c.replica for c in found.create] == [1]
    assert not found.delete
    assert seconds == 35
    found, _ = plan(spec, predecessors=(replace(going, deletion_at=NOW - 30),))
    assert [(d.uid, d.forced) for d in found.delete] == [("old", True)]
    gang = spec_of(replicas=1, **GANG)
    found, _ = plan(gang, predecessors=(pod(gang, rank=2, uid="old"),))
    assert not found.create, "a gang is made whole"


def test_what_is_missing_failed_or_outdated_is_replaced_in_one_pass() -> None:
    spec = spec_of(replicas=3, updateStrategy={"maxUnavailable": 3})
    old, dead = pod(spec, 0, revision="old"), pod(spec, 1, phase="Failed", finished_at=NOW)
    found, seconds = plan(spec, old, dead, healthy=frozenset({0}))
    assert deleted(found) == [("pool-1-0", 0), ("pool-0-0", None)]
    assert found.create == [CreatePod(2, 0, 0)]
    assert seconds is None


@pytest.mark.parametrize(
    ("pods", "seen", "kept"),
    [
        ([], {}, {0: 3}),
        (["failed"], {}, {0: 4}),
        (["new"], {}, {}),
        (["going"], {}, {0: 3}),
    ],
)
def test_failures_are_kept_until_the_new_pod_has_them(
    pods: list[str], seen: dict[str, Any], kept: dict[int, int]
) -> None:
    spec = spec_of(replicas=1)
    states: dict[str, dict[str, Any]] = {
        "failed": {"phase": "Failed", "finished_at": NOW - 900, "restarts": 3},
        "new": {},
        "going": {"deletion_at": NOW + 5},
    }
    found, _ = plan(spec, *(pod(spec, **states[p]) for p in pods), restarts_of={0: 3}, **seen)
    assert found.replacing == kept
    for change in ({"suspend": True}, {"replicas": 0}):
        gone, _ = plan(spec_of(**{"replicas": 1, **change}), restarts_of={0: 3})
        assert gone.replacing == {}


def test_a_new_pod_carries_the_failures_before_it() -> None:
    found, _ = plan(spec_of(replicas=2), restarts_of={1: 3})
    assert found.create == [CreatePod(0, 0, 0), CreatePod(1, 0, 3)]


def test_a_gang_is_completed_as_long_as_none_of_it_has_run() -> None:
    spec = spec_of(replicas=1, **GANG)
    first = pod(spec, rank=0, started=False, restarts=1)
    last = pod(spec, rank=2, started=False, restarts=2)
    found, _ = plan(spec, first, last)
    assert found.create == [CreatePod(0, 1, 2)]
    assert not found.delete


@pytest.mark.parametrize("change", [{"started": True}, {"deletion_at": NOW + 5}])
def test_a_gang_that_lost_a_pod_starts_anew(change: dict[str, Any]) -> None:
    spec = spec_of(replicas=1, **GANG)
    other = pod(spec, rank=0, started=False, **({} if "started" in change else change))
    last = replace(pod(spec, rank=1, started=False), started="started" in change)
    found, _ = plan(spec, other, last)
    assert not found.create
    going = {"pool-0-1"} if "deletion_at" in change else {"pool-0-0", "pool-0-1"}
    assert {name for name, _ in deleted(found)} == going
    assert all("restarts as a whole" in d.reason for d in found.delete)


@pytest.mark.parametrize(
    "change", [{"replicas": 0}, {"suspend": True}, {}], ids=["scaled", "suspended", "by-hand"]
)
def test_members_go_when_their_head_has_drained(change: dict[str, Any]) -> None:
    spec = spec_of(**{"replicas": 1, **change}, **GANG)
    head, *members = (pod(spec, rank=r) for r in range(3))
    if change:
        found, _ = plan(spec, head, *members)
        assert [name for name, _ in deleted(found)] == ["pool-0-0"]
    going = replace(head, deletion_at=NOW + 5)
    found, _ = plan(spec, going, *members)
    assert not found.delete, "they run the requests that it drains"
    ended = replace(going, phase="Failed", finished_at=NOW)
    for pods in ([ended, *members], members):
        found, _ = plan(spec, *pods)
        assert deleted(found) == [("pool-0-1", None), ("pool-0-2", None)]
        assert not found.create
        assert not found.restarts


def test_what_ends_beside_a_pod_that_is_deleted_has_not_failed() -> None:
    """It ends because of that; nothing is counted, and nobody waits for a back-off."""
    spec = spec_of(replicas=1, **GANG)
    going = pod(spec, rank=0, deletion_at=NOW + 5, restarts=3)
    follows = pod(spec, rank=1, phase="Failed", finished_at=NOW, restarts=3)
    found, _ = plan(spec, going, follows, pod(spec, rank=2, restarts=3))
    assert deleted(found) == [("pool-0-1", 0), ("pool-0-2", None)]
    assert (found.restarts, found.backing_off) == ({}, {})
    found, _ = plan(spec, replace(follows, rank=0, name="pool-0-0"), replace(going, rank=1))
    assert (found.restarts, found.backing_off) == ({}, {}), "nor where it is a member that goes"


def test_who_ended_first_says_why_a_gang_failed() -> None:
    """The head follows its member, and the member its head: one failure, one restart."""
    spec = spec_of(replicas=1, **GANG)
    head = pod(spec, rank=0, phase="Failed", finished_at=NOW - 1, trouble="it lost pool-0-2")
    member = pod(spec, rank=2, phase="Failed", finished_at=NOW - 4, trouble="OOMKilled")
    found, _ = plan(spec, head, pod(spec, rank=1), member)
    assert found.restarts == {0: 1}
    assert {d.reason for d in found.delete} == {"its replica failed (pool-0-2: OOMKilled)"}
    # The head's node is a minute behind.
    early = replace(head, finished_at=NOW - 60, followed=True)
    found, _ = plan(spec, early, pod(spec, rank=1), member)
    assert {d.reason for d in found.delete} == {"its replica failed (pool-0-2: OOMKilled)"}
    waiting = [replace(p, restarts=1) for p in (head, pod(spec, rank=1), member)]
    found, seconds = plan(spec, *waiting)
    assert "pool-0-2: OOMKilled" in found.backing_off[0]
    assert seconds == 6, "counted from the first end"


@pytest.mark.parametrize("kind", ["conflicts", "rejections", "api_errors", "awaited"])
def test_a_rank_that_was_refused_is_waited_for(kind: str) -> None:
    """A quota or a namesake in the way of one pod, or one whose name gets free, is no reason to end those that run."""
    spec = spec_of(replicas=1, **GANG)
    running = [pod(spec, rank=r, restarts=2) for r in (0, 2)]
    mine: dict[str, Any] = {kind: {"pod/pool-0-1": "pod/pool-0-1 was rejected: quota"}}
    found, _ = plan(spec, *running, **mine)
    assert (found.create, found.delete) == ([CreatePod(0, 1, 2)], [])
    others: dict[str, Any] = {kind: {"pod/pool-1-1": "pod/pool-1-1 was rejected: quota"}}
    found, _ = plan(spec, *running, **others)
    assert len(found.delete) == 2
    known: dict[str, Any] = {kind: {RECALLED_KEY: "as status says, of a process before this one"}}
    found, _ = plan(spec, *running, **known)
    assert (found.create, found.delete) == ([CreatePod(0, 1, 2)], []), "trying will show"


@pytest.mark.parametrize("started", [True, False])
def test_a_gang_that_waits_for_a_rank_does_not_wait_by_an_old_template(started: bool) -> None:
    """What is refused to the last one may be what the first ones have by it."""
    spec = spec_of(replicas=1, **GANG)
    old = [pod(spec, rank=r, revision="v1-of-before", started=started) for r in (0, 2)]
    refused = {"pod/pool-0-1": "pod/pool-0-1 was rejected: quota"}
    found, _ = plan(spec, *old, rejections=refused)
    assert not found.create
    assert [name for name, _ in deleted(found)] == ["pool-0-0", "pool-0-2"]
    assert {d.reason for d in found.delete} == {"its pod template is outdated"}
    assert [(s.replica, s.rank) for s in found.seek] == [(0, 1)], "it may only lack its labels"


@pytest.mark.parametrize(
    ("count", "seconds"), [(0, 0), (1, 0), (2, 10), (3, 20), (4, 40), (7, 300), (60, 300)]
)
def test_back_off_doubles_up_to_its_limit(count: int, seconds: float) -> None:
    assert backoff_seconds(spec_of(), count) == seconds


@pytest.mark.parametrize(
    "end", ["finished_at", "last_known_at"], ids=["a container says when", "none does"]
)
def test_a_failed_pod_waits_for_its_turn(end: str) -> None:
    """The kubelet may have refused it, or an init container failed."""
    spec = spec_of(replicas=1)
    failed: dict[str, Any] = {"phase": "Failed", "restarts": 1}
    found, seconds = plan(spec, pod(spec, **failed | {end: NOW - 4}))
    assert not found.delete
    assert seconds == 6.0
    ended = "pod 'pool-0-0' ended with phase Failed"
    assert found.backing_off == {
        0: f"replica 0 failed 2 times in a row and restarts at 13:46:46 UTC: {ended}"
    }
    found, _ = plan(spec, pod(spec, **failed | {end: NOW - 10}))
    assert deleted(found) == [("pool-0-0", 0)]
    assert found.restarts == {0: 2}


def test_too_many_failures_are_left_for_a_person() -> None:
    spec = spec_of(replicas=1, restartPolicy={"maxRestarts": 2})
    dead = pod(spec, phase="Failed", finished_at=NOW - 900, trouble="OOMKilled")
    found, _ = plan(spec, replace(dead, restarts=2))
    assert not found.delete
    assert "failed 3 times (maxRestarts 2): OOMKilled" in found.exhausted[0]
    found, _ = plan(spec, replace(dead, restarts=1))
    assert found.exhausted == {}
    assert found.restarts == {0: 2}
    found, _ = plan(spec, replace(dead, restarts=2), retry="again")
    assert found.restarts == {0: 1}, "the annotation resets the count"


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, 4),
        ({"proven_since": NOW - FAILURE_RESET_SECONDS}, 0),
        ({"proven_since": NOW - FAILURE_RESET_SECONDS + 1}, 4),
        ({"proven_since": NOW - FAILURE_RESET_SECONDS, "gate": False}, 0),
        (
            {
                "proven_since": NOW - FAILURE_RESET_SECONDS,
                "finished_at": None,
                "last_known_at": NOW,
            },
            0,
        ),
        ({"proven_since": NOW - FAILURE_RESET_SECONDS, "finished_at": None}, 4),
        ({"revision": "old"}, 0),
        ({"retry": "another"}, 0),
    ],
)
def test_failures_count_until_ten_minutes_after_it_proved_itself(
    fields: dict[str, Any], count: int
) -> None:
    spec = spec_of()
    dead = pod(spec, **{"phase": "Failed", "finished_at": NOW, "restarts": 4, **fields})
    seen = observed(dead)
    assert consecutive_failures(spec, seen, group_gangs(spec, seen, (0,))[0].pods, dead) == count
    assert FAILURE_RESET_SECONDS == 600


def test_what_the_head_has_proven_counts_for_its_members() -> None:
    spec = spec_of(replicas=1, **GANG)
    head = pod(spec, rank=0, restarts=4, proven_since=NOW - FAILURE_RESET_SECONDS)
    dead = pod(spec, rank=1, restarts=4, phase="Failed", finished_at=NOW)
    found, _ = plan(spec, head, dead, pod(spec, rank=2, restarts=4))
    assert found.restarts == {0: 1}
    found, _ = plan(spec, replace(head, proven_since=NOW - 1), dead, pod(spec, rank=2, restarts=4))
    assert list(found.backing_off) == [0]


def test_a_rolling_update_takes_the_broken_first_then_from_the_top() -> None:
    spec = spec_of(replicas=4, updateStrategy={"maxUnavailable": 2})
    pods = [pod(spec, index, revision="old") for index in range(4)]
    found, _ = plan(spec, *pods, healthy=frozenset({0, 2, 3}))
    assert [name for name, _ in deleted(found)] == ["pool-1-0", "pool-3-0"]
    assert found.outdated == 4
    found, _ = plan(spec, *pods, healthy=frozenset(range(4)))
    assert [name for name, _ in deleted(found)] == ["pool-3-0", "pool-2-0"]
    assert {d.reason for d in found.delete} == {"its pod template is outdated"}
    found, _ = plan(spec, *pods, healthy=frozenset({3}))
    assert [name for name, _ in deleted(found)] == ["pool-2-0", "pool-1-0", "pool-0-0"]


def test_a_rolling_update_deletes_nothing_that_could_not_be_made_again() -> None:
    """Nothing that serves goes for a gang scheduler that is not there, or for a queue that it refuses."""
    spec = spec_of(replicas=2)
    old = [pod(spec, index, revision="v1-of-before") for index in (0, 1)]
    found, _ = plan(spec, *old, scheduling=ObservedScheduling(lacking=True))
    assert (found.outdated, found.delete) == (2, [])
    found, _ = plan(spec, *old, scheduling=ObservedScheduling(GangScheduler.VOLCANO))
    assert found.delete


def test_a_rolling_update_leaves_what_is_new_or_going() -> None:
    spec = spec_of(replicas=2)
    new, going = pod(spec, 0), pod(spec, 1, revision="old", deletion_at=NOW + 5)
    found, _ = plan(spec, new, going, healthy=frozenset({0, 1}))
    assert not found.delete
    assert found.outdated == 0
    surplus = pod(spec, 2, revision="old")
    found, _ = plan(spec, new, pod(spec, 1), surplus, healthy=frozenset({0, 1}))
    assert found.outdated == 0, "what is surplus is no part of the update"
    dead = pod(spec, 1, revision="old", phase="Failed", finished_at=NOW)
    found, _ = plan(spec, new, dead, healthy=frozenset({0}))
    assert [d.reason.partition(" (")[0] for d in found.delete] == ["its replica failed"]


def test_what_is_surplus_takes_nothing_of_the_budget() -> None:
    spec = spec_of(replicas=2)
    old = [pod(spec, index, revision="old") for index in range(2)]
    found, _ = plan(spec, *old, pod(spec, 2), healthy=frozenset({0, 1, 2}))
    assert [name for name, _ in deleted(found)] == ["pool-2-0", "pool-1-0"]


def test_the_earliest_look_counts_and_none_is_sooner_than_a_moment() -> None:
    wait = RequeueAfter()
    assert wait.seconds is None
    for asked, kept in ((5.0, 5.0), (9.0, 5.0), (2.0, 2.0), (-1.0, 0.05), (1.0, 0.05)):
        wait.at_most(asked)
        assert wait.seconds == kept
