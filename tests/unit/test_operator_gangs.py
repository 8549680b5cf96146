"""Which pods come and go: strangers, back-off, gangs, stuck pods, the budget of a rolling update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from poolspecs import NOW, spec_of
from poolspecs import a_pod as pod
from rollout_operator.api.spec import RolloutReplicaSpec
from rollout_operator.core.gangs import HEALTHY_SECONDS, PodPlan, backoff, failures, plan_pods
from rollout_operator.core.plan import CreatePod, DeletePod, Wait
from rollout_operator.core.world import Observed, Pod

GANG: dict[str, Any] = {
    "engine": {"type": "vllm"},
    "parallelism": {"tensor": 3, "nodes": 3},
    "accelerator": {"resource": "nvidia.com/gpu"},
}


def plan(
    spec: RolloutReplicaSpec, *pods: Pod, healthy: frozenset[int] = frozenset(), **seen: Any
) -> tuple[PodPlan, float | None]:
    """The plan, and when to look again."""
    wait = Wait()
    known: dict[str, Any] = {
        "name": "pool", "namespace": "ns", "uid": "owner", "generation": 1, "pods": pods,
        "workers": {}, "conflicts": {}, "rejections": {}, "unsettled": 0, "restarts_of": {},
        "barrier": None, "paused": False, "retry": "",
    } | seen  # fmt: skip
    return plan_pods(spec, Observed(**known), NOW, healthy, wait), wait.seconds


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


def test_a_pod_that_goes_already_is_not_deleted_again() -> None:
    spec = spec_of(replicas=0)
    found, _ = plan(spec, pod(spec, deletion_at=NOW + 5))
    assert not found.delete


@pytest.mark.parametrize(
    ("ends", "freed", "again"), [(-29.0, False, 1.0), (-30.0, True, 30.0), (10.0, False, 40.0)]
)
def test_a_stuck_pod_is_freed_after_its_grace(ends: float, freed: bool, again: float) -> None:
    spec = spec_of(replicas=1)
    found, seconds = plan(spec, pod(spec, deletion_at=NOW + ends))
    wanted = [DeletePod("pool-0-0", "uid of pool-0-0", 0, "it outlived its grace period")]
    assert found.delete == (wanted if freed else [])
    assert seconds == again


def test_while_writes_are_unsettled_nothing_is_made_or_rolled() -> None:
    spec = spec_of(replicas=3, updateStrategy={"maxUnavailable": 3})
    old, dead = pod(spec, 0, revision="old"), pod(spec, 1, phase="Failed", finished_at=NOW)
    found, seconds = plan(spec, old, dead, pod(spec, 3), healthy=frozenset({0}), unsettled=1)
    assert deleted(found) == [("pool-3-0", None)], "what is surplus stays surplus"
    assert not found.create
    assert seconds == 1.0
    found, seconds = plan(spec, old, dead, healthy=frozenset({0}))
    assert deleted(found) == [("pool-1-0", 0), ("pool-0-0", None)]
    assert found.create == [CreatePod(2, 0, 0)]
    assert seconds is None


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


def test_a_gang_of_which_one_goes_is_not_made_again_meanwhile() -> None:
    spec = spec_of(replicas=1, **GANG)
    found, _ = plan(spec, *(pod(spec, rank=r, deletion_at=NOW + 5) for r in range(3)))
    assert not found.create
    assert not found.delete


def test_a_whole_gang_dies_with_one() -> None:
    spec = spec_of(replicas=1, **GANG)
    dead = pod(spec, rank=1, phase="Failed", finished_at=NOW, restarts=0, trouble="exit code 1")
    found, _ = plan(spec, pod(spec, rank=0), dead, pod(spec, rank=2))
    assert deleted(found) == [("pool-0-0", None), ("pool-0-1", 0), ("pool-0-2", None)]
    assert found.restarts == {0: 1}
    assert {d.reason for d in found.delete} == {"its replica failed (exit code 1)"}


@pytest.mark.parametrize(
    ("count", "seconds"), [(0, 0), (1, 0), (2, 10), (3, 20), (4, 40), (7, 300), (60, 300)]
)
def test_back_off_doubles_up_to_its_limit(count: int, seconds: float) -> None:
    assert backoff(spec_of(), count) == seconds


def test_a_failed_pod_waits_for_its_turn() -> None:
    spec = spec_of(replicas=1)
    dead = pod(spec, phase="Failed", finished_at=NOW - 4, restarts=1)
    found, seconds = plan(spec, dead)
    assert not found.delete
    assert seconds == 6.0
    ended = "pod 'pool-0-0' ended with phase Failed"
    assert found.backing_off == {0: f"replica 0 restarts at 13:46:46 UTC: {ended}"}
    found, _ = plan(spec, replace(dead, finished_at=NOW - 10))
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
        ({"gate": True, "gate_since": NOW - HEALTHY_SECONDS}, 0),
        ({"gate": True, "gate_since": NOW - HEALTHY_SECONDS + 1}, 4),
        ({"gate": False, "gate_since": NOW - HEALTHY_SECONDS}, 4),
        ({"gate": True, "gate_since": None}, 4),
        ({"gate": True, "gate_since": NOW - HEALTHY_SECONDS, "finished_at": None}, 4),
        ({"revision": "old"}, 0),
        ({"retry": "another"}, 0),
    ],
)
def test_failures_count_until_it_served_for_ten_minutes(fields: dict[str, Any], count: int) -> None:
    spec = spec_of()
    dead = pod(spec, **{"phase": "Failed", "finished_at": NOW, "restarts": 4, **fields})
    found, _ = plan(spec)
    assert isinstance(found, PodPlan)
    seen = Observed("pool", "ns", "u", 1, (dead,), {}, {}, {}, 0, {}, None, False, "")
    assert failures(spec, seen, dead) == count
    assert HEALTHY_SECONDS == 600


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


def test_one_old_rank_makes_its_gang_old() -> None:
    spec = spec_of(replicas=1, **GANG)
    pods = [pod(spec, rank=0), pod(spec, rank=1, revision="old"), pod(spec, rank=2)]
    found, _ = plan(spec, *pods, healthy=frozenset({0}))
    assert len(found.delete) == 3


def test_what_is_surplus_takes_nothing_of_the_budget() -> None:
    spec = spec_of(replicas=2)
    old = [pod(spec, index, revision="old") for index in range(2)]
    found, _ = plan(spec, *old, pod(spec, 2), healthy=frozenset({0, 1, 2}))
    assert [name for name, _ in deleted(found)] == ["pool-2-0", "pool-1-0"]


def test_the_earliest_look_counts_and_none_is_sooner_than_a_moment() -> None:
    wait = Wait()
    assert wait.seconds is None
    for asked, kept in ((5.0, 5.0), (9.0, 5.0), (2.0, 2.0), (-1.0, 0.05), (1.0, 0.05)):
        wait.at_most(asked)
        assert wait.seconds == kept
