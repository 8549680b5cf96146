"""What the garbage collector leaves alone once an engine has started."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from rollout_worker.engines.frozen_heap import freeze_heap


class Cycle:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_a_frozen_cycle_is_collected_when_the_next_engine_starts() -> None:
    cycle = Cycle()
    seen = weakref.ref(cycle)
    freeze_heap()
    del cycle
    gc.collect()
    assert seen() is not None, "the collector does not look at it"
    freeze_heap()
    assert seen() is None
    assert gc.get_freeze_count() > 0
