"""How long changes of a pool wait for each other before a pass looks at them."""

from __future__ import annotations

import pytest

from rollout_operator.api.names import LABEL_MANAGED_BY, LABEL_POOL, MANAGER_NAME
from rollout_operator.api.objects import Obj, PoolKey, ResourceName
from rollout_operator.cache.object_store import ObjectStore
from rollout_operator.cache.settings import MAX_BATCH_SECONDS, MAX_MOVING_BATCH_SECONDS
from rollout_operator.cache.store_feed import StoreFeed
from rollout_operator.cache.workqueue import WorkQueue
from rollout_operator.operator_telemetry import OperatorTelemetry

KEY = PoolKey("rl", "math")


class Feed:
    """A feed whose clock and number of moving pools a test sets."""

    def __init__(self) -> None:
        self.now, self.moving, self.version = 0.0, 0, 0
        self.queue: WorkQueue[PoolKey] = WorkQueue(clock=lambda: self.now)
        store: ObjectStore[Obj] = ObjectStore(lambda pod: pod)
        self.feed = StoreFeed(
            store, self.queue, OperatorTelemetry(), lambda: self.moving, lambda: self.now
        )
        self.take_event("pools", KEY.name)
        self.is_woken(0.0)

    def let_others_change(self) -> None:
        """Other pools change 100 times a second."""
        for number in range(1000):
            self.now += 0.01
            self.feed.note_change(PoolKey("rl", f"other-{number % 7}"))
        while self.queue.get_due() is not None:
            pass

    def take_event(self, resource: ResourceName, name: str) -> None:
        self.version += 1
        labels = {LABEL_MANAGED_BY: MANAGER_NAME, LABEL_POOL: KEY.name}
        meta = {"name": name, "namespace": KEY.namespace, "uid": name, "labels": labels}
        obj: Obj = {"metadata": {**meta, "resourceVersion": str(self.version)}}
        self.feed.take_event(resource, "MODIFIED", self.feed.read_object(resource, obj))

    def is_woken(self, seconds: float) -> bool:
        """Whether the pool is looked at within so many seconds; that look ends at once."""
        self.now += seconds
        key = self.queue.get_due()
        if key is not None:
            self.queue.mark_done(key)
        return key is not None


def test_a_small_pool_is_looked_at_immediately() -> None:
    feed = Feed()
    feed.take_event("pods", "a")
    assert feed.is_woken(0.0)


@pytest.mark.parametrize(
    ("moving", "seconds"), [(20, 0.1), (200, 1.0), (100_000, MAX_MOVING_BATCH_SECONDS)]
)
def test_while_many_pools_move_changes_of_pods_and_workers_wait_for_each_other(
    moving: int, seconds: float
) -> None:
    feed = Feed()
    feed.let_others_change()
    feed.moving = moving
    for name in "abc":
        feed.take_event("pods", name)
    feed.feed.note_change(KEY)
    assert not feed.is_woken(0.9 * seconds)
    assert feed.is_woken(0.2 * seconds), "the first of them counts"
    assert not feed.is_woken(3 * seconds), "once for all"


def test_while_little_changes_pools_that_move_delay_no_others() -> None:
    feed = Feed()
    feed.let_others_change()
    feed.moving = 100_000
    feed.now += 60
    feed.take_event("pods", "a")
    assert feed.is_woken(0.0)


def test_what_a_user_changes_waits_for_nothing() -> None:
    feed = Feed()
    feed.let_others_change()
    feed.moving = 100_000
    feed.take_event("pods", "a")
    feed.take_event("pools", KEY.name)
    assert feed.is_woken(0.0)


def test_a_large_pool_collects_changes_alone_too() -> None:
    feed = Feed()
    for number in range(400):
        feed.take_event("pods", f"p{number}")
    while feed.is_woken(MAX_BATCH_SECONDS):
        pass
    feed.take_event("pods", "another")
    assert not feed.is_woken(0.39)
    assert feed.is_woken(0.02)
