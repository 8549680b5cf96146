"""The PodGroups of one pool: each replica that may have pods has one, and no other replica.

They are not in the store, since their kind may be missing in the cluster: `GangWatch` lists them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import partial

from rollout_common.kube.errors import AlreadyExists, NotFound
from rollout_operator.api.gangs import GangScheduler, group_resource, pod_group_name
from rollout_operator.api.objects import Obj
from rollout_operator.api.spec import RolloutReplicaSpec
from rollout_operator.core.pass_plan import PassPlan
from rollout_operator.core.pods.pod_groups import pod_group
from rollout_operator.core.services import is_controlled_by

from .pass_input import PassInput
from .pool_writer import PoolWriter
from .settings import REFUSED_RETRY_SECONDS
from .write_obstacles import CONFLICT

logger = logging.getLogger(__name__)


class GroupWriter:
    """Writes the PodGroups of one pass, for a scheduler that needs them; obstacles are the pool's, see `PoolWriter`."""

    def __init__(
        self, writer: PoolWriter, spec: RolloutReplicaSpec, scheduler: GangScheduler
    ) -> None:
        self._writer = writer
        self._spec = spec
        self._scheduler = scheduler
        self._resource = group_resource(scheduler)

    async def write_groups(self, pass_input: PassInput, plan: PassPlan) -> frozenset[int]:
        """Make the groups that are missing, and remove those without a replica.

        Returns:
            Replicas whose group is not there: their pods would be scheduled one by one.
        """
        gangs, key = self._writer.ctx.gangs, self._writer.key
        known = gangs.pool_groups(key)
        present = {pod.replica for pod in pass_input.seen.pods}
        new = {create.replica for create in plan.create}
        if self._spec.scheduling.gang is None:
            # Pods of the former template may need theirs for as long as they are there.
            keep, missing = present, set[int]()
        else:
            lost = {r for r in present & plan.replicas if pod_group_name(key.name, r) not in known}
            keep, missing = present | new | plan.replicas, new | lost
        await self._remove_surplus({pod_group_name(key.name, r) for r in keep})
        replicas = sorted(missing)
        made: list[Obj | None] = []
        await self._writer.run_all(self._ensure_group(r, made) for r in replicas)
        there = {each["metadata"]["name"] for each in made if each is not None}
        return frozenset(r for r in replicas if pod_group_name(key.name, r) not in there)

    async def _remove_surplus(self, keep: Collection[str]) -> None:
        known = self._writer.ctx.gangs.pool_groups(self._writer.key)
        surplus = [(name, uid) for name, uid in known.items() if name not in keep]
        await self._writer.run_all(self._remove_group(name, uid) for name, uid in surplus)

    async def _remove_group(self, name: str, uid: str) -> None:
        what, send = f"the deletion of podgroup {name!r}", partial(self._send_delete, name, uid)
        await self._writer.run_guarded(
            f"delete podgroup/{name}", what, ("delete", self._resource), send
        )

    async def _send_delete(self, name: str, uid: str) -> None:
        ctx, key = self._writer.ctx, self._writer.key
        try:
            await ctx.kube.delete(self._resource, key.namespace, name, uid=uid)
        except NotFound:
            logger.debug("podgroup %s is gone already", name, extra=self._writer.extra)
        ctx.gangs.note_group(key, name, None)

    async def _ensure_group(self, replica: int, made: list[Obj | None]) -> None:
        key, uid = self._writer.key, self._writer.uid
        body = pod_group(key.name, key.namespace, uid, replica, self._spec, self._scheduler)
        name = body["metadata"]["name"]
        label, send = f"podgroup/{name}", partial(self._send_group, body)
        request = ("create", self._resource)
        made.append(await self._writer.run_guarded(label, f"podgroup {name!r}", request, send))

    async def _send_group(self, body: Obj) -> Obj | None:
        ctx, key, name = self._writer.ctx, self._writer.key, body["metadata"]["name"]
        try:
            found = await ctx.kube.create(self._resource, body)
        except AlreadyExists:
            found = await ctx.kube.get(self._resource, key.namespace, name)
            if not self._is_usable(found):
                return None
            if any(found["spec"].get(field) != want for field, want in body["spec"].items()):
                change = {"metadata": {"uid": found["metadata"]["uid"]}, "spec": body["spec"]}
                found = await ctx.kube.patch(self._resource, key.namespace, name, change)
        ctx.gangs.note_group(key, name, found["metadata"]["uid"])
        return found

    def _is_usable(self, found: Obj) -> bool:
        """Whether the PodGroup of our name is ours and stays; else `obstacles` says why not."""
        note, name = self._writer.obstacles.note_obstacle, found["metadata"]["name"]
        label, later = f"podgroup/{name}", self._writer.ctx.monotonic() + REFUSED_RETRY_SECONDS
        if self._writer.will_be_deleted(found):
            note(label, "", "", later, 0)  # no event says when its name gets free
            return False
        if not is_controlled_by(found, self._writer.uid):
            text = f"{label} exists but is not ours: delete it, or give the RolloutReplica another name"
            note(label, CONFLICT, text, later)
            return False
        return True
