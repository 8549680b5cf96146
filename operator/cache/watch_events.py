"""What the watch streams bring: raw objects into the store, keys into the queue.

Nothing is decided here and nothing fails here: an event says only which pool to look at.
"""

from __future__ import annotations

import logging
from typing import Any

from rollout_operator.api.objects import PoolKey, ResourceName
from rollout_operator.operator_telemetry import OperatorTelemetry

from .object_store import ObjectStore
from .resync import Resync
from .settings import MAX_BATCH_SECONDS, RELIST_DELAY_SECONDS
from .workqueue import WorkQueue

logger = logging.getLogger(__name__)

BATCH_SECONDS_PER_POD = 0.001

UNBATCHED_PODS = 16
"""A pool of up to this many pods is looked at immediately."""


class WatchEventHandler:
    """The sink of the streams; see the module.

    A stream that lists again has lost its place, and kopf does not say what was deleted until then, so a
    resync follows such a list.
    """

    def __init__(
        self,
        store: ObjectStore,
        queue: WorkQueue[PoolKey],
        telemetry: OperatorTelemetry,
        resync: Resync,
        relist_seconds: float = RELIST_DELAY_SECONDS,
    ) -> None:
        self._store = store
        self._queue = queue
        self._telemetry = telemetry
        self._resync = resync
        self._relist_seconds = relist_seconds

    def __call__(self, resource: ResourceName, event: str | None, obj: Any) -> None:
        """Take one raw event."""
        raw = dict(obj)
        self._telemetry.note_watch_event(resource)
        for key in self._store.apply_event(resource, event, raw):
            self._queue.add(key, 0.0 if resource == "pools" else self._batch_delay(key))
        if event is None:
            self._resync.schedule_list(self._relist_seconds)

    def note_worker_change(self, key: PoolKey) -> None:
        """Look at a pool, one of whose workers has changed."""
        self._queue.add(key, self._batch_delay(key))

    def _batch_delay(self, key: PoolKey) -> float:
        size = self._store.pod_count(key)
        return (
            min(MAX_BATCH_SECONDS, BATCH_SECONDS_PER_POD * size) if size > UNBATCHED_PODS else 0.0
        )
