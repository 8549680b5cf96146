"""Keeps the store as the API server has it: pools, and what is labelled as theirs.

Each collection is listed, and again after each interval, which corrects the store whatever a watch missed.
In between this follows the events of all but pools, which kopf's stream brings. The first lists precede the
first pass: nothing is decided in a namespace until all of it are complete. A namespace that may not be listed, because
it is gone or its Role is, keeps no other one waiting.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from rollout_common.kube.errors import Forbidden, KubeError
from rollout_common.kube.reflector import ListedValues, follow_collection
from rollout_operator.api.names import LABEL_MANAGED_BY, LABEL_SLICE_MANAGER, MANAGER_NAME, PLURAL
from rollout_operator.api.objects import WATCHED_RESOURCES, ResourceName
from rollout_operator.kube.kube_client import KubeClient, explain_error, resource_collection

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

_GONE = "; a namespace that was deleted took its Role along: remove it from watchNamespaces"
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
        self._forbidden: set[_Scope] = set()
        self._unlisted: set[_Scope] = set()
        """What could not be listed, because nothing answered."""
        self._all_listed = asyncio.Event()
        self._pools_listed = asyncio.Event()

    def oldest_list_age(self) -> float | None:
        """Return how many seconds ago the oldest of the last lists ended; None: one was not complete yet.

        Namespaces that may not be listed don't count.
        """
        if not self._all_listed.is_set():
            return None
        open_ones = self._permitted_namespaces()
        ended = (at for (_, namespace), at in self._listed_at.items() if namespace in open_ones)
        return time.monotonic() - min(ended, default=time.monotonic())

    def first_problem(self) -> str | None:
        """Return what keeps a list from being complete, if one failed."""
        return next((text for text in self._problems.values() if text), None)

    def is_listed(self, namespace: str) -> bool:
        """Return whether all of a namespace has been listed once; it is when its pools are woken."""
        scope = namespace if namespace in self._due else None
        return all((resource, scope) in self._listed_at for resource in WATCHED_RESOURCES)

    def streamed_namespaces(self) -> tuple[str, ...]:
        """Return the namespaces whose pools a stream can follow now; empty: it follows all."""
        named = [namespace for namespace in self._due if namespace is not None]
        return tuple(n for n in named if ("pools", n) not in self._forbidden) or tuple(named)

    def _permitted_namespaces(self) -> list[str | None]:
        closed = {namespace for _, namespace in self._forbidden}
        return [namespace for namespace in self._due if namespace not in closed]

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
        self._feed.take_event("pools", event, self._feed.read_object("pools", dict(obj)))
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
            partial(self._feed.read_object, resource),
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
        is_first = (resource, namespace) not in self._listed_at
        self._listed_at[resource, namespace] = time.monotonic()
        if resource == "pools":
            self._pools_listed.set()
            self._feed.wake_pools(namespace, RESYNC_WAKE_SPREAD * self.interval)
        if is_first and self.is_listed(namespace or ""):
            self._feed.wake_pools(namespace, 0)  # passes over them were dropped
        self._check_first_lists()

    def _check_first_lists(self) -> None:
        """Let passes begin once all that may be listed has been."""
        permitted = self._permitted_namespaces()
        if permitted and all(self.is_listed(each or "") for each in permitted):
            self._all_listed.set()

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
        self._note_permission(scope, error)
        text = "" if error is None else explain_error(error, _ABSENT)
        if isinstance(error, Forbidden) and scope[1] is not None:
            text += _GONE
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

    def _note_permission(self, scope: _Scope, error: KubeError | None) -> None:
        if isinstance(error, Forbidden) and scope not in self._forbidden:
            self._forbidden.add(scope)
            self._check_first_lists()
        elif error is None and scope in self._forbidden:
            self._forbidden.discard(scope)
            if scope[0] == "pools":
                self._lost()  # the stream is to follow this namespace, too
