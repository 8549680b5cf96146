"""The pods of trainers and their ResourceClaims, watched while a pool is beside them, or in them.

Each colocated pool subscribes with its passes (`look`) to the pods that its selector selects and to the
claims of its namespace (and, if it shares their devices out, to the cluster's ResourceSlices), each Hybrid pool (`inside`) to its selector's pods; pools share a watch. A watch lists, follows the events from there, and begins
again after some time or whatever ends it: a late or missed event costs time only. What is known
stays so while the API server is away.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from rollout_operator.api.objects import Key, Obj
from rollout_operator.kube.client import Kube
from rollout_operator.kube.errors import Forbidden, Gone, KubeError, NotFound

logger = logging.getLogger(__name__)

WATCH_SECONDS = 120.0
"""How long events are followed before the next list."""

RETRY_SECONDS = 1.0
"""Least time from one list to the next; doubled with each failure."""

MAX_RETRY_SECONDS = 30.0

Resource = Literal["pods", "resourceclaims", "resourceslices", "members"]
"""Members are pods as well; more is read of them."""
Read = Callable[[Obj], object | None]
"""Makes a value of an object; None: it does not count. Equal values are the same to every pass."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What one watch is about."""

    resource: Resource
    namespace: str | None
    """None: of no namespace."""
    selector: str | None

    @property
    def path(self) -> str:
        """What the API server calls it."""
        return "pods" if self.resource == "members" else self.resource


@dataclass(slots=True)
class _Watched:
    values: dict[str, object] = field(default_factory=dict)
    listed: bool = False
    problem: str = ""
    pools: set[Key] = field(default_factory=set)
    task: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class Neighbours:
    """What a pool has beside it; `unknown` says why it is not known yet."""

    pods: tuple[object, ...] = ()
    claims: tuple[object, ...] = ()
    slices: tuple[object, ...] = ()
    unknown: str | None = None


class Neighbourhood:
    """See the module.

    Args:
        kube: The client.
        read: Makes values of pods and of claims.
        wake: Told which pool to look at.
        seconds: How long a watch follows events before it lists again.
    """

    def __init__(
        self,
        kube: Kube,
        read: Mapping[Resource, Read],
        wake: Callable[[Key], None],
        *,
        seconds: float = WATCH_SECONDS,
    ) -> None:
        self._kube = kube
        self._read = read
        self._wake = wake
        self._seconds = seconds
        self._watched: dict[Scope, _Watched] = {}
        self._stale = asyncio.Event()

    def look(self, key: Key, selector: str, *, slices: bool = False) -> Neighbours:
        """Return what is beside a pool, and have it woken when that changes, until `forget`.

        Args:
            key: the pool.
            selector: of the trainer's pods.
            slices: whether the cluster's ResourceSlices are wanted as well.
        """
        scopes = [
            Scope("pods", key.namespace, selector),
            Scope("resourceclaims", key.namespace, None),
        ]
        scopes += [Scope("resourceslices", None, None)] if slices else []
        watched = [self._join(key, scope) for scope in scopes]
        self._leave(key, {id(each) for each in watched})
        if not all(each.listed for each in watched):
            return Neighbours(unknown=next((w.problem for w in watched if w.problem), ""))
        found = [tuple(each.values.values()) for each in watched]
        return Neighbours(found[0], found[1], found[2] if slices else ())

    def inside(self, key: Key, selector: str) -> Neighbours:
        """Return the same for the pods that a pool is in; nobody asks for claims."""
        members = self._join(key, Scope("members", key.namespace, selector))
        self._leave(key, {id(members)})
        if not members.listed:
            return Neighbours(unknown=members.problem)
        return Neighbours(tuple(members.values.values()))

    def forget(self, key: Key) -> None:
        """End the subscription of a pool that is gone."""
        self._leave(key, set())

    async def run(self) -> None:
        """Watch what pools have asked for, until cancelled."""
        try:
            while True:
                self._stale.clear()
                for scope, watched in list(self._watched.items()):
                    if not watched.pools:
                        await _ended(watched.task)
                        del self._watched[scope]
                    elif watched.task is None or watched.task.done():
                        follow = self._follow(scope, watched)
                        watched.task = asyncio.create_task(follow, name=f"watch of {scope}")
                        watched.task.add_done_callback(self._restart)
                await self._stale.wait()
        finally:
            for watched in self._watched.values():
                await _ended(watched.task)

    def _restart(self, task: asyncio.Task[None]) -> None:
        """Begin a watch again that ended by an object which nobody expected."""
        if not task.cancelled() and task.exception() is not None:
            logger.error("the %s ended", task.get_name(), exc_info=task.exception())
            asyncio.get_running_loop().call_later(MAX_RETRY_SECONDS, self._stale.set)

    def _join(self, key: Key, scope: Scope) -> _Watched:
        watched = self._watched.setdefault(scope, _Watched())
        if not watched.pools:
            self._stale.set()
        watched.pools.add(key)
        return watched

    def _leave(self, key: Key, kept: set[int]) -> None:
        for watched in self._watched.values():
            if key in watched.pools and id(watched) not in kept:
                watched.pools.discard(key)
                self._stale.set()

    async def _follow(self, scope: Scope, watched: _Watched) -> None:
        """List and watch, over and over; how often is bounded, however soon streams end."""
        delay = RETRY_SECONDS
        while True:
            began = time.monotonic()
            try:
                await self._once(scope, watched)
                delay = RETRY_SECONDS
            except Gone:
                delay = RETRY_SECONDS  # the list is too old for its events: take another one
            except KubeError as error:
                self._complain(watched, error)
                delay = min(MAX_RETRY_SECONDS, 2 * delay)
            due = began + delay * random.uniform(0.8, 1.2)
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def _once(self, scope: Scope, watched: _Watched) -> None:
        """List, and follow the events for a while."""
        found: dict[str, object] = {}
        version = ""
        pages = self._kube.list_pages(scope.path, scope.namespace, selector=scope.selector)
        async for page in pages:
            version = version or page.resource_version
            for obj in page.items:
                self._put(scope, found, obj)
        changed = not watched.listed or found != watched.values
        watched.values, watched.listed, watched.problem = found, True, ""
        if changed:
            self._tell(watched)
        events = self._kube.watch(
            scope.path, scope.namespace, version, selector=scope.selector, seconds=self._seconds
        )
        async for kind, obj in events:
            if kind in ("ADDED", "MODIFIED", "DELETED"):
                self._take(scope, watched, kind, obj)

    def _take(self, scope: Scope, watched: _Watched, kind: str, obj: Obj) -> None:
        name = obj["metadata"]["name"]
        before = watched.values.get(name)
        if kind == "DELETED":
            watched.values.pop(name, None)
        else:
            self._put(scope, watched.values, obj)
        if watched.values.get(name) != before:
            self._tell(watched)

    def _put(self, scope: Scope, values: dict[str, object], obj: Obj) -> None:
        value = self._read[scope.resource](obj)
        name = obj["metadata"]["name"]
        if value is None:
            values.pop(name, None)
        else:
            values[name] = value

    def _tell(self, watched: _Watched) -> None:
        for key in watched.pools:
            self._wake(key)

    def _complain(self, watched: _Watched, error: KubeError) -> None:
        """Log a new problem, and have the pools tell it that know nothing because of it."""
        text = _explained(error)
        if text == watched.problem:
            return
        logger.warning("%s", text)
        watched.problem = text
        if not watched.listed:
            self._tell(watched)


async def _ended(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait({task})


def _explained(error: KubeError) -> str:
    """Return the error with what to do about it, where that is known."""
    if isinstance(error, NotFound):
        return f"{error}; does the cluster have resource.k8s.io/v1 (Kubernetes 1.34)?"
    if isinstance(error, Forbidden):
        return f"{error}; the operator's role lacks this permission: upgrade its chart"
    return str(error)
