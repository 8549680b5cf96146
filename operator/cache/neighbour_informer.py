"""The pods of trainers and their ResourceClaims, watched while a pool is beside them, or in them.

Each colocated pool subscribes with its passes (`look`) to the pods that its selector selects and to the
claims of its namespace (and, if it shares their devices out, to the cluster's ResourceSlices), each Hybrid
pool (`inside`) to its selector's pods; pools share a watch. A watch lists, follows the events from there,
and begins again after some time or whatever ends it: a late or missed event costs time only. What is
known stays so while the API server is away.

Each watch has a connection of its own, with its buffers, so a namespace has a few of them whatever is
created in it: later selectors share one watch of its pods, and are applied here.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from rollout_operator.api.names import LABEL_MANAGED_BY, MANAGER_NAME
from rollout_operator.api.objects import Obj, PoolKey
from rollout_operator.api.spec_colocation import TrainerSelector
from rollout_operator.kube.errors import Forbidden, Gone, KubeError, NotFound
from rollout_operator.kube.kube_client import KubeClient

from .settings import LIST_RETRY_SECONDS, MAX_LIST_RETRY_SECONDS, WATCH_TIMEOUT_SECONDS

logger = logging.getLogger(__name__)

MAX_SELECTOR_WATCHES = 8
"""Selectors of a namespace that have a watch of their own: the API server leaves out all other pods."""

WAKE_ALL_CHANGES = 64
"""From so many changes in a list on, all pools are woken instead of those that the changes are about."""

UNMANAGED_SELECTOR = f"{LABEL_MANAGED_BY}!={MANAGER_NAME}"

NeighbourResource = Literal["pods", "resourceclaims", "resourceslices", "members"]
"""Members are pods as well; more is read of them."""
ReadObject = Callable[[Obj], object | None]
"""Makes a value of an object; None: it does not count. Equal values are the same to every pass."""
Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class WatchScope:
    """What one watch is about."""

    resource: NeighbourResource
    namespace: str | None
    """None: of no namespace."""
    selector: str | None

    @property
    def api_resource(self) -> str:
        """What the API server calls it."""
        return "pods" if self.resource == "members" else self.resource

    @property
    def is_shared(self) -> bool:
        """Pools with different selectors share it: it shows all pods but ours."""
        return self.selector is None and self.api_resource == "pods"


@dataclass(slots=True)
class _NeighbourWatch:
    found: dict[str, tuple[Labels, object]] = field(default_factory=dict)
    """Labels and value of each object that counts, by name."""
    listed: bool = False
    problem: str = ""
    pools: dict[PoolKey, TrainerSelector | None] = field(default_factory=dict)
    """Who asks, and which of the objects it means; None: all."""
    task: asyncio.Task[None] | None = None

    def pool_values(self, key: PoolKey) -> tuple[object, ...]:
        """What a pool asks for, as far as it is known."""
        chosen = self.pools[key]
        return tuple(
            value
            for labels, value in self.found.values()
            if chosen is None or chosen.matches_labels(labels)
        )


@dataclass(frozen=True, slots=True)
class NeighbourObjects:
    """What a pool has beside it; `unknown` says why it is not known yet."""

    pods: tuple[object, ...] = ()
    claims: tuple[object, ...] = ()
    slices: tuple[object, ...] = ()
    unknown: str | None = None


class NeighbourInformer:
    """See the module.

    Args:
        kube: The client.
        read: Makes values of pods and of claims.
        wake: Told which pool to look at.
        seconds: How long a watch follows events before it lists again.
    """

    def __init__(
        self,
        kube: KubeClient,
        read: Mapping[NeighbourResource, ReadObject],
        wake: Callable[[PoolKey], None],
        *,
        seconds: float = WATCH_TIMEOUT_SECONDS,
    ) -> None:
        self._kube = kube
        self._read = read
        self._wake = wake
        self._seconds = seconds
        self._watches: dict[WatchScope, _NeighbourWatch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        """Of all watches, and of those that nobody needs any more until they have ended."""
        self._stale = asyncio.Event()

    def subscribe_beside(
        self, key: PoolKey, selector: TrainerSelector, *, slices: bool = False
    ) -> NeighbourObjects:
        """Return what is beside a pool, and have it woken when that changes, until `forget`.

        Args:
            key: the pool.
            selector: of the trainer's pods.
            slices: whether the cluster's ResourceSlices are wanted as well.
        """
        watches = [
            self._join_watch(key, "pods", selector),
            self._join_watch(key, "resourceclaims", None),
        ]
        watches += [self._join_watch(key, "resourceslices", None)] if slices else []
        self._leave_watches(key, watches)
        if not all(each.listed for each in watches):
            return NeighbourObjects(unknown=next((w.problem for w in watches if w.problem), ""))
        found = [each.pool_values(key) for each in watches]
        return NeighbourObjects(found[0], found[1], found[2] if slices else ())

    def subscribe_inside(self, key: PoolKey, selector: TrainerSelector) -> NeighbourObjects:
        """Return the same for the pods that a pool is in; nobody asks for claims."""
        members = self._join_watch(key, "members", selector)
        self._leave_watches(key, (members,))
        if not members.listed:
            return NeighbourObjects(unknown=members.problem)
        return NeighbourObjects(members.pool_values(key))

    def unsubscribe_pool(self, key: PoolKey) -> None:
        """End the subscription of a pool that is gone."""
        self._leave_watches(key, ())

    async def run(self) -> None:
        """Watch what pools have asked for, until cancelled."""
        try:
            while True:
                self._stale.clear()
                for scope, watch in self._watches.items():
                    if watch.task is None or watch.task.done():
                        follow = self._keep_watching(scope, watch)
                        watch.task = asyncio.create_task(follow, name=f"watch of {scope}")
                        watch.task.add_done_callback(self._note_ended_watch)
                        self._tasks.add(watch.task)
                await self._stale.wait()
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)

    def _note_ended_watch(self, task: asyncio.Task[None]) -> None:
        """Begin a watch again that ended by an object which nobody expected."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("the %s ended", task.get_name(), exc_info=task.exception())
            asyncio.get_running_loop().call_later(MAX_LIST_RETRY_SECONDS, self._stale.set)

    def _join_watch(
        self, key: PoolKey, resource: NeighbourResource, selector: TrainerSelector | None
    ) -> _NeighbourWatch:
        scope = self._watch_scope(key, resource, selector)
        watch = self._watches.get(scope)
        if watch is None:
            watch = self._watches[scope] = _NeighbourWatch()
            self._stale.set()
        watch.pools[key] = selector if scope.selector is None else None
        return watch

    def _watch_scope(
        self, key: PoolKey, resource: NeighbourResource, selector: TrainerSelector | None
    ) -> WatchScope:
        """Of the watch that shows these objects: their own, or that of the whole namespace."""
        namespace = None if resource == "resourceslices" else key.namespace
        whole = WatchScope(resource, namespace, None)
        if selector is None:
            return whole
        own = WatchScope(resource, key.namespace, selector.to_query())
        if own in self._watches:
            return own
        there = self._watches.get(whole)
        if there is not None and there.pools.get(key) == selector:
            return whole  # it stays where it is known
        apart = sum(
            (s.resource, s.namespace) == (resource, key.namespace) and s.selector is not None
            for s in self._watches
        )
        return own if apart < MAX_SELECTOR_WATCHES else whole

    def _leave_watches(self, key: PoolKey, kept: Collection[_NeighbourWatch]) -> None:
        """Take a pool from all other watches; one that nobody asks for ends, and is not joined again."""
        for scope, watch in list(self._watches.items()):
            if key not in watch.pools or any(watch is each for each in kept):
                continue
            del watch.pools[key]
            if not watch.pools:
                del self._watches[scope]
                if watch.task is not None:
                    watch.task.cancel()

    async def _keep_watching(self, scope: WatchScope, watch: _NeighbourWatch) -> None:
        """List and watch, over and over; how often is bounded, however soon streams end."""
        delay = LIST_RETRY_SECONDS
        while True:
            began = time.monotonic()
            try:
                await self._list_and_watch(scope, watch)
                delay = LIST_RETRY_SECONDS
            except Gone:
                delay = LIST_RETRY_SECONDS  # the list is too old for its events: take another one
            except KubeError as error:
                self._note_problem(watch, error)
                delay = min(MAX_LIST_RETRY_SECONDS, 2 * delay)
            due = began + delay * random.uniform(0.8, 1.2)
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def _list_and_watch(self, scope: WatchScope, watch: _NeighbourWatch) -> None:
        """List, and follow the events for a while."""
        found: dict[str, tuple[Labels, object]] = {}
        version = ""
        selector = UNMANAGED_SELECTOR if scope.is_shared else scope.selector
        async for page in self._kube.list_pages(
            scope.api_resource, scope.namespace, selector=selector
        ):
            version = version or page.resource_version
            for obj in page.items:
                self._put_object(scope, found, obj)
        before, known = watch.found, watch.listed
        watch.found, watch.listed, watch.problem = found, True, ""
        changed = [
            each
            for name in before.keys() | found.keys()
            for each in _changed_labels(before.get(name), found.get(name))
        ]
        self._wake_pools(watch, changed if known and len(changed) < WAKE_ALL_CHANGES else None)
        events = self._kube.watch(
            scope.api_resource, scope.namespace, version, selector=selector, seconds=self._seconds
        )
        async for kind, obj in events:
            if kind in ("ADDED", "MODIFIED", "DELETED"):
                self._apply_event(scope, watch, kind, obj)

    def _apply_event(self, scope: WatchScope, watch: _NeighbourWatch, kind: str, obj: Obj) -> None:
        name = obj["metadata"]["name"]
        before = watch.found.get(name)
        if kind == "DELETED":
            watch.found.pop(name, None)
        else:
            self._put_object(scope, watch.found, obj)
        self._wake_pools(watch, _changed_labels(before, watch.found.get(name)))

    def _put_object(
        self, scope: WatchScope, found: dict[str, tuple[Labels, object]], obj: Obj
    ) -> None:
        value = self._read[scope.resource](obj)
        name, labels = obj["metadata"]["name"], obj["metadata"].get("labels") or {}
        if value is None:
            found.pop(name, None)
        else:
            # Other labels are no change to pools for which the API server selects.
            found[name] = (labels if scope.is_shared else {}, value)

    def _wake_pools(self, watch: _NeighbourWatch, changed: Collection[Labels] | None) -> None:
        """Wake the pools that mean an object with these labels; None: all of them."""
        for key, chosen in list(watch.pools.items()):
            if changed is None or any(
                chosen is None or chosen.matches_labels(each) for each in changed
            ):
                self._wake(key)

    def _note_problem(self, watch: _NeighbourWatch, error: KubeError) -> None:
        """Log a new problem, and have the pools tell it that know nothing because of it."""
        text = _explain_error(error)
        if text == watch.problem:
            return
        logger.warning("%s", text)
        watch.problem = text
        if not watch.listed:
            self._wake_pools(watch, None)


def _changed_labels(
    before: tuple[Labels, object] | None, after: tuple[Labels, object] | None
) -> list[Labels]:
    """Labels of an object before and after a change; empty if there is none."""
    return [] if before == after else [each[0] for each in (before, after) if each is not None]


def _explain_error(error: KubeError) -> str:
    """Return the error with what to do about it, where that is known."""
    if isinstance(error, NotFound):
        return f"{error}; does the cluster have resource.k8s.io/v1 (Kubernetes 1.34)?"
    if isinstance(error, Forbidden):
        return (
            f"{error}; the operator's role lacks this permission: upgrade its chart, or, where that creates "
            "nothing cluster-wide, let a cluster admin grant it (the chart's README says how)"
        )
    return str(error)
