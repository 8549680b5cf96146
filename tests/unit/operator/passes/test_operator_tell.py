"""What is counted of weights updates: each outcome once, whatever passes miss."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from rollout_operator.api.objects import PoolKey
from rollout_operator.api.status import (
    CommittedWeights,
    LastUpdate,
    UpdatePhase,
    WeightsStatus,
)
from rollout_operator.operator_telemetry import OperatorTelemetry
from rollout_operator.passes.pass_reporting import FINAL_PHASES, update_outcomes
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


def test_a_pool_that_is_gone_shows_no_updates() -> None:
    telemetry = OperatorTelemetry()
    for outcome in ("Complete", "Failed"):
        telemetry.count_ended_update(PoolKey("rl", "math"), outcome, 0.3)
    telemetry.count_ended_update(PoolKey("rl", "other"), "Complete", 0.3)
    page = telemetry.render_page().decode()
    at = 'namespace="rl",outcome="Complete",pool="math"'
    assert f"rollout_pool_weights_update_seconds_sum{{{at}}} 0.3" in page
    telemetry.forget_pool(PoolKey("rl", "math"))
    page = telemetry.render_page().decode()
    assert "math" not in page
    assert 'pool="other"' in page


def test_a_first_update_is_counted_from_zero() -> None:
    """A counter that is born with 1 has no increase that Prometheus could see."""
    telemetry = OperatorTelemetry()
    telemetry.set_pool_metrics(PoolKey("rl", "math"), PoolMetrics())
    page = telemetry.render_page().decode()
    for outcome in (*FINAL_PHASES, UpdatePhase.FAILED):
        at = f'namespace="rl",outcome="{outcome}",pool="math"'
        assert f"rollout_pool_weights_update_seconds_count{{{at}}} 0.0" in page
    assert 'rollout_pool_failed_passes_total{namespace="rl",pool="math"} 0.0' in page


def test_no_series_says_when_another_one_began() -> None:
    telemetry = OperatorTelemetry()
    telemetry.reconcile_total.labels("ok").inc()
    telemetry.count_ended_update(PoolKey("rl", "math"), "Complete", 0.3)
    assert "_created" not in telemetry.render_page().decode()
