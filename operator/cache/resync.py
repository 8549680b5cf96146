"""The periodic full list, which corrects the store whatever the watch missed.

The first one precedes the first pass: nothing is decided until all resources are listed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from contextlib import aclosing

from rollout_common.kube.errors import Forbidden, Gone, KubeError, NotFound
from rollout_common.kube.reflector import list_pages
from rollout_operator.api.names import LABEL_MANAGED_BY, LABEL_SLICE_MANAGER, MANAGER_NAME, PLURAL
from rollout_operator.api.objects import WATCHED_RESOURCES, Obj, PoolKey, ResourceName
from rollout_operator.kube.kube_client import KubeClient, resource_collection
from rollout_operator.operator_telemetry import OperatorTelemetry

from .object_store import ObjectStore, trim_object
from .settings import MAX_RESYNC_RETRY_SECONDS, RESYNC_RETRY_SECONDS
from .workqueue import WorkQueue

logger = logging.getLogger(__name__)

MANAGED_SELECTOR = f"{LABEL_MANAGED_BY}={MANAGER_NAME}"
OUR_SLICES_SELECTOR = f"{LABEL_SLICE_MANAGER}={MANAGER_NAME}"
"""Kubernetes' own EndpointSlices of our Services have all labels of these, but not this one."""

RESOURCE_PATHS: dict[ResourceName, str] = {
    "pools": PLURAL,
    "pods": "pods",
    "services": "services",
    "endpointslices": "endpointslices",
}
RESOURCE_SELECTORS: dict[ResourceName, str | None] = {
    "pools": None,
    "pods": MANAGED_SELECTOR,
    "services": MANAGED_SELECTOR,
    "endpointslices": OUR_SLICES_SELECTOR,
}

MAX_LIST_ATTEMPTS = 3
"""A list whose continuation expired is restarted this often before it counts as failed."""

RESYNC_WAKE_SPREAD = 0.5
"""Share of the interval over which a resync wakes the pools in which nothing changed."""


class Resync:
    """Lists everything at an interval, or sooner if asked.

    Args:
        kube: The client.
        store: What is corrected.
        queue: Where the pools are woken.
        telemetry: Counts ghosts.
        namespaces: What to list; empty: all.
        interval: Seconds between two lists.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        kube: KubeClient,
        store: ObjectStore,
        queue: WorkQueue[PoolKey],
        telemetry: OperatorTelemetry,
        *,
        namespaces: tuple[str, ...] = (),
        interval: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube = kube
        self._store = store
        self._queue = queue
        self._telemetry = telemetry
        self._namespaces: tuple[str | None, ...] = namespaces or (None,)
        self._interval = interval
        self._clock = clock
        self._finished_at: float | None = None
        self._logged = ""
        self._soon = asyncio.Event()
        self._soon_timer: asyncio.TimerHandle | None = None

    @property
    def interval(self) -> float:
        """Seconds between two lists."""
        return self._interval

    def last_list_age(self) -> float | None:
        """Return how many seconds ago the last full list ended; None: there was none yet."""
        return None if self._finished_at is None else self._clock() - self._finished_at

    def schedule_list(self, delay: float) -> None:
        """List again in `delay` seconds instead of at the end of the interval."""
        loop = asyncio.get_running_loop()
        if self._soon_timer is not None:
            if self._soon_timer.when() <= loop.time() + delay:
                return
            self._soon_timer.cancel()
        self._soon_timer = loop.call_later(delay, self._soon.set)

    async def run_first_list(self) -> None:
        """List everything, trying until it works; the reason for waiting is logged once."""
        delay = RESYNC_RETRY_SECONDS
        while not await self._try_list():
            await asyncio.sleep(delay * random.uniform(0.8, 1.2))
            delay = min(MAX_RESYNC_RETRY_SECONDS, 1.5 * delay)

    async def run(self) -> None:
        """List again after each interval, or `schedule_list`, until cancelled."""
        while True:
            await self._wait_until_due()
            if not await self._try_list():
                self.schedule_list(2 * RESYNC_RETRY_SECONDS)

    async def list_everything(self) -> None:
        """List everything once, and wake every pool: at once where something changed."""
        touched: set[PoolKey] = set()
        for resource in WATCHED_RESOURCES:
            for namespace in self._namespaces:
                touched |= await self._list_resource(resource, namespace)
        self._finished_at = self._clock()
        for key in touched:
            self._queue.add(key)
        pools = self._store.pool_keys()
        for key in pools:
            self._queue.add(key, random.uniform(0, RESYNC_WAKE_SPREAD * self._interval))

    async def _try_list(self) -> bool:
        """List everything; if that fails, log the reason unless it was the same last time."""
        try:
            await self.list_everything()
        except KubeError as error:
            text = _explain_error(error)
            logger.log(logging.DEBUG if text == self._logged else logging.WARNING, "%s", text)
            self._logged = text
            return False
        self._logged = ""
        return True

    async def _wait_until_due(self) -> None:
        try:
            async with asyncio.timeout(self._interval):
                await self._soon.wait()
        except TimeoutError:
            pass
        self._soon.clear()
        if self._soon_timer is not None:
            self._soon_timer.cancel()
            self._soon_timer = None

    async def _list_resource(self, resource: ResourceName, namespace: str | None) -> set[PoolKey]:
        for attempt in range(1, MAX_LIST_ATTEMPTS + 1):
            try:
                objs, version = await self._collect_pages(resource, namespace)
            except Gone:
                if attempt == MAX_LIST_ATTEMPTS:
                    raise
                continue
            touched, ghosts = self._store.replace_listed(
                resource, objs, listed_at=version, namespace=namespace
            )
            if ghosts:
                self._telemetry.ghosts.inc(ghosts)
                logger.info("a list found %d %s gone that the watch had missed", ghosts, resource)
            return touched
        raise AssertionError("the loop returns or raises")

    async def _collect_pages(
        self, resource: ResourceName, namespace: str | None
    ) -> tuple[list[Obj], str]:
        objs: list[Obj] = []
        version = ""
        of = resource_collection(RESOURCE_PATHS[resource], namespace, RESOURCE_SELECTORS[resource])
        async with aclosing(list_pages(self._kube, of)) as pages:
            async for page in pages:
                version = version or page.resource_version
                objs.extend(trim_object(resource, obj) for obj in page.items)
        return objs, version


def _explain_error(error: KubeError) -> str:
    """Return the error with what to do about it, where that is known."""
    if isinstance(error, NotFound):
        return f"{error}; is the CustomResourceDefinition installed?"
    if isinstance(error, Forbidden):
        return f"{error}; the operator's role lacks this permission"
    return str(error)
