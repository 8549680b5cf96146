"""What the operator believes the cluster holds: pools, and what is labelled as theirs.

That is pods, Services, PodDisruptionBudgets and, of Hybrid pools, EndpointSlices. They come from the watch streams (`apply_event`),
from the answers to our own writes (`upsert_written`) and from whole lists (`replace_listed`). A list removes
ghosts: objects whose DELETED event never came, which happens after a 410 and when a stream was cut. Objects
are ordered by `resourceVersion`, so a late event never undoes a newer one: a deleted object leaves a
tombstone until the next list, and nothing older than a list is believed after it. A list is the truth about
all that is not newer than it, and where it is older than what was known before it was asked for, the cluster
came back from a backup: then it is the truth about everything. Events and lists come
as `read_object` makes them: of a pod only what passes read is kept, and an event that changes nothing of that
wakes nobody. Nothing is copied on reading: callers must not change what they get.

The store also keeps pools of another operator's class, so that their children do not seem to lack a pool;
it shows neither these pools nor their children.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

from rollout_operator.api.names import LABEL_MANAGED_BY, LABEL_POOL, MANAGER_NAME
from rollout_operator.api.objects import WATCHED_RESOURCES, Obj, PoolKey, ResourceName

P = TypeVar("P")


class StoredObject(NamedTuple):
    """An object as the store orders and finds it; `value` is what it keeps of it."""

    key: PoolKey
    uid: str
    version: int
    """0 of servers that don't number."""
    pool: PoolKey | None
    """The pool that the object is or says it belongs to, by its labels."""
    value: Any


class ListOutcome(NamedTuple):
    """What a list changed in the store."""

    touched: set[PoolKey]
    """Pools in which something came, changed or went."""
    ghosts: int
    """Objects that were known and are gone."""
    rewound: bool
    """The cluster came back from a backup: versions run backwards."""


class ObjectStore(Generic[P]):
    """Objects by pool: pods as `read_pod` makes them, others raw.

    Args:
        read_pod: Makes of a pod what passes read; equal values are the same to them.
        operator_class: `spec.operatorClass` of the pools that this operator acts on; empty: of those
            without one.
        covers_pool: Returns whether a pool is of the shard that this process leads; others, and their children,
            are not stored at all.
    """

    def __init__(
        self,
        read_pod: Callable[[Obj], P],
        operator_class: str = "",
        covers_pool: Callable[[PoolKey], bool] = lambda key: True,
    ) -> None:
        self._read_pod = read_pod
        self._class = operator_class
        self._kinds: dict[ResourceName, _ResourceStore] = {
            name: _ResourceStore(name, covers_pool) for name in WATCHED_RESOURCES
        }

    def find_pool(self, key: PoolKey) -> Obj | None:
        """Return the RolloutReplica, or None if there is none (any more)."""
        found = self._kinds["pools"].objects.get(key)
        return None if found is None or not self._is_our_key(key) else found.value

    def _is_our_key(self, key: PoolKey) -> bool:
        """Return whether it is of our class; a missing pool counts, since it may have left children."""
        pool = self._kinds["pools"].objects.get(key)
        spec = {} if pool is None else pool.value.get("spec") or {}
        return pool is None or (spec.get("operatorClass") or "") == self._class

    def _pool_objects(self, resource: ResourceName, key: PoolKey) -> list[Any]:
        members = self._kinds[resource].by_pool.get(key, {}) if self._is_our_key(key) else {}
        return [members[name].value for name in sorted(members)]

    def pool_pods(self, key: PoolKey) -> list[P]:
        """Return the pool's pods, sorted by name."""
        return self._pool_objects("pods", key)

    def pod_count(self, key: PoolKey) -> int:
        """Return how many pods the pool has."""
        return len(self._kinds["pods"].by_pool.get(key, ())) if self._is_our_key(key) else 0

    def pool_services(self, key: PoolKey) -> list[Obj]:
        """Return the pool's Services, sorted by name."""
        return self._pool_objects("services", key)

    def pool_slices(self, key: PoolKey) -> list[Obj]:
        """Return the EndpointSlices that we made for the pool, sorted by name; only Hybrid pools have any."""
        return self._pool_objects("endpointslices", key)

    def pool_budgets(self, key: PoolKey) -> list[Obj]:
        """Return the PodDisruptionBudgets that we made for the pool, sorted by name."""
        return self._pool_objects("poddisruptionbudgets", key)

    def pool_keys(self) -> list[PoolKey]:
        """Return the keys of all pools of our class."""
        return list(filter(self._is_our_key, self._kinds["pools"].objects))

    def read_object(self, resource: ResourceName, obj: Obj) -> StoredObject:
        """Return what is kept of an object: what passes read."""
        meta = obj["metadata"]
        key = PoolKey(sys.intern(meta.get("namespace", "")), sys.intern(meta["name"]))
        pool = key if resource == "pools" else _labelled_pool(key.namespace, meta)
        version = _version_number(meta.get("resourceVersion"))
        value = self._read_pod(obj) if resource == "pods" else _trim_object(resource, obj)
        return StoredObject(key, sys.intern(meta.get("uid", "")), version, pool, value)

    def apply_event(
        self, resource: ResourceName, event: str | None, obj: StoredObject
    ) -> set[PoolKey]:
        """Take a watch event; `event` is None for an object from a stream's first list.

        Returns:
            The pools to look at: none where nothing of ours changed (an older version than the one
            known, an object that belongs to no pool), two where a child moved between pools.
        """
        kind = self._kinds[resource]
        touched = kind.remove_object(obj) if event == "DELETED" else kind.put_object(obj)
        return self._pools_to_wake(resource, touched)

    def _pools_to_wake(self, resource: ResourceName, touched: set[PoolKey]) -> set[PoolKey]:
        """Return the touched pools to look at; a pool that went to another class is still one, to be let go."""
        return touched if resource == "pools" else {key for key in touched if self._is_our_key(key)}

    def upsert_written(self, resource: ResourceName, obj: Obj) -> bool:
        """Take the answer to a write of ours, so that the next pass sees it before the watch.

        Return whether this changed the store; the watch may have been faster.
        """
        return bool(self._kinds[resource].put_object(self.read_object(resource, obj)))

    def upsert_deleted(self, resource: ResourceName, key: PoolKey, uid: str, answer: Obj) -> bool:
        """Take the answer to a delete of ours: the object as it terminates, or that it is gone; return whether the store changed.

        An object without a version is gone, too: somebody else's delete was faster, and the API server
        answers with what it has read before.
        """
        kind = self._kinds[resource]
        meta = answer.get("metadata") or {}
        if meta.get("deletionTimestamp") and meta.get("resourceVersion"):
            return self.upsert_written(resource, answer)
        known = kind.objects.get(key)
        return known is not None and known.uid == uid and bool(kind.remove_object(known))

    def begin_list(self, resource: ResourceName, namespace: str | None = None) -> None:
        """Note that a list is about to be asked for, of one namespace or (None) of all."""
        self._kinds[resource].begin_list(namespace)

    def replace_listed(
        self,
        resource: ResourceName,
        objs: Iterable[StoredObject],
        *,
        listed_at: str,
        namespace: str | None = None,
    ) -> ListOutcome:
        """Take a finished list of one namespace, or (None) of all: add and change what it holds, remove what it lacks.

        `listed_at` is the list's `resourceVersion`.
        """
        found = self._kinds[resource].replace_listed(objs, _version_number(listed_at), namespace)
        return found._replace(touched=self._pools_to_wake(resource, found.touched))

    def object_counts(self) -> dict[ResourceName, int]:
        """Return how many objects of each resource are known."""
        return {name: len(kind.objects) for name, kind in self._kinds.items()}


def _labelled_pool(namespace: str, meta: Obj) -> PoolKey | None:
    labels = meta.get("labels") or {}
    pool = labels.get(LABEL_POOL)
    if not pool or labels.get(LABEL_MANAGED_BY) != MANAGER_NAME:
        return None
    return _shared_key(namespace, pool)


_shared_key = lru_cache(maxsize=16_384)(PoolKey)
"""A pool's key is the same object in all that belongs to it."""


_TRIMMED = ("services", "poddisruptionbudgets")
_CHILD_METADATA = (
    "name", "namespace", "uid", "resourceVersion", "labels", "annotations", "ownerReferences", "deletionTimestamp",
)  # fmt: skip
_CHILD_SPEC = (
    "selector", "publishNotReadyAddresses", "ports",
    "minAvailable", "maxUnavailable", "unhealthyPodEvictionPolicy",
)  # fmt: skip


def _trim_object(resource: ResourceName, obj: Obj) -> Obj:
    """Return an object without `managedFields`; of a Service or PodDisruptionBudget what passes read, which leaves status out."""
    meta = obj["metadata"]
    if resource not in _TRIMMED:
        kept = {name: value for name, value in meta.items() if name != "managedFields"}
        return {**obj, "metadata": kept}
    spec = obj.get("spec") or {}
    return {
        "kind": obj.get("kind"),
        "metadata": {name: meta[name] for name in _CHILD_METADATA if name in meta},
        "spec": {name: spec[name] for name in _CHILD_SPEC if name in spec},
    }


def _without_version(resource: ResourceName, obj: StoredObject) -> StoredObject:
    """Return what passes would see no difference in; a pool is another object with each version."""
    value = obj.value
    if resource in _TRIMMED:
        value = {**value, "metadata": {**value["metadata"], "resourceVersion": ""}}
    return obj._replace(version=0, value=value)


def _version_number(version: str | None) -> int:
    """Return a resourceVersion as a number; servers that don't number order nothing (0)."""
    return int(version) if version and version.isdecimal() else 0


class _ResourceStore:
    """All known objects of one resource, by (namespace, name), with an index by pool."""

    def __init__(self, resource: ResourceName, covers_pool: Callable[[PoolKey], bool]) -> None:
        self._resource: ResourceName = resource
        self._covers_pool = covers_pool
        self.objects: dict[PoolKey, StoredObject] = {}
        self.by_pool: defaultdict[PoolKey, dict[str, StoredObject]] = defaultdict(dict)
        self._tombstones: dict[str, tuple[str, int]] = {}  # uid to namespace and version
        self._listed_at: dict[str | None, int] = {}
        self._floors: dict[str | None, int] = {}
        """By namespace (None: all), the newest version that was known before its list was asked for."""

    def put_object(self, obj: StoredObject) -> set[PoolKey]:
        if self._is_late(obj) or self._is_listed(obj):
            return set()
        return self._replace_object(obj)

    def _replace_object(self, obj: StoredObject) -> set[PoolKey]:
        known, pool = self.objects.get(obj.key), obj.pool
        same = known is not None and _without_version(self._resource, known) == _without_version(
            self._resource, obj
        )
        touched = self._drop_object(obj.key)
        if pool is not None and self._covers_pool(pool):
            self.objects[obj.key] = self.by_pool[pool][obj.key.name] = obj
            touched.add(pool)
        return set() if same else touched

    def remove_object(self, obj: StoredObject) -> set[PoolKey]:
        self._tombstones[obj.uid] = (obj.key.namespace, obj.version)
        known = self.objects.get(obj.key)
        if known is None or known.uid != obj.uid:
            return set()  # a namesake took the place already
        if obj.version and known.version > obj.version:
            return set()  # its labels came back after it had left the selector
        return self._drop_object(obj.key)

    def begin_list(self, namespace: str | None) -> None:
        known = ((key.namespace, obj.version) for key, obj in self.objects.items())
        seen = (
            v for where, v in (*known, *self._tombstones.values()) if namespace in (None, where)
        )
        self._floors[namespace] = max(seen, default=0)

    def replace_listed(
        self, objs: Iterable[StoredObject], listed_at: int, namespace: str | None
    ) -> ListOutcome:
        touched, rewound = self._start_over_if_rewound(listed_at, namespace)
        present = set()
        ghosts = 0
        for obj in objs:
            present.add(obj.uid)
            touched |= self._put_listed(obj, listed_at)
        for key, known in list(self.objects.items()):
            if known.uid in present or namespace not in (None, key.namespace):
                continue
            if listed_at and known.version > listed_at:
                continue  # made or changed after the list was taken
            touched |= self._drop_object(key)
            ghosts += 1
        self._listed_at[namespace] = listed_at
        self._tombstones = {
            uid: (where, version)
            for uid, (where, version) in self._tombstones.items()
            if version > listed_at or namespace not in (None, where)
        }
        return ListOutcome(touched, ghosts, rewound)

    def _put_listed(self, obj: StoredObject, listed_at: int) -> set[PoolKey]:
        """Take what a list holds, unless something newer than the list is known of it."""
        known = self.objects.get(obj.key)
        newest = max(self._buried_version(obj), 0 if known is None else known.version)
        if 0 < listed_at < newest:
            return set()
        if known is not None and 0 < known.version == obj.version and known.uid == obj.uid:
            return set()
        return self._replace_object(obj)

    def _start_over_if_rewound(
        self, listed_at: int, namespace: str | None
    ) -> tuple[set[PoolKey], bool]:
        """Forget everything if versions run backwards; return what that touched, and whether they do."""
        floor = max(self._listed_at.get(namespace, 0), self._floors.pop(namespace, 0))
        if not 0 < listed_at < floor:
            return set(), False
        self._tombstones.clear()
        self._listed_at.clear()
        forgotten = [key for key in self.objects if namespace in (None, key.namespace)]
        return set().union(*(self._drop_object(key) for key in forgotten)), True

    def _is_late(self, obj: StoredObject) -> bool:
        if obj.version <= self._buried_version(obj):
            return True
        known = self.objects.get(obj.key)
        # Equal versions are the same object: nothing to wake for.
        return known is not None and 0 < obj.version <= known.version

    def _buried_version(self, obj: StoredObject) -> int:
        return self._tombstones.get(obj.uid, ("", -1))[1]

    def _is_listed(self, obj: StoredObject) -> bool:
        """Return whether the last list knew of this version: then it is in the store, or gone."""
        floor = max(self._listed_at.get(None, 0), self._listed_at.get(obj.key.namespace, 0))
        return 0 < obj.version <= floor

    def _drop_object(self, key: PoolKey) -> set[PoolKey]:
        known = self.objects.pop(key, None)
        if known is None:
            return set()
        pool = known.pool
        assert pool is not None, "only objects of a pool are stored"
        self.by_pool[pool].pop(key.name, None)
        if not self.by_pool[pool]:
            del self.by_pool[pool]
        return {pool}
