"""Expectations end when the watch or a list shows the write, or after a minute."""

from __future__ import annotations

import logging

import pytest

from rollout_operator.api.objects import Key, Obj
from rollout_operator.cache.expectations import TIMEOUT_SECONDS, Expectations

KEY = Key("rl", "math")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def pod(uid: str, *, terminating: bool = False) -> Obj:
    meta = {"namespace": "rl", "name": "math-0-0", "uid": uid}
    if terminating:
        meta["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return {"metadata": meta}


def test_a_create_is_expected_until_the_watch_shows_it() -> None:
    expectations = Expectations()
    expectations.expect_create(KEY, "pods", "math-0-0", "u1")
    expectations.observe("pods", "ADDED", pod("another"))
    assert expectations.pending(KEY) == 1
    expectations.observe("pods", "ADDED", pod("u1"))
    assert expectations.pending(KEY) == 0


@pytest.mark.parametrize(
    ("event", "terminating"), [("DELETED", False), ("MODIFIED", True)], ids=["gone", "terminating"]
)
def test_a_delete_is_expected_until_it_shows(event: str, terminating: bool) -> None:
    expectations = Expectations()
    expectations.expect_delete(KEY, "pods", "math-0-0", "u1")
    expectations.observe("pods", "MODIFIED", pod("u1"))
    assert expectations.pending(KEY) == 1
    expectations.observe("pods", event, pod("u1", terminating=terminating))
    assert expectations.pending(KEY) == 0


def test_create_and_delete_of_one_object_are_two() -> None:
    expectations = Expectations()
    expectations.expect_create(KEY, "pods", "math-0-0", "u1")
    expectations.expect_delete(KEY, "pods", "math-0-0", "u1")
    assert expectations.pending(KEY) == 2
    expectations.observe("pods", "DELETED", pod("u1"))
    assert expectations.pending(KEY) == 0


def test_a_list_begun_afterwards_settles_what_it_lacks() -> None:
    clock = Clock()
    expectations = Expectations(clock)
    expectations.expect_create(KEY, "pods", "math-0-0", "u1")
    expectations.expect_delete(KEY, "pods", "math-1-0", "u2")
    expectations.listed("pods", [], started=clock.now - 1)
    assert expectations.pending(KEY) == 2, "the list may be older than the writes"
    expectations.listed("services", [], started=clock.now + 1)
    expectations.listed("pods", [], started=clock.now + 1, namespace="elsewhere")
    assert expectations.pending(KEY) == 2
    expectations.listed("pods", [], started=clock.now + 1)
    assert expectations.pending(KEY) == 0


def test_an_object_in_a_list_is_seen_but_not_deleted() -> None:
    clock = Clock()
    expectations = Expectations(clock)
    expectations.expect_create(KEY, "pods", "math-0-0", "u1")
    expectations.expect_delete(KEY, "pods", "math-1-0", "u2")
    expectations.listed("pods", [pod("u1"), pod("u2")], started=clock.now + 1)
    assert expectations.pending(KEY) == 1
    expectations.listed("pods", [pod("u2", terminating=True)], started=clock.now + 1)
    assert expectations.pending(KEY) == 0


def test_a_lost_event_delays_a_pool_for_a_minute_and_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    told: list[str] = []
    expectations = Expectations(clock, told.append)
    expectations.expect_create(KEY, "pods", "math-0-0", "u1")
    clock.now += TIMEOUT_SECONDS
    assert expectations.pending(KEY) == 1
    clock.now += 1
    with caplog.at_level(logging.WARNING):
        assert expectations.pending(KEY) == 0
    assert told == ["pods"]
    assert "did not show the create of pods 'math-0-0'" in caplog.text


def test_pools_are_apart_and_forgotten_as_a_whole() -> None:
    other = Key("rl", "code")
    expectations = Expectations()
    expectations.expect_create(KEY, "pods", "math-0-0", "u1")
    expectations.expect_create(other, "pods", "code-0-0", "u2")
    expectations.forget(KEY)
    assert (expectations.pending(KEY), expectations.pending(other)) == (0, 1)


def test_who_waited_is_told_so_that_it_can_look_again() -> None:
    clock = Clock()
    expectations = Expectations(clock)
    assert expectations.observe("pods", "ADDED", pod("u1")) is None
    expectations.expect_create(KEY, "pods", "math-0-0", "u1")
    assert expectations.observe("pods", "ADDED", pod("u1")) == KEY
    expectations.expect_delete(KEY, "pods", "math-0-0", "u1")
    assert expectations.listed("pods", [], started=clock.now + 1) == {KEY}
    assert expectations.listed("pods", [], started=clock.now + 1) == set()
