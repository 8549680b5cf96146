"""An API server in memory: versions, conflicts, generations, graceful deletion, and its etcd's history.

What it does is compared with a real one by `tests/api/test_memory_api.py`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rollout_operator.api.objects import Obj

Key = tuple[str, str, str]
"""Resource, namespace and name."""

WITH_STATUS = ("pods", "rolloutreplicas", "poddisruptionbudgets")
"""Resources whose status is written by a route of its own."""


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


def status_body(code: int, reason: str, message: str) -> Obj:
    """Return the API's object for an error."""
    return {"kind": "Status", "code": code, "reason": reason, "message": message, "metadata": {}}


@dataclass(frozen=True, slots=True)
class Change:
    """A version in the history."""

    version: int
    resource: str
    kind: str
    obj: Obj
    before: Obj | None = None


@dataclass
class MemoryApi:
    """Objects and their history. Nothing that is returned may be changed.

    Attributes:
        clock: Wall-clock seconds.
        compacted: A watch from before this version is answered by 410.
        on_change: Called after each change.
    """

    clock: Callable[[], float]
    objects: dict[Key, Obj] = field(default_factory=dict)
    owned: dict[tuple[Key, str], frozenset[str]] = field(default_factory=dict)
    """What an apply has set, by object and manager."""
    history: list[Change] = field(default_factory=list)
    version: int = 100
    compacted: int = 0
    uids: int = 0
    on_change: list[Callable[[Change], None]] = field(default_factory=list)

    def snapshot(self) -> tuple[Any, ...]:
        """Return what etcd holds; objects are never changed in place."""
        return dict(self.objects), dict(self.owned), self.version

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        """Be as the snapshot was; its history is lost, and versions count from there."""
        objects, owned, self.version = snapshot
        self.objects, self.owned, self.history = dict(objects), dict(owned), []
        self.compacted = self.version

    def of(self, resource: str, namespace: str | None = None) -> Iterator[Obj]:
        """Yield the objects of a resource, by name."""
        for key in sorted(self.objects):
            if key[0] == resource and namespace in (None, key[1]):
                yield self.objects[key]

    def get(self, key: Key) -> Obj:
        if key not in self.objects:
            raise Refused(404, "NotFound", f'{key[0]} "{key[2]}" not found')
        return self.objects[key]

    def create(self, resource: str, body: Obj) -> Obj:
        meta = body["metadata"]
        key = resource, meta["namespace"], meta["name"]
        if key in self.objects:
            raise Refused(409, "AlreadyExists", f'{resource} "{key[2]}" already exists')
        made = _copied(body)
        self.uids += 1
        now = format_time(self.clock())
        made["metadata"] |= {"uid": f"uid-{self.uids}", "creationTimestamp": now, "generation": 1}
        if resource == "pods":
            made["status"] = {"phase": "Pending"}
        elif resource in WITH_STATUS:
            made.pop("status", None)
        return self._store(key, "ADDED", made)

    def patch(self, key: Key, body: Any, kind: str, subresource: str, manager: str = "") -> Obj:
        """Patch an object; one that changes nothing makes no version."""
        now = self.get(key)
        changed = self._merged(key, now, body, manager if kind == "apply" else None)
        meta = changed["metadata"]
        if meta["uid"] != now["metadata"]["uid"]:
            raise Refused(422, "Invalid", "metadata.uid: Invalid value: field is immutable")
        if meta["resourceVersion"] != now["metadata"]["resourceVersion"]:
            raise Refused(409, "Conflict", "the object has been modified")
        if key[0] in WITH_STATUS:
            kept = "spec" if subresource == "status" else "status"
            changed = {**changed, kept: now.get(kept)}
            if changed[kept] is None:
                del changed[kept]
        if changed == now:
            return now
        if changed.get("spec") != now.get("spec"):
            generation = now["metadata"].get("generation", 1) + 1
            changed["metadata"] = {**changed["metadata"], "generation": generation}
        return self._store(key, "MODIFIED", _copied(changed))

    def _merged(self, key: Key, now: Obj, body: Obj, manager: str | None) -> Obj:
        if manager is None:
            merged: Obj = _merge_patched(now, body)
            return merged
        status = body.get("status", {})
        held = self.owned.get((key, manager), frozenset())
        out = {**now, "metadata": {**now["metadata"], **_identity(body["metadata"])}}
        if key[0] == "pods":
            kinds = {c["type"] for c in status["conditions"]}
            there = now["status"].get("conditions", [])
            kept = [c for c in there if c["type"] not in kinds | held]
            out["status"] = {**now["status"], "conditions": [*kept, *status["conditions"]]}
            self.owned[key, manager] = frozenset(kinds)
        else:
            before = {n: v for n, v in (now.get("status") or {}).items() if n not in held}
            out["status"] = {**before, **status}
            self.owned[key, manager] = frozenset(status)
        return out

    def delete(self, key: Key, *, uid: str | None = None, grace: int | None = None) -> Obj:
        """Delete an object; a pod on a node terminates first."""
        now = self.get(key)
        meta = now["metadata"]
        if uid not in (None, meta["uid"]):
            raise Refused(409, "Conflict", f"the UID in the precondition ({uid}) does not match")
        seconds = self._grace(now, grace) if key[0] == "pods" else 0
        if seconds == 0 and not meta.get("finalizers"):
            return self._remove(key, now)
        known = meta.get("deletionGracePeriodSeconds")
        if known is not None and known <= seconds:
            return now
        going = {
            "deletionTimestamp": format_time(self.clock() + seconds),
            "deletionGracePeriodSeconds": seconds,
        }
        return self._store(key, "MODIFIED", {**now, "metadata": {**meta, **going}})

    @staticmethod
    def _grace(pod: Obj, grace: int | None) -> int:
        if not pod["spec"].get("nodeName") or pod["status"]["phase"] in ("Failed", "Succeeded"):
            return 0
        own = int(pod["spec"].get("terminationGracePeriodSeconds", 30))
        return own if grace is None else grace

    def _remove(self, key: Key, now: Obj) -> Obj:
        del self.objects[key]
        self.owned = {held: names for held, names in self.owned.items() if held[0] != key}
        return self._note(key, "DELETED", now, now)

    def _store(self, key: Key, kind: str, obj: Obj) -> Obj:
        before = self.objects.get(key)
        self.objects[key] = stored = self._note(key, kind, obj, before)
        return stored

    def _note(self, key: Key, kind: str, obj: Obj, before: Obj | None) -> Obj:
        self.version += 1
        stored = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(self.version)}}
        change = Change(self.version, key[0], kind, stored, before)
        self.history.append(change)
        for call in self.on_change:
            call(change)
        return stored


def _copied(obj: Obj) -> Obj:
    copied: Obj = json.loads(json.dumps(obj))
    return copied


def _identity(meta: Obj) -> Obj:
    return {n: meta[n] for n in ("uid", "resourceVersion") if meta.get(n)}


def _merge_patched(now: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    out = dict(now) if isinstance(now, dict) else {}
    for name, value in patch.items():
        if value is None:
            out.pop(name, None)
        else:
            out[name] = _merge_patched(out.get(name), value)
    return out


def format_time(seconds: float) -> str:
    """Return a moment as the API writes it."""
    moment = datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
