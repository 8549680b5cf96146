"""The message of a pool that starts says how far its first worker has come, in that one's words."""

from __future__ import annotations

import pytest

from poolspecs import spec_of
from rollout_worker.schemas import Progress
from world import World


@pytest.mark.parametrize(
    ("progress", "said"),
    [
        (Progress(message="loading weights 37%", fraction=0.37), "Loading: loading weights 37%"),
        (Progress(message="compiling", fraction=0.5), "Loading: compiling 50%"),
        (Progress(message="warming up"), "Loading: warming up"),
    ],
    ids=lambda value: value.message if isinstance(value, Progress) else "",
)
def test_the_start_of_a_worker_is_told(progress: Progress, said: str) -> None:
    world = World(spec_of(replicas=2))
    world.autoload = False
    world.run(5)
    world.worker(0).progress = progress
    world.run(5)
    expected = f"waiting for 2 of 2 replicas to serve: pool-0-0 is {said}"
    assert world.status.message == expected
