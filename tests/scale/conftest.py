"""One control plane with kwok's nodes for the whole tier, and the real operator beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from random import Random

import pytest

from tests.support.cluster.gpujob import TRAINERS, Job
from tests.support.cluster.scalelab import Lab, scale_lab
from tests.support.cluster.stuck import STUCK_SECONDS, StuckPod, make_stuck
from tests.support.clusters import remove_left_behind


@pytest.fixture(scope="session")
def bare_lab() -> Iterator[Lab]:
    if os.geteuid() != 0:
        pytest.skip("pods without processes need root: their addresses are routed here")
    remove_left_behind()
    with scale_lab(f"test-scale-{os.getpid()}") as made:
        made.forced_after = STUCK_SECONDS
        made.start_operator()
        yield made


@pytest.fixture(scope="session")
def stuck(bare_lab: Lab) -> StuckPod:
    """A pod that terminates on a dead node; what it waits for passes while the other tests run."""
    return make_stuck(bare_lab)


@pytest.fixture
def lab(bare_lab: Lab, stuck: StuckPod) -> Lab:
    """The cluster, with the stuck pod waiting in it."""
    return bare_lab


@pytest.fixture(scope="session")
def job(bare_lab: Lab, stuck: StuckPod) -> Job:
    """A trainer and a pool beside it, made in any order; nothing is waited for."""
    made = Job(bare_lab)
    made.make_all(Random(TRAINERS))
    return made


@pytest.fixture(scope="session")
def lost_node(job: Job) -> str:
    """A node of the trainer's that is lost; what is waited for passes while the other tests run."""
    job.await_places()
    return job.lose_node()
