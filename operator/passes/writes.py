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
from rollout_operator.core.endpoints import is_controlled
from rollout_operator.core.plan import DeletePod, SetGate
from rollout_operator.core.podreader import BOOT_PREFIX, is_leftover, why_foreign
from rollout_operator.core.services import differs, pool_services, repair
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
    awaited: set[str] = field(default_factory=set)
    """Names whose holders terminate: they get free, and perhaps no event says when."""

    @property
    def labels(self) -> set[str]:
        """What is in the way; what is said of it may differ at each try."""
        return {*self.conflicts, *self.rejections, *self.awaited}

    def added_to(self, before: Obstacles) -> Obstacles:
        """Return these and the ones before, where these don't know better."""
        return Obstacles(
            before.conflicts | self.conflicts,
            before.rejections | self.rejections,
            before.awaited | self.awaited,
        )


class Writer:
    """The writes of one pass over one pool."""

    def __init__(self, ctx: Context, key: Key, uid: str) -> None:
        self.ctx = ctx
        self.key = key
        self.uid = uid
        self.obstacles = Obstacles()
        self.relabelled = 0
        """Pods that are found again: what to do with them is for the next pass."""
        self.sliced = False
        """EndpointSlices were written: who serves by them is for the next pass to tell."""
        self._limit = asyncio.Semaphore(AT_ONCE)

    async def all(self, writes: Iterable[Coroutine[Any, Any, object]]) -> None:
        """Run writes, a bounded number at once; raise the first failure once all have ended."""

        async def bounded(write: Coroutine[Any, Any, object]) -> None:
            async with self._limit:
                await write

        results = await asyncio.gather(*(bounded(w) for w in writes), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def services(
        self, weights_port: int = names.WEIGHTS_PORT, *, selecting: bool = True
    ) -> None:
        """Create the two Services, or repair what somebody changed."""
        stored = {
            o["metadata"]["name"]: o
            for o in self.ctx.store.services(self.key)
            if self.is_ours(o) and not o["metadata"].get("deletionTimestamp")
        }
        waited_for = {
            o["metadata"]["name"] for o in self.ctx.store.services(self.key) if self.will_go(o)
        }
        key = self.key
        for want in pool_services(
            key.name, key.namespace, self.uid, weights_port, selecting=selecting
        ):
            name = want["metadata"]["name"]
            have = stored.get(name)
            if have is None:
                if name not in waited_for:
                    await self.create("services", want)
            elif reason := differs(want, have):
                text = "repairing Service %s: somebody changed %s"
                logger.info(text, name, reason, extra=self._extra())
                answer = await self.ctx.kube.patch(
                    "services", self.key.namespace, name, repair(want), kind="json"
                )
                self.ctx.store.upsert("services", answer)

    async def create(self, resource: str, body: Obj) -> Obj | None:
        """Create a child; a taken name is success only if the object there is ours.

        Returns:
            What is there now and ours; None: nothing, and `obstacles` says why.
        """
        name = body["metadata"]["name"]
        label = f"{body['kind'].lower()}/{name}"
        try:
            made = await self.ctx.kube.create(resource, body)
        except AlreadyExists:
            return await self._look_at_namesake(resource, body, label)
        except (Invalid, Forbidden) as error:
            self.obstacles.rejections[label] = f"{label} was rejected: {error.message}" + (
                _ACCOUNT_HINT if "service account" in error.message else ""
            )
            return None
        uid = made["metadata"]["uid"]
        if not self.ctx.store.holds(resource, made):  # type: ignore[arg-type]
            # Else the watch was faster than the answer.
            self.ctx.expectations.expect_create(self.key, resource, name, uid)  # type: ignore[arg-type]
        self.ctx.store.upsert(resource, made)  # type: ignore[arg-type]
        logger.info("created %s", label, extra=self._extra())
        return made

    async def _look_at_namesake(self, resource: str, body: Obj, label: str) -> Obj | None:
        name = body["metadata"]["name"]
        try:
            found = await self.ctx.kube.get(resource, self.key.namespace, name)
        except NotFound:
            return None  # gone in between: the next pass creates it
        self.ctx.store.upsert(resource, found)  # type: ignore[arg-type]
        if self.will_go(found):
            if not self.is_ours(found):
                self.obstacles.awaited.add(label)
            return None
        if not self.is_ours(found):
            self.obstacles.conflicts[label] = (
                f"{label} exists but is not ours: delete it, or give the RolloutReplica another name"
            )
            return None
        if resource == "pods":
            if why := _why_foreign(found, body, self.key.name):
                self.obstacles.conflicts[label] = why
                return None
            # Not its revision, nor what the user adds: this may be a pod of an older template.
            ours = body["metadata"]["labels"].keys() & names.worker_labels("", 0, 0).keys()
            labels = {label: body["metadata"]["labels"][label] for label in ours}
            await self.relabel(name, found["metadata"]["uid"], labels)
        return found

    async def seek(self, body: Obj) -> None:
        """Look for a pod that the watch does not show; ours gets its labels back."""
        await self._look_at_namesake("pods", body, f"pod/{body['metadata']['name']}")

    async def relabel(self, name: str, uid: str, labels: Mapping[str, str]) -> None:
        """Give a pod of ours these labels again: without them neither we nor Services find it.

        Through its status, which the API server lets carry labels: the operator may write no more
        of a pod than that.
        """
        body = {"metadata": {"uid": uid, "labels": dict(labels)}}
        try:
            answer = await self.ctx.kube.patch(
                "pods", self.key.namespace, name, body, subresource="status"
            )
        except (NotFound, Conflict):
            return  # the pod is gone or another one
        self.ctx.store.upsert("pods", answer)
        self.relabelled += labels.items() <= (answer["metadata"].get("labels") or {}).items()
        text = "repairing pod %s: somebody changed the labels by which it is found"
        logger.info(text, name, extra=self._extra())

    def will_go(self, obj: Obj) -> bool:
        """Whether it terminates, or the garbage collector will delete it: its name gets free."""
        going = obj["metadata"].get("deletionTimestamp") is not None
        return going or is_leftover(obj, self.key.name, self.uid)

    def is_ours(self, obj: Obj) -> bool:
        """Whether the pool's object is its controller."""
        return is_controlled(obj, self.uid)

    async def delete(self, pod: DeletePod) -> None:
        """Delete exactly this pod; gone or replaced is success."""
        # Before the call, since the watch may be faster than the answer.
        if not pod.forced:
            self.ctx.expectations.expect_delete(self.key, "pods", pod.name, pod.uid)
        try:
            await self.ctx.kube.delete(
                "pods", self.key.namespace, pod.name, uid=pod.uid, grace=pod.grace
            )
        except (NotFound, Conflict):
            self.ctx.expectations.forget_delete(pod.uid)
            return
        except BaseException:
            # Perhaps it was carried out all the same; then the watch shows a pod that terminates.
            self.ctx.expectations.forget_delete(pod.uid)
            raise
        logger.info("deleted pod %s: %s", pod.name, pod.reason, extra=self._extra())

    async def gate(self, gate: SetGate) -> None:
        """Set the readiness gate, bound to the process that earned it."""
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": gate.name, "namespace": self.key.namespace, "uid": gate.uid},
            "status": {"conditions": _gate_conditions(gate, self.ctx.clock())},
        }
        try:
            answer = await self.ctx.kube.patch(
                "pods", self.key.namespace, gate.name, body, kind="apply", subresource="status"
            )
        except (NotFound, Conflict):
            return  # the pod is gone or another one
        except Invalid as error:
            if "metadata.uid" in error.message:
                return  # another one: the API server takes the uid for a change of it
            raise
        self.ctx.store.upsert("pods", answer)
        logger.info("gate of %s: %s", gate.name, gate.reason, extra=self._extra())

    async def status(self, resource_version: str, status: Mapping[str, Any]) -> None:
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

    def _extra(self) -> dict[str, str]:
        return {"pool": str(self.key)}


def _gate_conditions(gate: SetGate, now: float) -> list[Obj]:
    """The readiness gate; and, once it is so, since when the worker has proven itself."""
    serving = {
        "type": names.GATE_SERVING,
        "status": "True" if gate.serving else "False",
        "reason": "Serving" if gate.serving else "NotServing",
        "message": f"{BOOT_PREFIX}{gate.boot}: {gate.reason}",
        "lastTransitionTime": _moment(now),
    }
    if gate.proven_since is None:
        return [serving]
    proven = {
        "type": names.PROVEN,
        "status": "True",
        "reason": "AsExpected",
        "message": "the worker has done what its pool asks for",
        "lastTransitionTime": _moment(gate.proven_since),
    }
    return [serving, proven]


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _why_foreign(found: Obj, body: Obj, pool: str) -> str | None:
    """Why the pod that has a name of ours is none of ours, although its controller is."""
    meta, account = body["metadata"], body["spec"]["serviceAccountName"]
    labels = found["metadata"].get("labels") or {}
    current = labels.get(names.LABEL_REVISION) == meta["labels"][names.LABEL_REVISION]
    return why_foreign(found, meta["name"], names.heads_service(pool), account, current=current)
