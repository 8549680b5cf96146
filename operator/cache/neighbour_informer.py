"""What pools depend on without owning it: pods of trainers, their ResourceClaims, nodes that are cordoned.

Each pass of a colocated pool subscribes it to the pods that its selector selects and to the claims of its
namespace (and, if it shares their devices out, to the cluster's ResourceSlices); each pass of a Hybrid pool
subscribes it to its selector's pods, and each pass of a pool with pushed weights to cordoned nodes. Pools
share watches.

Each watch has a connection with buffers of its own, so a namespace has a few of them however many pools
it has: later selectors share one watch of its pods, and are applied here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal

from rollout_common.kube.errors import KubeError
from rollout_common.kube.reflector import Reflector, follow_collection
from rollout_operator.api.names import LABEL_MANAGED_BY, MANAGER_NAME
from rollout_operator.api.objects import Obj, PoolKey
from rollout_operator.api.spec_colocation import TrainerSelector
from rollout_operator.kube.kube_client import KubeClient, explain_error, resource_collection

from .settings import LIST_RETRY_SECONDS, MAX_LIST_RETRY_SECONDS, WATCH_TIMEOUT_SECONDS

logger = logging.getLogger(__name__)

MAX_SELECTOR_WATCHES = 8
"""Selectors of a namespace that have a watch of their own: the API server leaves out all other pods."""

WAKE_ALL_CHANGES = 64
"""From so many changes in a list on, all pools are woken instead of those that the changes are about."""

UNMANAGED_SELECTOR = f"{LABEL_MANAGED_BY}!={MANAGER_NAME}"

_ABSENT = "does the cluster have resource.k8s.io/v1 (Kubernetes 1.34)?"

NeighbourResource = Literal["pods", "resourceclaims", "resourceslices", "members", "nodes"]
"""Members are pods as well; more is read of them. Nodes: only those that are cordoned."""

_CLUSTER_RESOURCES = ("resourceslices", "nodes")
"""They have no namespace."""

ReadObject = Callable[[Obj], object | None]
"""Makes a value of an object; None: it does not count. A pass sees no difference between equal values."""
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
    def field_selector(self) -> str | None:
        """By which the API server leaves out nodes that are not cordoned."""
        return "spec.unschedulable=true" if self.resource == "nodes" else None

    @property
    def is_shared(self) -> bool:
        """Pools with different selectors share it: it shows all pods but ours."""
        return self.selector is None and self.api_resource == "pods"


@dataclass(slots=True)
class _NeighbourWatch:
    reflector: Reflector[tuple[Labels, object]]
    """Keeps labels and value of each object that counts."""
    problem: str = ""
    pools: dict[PoolKey, TrainerSelector | None] = field(default_factory=dict)
    """The subscribers, and which of the objects each selects; None: all."""
    task: asyncio.Task[None] | None = None

    def pool_values(self, key: PoolKey) -> tuple[object, ...]:
        """What a pool asks for, as far as it is known."""
        chosen = self.pools[key]
        return tuple(
            value
            for labels, value in self.reflector.values.values()
            if chosen is None or chosen.matches_labels(labels)
        )


@dataclass(frozen=True, slots=True)
class NeighbourObjects:
    """What a pool has next to it; `unknown` says why it is not known yet."""

    pods: tuple[object, ...] = ()
    claims: tuple[object, ...] = ()
    slices: tuple[object, ...] = ()
    nodes: tuple[object, ...] = ()
    unknown: str | None = None


class NeighbourInformer:
    """Watches what pools subscribe to, and lists it again every `seconds`; `wake` takes the pool to look at."""

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
        self._group: asyncio.TaskGroup | None = None
        """Of all watches, while `run` runs."""

    def subscribe_beside(
        self, key: PoolKey, selector: TrainerSelector, *, slices: bool = False
    ) -> NeighbourObjects:
        """Return what is next to a pool, and wake the pool when that changes, until `unsubscribe_pool`.

        That is the trainer's pods, which `selector` selects, the namespace's claims and, if wanted, the cluster's ResourceSlices.
        """
        watches = [
            self._join_watch(key, "pods", selector),
            self._join_watch(key, "resourceclaims", None),
        ]
        watches += [self._join_watch(key, "resourceslices", None)] if slices else []
        self._leave_watches(key, watches)
        if not all(each.reflector.listed for each in watches):
            return NeighbourObjects(unknown=next((w.problem for w in watches if w.problem), ""))
        found = [each.pool_values(key) for each in watches]
        return NeighbourObjects(found[0], found[1], found[2] if slices else ())

    def subscribe_inside(self, key: PoolKey, selector: TrainerSelector) -> NeighbourObjects:
        """Return the same for the pods that a pool is in; nobody asks for claims."""
        members = self._join_watch(key, "members", selector)
        self._leave_watches(key, (members,))
        if not members.reflector.listed:
            return NeighbourObjects(unknown=members.problem)
        return NeighbourObjects(members.pool_values(key))

    def subscribe_cordons(self, key: PoolKey) -> NeighbourObjects:
        """Return the cordoned nodes of the cluster, for a pool that runs on any of its nodes."""
        nodes = self._join_watch(key, "nodes", None)
        self._leave_watches(key, (nodes,))
        if not nodes.reflector.listed:
            return NeighbourObjects(unknown=nodes.problem)
        return NeighbourObjects(nodes=nodes.pool_values(key))

    def unsubscribe_pool(self, key: PoolKey) -> None:
        """End the subscription of a pool that is gone, or depends on nothing now."""
        self._leave_watches(key, ())

    async def run(self) -> None:
        """Watch what pools have asked for, until cancelled."""
        async with asyncio.TaskGroup() as self._group:
            for scope, watch in self._watches.items():
                self._start_watch(scope, watch)
            await asyncio.Event().wait()

    def _start_watch(self, scope: WatchScope, watch: _NeighbourWatch) -> None:
        if self._group is not None:
            watch.task = self._group.create_task(self._keep_watch(scope, watch))

    async def _keep_watch(self, scope: WatchScope, watch: _NeighbourWatch) -> None:
        """Follow a watch, and start it again if a stranger's object ends it, which must not end the others."""
        while True:
            try:
                await self._follow_watch(watch)
            except Exception:
                logger.exception("the watch of %s ended", scope)
            await asyncio.sleep(MAX_LIST_RETRY_SECONDS)

    def _join_watch(
        self, key: PoolKey, resource: NeighbourResource, selector: TrainerSelector | None
    ) -> _NeighbourWatch:
        scope = self._watch_scope(key, resource, selector)
        watch = self._watches.get(scope)
        if watch is None:
            watch = self._watches[scope] = self._make_watch(scope)
            self._start_watch(scope, watch)
        watch.pools[key] = selector if scope.selector is None else None
        return watch

    def _make_watch(self, scope: WatchScope) -> _NeighbourWatch:
        def read(obj: Obj) -> tuple[str, tuple[Labels, object] | None]:
            meta, value = obj["metadata"], self._read[scope.resource](obj)
            # Where the API server selects, other labels change nothing for a pool.
            labels = (meta.get("labels") or {}) if scope.is_shared else {}
            return meta["name"], None if value is None else (labels, value)

        selector = UNMANAGED_SELECTOR if scope.is_shared else scope.selector
        of = resource_collection(
            scope.api_resource, scope.namespace, selector, scope.field_selector
        )
        watch = _NeighbourWatch(
            Reflector(
                lambda: follow_collection(
                    self._kube,
                    of,
                    read,
                    lambda error: self._note_trouble(watch, error),
                    seconds=self._seconds,
                    pauses=(LIST_RETRY_SECONDS, MAX_LIST_RETRY_SECONDS),
                )
            )
        )
        return watch

    def _watch_scope(
        self, key: PoolKey, resource: NeighbourResource, selector: TrainerSelector | None
    ) -> WatchScope:
        """Return the watch that shows these objects: their own, or that of the whole namespace."""
        namespace = None if resource in _CLUSTER_RESOURCES else key.namespace
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
        """Take a pool from all other watches; one without subscribers ends, and none joins it again."""
        for scope, watch in list(self._watches.items()):
            if key not in watch.pools or any(watch is each for each in kept):
                continue
            del watch.pools[key]
            if not watch.pools:
                del self._watches[scope]
                if watch.task is not None:
                    watch.task.cancel()

    async def _follow_watch(self, watch: _NeighbourWatch) -> None:
        """Wake the pools that each change is about; all of them by the first list."""
        known = False
        async with aclosing(watch.reflector.changes()) as changes:
            async for changed in changes:
                labels = [each[0] for pair in changed for each in pair if each is not None]
                few = known and len(labels) < WAKE_ALL_CHANGES
                self._wake_pools(watch, labels if few else None)
                known = True

    def _wake_pools(self, watch: _NeighbourWatch, changed: Collection[Labels] | None) -> None:
        """Wake the pools that select an object with these labels; None: all of them."""
        for key, chosen in list(watch.pools.items()):
            if changed is None or any(
                chosen is None or chosen.matches_labels(each) for each in changed
            ):
                self._wake(key)

    def _note_trouble(self, watch: _NeighbourWatch, error: KubeError | None) -> None:
        """Log a new problem, and wake the pools that know nothing because of it: they report it."""
        text = "" if error is None else explain_error(error, _ABSENT)
        if text == watch.problem:
            return
        watch.problem = text
        if text:
            logger.warning("%s", text)
            if not watch.reflector.listed:
                self._wake_pools(watch, None)
