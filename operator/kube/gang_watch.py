"""Which gang scheduler the cluster has, and the PodGroups that the operator made for it.

Both are looked at again and again in the background, because installations come and go; a pass reads
what was found last and waits for nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing

from rollout_common.kube.errors import Forbidden, KubeError
from rollout_common.kube.reflector import list_pages
from rollout_operator.api.gangs import API_GROUPS, GangScheduler, group_resource, needs_groups
from rollout_operator.api.names import LABEL_MANAGED_BY, LABEL_POOL, MANAGER_NAME
from rollout_operator.api.objects import Obj, PoolKey

from .kube_client import KubeClient, resource_collection
from .settings import GANG_LOOK_SECONDS, GANG_RETRY_SECONDS

logger = logging.getLogger(__name__)

GroupUids = Mapping[str, str]
"""Uids of a pool's PodGroups by name."""

_SETTING = "--gang-scheduler (extraArgs in the operator's chart)"


class GangWatch:
    """Looks for gang schedulers while `run` is running, and wakes each pool for which something changed.

    PodGroups are listed in `namespaces`, or everywhere if there are none. `chosen` is the one scheduler to use; None:
    the one that the cluster has.
    """

    def __init__(
        self,
        kube: KubeClient,
        wake: Callable[[PoolKey], None],
        namespaces: Sequence[str] = (),
        chosen: GangScheduler | None = None,
    ) -> None:
        self._kube = kube
        self._wake = wake
        self._namespaces = namespaces
        self._chosen = chosen
        self.found: frozenset[GangScheduler] | None = None
        """The schedulers that the cluster has; None: nobody has looked yet."""
        self._pools: set[PoolKey] = set()
        self._groups: dict[PoolKey, dict[str, str]] = {}
        self._refused: set[str] = set()
        """Namespaces whose PodGroups may not be listed: gone with the role in them, or not granted yet."""

    @property
    def scheduler(self) -> GangScheduler | None:
        """The scheduler that takes gangs; None: there is none, or none is known yet."""
        return self._choose_scheduler(self.found or frozenset())

    def _choose_scheduler(self, there: frozenset[GangScheduler]) -> GangScheduler | None:
        if self._chosen is not None:
            return self._chosen if self._chosen in there else None
        return next(iter(there)) if len(there) == 1 else None

    def find_trouble(self) -> str:
        """Return why no scheduler takes gangs, with the fix; empty: one does, or it is not known yet."""
        if self.found is None or self.scheduler is not None:
            return ""
        if self._chosen is not None:
            return (
                f"spec.scheduling.gang is set and the cluster lacks {self._chosen}, which {_SETTING} "
                "names: install it, change the setting, or remove spec.scheduling"
            )
        if self.found:
            return (
                f"spec.scheduling.gang is set and the cluster has {' and '.join(sorted(self.found))}: "
                f"name one in {_SETTING}"
            )
        return (
            "spec.scheduling.gang is set and the cluster has no gang scheduler: install Kueue, Volcano or "
            "scheduler-plugins, or remove spec.scheduling"
        )

    def note_pool(self, key: PoolKey, *, wants_gang: bool) -> None:
        """Note whether the pool is to be woken when another scheduler is found."""
        (self._pools.add if wants_gang else self._pools.discard)(key)

    def pool_groups(self, key: PoolKey) -> GroupUids:
        """Return the pool's PodGroups as last listed, with what was written since."""
        return self._groups.get(key, {})

    def note_group(self, key: PoolKey, name: str, uid: str | None) -> None:
        """Note that a PodGroup is there, or, with None, that it is gone."""
        if uid is not None:
            self._groups.setdefault(key, {})[name] = uid
        elif key in self._groups:
            self._groups[key].pop(name, None)

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            try:
                await self.look_again()
            except KubeError as error:
                logger.warning("can't look for gang schedulers: %s", error)
                await asyncio.sleep(GANG_RETRY_SECONDS)
            else:
                await asyncio.sleep(GANG_LOOK_SECONDS)

    async def look_again(self) -> None:
        """Look once, and wake the pools for which something changed.

        Raises:
            KubeError: The API server did not answer, or refused; what was known stays.
        """
        there = frozenset(API_GROUPS[n] for n in await self._kube.get_group_names() & {*API_GROUPS})
        scheduler = self._choose_scheduler(there)
        try:
            found = await self._list_groups(scheduler) if needs_groups(scheduler) else {}
            changed = {
                k
                for k in found.keys() | self._groups
                if found.get(k, {}) != self._groups.get(k, {})
            }
            self._groups = found
            self._wake_all(changed)
        finally:
            # After the list, without which each group would seem to be missing. But if that is refused,
            # a pool's own write says why.
            self._note_schedulers(there)

    def _note_schedulers(self, there: frozenset[GangScheduler]) -> None:
        before, self.found = self.found, there
        if there != before:
            logger.info("gang schedulers in the cluster: %s", ", ".join(sorted(there)) or "none")
            self._wake_all(self._pools)

    async def _list_groups(self, scheduler: GangScheduler) -> dict[PoolKey, dict[str, str]]:
        found: dict[PoolKey, dict[str, str]] = {}
        resource = group_resource(scheduler)
        selector = f"{LABEL_MANAGED_BY}={MANAGER_NAME}"
        for namespace in self._namespaces or (None,):
            of = resource_collection(resource, namespace, selector)
            try:
                async with aclosing(list_pages(self._kube, of)) as pages:
                    async for page in pages:
                        for item in page.items:
                            _add_group(found, item)
            except Forbidden as error:
                if namespace is None or len(self._namespaces) == 1:
                    raise
                self._keep_groups(found, namespace, error)
            else:
                self._refused.discard(namespace or "")
        return found

    def _keep_groups(
        self, found: dict[PoolKey, dict[str, str]], namespace: str, error: Forbidden
    ) -> None:
        """Go on with what was known of a namespace that can't be listed: others must not be blind for it."""
        found |= {key: groups for key, groups in self._groups.items() if key.namespace == namespace}
        if namespace not in self._refused:
            logger.warning("can't list the PodGroups of %s: %s", namespace, error)
        self._refused.add(namespace)

    def _wake_all(self, keys: Iterable[PoolKey]) -> None:
        for key in tuple(keys):
            self._wake(key)


def _add_group(found: dict[PoolKey, dict[str, str]], item: Obj) -> None:
    """Add a PodGroup to those of its pool; one that terminates is gone."""
    meta = item["metadata"]
    pool = (meta.get("labels") or {}).get(LABEL_POOL)
    if pool and meta.get("deletionTimestamp") is None:
        found.setdefault(PoolKey(meta["namespace"], pool), {})[meta["name"]] = meta["uid"]
