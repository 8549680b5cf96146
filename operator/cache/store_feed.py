"""What lists and watches bring: raw objects into the store, keys into the queue.

Nothing is decided here and nothing fails here: an event says only which pool to look at.
"""

from __future__ import annotations

import logging
import random

from rollout_common.kube.reflector import ListedValues
from rollout_operator.api.objects import Obj, PoolKey, ResourceName
from rollout_operator.operator_telemetry import OperatorTelemetry

from .object_store import ObjectStore
from .settings import MAX_BATCH_SECONDS
from .workqueue import WorkQueue

logger = logging.getLogger(__name__)

BATCH_SECONDS_PER_POD = 0.001

UNBATCHED_PODS = 16
"""A pool of up to this many pods is looked at immediately."""


class StoreFeed:
    """Takes objects as `trim_object` returns them; see the module."""

    def __init__(
        self, store: ObjectStore, queue: WorkQueue[PoolKey], telemetry: OperatorTelemetry
    ) -> None:
        self._store = store
        self._queue = queue
        self._telemetry = telemetry

    def take_event(self, resource: ResourceName, event: str | None, obj: Obj) -> None:
        """Take one event; `event` is None for an object from a list of kopf's stream."""
        self._telemetry.note_watch_event(resource)
        for key in self._store.apply_event(resource, event, obj):
            self._queue.add(key, 0.0 if resource == "pools" else self._batch_delay(key))

    def begin_list(self, resource: ResourceName, namespace: str | None) -> None:
        """Note that a list is about to be asked for."""
        self._store.begin_list(resource, namespace)

    def take_list(
        self, resource: ResourceName, listed: ListedValues[Obj], namespace: str | None
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

    def note_worker_change(self, key: PoolKey) -> None:
        """Look at a pool, one of whose workers has changed."""
        self._queue.add(key, self._batch_delay(key))

    def _batch_delay(self, key: PoolKey) -> float:
        size = self._store.pod_count(key)
        return (
            min(MAX_BATCH_SECONDS, BATCH_SECONDS_PER_POD * size) if size > UNBATCHED_PODS else 0.0
        )
