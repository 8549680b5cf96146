"""Whatever spec, pods, workers and the API server may say, status holds it: no pass ends for its length."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from rollout_operator.api import names
from rollout_operator.api.spec_colocation import LabelSelectorRequirement, TrainerSelector
from rollout_operator.api.status import MAX_SELECTOR_LENGTH, RolloutReplicaStatus
from rollout_operator.core.pass_planning import plan_pass
from rollout_operator.core.pods.pod_reader import parse_pod
from rollout_operator.core.trainer_pods import ObservedTrainers
from rollout_worker.schemas import ActiveWeights, KeptWeights, StagedWeights
from tests.support.unit.passlab import pod
from tests.support.unit.poolspecs import NOW, a_pod, observed, spec_of


def label(number: int) -> str:
    """A label's key of 317 characters, the most that Kubernetes takes."""
    prefix = ".".join("a" * 63 for _ in range(4))[:253]
    return f"{prefix}/{number:063d}"


def selector(labels: int, expressions: int) -> dict[str, Any]:
    values = [f"{n:063d}" for n in range(32)]
    return {
        "matchLabels": {label(n): "v" * 63 for n in range(labels)},
        "matchExpressions": [
            {"key": label(n), "operator": "NotIn", "values": values} for n in range(expressions)
        ],
    }


def test_a_hybrid_pool_is_reconciled_however_long_its_selector_is() -> None:
    spec = spec_of(mode="Hybrid", colocation={"trainerSelector": selector(32, 32)}, replicas=1)
    seen = observed(trainers=ObservedTrainers(claims={}))
    status = plan_pass(spec, seen, RolloutReplicaStatus(), NOW).status
    assert spec.colocation is not None
    assert status.selector == spec.colocation.trainer_selector.to_query()
    assert RolloutReplicaStatus.model_validate(status.to_document()) == status


def test_no_selector_is_longer_than_status_holds() -> None:
    longest = selector(32, 32)
    found = TrainerSelector.model_validate(longest)
    assert 80_000 < len(found.to_query()) <= MAX_SELECTOR_LENGTH
    for refused in (selector(33, 0), selector(1, 33)):
        with pytest.raises(ValidationError):
            TrainerSelector.model_validate(refused)
    with pytest.raises(ValidationError):
        LabelSelectorRequirement(key="k", operator="In", values=("v",) * 33)


def test_a_sentence_beyond_its_bound_is_news_once() -> None:
    seen = observed(rejections={"pod/pool-0-0": "no " * 400})
    first = plan_pass(spec_of(), seen, RolloutReplicaStatus(), NOW).status
    again = plan_pass(spec_of(), seen, first, NOW + 1).status
    assert len(again.last_errors) == 1
    assert again == first


@pytest.mark.parametrize("count", ["-1", str(10**12)])
def test_a_count_of_restarts_that_somebody_made_up_is_bounded(count: str) -> None:
    found = parse_pod(pod(annotations={names.ANNOTATION_RESTARTS: count}))
    assert found is not None
    failed = replace(a_pod(spec_of(replicas=1), phase="Failed"), restarts=found.restarts)
    plan = plan_pass(spec_of(replicas=1), observed(failed), RolloutReplicaStatus(), NOW)
    assert plan.status.members[0].restarts == found.restarts


@pytest.mark.parametrize("kind", [StagedWeights, ActiveWeights, KeptWeights])
def test_a_hash_that_status_can_not_hold_is_no_answer_of_a_worker(kind: type[Any]) -> None:
    fields = {"epoch": 1, "version": 1, "source": {"path": "x"}, "phase": "Staged", "bytes": 1}
    fields = {name: value for name, value in fields.items() if name in kind.model_fields}
    kind.model_validate(fields | {"root_hash": "h" * 128})
    with pytest.raises(ValidationError):
        kind.model_validate(fields | {"root_hash": "h" * 129})
