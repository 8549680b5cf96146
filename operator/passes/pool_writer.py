"""Writes to the API server: children, gates and the status of one pool.

Names are deterministic, so 409 on create is success if the object is ours, and 404 on delete as soon
as the watch shows it. An object of somebody else under that name is remembered as a conflict and never touched. Each write
stands alone: whatever the API server answers to one is an obstacle of it, and the others go on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from rollout_common.kube.errors import AlreadyExists, Conflict, Invalid, NotFound
from rollout_operator.api import names
from rollout_operator.api.objects import Obj, PoolKey
from rollout_operator.core.endpoint_slices import is_controlled_by
from rollout_operator.core.pass_plan import DeletePod, SetGate
from rollout_operator.core.pod_reader import BOOT_PREFIX, foreign_pod_reason, is_leftover
from rollout_operator.core.services import pool_services, service_difference, service_patch

from .pass_context import PassContext
from .settings import REFUSED_RETRY_SECONDS
from .write_obstacles import CONFLICT, WriteObstacles
from .write_runner import WriteRunner

logger = logging.getLogger(__name__)

PODS: Final = "pods"


class PoolWriter(WriteRunner):
    """The writes of one pass over one pool.

    All but `status` raise only what ends a pass, see `WriteRunner`.
    """

    def __init__(
        self, ctx: PassContext, key: PoolKey, uid: str, obstacles: WriteObstacles | None = None
    ) -> None:
        super().__init__(ctx, key, obstacles)
        self.uid = uid
        self.relabelled = 0
        """Pods that are found again: what to do with them is for the next pass."""
        self.changed = False
        """The store has answers to our writes: what they mean is for the next pass to report.

        No watch event wakes the pool for them, because the store knows that version already.
        """

    async def write_services(
        self, weights_port: int = names.WEIGHTS_PORT, *, selecting: bool = True
    ) -> None:
        """Create the two Services, or repair what somebody changed."""
        there = {o["metadata"]["name"]: o for o in self.ctx.store.pool_services(self.key)}
        waited_for = {name for name, o in there.items() if self.will_be_deleted(o)}
        stored = {
            name: o for name, o in there.items() if self.is_ours(o) and name not in waited_for
        }
        key = self.key
        for want in pool_services(
            key.name, key.namespace, self.uid, weights_port, selecting=selecting
        ):
            name = want["metadata"]["name"]
            have = stored.get(name)
            if have is None:
                if name not in waited_for:
                    await self.create_child("services", want)
            elif reason := service_difference(want, have):
                text = "repairing Service %s: somebody changed %s"
                logger.info(text, name, reason, extra=self.extra)
                await self.run_guarded(
                    f"repair service/{name}",
                    f"the change of service {name!r}",
                    ("patch", "services"),
                    partial(self._send_service_repair, want, have),
                )

    async def _send_service_repair(self, want: Obj, have: Obj) -> None:
        """Bring exactly this Service back."""
        name = want["metadata"]["name"]
        body = service_patch(want, have["metadata"]["uid"])
        try:
            answer = await self.ctx.kube.patch(
                "services", self.key.namespace, name, body, kind="json"
            )
        except Invalid as error:  # so the API server says that it is another one by now
            raise Conflict.from_error(error) from error
        self.ctx.store.upsert_written("services", answer)

    async def create_pods(self, bodies: Iterable[Obj]) -> None:
        """Create pods, few at first: what refuses one often refuses all."""
        await self.slow_start_batch(
            PODS, {_object_label(b): partial(self.create_child, PODS, b) for b in bodies}
        )

    async def create_child(self, resource: str, body: Obj) -> Obj | None:
        """Create a child; a taken name is success only if the object there is ours.

        Returns:
            What is there now and ours; None: nothing, and `obstacles` says why.
        """
        label, what = _object_label(body), f"{body['kind'].lower()} {body['metadata']['name']!r}"
        create = partial(self._send_create, resource, body, label)
        return await self.run_guarded(label, what, ("create", resource), create)

    async def _send_create(self, resource: str, body: Obj, label: str) -> Obj | None:
        try:
            made = await self.ctx.kube.create(resource, body)
        except AlreadyExists:
            return await self._inspect_namesake(resource, body, label)
        self.changed |= self.ctx.store.upsert_written(resource, made)  # type: ignore[arg-type]
        logger.info("created %s", label, extra=self.extra)
        return made

    async def _inspect_namesake(
        self, resource: str, body: Obj, label: str, *, seeking: bool = False
    ) -> Obj | None:
        name, later = body["metadata"]["name"], self.ctx.monotonic() + REFUSED_RETRY_SECONDS
        try:
            found = await self.ctx.kube.get(resource, self.key.namespace, name)
        except NotFound:
            if not seeking:  # gone in between: the next pass creates it
                self.obstacles.note_obstacle(label, "", "", self.ctx.monotonic(), 0)
            return None
        self.ctx.store.upsert_written(resource, found)  # type: ignore[arg-type]
        if self.will_be_deleted(found):
            if not self.is_ours(found):
                # Its name gets free, and perhaps no event says when.
                self.obstacles.note_obstacle(label, "", "", later, 0)
            return None
        if not self.is_ours(found):
            text = f"{label} exists but is not ours: delete it, or give the RolloutReplica another name"
            self.obstacles.note_obstacle(label, CONFLICT, text, later)
            return None
        if resource == "pods":
            if why := _foreign_namesake_reason(found, body, self.key.name):
                self.obstacles.note_obstacle(label, CONFLICT, why, later)
                return None
            # Not its revision, nor what the user adds: this may be a pod of an older template.
            ours = body["metadata"]["labels"].keys() & names.worker_labels("", 0, 0).keys()
            labels = {label: body["metadata"]["labels"][label] for label in ours}
            await self.relabel_pod(name, found["metadata"]["uid"], labels)
        return found

    async def seek_pod(self, body: Obj) -> None:
        """Look for a pod that the watch does not show; ours gets its labels back."""
        label = _object_label(body)
        seek = partial(self._inspect_namesake, PODS, body, label, seeking=True)
        what = f"the look for pod {body['metadata']['name']!r}"
        await self.run_guarded(f"seek {label}", what, ("get", PODS), seek)

    async def relabel_pod(self, name: str, uid: str, labels: Mapping[str, str]) -> None:
        """Give a pod of ours these labels again: without them neither we nor Services find it.

        Through its status, which the API server lets carry labels: the operator may write no more
        of a pod than that.
        """
        what, relabel = (
            f"the labels of pod {name!r}",
            partial(self._send_relabel, name, uid, labels),
        )
        await self.run_guarded(f"relabel {uid}", what, ("patch", PODS), relabel)

    async def _send_relabel(self, name: str, uid: str, labels: Mapping[str, str]) -> None:
        body = {"metadata": {"uid": uid, "labels": dict(labels)}}
        answer = await self.ctx.kube.patch(
            "pods", self.key.namespace, name, body, subresource="status"
        )
        self.ctx.store.upsert_written("pods", answer)
        self.relabelled += labels.items() <= (answer["metadata"].get("labels") or {}).items()
        text = "repairing pod %s: somebody changed the labels by which it is found"
        logger.info(text, name, extra=self.extra)

    def will_be_deleted(self, obj: Obj) -> bool:
        """Whether it terminates, or the garbage collector will delete it: its name gets free."""
        going = obj["metadata"].get("deletionTimestamp") is not None
        return going or is_leftover(obj, self.key.name, self.uid)

    def is_ours(self, obj: Obj) -> bool:
        """Whether the pool's object is its controller."""
        return is_controlled_by(obj, self.uid)

    async def delete_pod(self, pod: DeletePod) -> None:
        """Delete exactly this pod."""
        what, delete = f"the deletion of pod {pod.name!r}", partial(self._send_delete, pod)
        await self.run_guarded(f"delete {pod.uid}", what, ("delete", PODS), delete)

    async def _send_delete(self, pod: DeletePod) -> None:
        answer = await self.ctx.kube.delete(
            PODS, self.key.namespace, pod.name, uid=pod.uid, grace=pod.grace
        )
        self.changed |= self.ctx.store.upsert_deleted(
            PODS, PoolKey(self.key.namespace, pod.name), pod.uid, answer
        )
        logger.info("deleted pod %s: %s", pod.name, pod.reason, extra=self.extra)

    async def set_gate(self, gate: SetGate) -> None:
        """Set the readiness gate, bound to the process that earned it."""
        what = f"the readiness gate of pod {gate.name!r}"
        await self.run_guarded(
            f"gate {gate.uid}", what, ("patch", PODS), partial(self._send_gate, gate)
        )

    async def _send_gate(self, gate: SetGate) -> None:
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
        except Invalid as error:
            if "metadata.uid" in error.message:  # another one: taken for a change of its uid
                raise Conflict.from_error(error) from error
            raise
        self.ctx.store.upsert_written("pods", answer)
        logger.info("gate of %s: %s", gate.name, gate.reason, extra=self.extra)

    async def apply_status(self, resource_version: str, status: Mapping[str, Any]) -> None:
        """Apply the whole status, as a document; raises each `KubeError`.

        `Conflict`: somebody else wrote the object in between.
        """
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
        self.ctx.store.upsert_written("pools", answer)


def _object_label(body: Obj) -> str:
    return f"{body['kind'].lower()}/{body['metadata']['name']}"


def _gate_conditions(gate: SetGate, now: float) -> list[Obj]:
    """The readiness gate; and, once it is so, since when the worker has proven itself."""
    serving = {
        "type": names.GATE_SERVING,
        "status": "True" if gate.serving else "False",
        "reason": "Serving" if gate.serving else "NotServing",
        "message": f"{BOOT_PREFIX}{gate.boot}: {gate.reason}",
        "lastTransitionTime": _format_time(now),
    }
    if gate.proven_since is None:
        return [serving]
    proven = {
        "type": names.CONDITION_PROVEN,
        "status": "True",
        "reason": "AsExpected",
        "message": "the worker has done what its pool asks for",
        "lastTransitionTime": _format_time(gate.proven_since),
    }
    return [serving, proven]


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _foreign_namesake_reason(found: Obj, body: Obj, pool: str) -> str | None:
    """Why the pod that has a name of ours is none of ours, although its controller is."""
    meta, account = body["metadata"], body["spec"]["serviceAccountName"]
    labels = found["metadata"].get("labels") or {}
    current = labels.get(names.LABEL_REVISION) == meta["labels"][names.LABEL_REVISION]
    return foreign_pod_reason(
        found, meta["name"], names.heads_service(pool), account, current=current
    )
