"""Which changes of a status are written at once, and which are mere progress."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_operator.api.status import PoolCondition, RolloutReplicaStatus
from rollout_operator.core.status_changes import owned_fields, without_progress

MOMENT = "2026-01-01T00:00:00Z"
LATER = "2026-01-01T00:01:00Z"
UPDATE: dict[str, Any] = {
    "epoch": 1, "version": 2, "phase": "Staging", "startedAt": MOMENT, "message": "1 of 2",
}  # fmt: skip
IDENTITY = {"epoch": 1, "version": 1}
WEIGHTS: dict[str, Any] = {
    "committed": {**IDENTITY, "source": {"path": "/w/1"}},
    "active": {"min": IDENTITY, "max": IDENTITY},
    "stagedReplicas": 1,
    "lastUpdate": UPDATE,
}
TRANSITION = {"to": "Asleep", "startedAt": MOMENT, "message": "1 of 2 sleep"}


def ready(status: str = "True", message: str = "", since: str = MOMENT) -> dict[str, str]:
    known = {"type": "Ready", "status": status, "reason": "Because", "message": message}
    return {**known, "lastTransitionTime": since}


BEFORE: dict[str, Any] = {
    "message": "1 of 2",
    "replicas": 2,
    "restarts": 1,
    "weights": WEIGHTS,
    "lastTransition": TRANSITION,
    "conditions": [ready()],
}


def fields(**changes: Any) -> dict[str, Any]:
    return owned_fields(RolloutReplicaStatus.model_validate(BEFORE | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"message": "2 of 2"},
        {"replicas": 1, "readyReplicas": 1, "updatedReplicas": 1, "asleepReplicas": 1},
        {"members": [{"name": "math-0-0", "state": "Active", "ready": True}]},
        {"lastErrors": [{"time": MOMENT, "message": "no"}]},
        {"conditions": [ready(message="other words", since=LATER)]},
        {"weights": WEIGHTS | {"active": {"min": IDENTITY, "max": {"epoch": 1, "version": 2}}}},
        {"weights": WEIGHTS | {"stagedReplicas": 2}},
        {"weights": WEIGHTS | {"lastUpdate": UPDATE | {"message": "2 of 2"}}},
        {"lastTransition": TRANSITION | {"message": "2 of 2 sleep"}},
    ],
)
def test_counts_and_words_are_progress(changes: dict[str, Any]) -> None:
    assert fields(**changes) != fields(), "but they are told"
    assert without_progress(fields(**changes)) == without_progress(fields())


@pytest.mark.parametrize(
    "changes",
    [
        {"observedGeneration": 2},
        {"phase": "Degraded"},
        {"restarts": 2},
        {"replacing": [{"replica": 0, "restarts": 1}]},
        {"conditions": [ready("False")]},
        {"conditions": [ready() | {"reason": "Other"}]},
        {"conditions": [ready(), ready() | {"type": "Degraded"}]},
        {"weights": WEIGHTS | {"committed": {**IDENTITY, "source": {"path": "/w/2"}}}},
        {"weights": WEIGHTS | {"lastUpdate": UPDATE | {"phase": "Committing"}}},
        {"weights": WEIGHTS | {"lastUpdate": UPDATE | {"commitStartedAt": LATER}}},
        {"weights": WEIGHTS | {"lastUpdate": None}},
        {"lastTransition": TRANSITION | {"completedAt": LATER}},
        {"lastTransition": None},
    ],
)
def test_what_is_relied_on_is_no_progress(changes: dict[str, Any]) -> None:
    assert without_progress(fields(**changes)) != without_progress(fields())


def test_a_pool_that_starts_makes_progress_from_pending_to_loading() -> None:
    assert fields(phase="Pending") != fields(phase="Loading")
    assert without_progress(fields(phase="Pending")) == without_progress(fields(phase="Loading"))


STARTING: dict[str, Any] = {
    "lastTransition": {"to": "Active", "startedAt": MOMENT},
    "weights": {"committed": {"epoch": 0, "version": 0, "source": {"checkpoint": {}}}},
    "conditions": [ready("False")],
}
HASHED = {"committed": STARTING["weights"]["committed"] | {"rootHash": "xxh3_128_tree:00"}}


def synced(status: str, reason: str) -> dict[str, str]:
    return ready(status) | {"type": "WeightsSynced", "reason": reason}


def starting(told: dict[str, str], **changes: Any) -> dict[str, Any]:
    given = STARTING | {"conditions": [*STARTING["conditions"], told]} | changes
    return without_progress(fields(**given))


def test_what_a_pool_that_starts_has_loaded_waits_for_ready() -> None:
    before, after = synced("False", "Loading"), synced("True", "Synced")
    assert starting(before) == starting(after, weights=HASHED), "nobody serves it yet"
    assert starting(before) != starting(synced("False", "AheadOfTarget")), "somebody has to act"
    serves = {"conditions": [ready(), after]}
    done = {"lastTransition": STARTING["lastTransition"] | {"completedAt": LATER}}
    for changes in (serves, done):
        assert starting(before) != starting(after, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"lastTransition": STARTING["lastTransition"] | {"completedAt": LATER}},
        {"lastTransition": STARTING["lastTransition"] | {"from": "Asleep"}},
        {"lastTransition": None},
        {"weights": STARTING["weights"] | {"lastUpdate": UPDATE}},
        {"weights": {"committed": WEIGHTS["committed"]}},
        {"weights": {}},
    ],
    ids=["was Ready", "woke up", "no transition", "an update", "other weights", "none"],
)
def test_what_any_other_pool_has_loaded_is_no_progress(changes: dict[str, Any]) -> None:
    before, after = synced("False", "Loading"), synced("True", "Synced")
    assert starting(before, **changes) != starting(after, **changes)


def test_the_hash_of_a_pool_that_ran_before_is_no_progress() -> None:
    ran = {"lastTransition": STARTING["lastTransition"] | {"completedAt": LATER}}
    told = synced("True", "Synced")
    assert starting(told, **ran) != starting(told, weights=HASHED, **ran)


def test_a_pool_without_updates_and_transitions_makes_progress_too() -> None:
    bare = owned_fields(RolloutReplicaStatus(message="a"))
    assert without_progress(bare) == without_progress(owned_fields(RolloutReplicaStatus()))


def test_conditions_of_others_and_their_order_are_not_ours() -> None:
    ours = [PoolCondition.model_validate(ready() | {"type": t}) for t in ("Ready", "Asleep")]
    theirs = PoolCondition.model_validate(ready() | {"type": "example.com/Audited"})
    told = owned_fields(RolloutReplicaStatus(conditions=(*ours, theirs)))
    assert [c["type"] for c in told["conditions"]] == ["Asleep", "Ready"]
    assert told == owned_fields(RolloutReplicaStatus(conditions=(ours[1], ours[0])))
