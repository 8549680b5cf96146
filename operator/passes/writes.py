"""Writes to the API server: children, gates and the status of one pool.

Names are deterministic, so 409 on create and 404 on delete are success if the object is ours. An
object of somebody else under that name is remembered as a conflict and never touched.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from rollout_operator.api import names
from rollout_operator.api.objects import Key, Obj
from rollout_operator.core.plan import DeletePod, SetGate
from rollout_operator.core.services import differs, pool_services, repair
from rollout_operator.core.world import BOOT_PREFIX
from rollout_operator.kube.errors import AlreadyExists, Conflict, Forbidden, Invalid, NotFound

from .context import Context

logger = logging.getLogger(__name__)

AT_ONCE = 12
"""Writes of one pass in flight. Each turn of the event loop serves all of them, and another pool's
call waits for them at every step: 500 new pods must not make it late."""

_ACCOUNT_HINT = (
    "; add the namespace to the chart's workers.namespaces, or set spec.serviceAccountName"
)


@dataclass(slots=True)
class Obstacles:
    """Why children could not be created, by `kind/name`."""

    conflicts: dict[str, str] = field(default_factory=dict)
    rejections: dict[str, str] = field(default_factory=dict)


class Writer:
    """The writes of one pass over one pool."""

    def __init__(self, ctx: Context, key: Key, uid: str) -> None:
        self.ctx = ctx
        self.key = key
        self.uid = uid
        self.obstacles = Obstacles()
        self._limit = asyncio.Semaphore(AT_ONCE)

    async def all(self, writes: Iterable[Coroutine[Any, Any, None]]) -> None:
        """Run writes, a bounded number at once; raise the first failure once all have ended."""

        async def bounded(write: Coroutine[Any, Any, None]) -> None:
            async with self._limit:
                await write

        results = await asyncio.gather(*(bounded(w) for w in writes), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def services(self) -> None:
        """Create the two Services, or repair what somebody changed."""
        stored = {
            o["metadata"]["name"]: o
            for o in self.ctx.store.services(self.key)
            if self._is_ours(o) and not o["metadata"].get("deletionTimestamp")
        }
        for want in pool_services(self.key.name, self.key.namespace, self.uid):
            name = want["metadata"]["name"]
            have = stored.get(name)
            if have is None:
                await self.create("services", want)
            elif reason := differs(want, have):
                text = "repairing Service %s: somebody changed %s"
                logger.info(text, name, reason, extra=self._extra())
                answer = await self.ctx.kube.patch(
                    "services", self.key.namespace, name, repair(want), kind="json"
                )
                self.ctx.store.upsert("services", answer)

    async def create(self, resource: str, body: Obj) -> None:
        """Create a child; a taken name is success only if the object there is ours."""
        name = body["metadata"]["name"]
        label = f"{body['kind'].lower()}/{name}"
        try:
            made = await self.ctx.kube.create(resource, body)
        except AlreadyExists:
            await self._look_at_namesake(resource, name, label)
            return
        except (Invalid, Forbidden) as error:
            self.obstacles.rejections[label] = f"{label} was rejected: {error.message}" + (
                _ACCOUNT_HINT if "service account" in error.message else ""
            )
            return
        uid = made["metadata"]["uid"]
        if not self._is_known(uid):  # else the watch was faster than the answer
            self.ctx.expectations.expect_create(self.key, resource, name, uid)  # type: ignore[arg-type]
        self.ctx.store.upsert(resource, made)  # type: ignore[arg-type]
        logger.info("created %s", label, extra=self._extra())

    async def _look_at_namesake(self, resource: str, name: str, label: str) -> None:
        try:
            found = await self.ctx.kube.get(resource, self.key.namespace, name)
        except NotFound:
            return  # gone in between: the next pass creates it
        if self._is_ours(found):
            self.ctx.store.upsert(resource, found)  # type: ignore[arg-type]
        elif not found["metadata"].get("deletionTimestamp"):
            self.obstacles.conflicts[label] = (
                f"{label} exists but is not ours: delete it, or give the RolloutReplica another name"
            )

    def _is_known(self, uid: str) -> bool:
        stored = (*self.ctx.store.pods(self.key), *self.ctx.store.services(self.key))
        return any(obj["metadata"]["uid"] == uid for obj in stored)

    def _is_ours(self, obj: Obj) -> bool:
        refs = obj["metadata"].get("ownerReferences") or ()
        return any(r.get("controller") and r.get("uid") == self.uid for r in refs)

    async def delete(self, pod: DeletePod) -> None:
        """Delete exactly this pod; gone or replaced is success."""
        self.ctx.expectations.expect_delete(self.key, "pods", pod.name, pod.uid)
        try:
            await self.ctx.kube.delete(
                "pods", self.key.namespace, pod.name, uid=pod.uid, grace=pod.grace
            )
        except (NotFound, Conflict):
            gone = {"metadata": {"uid": pod.uid, "name": pod.name}}
            self.ctx.expectations.observe("pods", "DELETED", gone)
            return
        logger.info("deleted pod %s: %s", pod.name, pod.reason, extra=self._extra())

    async def gate(self, gate: SetGate) -> None:
        """Set the readiness gate, bound to the process that earned it."""
        condition = {
            "type": names.GATE_SERVING,
            "status": "True" if gate.serving else "False",
            "reason": "Serving" if gate.serving else "NotServing",
            "message": f"{BOOT_PREFIX}{gate.boot}: {gate.reason}",
            "lastTransitionTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": gate.name, "namespace": self.key.namespace, "uid": gate.uid},
            "status": {"conditions": [condition]},
        }
        try:
            answer = await self.ctx.kube.patch(
                "pods", self.key.namespace, gate.name, body, kind="apply", subresource="status"
            )
        except (NotFound, Conflict):
            return  # the pod is gone or another one
        self.ctx.store.upsert("pods", answer)
        logger.info("gate of %s: %s", gate.name, gate.reason, extra=self._extra())

    async def status(self, resource_version: str, status: Mapping[str, Any]) -> Obj:
        """Apply the whole status, as a document; refused (`Conflict`) if somebody else wrote in between."""
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {
                "name": self.key.name,
                "namespace": self.key.namespace,
                "uid": self.uid,
                "resourceVersion": resource_version,
            },
            "status": status,
        }
        answer = await self.ctx.kube.patch(
            "rolloutreplicas",
            self.key.namespace,
            self.key.name,
            body,
            kind="apply",
            subresource="status",
        )
        self.ctx.store.upsert("pools", answer)
        return answer

    def _extra(self) -> dict[str, str]:
        return {"pool": str(self.key)}
