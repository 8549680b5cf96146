"""What is witnessed of pods that end: since when, in which stage, and when force was tried."""

from __future__ import annotations

from dataclasses import replace

from rollout_operator.passes.pool_memory import EndedPodClock
from tests.support.unit.poolspecs import a_pod, spec_of

POD = a_pod(spec_of())
FAILED = replace(POD, phase="Failed")
GOING = replace(FAILED, deletion_at=500.0)


def test_a_pod_that_runs_needs_no_witness() -> None:
    assert EndedPodClock().with_seen_seconds([POD], 7.0) == (POD,)


def test_each_stage_of_an_end_is_timed_from_its_first_sight() -> None:
    ended_pods = EndedPodClock()
    assert [ended_pods.with_seen_seconds([FAILED], at)[0].seen_seconds for at in (10.0, 13.0)] == [
        0,
        3,
    ]
    assert [ended_pods.with_seen_seconds([GOING], at)[0].seen_seconds for at in (20.0, 24.0)] == [
        0,
        4,
    ]


def test_force_is_remembered_as_long_as_the_pod_is_there() -> None:
    ended_pods = EndedPodClock()
    [before] = ended_pods.with_seen_seconds([GOING], 10.0)
    assert before.forced_ago is None
    ended_pods.note_forced(GOING.uid, 11.0)
    for now in (15.0, 15.5):
        [after] = ended_pods.with_seen_seconds([GOING], now)
        assert after.forced_ago == now - 11.0
    assert ended_pods.with_seen_seconds([], 16.0) == ()
    [another] = ended_pods.with_seen_seconds([GOING], 20.0)
    assert (another.seen_seconds, another.forced_ago) == (0, None)


def test_a_pod_that_terminates_while_it_runs_is_timed_too() -> None:
    ended_pods, going = EndedPodClock(), replace(POD, deletion_at=500.0)
    ended_pods.with_seen_seconds([going], 7.0)
    [told] = ended_pods.with_seen_seconds([going], 9.0)
    assert told.seen_seconds == 2.0
