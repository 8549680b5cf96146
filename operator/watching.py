"""The watch streams, which kopf runs: raw objects into the store, keys into the queue.

Nothing is decided here and nothing fails here: an event says only which pool to look at.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import kopf

from .credentials import login
from .expectations import Expectations
from .names import GROUP, MANAGER, PLURAL, VERSION
from .resync import MANAGED, Resync
from .store import Key, ResourceName, Store
from .telemetry import Telemetry
from .workqueue import WorkQueue

logger = logging.getLogger(__name__)

Sink = Callable[[ResourceName, str | None, Any], None]
"""Takes resource, type of event (None: from a list) and raw object."""

RELIST_SECONDS = 5.0

PACE_SECONDS = 0.001
MAX_PACE_SECONDS = 0.5
"""Changes of parts are collected for so long, for each pod that the pool has: a pass costs more in a
larger pool, and one that starts changes five times for every pod."""

UNPACED_PODS = 16
"""Up to so many pods a pool is looked at immediately."""


def register(sink: Sink, registry: kopf.OperatorRegistry | None = None) -> None:
    """Register the handlers of the three streams, and our login, in a registry of kopf."""

    @kopf.on.login(registry=registry, id="rollout")
    async def _login(**_: Any) -> kopf.ConnectionInfo:
        return await login()

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry, id="pools")
    async def _pools(event: kopf.RawEvent, **_: Any) -> None:
        sink("pools", event["type"], event["object"])

    @kopf.on.event("", "v1", "pods", registry=registry, id="pods")
    async def _pods(event: kopf.RawEvent, **_: Any) -> None:
        sink("pods", event["type"], event["object"])

    @kopf.on.event("", "v1", "services", registry=registry, id="services")
    async def _services(event: kopf.RawEvent, **_: Any) -> None:
        sink("services", event["type"], event["object"])


def configure(settings: kopf.OperatorSettings, *, embedded: bool) -> None:
    """Set what was measured to matter (docs/architecture.md); `embedded`: kopf runs inside us."""
    settings.watching.label_selectors["pods"] = MANAGED
    settings.watching.label_selectors["services"] = MANAGED
    settings.watching.chunk_size = 500
    settings.watching.server_timeout = 300
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.queueing.idle_timeout = 1.0
    settings.queueing.exit_timeout = 1.0
    settings.queueing.error_delays = [1, 2, 5, 10, 30]
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.networking.error_backoffs = [0.5, 1, 2, 4]
    settings.persistence.finalizer = f"{GROUP}/{MANAGER}"
    settings.persistence.diffbase_storage = _NoDiffs()
    # Inside us, kopf ending is no reason to kill the process: we bound our own exit.
    settings.process.ultimate_exiting_timeout = None if embedded else 25


class _NoDiffs(kopf.DiffBaseStorage):
    """Remembers nothing: our handlers take raw events, and kopf would copy every object twice."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence({})

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        return None

    def store(self, **_: Any) -> None:
        return None


class Feed:
    """The sink of the streams; see the module.

    A stream that lists again has lost its place, and kopf does not tell what went meanwhile, so
    such a list is followed by a resync of ours.
    """

    def __init__(
        self,
        store: Store,
        expectations: Expectations,
        queue: WorkQueue[Key],
        telemetry: Telemetry,
        resync: Resync,
        relist_seconds: float = RELIST_SECONDS,
    ) -> None:
        self._store = store
        self._expectations = expectations
        self._queue = queue
        self._telemetry = telemetry
        self._resync = resync
        self._relist_seconds = relist_seconds

    def __call__(self, resource: ResourceName, event: str | None, obj: Any) -> None:
        """Take one raw event."""
        raw = dict(obj)
        self._telemetry.watch_event(resource)
        waited = self._expectations.observe(resource, event, raw)
        for key in self._store.take(resource, event, raw) | ({waited} if waited else set()):
            self._queue.add(key, 0.0 if resource == "pools" else self._pace(key))
        if event is None:
            self._resync.soon(self._relist_seconds)

    def part_changed(self, key: Key) -> None:
        """Look at a pool of which a worker has changed."""
        self._queue.add(key, self._pace(key))

    def _pace(self, key: Key) -> float:
        size = self._store.size(key)
        return min(MAX_PACE_SECONDS, PACE_SECONDS * size) if size > UNPACED_PODS else 0.0
