"""Writes to the API server: children, gates and the status of one pool.

Names are deterministic: 409 on create is success if the object is ours, and 404 on delete as soon as
the watch shows it. An object of another owner under such a name counts as a conflict, and the operator
leaves it alone. Each write stands alone: what the API server answers to one hinders no other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from rollout_common.kube.errors import AlreadyExists, Conflict, Invalid, NotFound
from rollout_operator.api import names
from rollout_operator.api.objects import Obj, PoolKey, ResourceName
from rollout_operator.core.observed_pool import Pod
from rollout_operator.core.pass_plan import DeletePod, DisruptionBudget, SetGate
from rollout_operator.core.pods.pod_reader import (
    BOOT_PREFIX,
    foreign_pod_reason,
    is_leftover,
    read_pod,
)
from rollout_operator.core.replicas.disruption import (
    budget_difference,
    budget_patch,
    disruption_budget,
)
from rollout_operator.core.services import (
    is_controlled_by,
    pool_services,
    pool_slices,
    service_difference,
    service_patch,
    slice_difference,
    slice_patch,
)

from .pass_context import PassContext
from .settings import REFUSED_RETRY_SECONDS
from .write_obstacles import CONFLICT, REJECTED, WriteObstacles
from .write_runner import WriteRunner

logger = logging.getLogger(__name__)

PODS: Final = "pods"
SLICES: Final = "endpointslices"
BUDGETS: Final = "poddisruptionbudgets"


class PoolWriter(WriteRunner):
    """The writes of one pass over one pool.

    All but `apply_status` raise only what ends a pass, see `WriteRunner`.
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
        """Create the two Services at once, or repair what somebody changed."""
        key, stored = self.key, self.ctx.store.pool_services(self.key)
        wanted = pool_services(key.name, key.namespace, self.uid, weights_port, selecting=selecting)
        await self._ensure_children("services", wanted, stored, service_difference, service_patch)

    async def write_budget(self, budget: DisruptionBudget) -> None:
        """Create the PodDisruptionBudget, or make it what it should be; write only what differs."""
        key, stored = self.key, self.ctx.store.pool_budgets(self.key)
        wanted = [disruption_budget(key.name, key.namespace, self.uid, budget)]
        await self._ensure_children(BUDGETS, wanted, stored, budget_difference, budget_patch)

    async def write_slices(self, members: Iterable[Pod]) -> None:
        """Have the EndpointSlices of a Hybrid pool show these members; write only what differs."""
        key, stored = self.key, self.ctx.store.pool_slices(self.key)
        wanted = pool_slices(key.name, key.namespace, self.uid, members, stored)
        await self._ensure_children(SLICES, wanted, stored, slice_difference, slice_patch)

    async def _ensure_children(
        self,
        resource: ResourceName,
        wanted: Iterable[Obj],
        stored: Iterable[Obj],
        find_difference: Callable[[Obj, Obj], str | None],
        make_patch: Callable[[Obj, Obj], Obj],
    ) -> None:
        """Create children, or make them what they should be; write only what differs.

        Names that get free by themselves are waited for.
        """
        there = {each["metadata"]["name"]: each for each in stored}
        going = {name for name, each in there.items() if self.will_be_deleted(each)}

        async def ensure(want: Obj) -> None:
            name, label = want["metadata"]["name"], _object_label(want)
            known = there.get(name)
            # One that the watch does not show may have lost its labels, and more.
            mine = known is not None and self._is_ours(known)
            have = known if mine else await self.create_child(resource, want)
            if have is not None and (changed := find_difference(want, have)) is not None:
                what = f"the change of {want['kind'].lower()} {name!r}"
                logger.info("writing %s: %s differs", label, changed, extra=self.extra)
                send = partial(self._send_change, resource, name, make_patch(want, have))
                await self.run_guarded(f"repair {label}", what, ("patch", resource), send)

        def is_right(want: Obj) -> bool:
            known = there.get(want["metadata"]["name"])
            return known is not None and self._is_ours(known) and not find_difference(want, known)

        # Mostly all are: a task for each would cost a pass more than what it looks at.
        left = [w for w in wanted if w["metadata"]["name"] not in going and not is_right(w)]
        await self.run_all(ensure(w) for w in left)

    async def _send_change(self, resource: ResourceName, name: str, body: Obj) -> None:
        await self._patch(resource, name, body)
        self.changed |= resource == SLICES  # they hold the gates, which the next pass reports

    async def create_pods(
        self, builds: Mapping[str, Callable[[], Obj]], goes_on: Callable[[], bool]
    ) -> None:
        """Create pods, few at first: what refuses one often refuses all; see `slow_start_batch`.

        `builds`: makes the pod of each name when its turn comes. All at once would hold the loop, a second for thousands.
        """

        async def create(build: Callable[[], Obj]) -> None:
            await self.create_child(PODS, build())

        creates = {f"pod/{name}": partial(create, build) for name, build in builds.items()}
        await self.slow_start_batch(PODS, creates, goes_on)

    async def create_child(self, resource: ResourceName, body: Obj) -> Obj | None:
        """Create a child; a taken name is success only if the object there is ours.

        Returns:
            What is there now and ours; None: nothing, and `obstacles` says why.
        """
        label, what = _object_label(body), f"{body['kind'].lower()} {body['metadata']['name']!r}"
        create = partial(self._send_create, resource, body, label)
        return await self.run_guarded(label, what, ("create", resource), create)

    async def _send_create(self, resource: ResourceName, body: Obj, label: str) -> Obj | None:
        try:
            made = await self.ctx.kube.create(resource, body)
        except AlreadyExists:
            return await self._inspect_namesake(resource, body, label)
        self.changed |= self.ctx.store.upsert_written(resource, made)
        logger.info("created %s", label, extra=self.extra)
        if resource == PODS and not _pool_labels(body).items() <= _labels_of(made).items():
            await self._restore_labels(made, body, label)
        return made

    async def _inspect_namesake(
        self, resource: ResourceName, body: Obj, label: str, *, seeking: bool = False
    ) -> Obj | None:
        name, now = body["metadata"]["name"], self.ctx.monotonic()
        note, later = self.obstacles.note_obstacle, now + REFUSED_RETRY_SECONDS
        try:
            found = await self.ctx.kube.get(resource, self.key.namespace, name)
        except NotFound:
            if not seeking:  # gone in between: the next pass creates it
                note(label, "", "", self.ctx.monotonic(), 0)
            return None
        self.changed |= self.ctx.store.upsert_written(resource, found)
        if self.will_be_deleted(found):
            if not self._is_ours(found):
                # Its name gets free, and perhaps no event says when.
                note(label, "", "", later, 0)
            return None
        if not self._is_ours(found):
            text = f"{label} exists but is not ours: delete it, or give the RolloutReplica another name"
            note(label, CONFLICT, text, later)
            return None
        if resource == PODS:
            if why := _foreign_namesake_reason(found, body, self.key.name):
                note(label, CONFLICT, why, later)
                return None
            await self._restore_labels(found, body, label)
        return found

    async def _restore_labels(self, found: Obj, body: Obj, label: str) -> None:
        """Give a pod of ours its labels; say so if they are changed once more."""
        before, uid, labels = self.relabelled, found["metadata"]["uid"], _pool_labels(body)
        await self.relabel_pod(body["metadata"]["name"], uid, labels)
        if self.relabelled > before or self.obstacles.get(f"relabel {uid}") is not None:
            return
        there = _labels_of(found)
        changed = next((key for key, value in labels.items() if there.get(key) != value), "")
        text = (
            f"{label} is not seen as this pool's: an admission policy or another controller sets its label "
            f"{changed} to {there.get(changed)!r}, and again after each repair: exempt the operator's pods"
        )
        self.obstacles.note_obstacle(
            label, REJECTED, text, self.ctx.monotonic() + REFUSED_RETRY_SECONDS
        )

    async def seek_pod(self, body: Obj) -> None:
        """Look for a pod that the watch does not show; ours gets its labels back."""
        label = _object_label(body)
        seek = partial(self._inspect_namesake, PODS, body, label, seeking=True)
        what = f"the look for pod {body['metadata']['name']!r}"
        await self.run_guarded(f"seek {label}", what, ("get", PODS), seek)

    async def relabel_pod(self, name: str, uid: str, labels: Mapping[str, str]) -> None:
        """Give a pod of ours these labels again: without them neither we nor Services find it.

        Its status carries them, because the operator may write no other part of a pod.
        """
        what, relabel = f"the labels of pod {name!r}", partial(self._send_labels, name, uid, labels)
        await self.run_guarded(f"relabel {uid}", what, ("patch", PODS), relabel)

    async def _send_labels(self, name: str, uid: str, labels: Mapping[str, str]) -> None:
        body = {"metadata": {"uid": uid, "labels": dict(labels)}}
        answer = await self._patch(PODS, name, body, subresource="status")
        self.relabelled += labels.items() <= (answer["metadata"].get("labels") or {}).items()
        text = "repairing pod %s: somebody changed the labels by which it is found"
        logger.info(text, name, extra=self.extra)

    async def delete_pod(self, pod: DeletePod) -> None:
        """Delete exactly this pod."""
        what, delete = f"the deletion of pod {pod.name!r}", partial(self._send_delete, pod)
        await self.run_guarded(f"delete {pod.uid}", what, ("delete", PODS), delete)

    async def _send_delete(self, pod: DeletePod) -> None:
        namespace, store = self.key.namespace, self.ctx.store
        answer = await self.ctx.kube.delete(PODS, namespace, pod.name, uid=pod.uid, grace=pod.grace)
        key = PoolKey(namespace, pod.name)
        self.changed |= store.upsert_deleted(PODS, key, pod.uid, answer)
        logger.info("deleted pod %s: %s", pod.name, pod.reason, extra=self.extra)

    async def set_gate(self, gate: SetGate) -> None:
        """Set the readiness gate, bound to the process that earned it."""
        what, send = f"the readiness gate of pod {gate.name!r}", partial(self._send_gate, gate)
        await self.run_guarded(f"gate {gate.uid}", what, ("patch", PODS), send)

    async def _send_gate(self, gate: SetGate) -> None:
        meta = {"name": gate.name, "namespace": self.key.namespace, "uid": gate.uid}
        status = {"conditions": _gate_conditions(gate, self.ctx.clock())}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "status": status}
        await self._patch(PODS, gate.name, body, kind="apply", subresource="status")
        logger.info("gate of %s: %s", gate.name, gate.reason, extra=self.extra)

    async def apply_status(self, resource_version: str, status: Mapping[str, Any]) -> None:
        """Apply the whole status, as a document; raises each `KubeError`.

        `Conflict`: another client wrote the object in between.
        """
        meta = {**self.key._asdict(), "uid": self.uid, "resourceVersion": resource_version}
        kind = {"apiVersion": names.API_VERSION, "kind": names.KIND}
        answer = await self.ctx.kube.patch(
            names.PLURAL,
            self.key.namespace,
            self.key.name,
            kind | {"metadata": meta, "status": status},
            kind="apply",
            subresource="status",
        )
        self.ctx.store.upsert_written("pools", answer)

    async def _patch(self, resource: ResourceName, name: str, body: Any, **how: Any) -> Obj:
        """Patch a child; the store takes the answer."""
        try:
            answer = await self.ctx.kube.patch(resource, self.key.namespace, name, body, **how)
        except Invalid as error:
            if "metadata.uid" in error.message:
                # Another child: the server sees a change of its uid.
                raise Conflict.from_error(error) from error
            raise
        self.ctx.store.upsert_written(resource, answer)
        return answer

    def will_be_deleted(self, obj: Obj) -> bool:
        """Return whether it terminates, or the garbage collector will delete it: its name gets free."""
        going = obj["metadata"].get("deletionTimestamp") is not None
        return going or is_leftover(obj, self.key.name, self.uid)

    def _is_ours(self, obj: Obj) -> bool:
        return is_controlled_by(obj, self.uid)


def _object_label(body: Obj) -> str:
    return f"{body['kind'].lower()}/{body['metadata']['name']}"


def _pool_labels(body: Obj) -> dict[str, str]:
    """The labels by which a pod is found: not its revision, nor what the user adds, since it may be of an older template."""
    labels = body["metadata"]["labels"]
    return {k: labels[k] for k in names.worker_labels("", 0, 0, "any") if k in labels}


def _labels_of(obj: Obj) -> dict[str, str]:
    return obj["metadata"].get("labels") or {}


def _gate_conditions(gate: SetGate, now: float) -> list[Obj]:
    """The readiness gate; and, if the worker has proven itself, since when."""
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
    """Why the pod that has a name of ours is not ours, although its controller is."""
    meta, account = body["metadata"], body["spec"]["serviceAccountName"]
    labels = found["metadata"].get("labels") or {}
    current = labels.get(names.LABEL_REVISION) == meta["labels"][names.LABEL_REVISION]
    subdomain = names.heads_service(pool)
    return foreign_pod_reason(read_pod(found), meta["name"], subdomain, account, current=current)
