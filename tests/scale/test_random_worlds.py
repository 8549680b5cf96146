"""Users, failures and restarts at random, for an hour, on a real control plane: nothing wrong is left behind.

ROLLOUT_SOAK_SECONDS=600 ROLLOUT_SEED=7 make soak PYTEST_ARGS=tests/scale/test_random_worlds.py
"""

from __future__ import annotations

import os
import sys
import time

import pytest

from tests.support.cluster.random_worlds import World
from tests.support.cluster.scalelab import scale_lab
from tests.support.clusters import remove_left_behind

SECONDS = float(os.environ.get("ROLLOUT_SOAK_SECONDS", "3600"))
SEED = int(os.environ.get("ROLLOUT_SEED", "1"))


@pytest.mark.soak  # test_operator_accidents.py plays accidents each day, in memory
@pytest.mark.timeout(SECONDS + 1800)
def test_every_pool_becomes_what_its_spec_says_whatever_happened(
    capsys: pytest.CaptureFixture[str],
) -> None:
    if os.geteuid() != 0:
        pytest.skip("pods without processes need root: their addresses are routed here")
    remove_left_behind()

    def say(text: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()

    with scale_lab(f"test-worlds-{os.getpid()}") as lab:
        world, end, rounds, slowest = World(lab, SEED), time.monotonic() + SECONDS, 0, 0.0
        try:
            while time.monotonic() < end:
                took = world.play_round()
                rounds, slowest = rounds + 1, max(slowest, took)
                say(f"round {rounds}: {len(world.acts)} acts, all right {took:.0f} s later")
        finally:
            world.stop()
        acts = ", ".join(f"{count} x {what}" for what, count in world.counts.most_common())
        say(f"{rounds} rounds, the slowest all right after {slowest:.0f} s: {acts}")
        assert rounds
