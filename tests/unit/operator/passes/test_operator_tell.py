"""What passes tell: an event for what is news of a condition, and each outcome of a weights update once."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from rollout_operator.api.objects import PoolKey
from rollout_operator.api.status import (
    CommittedWeights,
    LastUpdate,
    PoolCondition,
    UpdatePhase,
    WeightsStatus,
)
from rollout_operator.operator_telemetry import OperatorTelemetry
from rollout_operator.passes.pass_reporting import FINAL_PHASES, condition_event, update_outcomes
from rollout_operator.pool_page import PoolMetrics
from rollout_worker.schemas import WeightsSource

STAGING, COMMITTING, COMPLETE = UpdatePhase.STAGING, UpdatePhase.COMMITTING, UpdatePhase.COMPLETE
FAILED, SUPERSEDED = UpdatePhase.FAILED, UpdatePhase.SUPERSEDED


def status(
    version: int, phase: UpdatePhase, committed: int, began: int | None = None
) -> WeightsStatus:
    return WeightsStatus(
        committed=CommittedWeights(epoch=1, version=committed, source=WeightsSource(path="x")),
        last_update=LastUpdate(
            epoch=1,
            version=version,
            phase=phase,
            started_at=datetime.fromtimestamp(began or 1000 + version, UTC),
        ),
    )


@pytest.mark.parametrize(
    ("before", "after", "counted"),
    [
        (WeightsStatus(), status(1, STAGING, 0), []),
        (status(1, STAGING, 0), status(1, COMMITTING, 0), []),
        (status(1, COMMITTING, 0), status(1, COMPLETE, 1), [(1, COMPLETE)]),
        (status(1, COMPLETE, 1), status(1, COMPLETE, 1), []),
        (status(1, STAGING, 0), status(1, FAILED, 0), [(1, FAILED)]),
        (status(1, FAILED, 0), status(1, FAILED, 0), []),
        (status(1, FAILED, 0), status(1, COMPLETE, 1), [(1, COMPLETE)]),
        (status(1, COMPLETE, 1), status(1, COMPLETE, 1, began=2000), [(1, COMPLETE)]),
        (status(1, STAGING, 0, began=2000), status(2, STAGING, 0, began=2000), [(1, SUPERSEDED)]),
        (status(1, STAGING, 0), status(1, SUPERSEDED, 0), [(1, SUPERSEDED)]),
        (status(1, STAGING, 0), status(2, STAGING, 0), [(1, SUPERSEDED)]),
        (status(1, STAGING, 0), WeightsStatus(), [(1, SUPERSEDED)]),
        (status(1, COMMITTING, 0), status(2, STAGING, 1), [(1, COMPLETE)]),
        (status(1, COMPLETE, 1), status(2, COMPLETE, 2), [(2, COMPLETE)]),
        (WeightsStatus(), status(1, COMPLETE, 1), [(1, COMPLETE)]),
    ],
)
def test_each_outcome_is_counted_once(
    before: WeightsStatus, after: WeightsStatus, counted: list[tuple[int, UpdatePhase]]
) -> None:
    assert [(u.version, outcome) for u, outcome in update_outcomes(before, after)] == counted


def test_a_first_update_is_counted_from_zero() -> None:
    """A counter that is born with 1 has no increase that Prometheus could see."""
    telemetry = OperatorTelemetry()
    telemetry.pools.set_figures(PoolKey("rl", "math"), PoolMetrics())
    page = telemetry.render_page().decode()
    for outcome in (*FINAL_PHASES, UpdatePhase.FAILED):
        at = f'namespace="rl",outcome="{outcome}",pool="math"'
        assert f"rollout_pool_weights_update_seconds_count{{{at}}} 0.0" in page
    assert 'rollout_pool_failed_passes_total{namespace="rl",pool="math"} 0.0' in page


def test_no_series_says_when_another_one_began() -> None:
    telemetry = OperatorTelemetry()
    telemetry.reconcile_total.labels("ok").inc()
    telemetry.pools.observe_update(PoolKey("rl", "math"), "Complete", 0.3)
    assert "_created" not in telemetry.render_page().decode()


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (None, "Ready True Serving", "Normal Ready"),
        (None, "Ready False NotServing", None),
        (None, "Degraded False AsExpected", None),
        (None, "Degraded True Rejected", "Warning Rejected"),
        ("Ready True Serving", "Ready True Serving", None),
        ("Ready True Serving", "Ready False Suspended", "Normal NotReady"),
        ("Ready False Suspended", "Ready False NotServing", None),
        ("Asleep False Awake", "Asleep True Asleep", "Normal Asleep"),
        ("Suspended False Suspending", "Suspended True Suspended", "Normal Suspended"),
        ("Progressing False Complete", "Progressing True Starting", None),
        ("Degraded True Rejected", "Degraded True Rejected", None),
        ("Degraded True Rejected", "Degraded True NameConflict", "Warning NameConflict"),
        ("Degraded False Rejected", "Degraded True Rejected", "Warning Rejected"),
        ("Degraded True Rejected", "Degraded False AsExpected", "Normal Recovered"),
        ("Degraded False AsAnOlderOneSaid", "Degraded False AsExpected", None),
        (None, "Progressing True Unschedulable", "Warning Unschedulable"),
        ("Progressing True Starting", "Progressing True Unschedulable", "Warning Unschedulable"),
        ("Progressing True Unschedulable of 1", "Progressing True Unschedulable of 2", None),
        (None, "Progressing True WaitingForTrainer of 1", "Normal WaitingForTrainer"),
        (
            "Progressing True WaitingForTrainer of 1",
            "Progressing True WaitingForTrainer of 1",
            None,
        ),
        (
            "Progressing True WaitingForTrainer of 1",
            "Progressing True WaitingForTrainer of 2",
            "Normal WaitingForTrainer",
        ),
    ],
)
def test_what_is_news_of_a_condition_is_an_event(
    before: str | None, now: str, told: str | None
) -> None:
    def condition(text: str) -> PoolCondition:
        kind, status, reason, *message = text.split(maxsplit=3)
        known = {"type": kind, "status": status, "reason": reason, "message": "".join(message)}
        return PoolCondition.model_validate(known | {"lastTransitionTime": "2026-01-01T00:00:00Z"})

    found = condition_event(condition(now), None if before is None else condition(before))
    assert found == (None if told is None else tuple(told.split()))
