"""Keeps the store as the API server has it: pools, and what is labelled as theirs.

Each collection is listed, and again after each interval, which corrects the store whatever a watch missed.
In between this follows the events of all but pools, which kopf's stream brings. The first lists precede the
first pass: nothing is decided until all are complete.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from rollout_common.kube.errors import KubeError
from rollout_common.kube.reflector import ListedValues, follow_collection
from rollout_operator.api.names import LABEL_MANAGED_BY, LABEL_SLICE_MANAGER, MANAGER_NAME, PLURAL
from rollout_operator.api.objects import WATCHED_RESOURCES, ResourceName
from rollout_operator.kube.kube_client import KubeClient, explain_error, resource_collection

from .object_store import trim_object
from .settings import RELIST_DELAY_SECONDS
from .store_feed import StoreFeed

logger = logging.getLogger(__name__)

RESYNC_WAKE_SPREAD = 0.5
"""Share of the interval over which a list of pools wakes those in which nothing changed."""

_SELECTORS: dict[ResourceName, str | None] = {
    "pools": None,
    "pods": f"{LABEL_MANAGED_BY}={MANAGER_NAME}",
    "services": f"{LABEL_MANAGED_BY}={MANAGER_NAME}",
    "poddisruptionbudgets": f"{LABEL_MANAGED_BY}={MANAGER_NAME}",
    # Kubernetes' own EndpointSlices of our Services have all labels of these, but not this one.
    "endpointslices": f"{LABEL_SLICE_MANAGER}={MANAGER_NAME}",
}

_ABSENT = "is the CustomResourceDefinition installed?"

_Scope = tuple[ResourceName, str | None]
"""A resource in a namespace; None: in all."""


class PoolInformer:
    """Lists and follows; see the module.

    It lists every `interval` seconds, and pools also `relist_seconds` after kopf's stream has lost its place; `lost` is
    called when that may have lost it without a sign. No `namespaces`: all.
    """

    def __init__(
        self,
        kube: KubeClient,
        feed: StoreFeed,
        *,
        namespaces: tuple[str, ...] = (),
        interval: float = 300.0,
        relist_seconds: float = RELIST_DELAY_SECONDS,
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._kube = kube
        self._feed = feed
        self.interval = interval
        self._relist_seconds = relist_seconds
        self._lost = lost
        self._due: dict[str | None, asyncio.Event] = {
            each: asyncio.Event() for each in namespaces or (None,)
        }
        """Set when the pools of a namespace (None: all) are to be listed at once."""
        self._due_timer: asyncio.TimerHandle | None = None
        self._listed_at: dict[_Scope, float] = {}
        self._problems: dict[_Scope, str] = {}
        self._unlisted: set[_Scope] = set()
        """What could not be listed, because nothing answered."""
        self._all_listed = asyncio.Event()
        self._pools_listed = asyncio.Event()

    def oldest_list_age(self) -> float | None:
        """Return how many seconds ago the oldest of the last lists ended; None: one was not complete yet."""
        if not self._all_listed.is_set():
            return None
        return time.monotonic() - min(self._listed_at.values())

    async def wait_listed(self) -> None:
        """Wait until everything has been listed once; `run` must run."""
        await self._all_listed.wait()

    async def list_pools(self) -> None:
        """List pools now and wait until that has worked; `run` must run."""
        self._pools_listed.clear()
        self._set_pools_due()
        await self._pools_listed.wait()

    def schedule_pool_list(self, delay: float) -> None:
        """List pools in `delay` seconds instead of at the end of the interval."""
        loop = asyncio.get_running_loop()
        if self._due_timer is not None:
            if self._due_timer.when() <= loop.time() + delay:
                return
            self._due_timer.cancel()
        self._due_timer = loop.call_later(delay, self._set_pools_due)

    def take_pool_event(self, event: str | None, obj: Mapping[str, Any]) -> None:
        """Take an event of kopf's stream; `event` is None for an object that it lists.

        A stream that lists again has lost its place, and kopf does not say what was deleted until then, so a
        list of ours follows.
        """
        self._feed.take_event("pools", event, trim_object("pools", dict(obj)))
        if event is None:
            self.schedule_pool_list(self._relist_seconds)

    async def run(self) -> None:
        """Follow everything until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for resource in WATCHED_RESOURCES:
                for namespace in self._due:
                    tasks.create_task(self._follow_resource(resource, namespace))

    async def _follow_resource(self, resource: ResourceName, namespace: str | None) -> None:
        name = PLURAL if resource == "pools" else resource
        steps = follow_collection(
            self._kube,
            resource_collection(name, namespace, _SELECTORS[resource]),
            partial(trim_object, resource),
            partial(self._note_trouble, (resource, namespace)),
            seconds=self.interval,
            wait=partial(self._wait_until_due, namespace) if resource == "pools" else None,
            begin=partial(self._feed.begin_list, resource, namespace),
        )
        async with aclosing(steps):
            async for step in steps:
                if isinstance(step, ListedValues):
                    rewound = self._feed.take_list(resource, step, namespace)
                    self._note_list(resource, namespace)
                    if rewound:
                        self._follow_pools_anew()
                else:
                    self._feed.take_event(resource, step.kind, step.value)

    def _note_list(self, resource: ResourceName, namespace: str | None) -> None:
        self._listed_at[resource, namespace] = time.monotonic()
        if len(self._listed_at) == len(WATCHED_RESOURCES) * len(self._due):
            self._all_listed.set()
        if resource == "pools":
            self._pools_listed.set()
            self._feed.wake_pools(namespace, RESYNC_WAKE_SPREAD * self.interval)

    async def _wait_until_due(self, namespace: str | None) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._due[namespace].wait(), self.interval)
        self._due[namespace].clear()

    def _set_pools_due(self) -> None:
        self._due_timer = None
        for due in self._due.values():
            due.set()

    def _follow_pools_anew(self) -> None:
        self.schedule_pool_list(0)
        self._lost()

    def _note_trouble(self, scope: _Scope, error: KubeError | None) -> None:
        """Log an error, but not again before a list has worked or the reason has changed."""
        text = "" if error is None else explain_error(error, _ABSENT)
        before = self._problems.get(scope)
        if text and text != before:
            logger.warning("%s", text)
        if error is None and scope in self._unlisted:
            # The API server was away: it may have come back from a backup.
            self._unlisted.discard(scope)
            self._follow_pools_anew()
        elif error is not None and error.status == 0 and before:
            self._unlisted.add(scope)  # two errors without a list in between: a list has failed
        self._problems[scope] = text
