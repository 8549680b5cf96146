import asyncio
from pathlib import Path
from typing import cast

import pytest

from rollout_common.wire.problems import ProblemError, conflict_problem
from rollout_worker.core.worker_runtime import WorkerRuntime
from rollout_worker.engine import Engine
from rollout_worker.requests.admission_checks import (
    check_queue_room,
    check_version,
    serving_refusal,
)
from rollout_worker.schemas import GenerateRequest, Lifecycle, WeightsId
from tests.support.unit.tiny_engine import TinyEngine
from tests.support.unit.tiny_worker import settings

ACTIVE = WeightsId(epoch=2, version=80)


def request(**bounds: int) -> GenerateRequest:
    return GenerateRequest.model_validate({"token_ids": [1], **bounds})


@pytest.mark.parametrize(
    "bounds",
    [
        {},
        {"min_version": 80},
        {"epoch": 2, "min_version": 79},
        {"epoch": 1, "min_version": 9999},
        {"epoch": 2},
    ],
    ids=str,
)
def test_bounds_that_are_met(bounds: dict[str, int]) -> None:
    assert check_version(request(**bounds), ACTIVE) is None


@pytest.mark.parametrize("bounds", [{"exact_version": 80}, {"epoch": 2, "exact_version": 80}])
def test_an_exact_version_pins(bounds: dict[str, int]) -> None:
    assert check_version(request(**bounds), ACTIVE) == ACTIVE


@pytest.mark.parametrize(
    "bounds",
    [
        {"min_version": 81},
        {"epoch": 3, "min_version": 0},
        {"epoch": 3},
        {"exact_version": 79},
        {"exact_version": 81},
        {"epoch": 1, "exact_version": 80},
        {"exact_version": 80, "min_version": 81},
    ],
    ids=str,
)
def test_bounds_that_are_not_met_say_what_is_active(bounds: dict[str, int]) -> None:
    with pytest.raises(ProblemError) as refused:
        check_version(request(**bounds), ACTIVE)
    assert refused.value.problem.status == 409
    assert refused.value.headers == {"Retry-After": "1"}
    body = refused.value.problem.model_dump()
    assert body["type"] == "urn:rollout:problem:version-not-met"
    assert body["active"] == {"epoch": 2, "version": 80}


def test_a_conflict_is_a_409_whatever_the_slug() -> None:
    assert conflict_problem("asleep", "wake it").problem.status == 409
    assert ProblemError("asleep", "wake it").problem.status == 503


S = Lifecycle
WAYS: dict[Lifecycle, tuple[Lifecycle, ...]] = {
    S.STARTING: (),
    S.LOADING: (S.LOADING,),
    S.FAILED: (S.FAILED,),
    S.ACTIVE: (S.LOADING, S.ACTIVE),
    S.PAUSING: (S.LOADING, S.PAUSING),
    S.PAUSED: (S.LOADING, S.PAUSING, S.PAUSED),
    S.DRAINING: (S.LOADING, S.DRAINING),
    S.ASLEEP: (S.LOADING, S.DRAINING, S.ASLEEP),
    S.WAKING: (S.LOADING, S.DRAINING, S.ASLEEP, S.WAKING),
}


def runtime_in(state: Lifecycle, *flags: str) -> WorkerRuntime:
    """The state of a worker whose engine lives."""
    runtime = WorkerRuntime(settings(*flags))
    runtime.engine = cast(Engine, TinyEngine(Path("model")))
    runtime.died = asyncio.get_running_loop().create_future()
    for step in WAYS[state]:
        runtime.lifecycle.move_to(step)
    return runtime


@pytest.mark.parametrize(
    ("state", "slug", "retry_after"),
    [
        (Lifecycle.STARTING, "starting", 2),
        (Lifecycle.LOADING, "starting", 2),
        (Lifecycle.FAILED, "failed", 5),
        (Lifecycle.ACTIVE, None, None),
        (Lifecycle.PAUSING, "paused", 1),
        (Lifecycle.PAUSED, "paused", 1),
        (Lifecycle.DRAINING, "asleep", 5),
        (Lifecycle.ASLEEP, "asleep", 5),
        (Lifecycle.WAKING, "asleep", 5),
    ],
)
async def test_each_state_serves_or_says_why_not(
    state: Lifecycle, slug: str | None, retry_after: int | None
) -> None:
    runtime = runtime_in(state)
    refusal = serving_refusal(runtime, ACTIVE, None)
    assert (refusal and refusal.slug, refusal and refusal.retry_after) == (slug, retry_after)
    runtime.admitting = False
    refusal = serving_refusal(runtime, ACTIVE, None)
    assert refusal is not None
    assert refusal.slug == "shutting-down"


@pytest.mark.parametrize("want", ["pause", "sleep"])
async def test_a_hold_refuses_before_the_state_follows(want: str) -> None:
    runtime = runtime_in(Lifecycle.ACTIVE)
    if want == "pause":
        runtime.holds.hold_paused("me")
    else:
        runtime.holds.hold_asleep("me", 1, ["weights"])
    refusal = serving_refusal(runtime, ACTIVE, None)
    assert refusal is not None
    assert refusal.slug == ("paused" if want == "pause" else "asleep")


async def test_in_a_pool_nothing_is_served_below_a_floor_or_without_one(tmp_path: Path) -> None:
    pool = ("--pool", "p", "--namespace", "n", "--weights-roots", str(tmp_path))
    runtime = runtime_in(Lifecycle.ACTIVE, *pool)
    floor = WeightsId(epoch=2, version=81)
    for active, required, serves in (
        (ACTIVE, None, False),
        (ACTIVE, ACTIVE, True),
        (ACTIVE, floor, False),
        (None, floor, False),
        (floor, ACTIVE, True),
    ):
        refusal = serving_refusal(runtime, active, required)
        assert (refusal is None) is serves
        if refusal is not None:
            assert (refusal.slug, refusal.retry_after) == ("fenced", 1)


def test_what_never_fits_into_the_queue_is_no_matter_of_waiting() -> None:
    runtime = WorkerRuntime(settings("--max-queue", "4"))
    check_queue_room(runtime, 0, 4)
    for waiting, wanted, status in ((1, 4, 429), (0, 5, 422)):
        with pytest.raises(ProblemError) as refused:
            check_queue_room(runtime, waiting, wanted)
        assert refused.value.problem.status == status
    assert (refused.value.problem.model_extra or {})["errors"][0]["field"] == "sampling.n"
