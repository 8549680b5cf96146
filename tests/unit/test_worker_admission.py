import pytest

from rollout_worker.requests.admission import check_version
from rollout_worker.schemas import GenerateRequest, WeightsId
from rollout_worker.wire.problems import KINDS, ProblemError, conflict

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


def test_every_kind_of_problem_has_an_error_status_and_a_title() -> None:
    for slug, (status, title) in KINDS.items():
        assert slug == slug.lower().replace("_", "-")
        assert 400 <= status < 600
        assert title


def test_a_conflict_is_a_409_whatever_the_slug() -> None:
    assert conflict("asleep", "wake it").problem.status == 409
    assert ProblemError("asleep", "wake it").problem.status == 503
