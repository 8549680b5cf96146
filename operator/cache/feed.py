"""What the watch streams bring: raw objects into the store, keys into the queue.

Nothing is decided here and nothing fails here: an event says only which pool to look at.
"""

from __future__ import annotations

import logging
from typing import Any

from rollout_operator.api.objects import PoolKey, ResourceName
from rollout_operator.telemetry import OperatorTelemetry

from .resync import Resync
from .store import Store
from .workqueue import WorkQueue

logger = logging.getLogger(__name__)

RELIST_SECONDS = 5.0

PACE_SECONDS = 0.001
MAX_PACE_SECONDS = 0.5
"""How long changes to a pool's parts are collected, per pod that it has: a pass costs more in a
larger pool, and a pool that is starting changes five times per pod."""

UNPACED_PODS = 16
"""A pool of up to this many pods is looked at immediately."""


class Feed:
    """The sink of the streams; see the module.

    A stream that lists again has lost its place, and kopf does not say what was deleted meanwhile,
    so a resync follows such a list.
    """

    def __init__(
        self,
        store: Store,
        queue: WorkQueue[PoolKey],
        telemetry: OperatorTelemetry,
        resync: Resync,
        relist_seconds: float = RELIST_SECONDS,
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
        for key in self._store.take(resource, event, raw):
            self._queue.add(key, 0.0 if resource == "pools" else self._pace(key))
        if event is None:
            self._resync.soon(self._relist_seconds)

    def part_changed(self, key: PoolKey) -> None:
        """Look at a pool, one of whose workers has changed."""
        self._queue.add(key, self._pace(key))

    def _pace(self, key: PoolKey) -> float:
        size = self._store.size(key)
        return min(MAX_PACE_SECONDS, PACE_SECONDS * size) if size > UNPACED_PODS else 0.0
