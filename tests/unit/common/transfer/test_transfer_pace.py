"""The bucket that holds back what goes out: never more than its rate, nobody starved, nothing saved up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_common.transfer.connections.rate_limit import RateLimit
from rollout_common.transfer.settings import BURST_SECONDS


class Clock:
    """Tells the time that a test says."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(
    rate=st.floats(1e3, 1e9),
    steps=st.lists(st.tuples(st.floats(0, 3), st.integers(1, 1 << 22)), min_size=1, max_size=60),
)
def test_no_more_goes_out_than_the_rate_allows(rate: float, steps: list[tuple[float, int]]) -> None:
    clock = Clock()
    pace = RateLimit(rate, clock)
    sent: list[tuple[float, int]] = []
    for idle, nbytes in steps:
        clock.now += idle
        clock.now += pace.wait_for(nbytes)
        sent.append((clock.now, nbytes))
    for first, (began, _) in enumerate(sent):
        for last in range(first, len(sent)):
            before = sum(nbytes for _, nbytes in sent[first:last])  # its own turn comes after these
            assert before <= rate * (sent[last][0] - began + BURST_SECONDS) * (1 + 1e-6) + 1


def test_who_always_has_something_to_send_gets_the_whole_rate() -> None:
    clock = Clock()
    pace = RateLimit(100e6, clock)
    for _ in range(1000):
        clock.now += pace.wait_for(1 << 20)
    assert 1000 * (1 << 20) / (clock.now - 100) == pytest.approx(100e6, rel=0.02)


def test_connections_take_turns_in_the_order_of_asking() -> None:
    pace = RateLimit(10, Clock())
    assert [pace.wait_for(10) for _ in range(3)] == pytest.approx([0, 1, 2])


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 0"):
        RateLimit(0)
