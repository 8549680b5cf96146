"""What lists and watches bring: objects into the store, keys into the queue.

Nothing is decided here and nothing fails here: an event says only which pool to look at.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable
from typing import Any

from rollout_common.kube.reflector import ListedValues
from rollout_operator.api.objects import PoolKey, ResourceName
from rollout_operator.operator_telemetry import OperatorTelemetry

from .object_store import ObjectStore, StoredObject
from .settings import MAX_BATCH_SECONDS, MAX_MOVING_BATCH_SECONDS, RATE_WINDOW_SECONDS
from .workqueue import WorkQueue

logger = logging.getLogger(__name__)

BATCH_SECONDS_PER_POD = 0.001

UNBATCHED_PODS = 16
"""A pool of up to this many pods is looked at immediately, unless many pools move."""

MOVING_PASSES_PER_SECOND = 200
"""Passes of all pools that move: each pod makes five or more reasons for one, and they come in groups."""

BUSY_CHANGES_PER_SECOND = 50
"""Of pods and workers, of all pools. With fewer, pools that wait for a node or a trainer move, but no pass waits for another."""


class ChangeRate:
    """How many changes come in a second, lately."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._count, self._counted_at = 0.0, clock()

    def add_change(self) -> None:
        """Count a change."""
        now = self._clock()
        self._count = 1 + self._count * math.exp((self._counted_at - now) / RATE_WINDOW_SECONDS)
        self._counted_at = now

    def per_second(self) -> float:
        """Return the rate at the last change."""
        return self._count / RATE_WINDOW_SECONDS


class StoreFeed:
    """Takes objects as the store's `read_object` returns them; see the module.

    `moving_pools` returns how many pools are on their way to what their spec asks for.
    """

    def __init__(
        self,
        store: ObjectStore[Any],
        queue: WorkQueue[PoolKey],
        telemetry: OperatorTelemetry,
        moving_pools: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.read_object = store.read_object
        self._store = store
        self._queue = queue
        self._telemetry = telemetry
        self._moving_pools = moving_pools
        self._changes = ChangeRate(clock)

    def take_event(self, resource: ResourceName, event: str | None, obj: StoredObject) -> None:
        """Take one event; `event` is None for an object from a list of kopf's stream."""
        self._telemetry.note_watch_event(resource)
        for key in self._store.apply_event(resource, event, obj):
            if resource == "pools":
                self._queue.add(key)
            else:
                self.note_change(key)

    def begin_list(self, resource: ResourceName, namespace: str | None) -> None:
        """Note that a list is about to be asked for."""
        self._store.begin_list(resource, namespace)

    def take_list(
        self, resource: ResourceName, listed: ListedValues[StoredObject], namespace: str | None
    ) -> bool:
        """Take a finished list of one namespace, or (None) of all; return whether versions run backwards."""
        found = self._store.replace_listed(
            resource, listed.values, listed_at=listed.resource_version, namespace=namespace
        )
        if found.ghosts:
            self._telemetry.ghosts.inc(found.ghosts)
            logger.info("a list found %d %s gone that the watch had missed", found.ghosts, resource)
        if found.rewound:
            logger.warning(
                "a list of %s is older than what was known before: the cluster came back from a backup",
                resource,
            )
        for key in found.touched:
            self._queue.add(key)
        return found.rewound

    def wake_pools(self, namespace: str | None, seconds: float) -> None:
        """Look at all pools of one namespace, or (None) of all, spread over so many seconds."""
        for key in self._store.pool_keys():
            if namespace in (None, key.namespace):
                self._queue.add(key, random.uniform(0, seconds))

    def note_change(self, key: PoolKey) -> None:
        """Look at a pool: one of its pods or workers, or what it shares devices with, has changed."""
        self._changes.add_change()
        self._queue.add(key, self._batch_delay(key))

    def _batch_delay(self, key: PoolKey) -> float:
        """Return for how long more changes may join one: longer in large pools, and while many pools move."""
        size = self._store.pod_count(key)
        own = (
            0.0 if size <= UNBATCHED_PODS else min(MAX_BATCH_SECONDS, BATCH_SECONDS_PER_POD * size)
        )
        if self._changes.per_second() < BUSY_CHANGES_PER_SECOND:
            return own
        shared = self._moving_pools() / MOVING_PASSES_PER_SECOND
        return max(own, min(MAX_MOVING_BATCH_SECONDS, shared))
