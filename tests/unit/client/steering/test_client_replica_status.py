"""What the client reads from a RolloutReplica: epochs, how far weights are, whether a state is reached."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_client import (
    EpochLost,
    Published,
    PublishFailed,
    PublishProgress,
    SteeringFailed,
    Superseded,
    WeightsId,
)
from rollout_client.steering.replica_status import (
    check_epoch,
    has_reached,
    has_target,
    highest_epoch,
    publish_progress,
    wanted_replicas,
    wanted_state,
)
from rollout_worker.schemas import WeightsSource

OURS = WeightsId(epoch=2, version=5)


def identity(epoch: int, version: int, **more: Any) -> dict[str, Any]:
    return {"epoch": epoch, "version": version, **more}


def pool(
    status: dict[str, Any] | None = None, annotation: str | None = None, **spec: Any
) -> dict[str, Any]:
    annotations = {} if annotation is None else {"rollout.dev/trainer-epoch": annotation}
    found: dict[str, Any] = {"metadata": {"annotations": annotations}, "spec": spec}
    if status is not None:
        found["status"] = {"observedGeneration": 7, **status}
    return found


def underway(phase: str, message: str) -> PublishProgress:
    return PublishProgress(phase, 1, 3, message)


def weights(**of: Any) -> dict[str, Any]:
    return pool(
        {
            "weights": {"stagedReplicas": 1, **of},
            "readyReplicas": 3,
            "message": "the pool is serving",
        },
        replicas=3,
    )


# Weights.


def test_committed_weights_are_published() -> None:
    seen = weights(committed=identity(2, 5, rootHash="h"))
    assert publish_progress(seen, OURS, 7, 1.5) == Published(
        identity=OURS,
        root_hash="h",
        replicas=3,
        seconds=1.5,
        pause_seconds=None,
        message="weights (2, 5) are committed",
    )
    last = identity(2, 5, phase="Complete", message="3 of 3 replicas serve them")
    seen = weights(committed=identity(2, 5, rootHash="h"), lastUpdate=last)
    assert publish_progress(seen, OURS, 7, 1.5).message == (
        "weights (2, 5) are committed: 3 of 3 replicas serve them"
    )


@pytest.mark.parametrize(("generation", "seen"), [(6, True), (7, True), (8, False)], ids=str)
def test_a_status_of_an_older_spec_tells_nothing(generation: int, seen: bool) -> None:
    told = publish_progress(weights(committed=identity(2, 5)), OURS, generation, 0)
    assert isinstance(told, Published) is seen
    if not seen:
        assert told == underway("Staging", "waiting for the operator to see the new target")
    assert isinstance(publish_progress(pool(), OURS, 1, 0), PublishProgress)


def test_our_update_is_told_in_the_operators_words() -> None:
    last = identity(2, 5, phase="Committing", message="1 of 3 have")
    assert publish_progress(weights(lastUpdate=last), OURS, 7, 0) == underway(
        "Committing", "1 of 3 have"
    )
    last = identity(2, 5, phase="Staging")
    told = publish_progress(weights(lastUpdate=last), OURS, 7, 0)
    assert told == underway("Staging", "the pool is serving")


def test_bytes_that_workers_refuse_again_and_again_are_told_long_before_the_deadline() -> None:
    why = "0 of 2 replicas have staged (2, 5); math-0-0: tensor 'lm_head.weight' is missing"
    last = identity(2, 5, phase="Staging", message=why, attempts=6)
    assert publish_progress(weights(lastUpdate=last), OURS, 7, 0) == underway("Staging", why)
    with pytest.raises(PublishFailed, match=r"lm_head.weight.*tried 7 times.*higher version"):
        publish_progress(weights(lastUpdate={**last, "attempts": 7}), OURS, 7, 0)
    before = {**last, "version": 4, "attempts": 99}
    assert isinstance(publish_progress(weights(lastUpdate=before), OURS, 7, 0), PublishProgress)


def test_an_update_before_ours_is_waited_for() -> None:
    last = identity(2, 4, phase="Committing", message="1 of 3 have")
    told = publish_progress(weights(committed=identity(2, 3), lastUpdate=last), OURS, 7, 0)
    assert told == underway("Staging", "waiting for the update before it: 1 of 3 have")
    failed = identity(2, 4, phase="Failed", message="no such file")
    assert isinstance(publish_progress(weights(lastUpdate=failed), OURS, 7, 0), PublishProgress)
    assert isinstance(publish_progress(weights(), OURS, 7, 0), PublishProgress)


@pytest.mark.parametrize(
    ("of", "why"),
    [
        ({"committed": identity(2, 6)}, "weights (2, 6) took the place of (2, 5)"),
        ({"committed": identity(3, 0)}, "weights (3, 0) took the place of (2, 5)"),
        ({"lastUpdate": identity(2, 6)}, "weights (2, 6) took the place of (2, 5)"),
        ({"lastUpdate": identity(2, 5, phase="Superseded", message="epoch 9")}, "epoch 9"),
        ({"lastUpdate": identity(2, 5, phase="Superseded")}, "weights (2, 5) were given up"),
    ],
)
def test_newer_weights_take_the_place_of_ours(of: dict[str, Any], why: str) -> None:
    with pytest.raises(Superseded) as error:
        publish_progress(weights(**of), OURS, 7, 0)
    assert error.value.cause == why


@pytest.mark.parametrize("message", ["no such tensor", ""])
def test_a_failed_update_is_raised(message: str) -> None:
    last = identity(2, 5, phase="Failed", message=message)
    with pytest.raises(PublishFailed) as error:
        publish_progress(weights(lastUpdate=last), OURS, 7, 0)
    assert error.value.cause == (message or "weights (2, 5) failed")


@pytest.mark.parametrize(
    ("target", "has"),
    [
        (None, False),
        (identity(2, 5, source={"path": "a"}), True),
        (identity(2, 5, source={"path": "b"}), False),
        (identity(2, 4, source={"path": "a"}), False),
        (identity(2, 5, source={"checkpoint": {}}), False),
    ],
)
def test_a_target_is_the_same_if_identity_and_source_are(target: Any, has: bool) -> None:
    assert has_target(pool(weights={"target": target}), OURS, WeightsSource(path="a")) is has
    assert not has_target(pool(), OURS, WeightsSource(path="a"))


# Epochs.


@pytest.mark.parametrize(
    ("seen", "highest"),
    [
        (pool(), 0),
        (pool(annotation="3"), 3),
        (pool(annotation="not a number"), 0),
        (pool(annotation="3", weights={"target": identity(4, 1)}), 4),
        (pool({"weights": {"committed": identity(5, 1)}}, "3"), 5),
        (pool({"weights": {"lastUpdate": identity(6, 1)}}, "3"), 6),
        (pool({"weights": {"committed": identity(5, 1)}}, "8"), 8),
        ({"metadata": {"annotations": None}, "spec": {"weights": None}, "status": None}, 0),
    ],
)
def test_the_highest_epoch_is_that_of_any_trainer(seen: dict[str, Any], highest: int) -> None:
    assert highest_epoch(seen) == highest


def test_a_trainer_that_was_shut_out_is_told_so() -> None:
    check_epoch(pool(annotation="3"), 3)
    check_epoch(pool(annotation="3"), 4)
    with pytest.raises(EpochLost, match="a trainer with epoch 3 has the pool, this one holds 2"):
        check_epoch(pool(annotation="3"), 2)


# States.


def test_a_state_is_reached_when_the_workers_have_said_so() -> None:
    done = {"to": "Asleep", "completedAt": "2026-01-01T00:00:00Z"}
    assert has_reached(pool({"lastTransition": done}, state="Asleep"), "Asleep", 7)
    assert not has_reached(pool({"lastTransition": done}, state="Asleep"), "Asleep", 8)
    begun = {"to": "Asleep", "startedAt": "2026-01-01T00:00:00Z"}
    assert not has_reached(pool({"lastTransition": begun}, state="Asleep"), "Asleep", 7)
    other = {**done, "to": "Paused"}
    assert not has_reached(pool({"lastTransition": other}, state="Asleep"), "Asleep", 7)
    assert not has_reached(pool(state="Asleep"), "Asleep", 1)


def test_how_many_replicas_a_hybrid_pool_has_status_says() -> None:
    assert wanted_replicas(pool(replicas=3)) == 3
    assert wanted_replicas(pool()) == 1
    assert wanted_replicas(pool({"desiredReplicas": 2}, mode="Hybrid", replicas=1)) == 2


def test_somebody_elses_wish_for_the_pool_wins() -> None:
    assert wanted_state(pool()) == "Active"
    assert wanted_state(pool(state="Paused")) == "Paused"
    with pytest.raises(SteeringFailed, match=r"somebody set spec\.state to Paused"):
        has_reached(pool(state="Paused"), "Asleep", 0)
    with pytest.raises(SteeringFailed, match="the pool is suspended: it can't become Asleep"):
        has_reached(pool(state="Asleep", suspend=True), "Asleep", 0)
