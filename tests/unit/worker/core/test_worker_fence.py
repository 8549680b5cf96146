import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_common.wire.problems import ProblemError
from rollout_worker.core.weights_fence import WeightsFence
from rollout_worker.schemas import RequireRequest, WeightsId

REQUESTS = st.builds(
    RequireRequest, epoch=st.integers(0, 4), min_version=st.one_of(st.none(), st.integers(0, 4))
)


@given(st.lists(REQUESTS, max_size=20))
def test_floor_and_epoch_only_rise(requests: list[RequireRequest]) -> None:
    fence = WeightsFence()
    for request in requests:
        floor, epoch = fence.floor, fence.epoch
        try:
            fence.raise_to("me", request)
        except ProblemError as refusal:
            slug = refusal.slug
            assert (fence.floor, fence.epoch) == (floor, epoch), "a refusal changes nothing"
            assert slug in ("stale-epoch", "version-regressed")
        else:
            assert fence.epoch == max(epoch, request.epoch)
            if request.min_version is None:
                assert fence.floor == floor
            else:
                assert fence.floor is not None
                assert fence.floor.as_tuple() == (request.epoch, request.min_version)
                assert floor is None or fence.floor >= floor


def test_repeating_is_fine_and_a_floor_below_the_fence_too() -> None:
    """A worker that joins while a new trainer takes over is fenced and seeded with old weights."""
    fence = WeightsFence()
    fence.raise_to("me", RequireRequest(epoch=2))
    fence.raise_to("me", RequireRequest(epoch=1, min_version=7))
    fence.raise_to("me", RequireRequest(epoch=1, min_version=7))
    assert fence.epoch == 2
    fence.check_epoch(2)
    with pytest.raises(ProblemError, match="fenced off") as refused:
        fence.check_epoch(1, active=None)
    body = refused.value.problem.model_dump()
    assert (body["fence_epoch"], body["active"]) == (2, None), "it is told with the facts"


@pytest.mark.parametrize(
    ("epoch", "version", "slug"), [(2, 6, "version-regressed"), (1, 9, "stale-epoch")]
)
def test_a_floor_that_would_go_down_says_which_way(epoch: int, version: int, slug: str) -> None:
    fence = WeightsFence()
    fence.raise_to("me", RequireRequest(epoch=2, min_version=7))
    with pytest.raises(ProblemError) as refused:
        fence.raise_to("me", RequireRequest(epoch=epoch, min_version=version))
    assert refused.value.slug == slug
    assert refused.value.problem.model_dump()["required"] == {"epoch": 2, "version": 7}


def test_a_floor_that_stands_goes_along_with_what_is_committed() -> None:
    fence = WeightsFence()
    first, second = (WeightsId(epoch=1, version=version) for version in (1, 2))
    fence.follow_commit(second)
    assert fence.floor is None, "nobody asked for one: a fence that is down stays down"
    fence.raise_to("me", RequireRequest(epoch=1, min_version=1))
    fence.follow_commit(second)
    assert fence.floor == second
    fence.follow_commit(first)
    assert fence.floor == second


def test_only_a_change_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    fence = WeightsFence()
    for _ in range(2):
        fence.raise_to("me", RequireRequest(epoch=2, min_version=7))
    assert len(caplog.records) == 2, "the epoch and the floor, once each"
