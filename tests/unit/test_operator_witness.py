"""What is witnessed of pods that end: since when, in which stage, and when force was tried."""

from __future__ import annotations

from dataclasses import replace

from poolspecs import a_pod, spec_of
from rollout_operator.passes.witness import Witness

POD = a_pod(spec_of())
FAILED = replace(POD, phase="Failed")
GOING = replace(FAILED, deletion_at=500.0)


def test_a_pod_that_runs_needs_no_witness() -> None:
    assert Witness().testify([POD], 7.0) == (POD,)


def test_each_stage_of_an_end_is_timed_from_its_first_sight() -> None:
    witness = Witness()
    assert [witness.testify([FAILED], at)[0].witnessed for at in (10.0, 13.0)] == [0, 3]
    assert [witness.testify([GOING], at)[0].witnessed for at in (20.0, 24.0)] == [0, 4]


def test_force_is_remembered_as_long_as_the_pod_is_there() -> None:
    witness = Witness()
    [before] = witness.testify([GOING], 10.0)
    assert before.forced_ago is None
    witness.forced(GOING.uid, 11.0)
    for now in (15.0, 15.5):
        [after] = witness.testify([GOING], now)
        assert after.forced_ago == now - 11.0
    assert witness.testify([], 16.0) == ()
    [another] = witness.testify([GOING], 20.0)
    assert (another.witnessed, another.forced_ago) == (0, None)


def test_a_pod_that_terminates_while_it_runs_is_timed_too() -> None:
    witness, going = Witness(), replace(POD, deletion_at=500.0)
    witness.testify([going], 7.0)
    [told] = witness.testify([going], 9.0)
    assert told.witnessed == 2.0
