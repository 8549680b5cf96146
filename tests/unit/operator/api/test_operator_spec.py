"""Spec and status: defaults, derived values, and objects that other versions have stored."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollout_operator.api.schema import field_path, without_location
from rollout_operator.api.spec import (
    DesiredState,
    EngineType,
    InvalidSpec,
    RolloutReplicaSpec,
    WeightsStrategy,
    parse_spec,
)
from rollout_operator.api.status import (
    LastError,
    MemberStatus,
    PoolCondition,
    RolloutReplicaStatus,
    parse_status,
)
from rollout_worker.schemas import WeightsId
from tests.support.manifests import pool

NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
GPU = {"resource": "nvidia.com/gpu"}


def spec(patch: dict[str, Any] | None = None) -> RolloutReplicaSpec:
    return parse_spec(pool("demo", patch))


def test_defaults_are_values_and_not_none() -> None:
    it = spec()
    assert (it.replicas, it.state, it.suspend) == (1, DesiredState.ACTIVE, False)
    assert it.engine.type is EngineType.HF
    assert it.engine.logprobs_of == "sampling"
    assert (it.model.dtype, it.model.max_length) == ("auto", None)
    assert (it.sleep.level, it.drain_seconds, it.grace_seconds) == (1, 30, 45)
    assert it.weights.strategy is WeightsStrategy.ALL_AT_ONCE
    assert (it.weights.max_unavailable, it.weights.deadline_seconds) == (1, 600)
    assert (it.weights.in_flight.policy, it.weights.in_flight.on_deadline) == ("Drain", "Abort")
    assert it.update_strategy.max_unavailable == 1
    policy = it.restart_policy
    assert (policy.base_delay_seconds, policy.max_delay_seconds) == (10, 300)
    assert policy.max_restarts is None
    assert it.service_account_name == "rollout-worker"


def test_checkpoint_is_the_target_until_one_is_set() -> None:
    assert spec().weights.target is None
    moved = spec({"weights": {"target": {"epoch": 2, "version": 9, "source": {"path": "a"}}}})
    assert moved.weights.target is not None
    assert moved.weights.target.identity == WeightsId(epoch=2, version=9)
    assert moved.weights.target.source.path == "a"


@pytest.mark.parametrize(
    ("shape", "accelerator", "world", "pods", "each"),
    [
        ({}, None, 1, 1, 0),
        ({}, GPU, 1, 1, 1),
        ({"tensor": 8}, GPU, 8, 1, 8),
        ({"tensor": 8, "pipeline": 2, "data": 2, "nodes": 4}, GPU, 32, 4, 8),
    ],
)
def test_shape_of_a_gang(
    shape: dict[str, int], accelerator: dict[str, str] | None, world: int, pods: int, each: int
) -> None:
    it = spec({"parallelism": shape, "accelerator": accelerator})
    assert (it.world_size, it.parallelism.nodes, it.accelerators_per_pod) == (world, pods, each)


def test_in_flight_deadline_is_the_drain_time_unless_given() -> None:
    assert spec({"drainSeconds": 7}).in_flight_deadline_seconds == 7
    given_ = {"drainSeconds": 7, "weights": {"inFlight": {"deadlineSeconds": 0}}}
    assert spec(given_).in_flight_deadline_seconds == 0


@pytest.mark.parametrize(
    ("obj", "message"),
    [
        ({}, "spec.engine: Field required"),
        (pool("x", {"engine": {"type": "trt"}}), "spec.engine.type: Input should be 'hf', 'vllm'"),
        (
            pool("x", {"engine": {"env": [{"name": "A", "from": 1}]}}),
            "spec.engine.env[0].from: this operator does not know the field; remove it or upgrade",
        ),
        (pool("x", {"replicas": -1}), "spec.replicas: Input should be greater than or equal to 0"),
        (
            pool("x", {"weights": {"target": {"epoch": 1, "version": 1, "source": {}}}}),
            "spec.weights.target.source: Value error, give exactly one of source.path, source.checkpoint and source",
        ),
    ],
    ids=["empty", "engine", "unknown", "bounds", "source"],
)
def test_a_spec_of_another_version_names_the_field(obj: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSpec) as error:
        parse_spec(obj)
    assert str(error.value).startswith(message)


def test_open_objects_are_kept_as_given() -> None:
    volume = {"name": "m", "persistentVolumeClaim": {"claimName": "models"}}
    it = spec({"podTemplate": {"volumes": [volume], "affinity": {"podAffinity": {"x": [1]}}}})
    document = it.pod_template.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    assert document == {"volumes": [volume], "affinity": {"podAffinity": {"x": [1]}}}


def test_models_are_frozen_and_closed() -> None:
    with pytest.raises(ValidationError):
        spec().replicas = 3  # type: ignore[misc]
    with pytest.raises(ValidationError):
        RolloutReplicaStatus.model_validate({"other": 1})


# --- status -----------------------------------------------------------------------------------


def full_status() -> RolloutReplicaStatus:
    return RolloutReplicaStatus.model_validate(
        {
            "observedGeneration": 3,
            "phase": "Updating",
            "weights": {
                "committed": {"epoch": 1, "version": 2, "source": {"path": "a"}},
                "active": {"min": {"epoch": 1, "version": 2}, "max": {"epoch": 1, "version": 3}},
                "lastUpdate": {
                    "epoch": 1,
                    "version": 3,
                    "phase": "Committing",
                    "startedAt": NOW,
                    "attempts": 1,
                },
            },
            "lastTransition": {"from": "Active", "to": "Asleep", "startedAt": NOW},
            "members": [{"name": "demo-0-0", "state": "Active", "ready": True}],
            "lastErrors": [{"time": NOW, "message": "x"}],
            "conditions": [
                {"type": "Ready", "status": "True", "reason": "Serving", "lastTransitionTime": NOW}
            ],
        }
    )


def test_status_survives_the_way_through_the_api() -> None:
    status = full_status()
    assert parse_status({"status": status.to_document()}) == (status, None)


def test_times_are_utc_in_the_precision_of_their_kind() -> None:
    document = full_status().to_document()
    assert document["lastTransition"]["startedAt"] == "2026-01-02T03:04:05.678Z"
    assert document["conditions"][0]["lastTransitionTime"] == "2026-01-02T03:04:05Z"
    there = NOW.astimezone(timezone(timedelta(hours=2)))
    assert (
        LastError(time=there, message="x").model_dump(mode="json")["time"].endswith("03:04:05.678Z")
    )


def test_document_leaves_absent_values_out() -> None:
    document = RolloutReplicaStatus().to_document()
    assert document["replicas"] == 0
    assert "phase" not in document
    assert "selector" not in document


def test_long_texts_are_cut_and_not_refused() -> None:
    member = MemberStatus(name="a", state="Failed", ready=False, message="x" * 1000)
    assert len(member.message) == 256
    assert member.message.endswith("…")
    condition = PoolCondition(
        type="Ready", status="False", reason="Failed", message="y" * 5000, last_transition_time=NOW
    )
    assert len(condition.message) == 1024


def test_status_of_another_version_keeps_what_is_understood() -> None:
    document = full_status().to_document()
    document |= {"phase": "Hovering", "novelty": {"a": 1}}
    document["weights"]["lastUpdate"]["lanes"] = 4
    document["members"] = [
        {"name": "a", "state": "Active", "ready": True, "score": 1},
        {"name": 3},
        {"name": "c", "state": "Active", "ready": False},
    ]
    status, why = parse_status({"status": document})
    assert why == (
        "status.phase was written by another version of the operator and can't be read (Input "
        "should be 'Pending', 'Loading', 'Ready', 'Updating', 'Paused', 'Asleep', 'Suspended', "
        "'Degraded' or 'Failed'): upgrade this one; until then it leaves the pool as it is"
    )
    assert status.phase is None
    assert [m.name for m in status.members] == ["a", "c"]
    assert status.weights == full_status().weights
    assert parse_status({}) == (RolloutReplicaStatus(), None)


@pytest.mark.parametrize(
    ("committed", "said"),
    [
        ({"source": {"tape": "7"}}, "status.weights.committed.source"),
        ({"source": {"path": "/x"}, "shards": 3}, "status.weights.committed.shards"),
        ({"source": {}}, "status.weights.committed.source"),
    ],
)
def test_what_can_not_be_read_is_named(committed: dict[str, Any], said: str) -> None:
    weights = {"committed": {"epoch": 1, "version": 2, **committed}}
    why = parse_status({"status": {"weights": weights}})[1]
    assert why is not None
    assert why.startswith(said)


TEXT = st.text("aT0 -:.é", max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner),
    max_leaves=8,
)
FIELDS = st.sampled_from([f.alias for f in RolloutReplicaStatus.model_fields.values() if f.alias])


@given(st.dictionaries(FIELDS | TEXT, JSON, max_size=6))
def test_no_stored_status_stops_the_operator(document: dict[str, Any]) -> None:
    parse_status({"status": document})


@given(st.dictionaries(TEXT, JSON, max_size=6))
def test_no_stored_spec_fails_otherwise_than_invalid(document: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec):
        parse_spec({"spec": document})


def test_locations_are_written_as_people_do() -> None:
    assert field_path(("spec", "engine", "env", 0, "name")) == "spec.engine.env[0].name"


def test_without_shares_the_rest() -> None:
    document = {"a": {"b": [1, {"c": 2, "d": 3}]}, "e": {}}
    assert without_location(document, ("a", "b", 1, "c")) == {"a": {"b": [1, {"d": 3}]}, "e": {}}
    assert without_location(document, ("a", "b", 0)) == {"a": {"b": [{"c": 2, "d": 3}]}, "e": {}}
    assert without_location(document, ("a", "x", "y")) == document
    assert document == {"a": {"b": [1, {"c": 2, "d": 3}]}, "e": {}}
