"""Writes whose effect the watch has not shown yet.

Between a create or delete and its event a pass would see an old world: it would create again or
delete another one. Names are deterministic and answers go into the store, so the API server would
catch a mistake anyway; expectations save the calls and the wrong status. They expire after a
minute, because a lost event may delay a pool but never stop it.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from rollout_operator.api.objects import Key, Obj, ResourceName

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _Expected:
    key: Key
    verb: Literal["create", "delete"]
    resource: ResourceName
    name: str
    since: float


class Expectations:
    """Creates and deletes in flight, by pool.

    Args:
        clock: Monotonic seconds.
        on_timeout: Called with the resource for every expectation that expired.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        on_timeout: Callable[[str], None] = lambda resource: None,
    ) -> None:
        self._clock = clock
        self._on_timeout = on_timeout
        self._by_uid: dict[tuple[str, str], _Expected] = {}
        self._by_key: defaultdict[Key, set[tuple[str, str]]] = defaultdict(set)

    def expect_create(self, key: Key, resource: ResourceName, name: str, uid: str) -> None:
        """Expect the watch to show the object that a create of ours returned."""
        self._add("create", key, resource, name, uid)

    def expect_delete(self, key: Key, resource: ResourceName, name: str, uid: str) -> None:
        """Expect the watch to show the object terminating or gone."""
        self._add("delete", key, resource, name, uid)

    def forget_delete(self, uid: str) -> None:
        """Expect the delete no more: it failed, or there was nothing to delete."""
        self._remove(("delete", uid))

    def observe(self, resource: ResourceName, event: str | None, obj: Obj) -> Key | None:
        """Take a watch event: it fulfils what was expected of this object.

        Returns:
            The pool that waited for this event. The store may have known the object already, by
            the answer to our write, so this can be the only reason to look at the pool.
        """
        meta = obj["metadata"]
        uid = meta.get("uid", "")
        waited = self._remove(("create", uid))
        if event == "DELETED" or meta.get("deletionTimestamp"):
            waited = self._remove(("delete", uid)) or waited
        return waited

    def listed(
        self,
        resource: ResourceName,
        objs: Iterable[Obj],
        *,
        started: float,
        namespace: str | None = None,
    ) -> set[Key]:
        """Take a whole list that was begun at monotonic time `started`.

        What it shows has been seen. What was expected before the list began but is missing is gone.

        Returns:
            The pools that waited for something of this.
        """
        present = set()
        waited: set[Key | None] = set()
        for obj in objs:
            present.add(obj["metadata"].get("uid", ""))
            waited.add(self.observe(resource, None, obj))
        for ident, expected in list(self._by_uid.items()):
            in_scope = expected.resource == resource and namespace in (None, expected.key.namespace)
            if in_scope and expected.since < started and ident[1] not in present:
                waited.add(self._remove(ident))
        return {key for key in waited if key is not None}

    def pending(self, key: Key) -> int:
        """Return how many writes of this pool the watch has yet to show."""
        if key not in self._by_key:
            return 0
        self._expire(key)
        return len(self._by_key.get(key, ()))

    def forget(self, key: Key) -> None:
        """Drop all expectations of a pool, because it is gone."""
        for ident in list(self._by_key.get(key, ())):
            self._remove(ident)

    def _add(
        self,
        verb: Literal["create", "delete"],
        key: Key,
        resource: ResourceName,
        name: str,
        uid: str,
    ) -> None:
        ident = (verb, uid)
        self._remove(ident)
        self._by_uid[ident] = _Expected(key, verb, resource, name, self._clock())
        self._by_key[key].add(ident)

    def _remove(self, ident: tuple[str, str]) -> Key | None:
        expected = self._by_uid.pop(ident, None)
        if expected is None:
            return None
        idents = self._by_key[expected.key]
        idents.discard(ident)
        if not idents:
            del self._by_key[expected.key]
        return expected.key

    def _expire(self, key: Key) -> None:
        now = self._clock()
        for ident in list(self._by_key.get(key, ())):
            expected = self._by_uid[ident]
            if now - expected.since > TIMEOUT_SECONDS:
                self._remove(ident)
                self._on_timeout(expected.resource)
                logger.warning(
                    "the watch did not show the %s of %s %r within %d s: looking again",
                    expected.verb,
                    expected.resource,
                    expected.name,
                    TIMEOUT_SECONDS,
                    extra={"pool": str(key)},
                )
