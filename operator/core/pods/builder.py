"""Makes worker pods: spec and the operator's defaults in, a plain dict out. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rollout_operator.api import names
from rollout_operator.api.gangs import GangScheduler
from rollout_operator.api.objects import Obj
from rollout_operator.api.revision import pod_revision
from rollout_operator.api.spec import RolloutReplicaSpec
from rollout_operator.config import EngineDefaults
from rollout_operator.core.placement import PodPlacement
from rollout_operator.core.settings import NODE_TOLERATION_SECONDS

from . import gang_pods, pod_devices
from .pod_groups import mark_pod
from .worker_environment import (
    pod_volumes,
    spec_environment,
    volume_mounts,
    worker_environment,
)

WORKER_USER_ID = 65532
"""The unprivileged user of our images."""

COPIED_FIELDS = (
    *(
        "hostNetwork",
        "hostIPC",
        "shareProcessNamespace",
        "resourceClaims",
        "nodeSelector",
        "affinity",
    ),
    *("topologySpreadConstraints", "imagePullSecrets", "priorityClassName", "runtimeClassName"),
    "schedulerName",
)
"""Fields of the pod template that a pod spec has under the same name."""


@dataclass(frozen=True)
class PodBuilder:
    """Builds the pods of one pool."""

    name: str
    """Of the RolloutReplica, as are the namespace and the uid."""
    namespace: str
    uid: str
    retry: str
    """Its retry annotation, copied onto pods."""
    spec: RolloutReplicaSpec
    defaults: EngineDefaults
    """The operator's image, environment and pod template for the engine."""
    turn_claim: str = ""
    """PersistentVolumeClaim with a node's lock directory, for colocated pods; empty: none."""
    gang_scheduler: GangScheduler | None = None
    """What starts a replica's pods together; None: nothing does."""

    @cached_property
    def overlay(self) -> Obj:
        """The operator's pod template with the pool's on it."""
        own = self.spec.pod_template.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        return merge_templates(self.defaults.pod_template, own)

    @property
    def image(self) -> str | None:
        """Image of the worker; None if neither the pool nor the operator names one."""
        return self.spec.engine.image or self.defaults.image

    @property
    def missing_setting(self) -> tuple[str, str] | None:
        """What pods can't be made without: its subject, and what to set; None: nothing is missing."""
        engine = self.spec.engine.type.value
        if not self.image:
            return "image", (
                f"engine {engine} has no image: set spec.engine.image, or engines.{engine}.image "
                "in the operator's chart"
            )
        if self.spec.weights.transport.tls == "Off" or self._has_certificate:
            return None
        return "certificate", (
            "spec.weights.transport.tls is Required and the workers have no certificate: set "
            "workers.controlTLS in the operator's chart, or tls to Off"
        )

    def build_pod(
        self,
        replica: int,
        rank: int,
        restarts: int,
        place: PodPlacement | None = None,
        *,
        surge: bool = False,
    ) -> Obj:
        """Return the pod of `(replica, rank)`; a colocated one has a place, one in addition to the wanted ones is a surge."""
        made = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": self._pod_metadata(replica, rank, restarts, surge=surge),
            "spec": self._pod_spec(replica, rank),
        }
        if place is not None:
            pod_devices.apply_placement(made, self.spec, rank, place, self.turn_claim)
        if self.gang_scheduler is not None:
            mark_pod(made, self.name, replica, self.spec, self.gang_scheduler)
        return made

    def _pod_metadata(self, replica: int, rank: int, restarts: int, *, surge: bool) -> Obj:
        annotations = gang_pods.without_scraping(self.overlay.get("annotations", {}), rank)
        annotations[names.ANNOTATION_RESTARTS] = str(restarts)
        if self.retry:
            annotations[names.ANNOTATION_RETRY] = self.retry
        if surge:
            annotations[names.ANNOTATION_SURGE] = "true"
        return {
            "name": names.pod_name(self.name, replica, rank),
            "namespace": self.namespace,
            "labels": {
                **self.overlay.get("labels", {}),
                **names.worker_labels(self.name, replica, rank, self.spec.operator_class),
                names.LABEL_REVISION: pod_revision(self.spec),
            },
            "annotations": annotations,
            "ownerReferences": [names.controller_reference(self.name, self.uid)],
        }

    def _pod_spec(self, replica: int, rank: int) -> Obj:
        overlay = self.overlay
        out: Obj = {
            "hostname": names.pod_name(self.name, replica, rank),
            "subdomain": names.heads_service(self.name),
            # A process that ends takes its gang down, and the operator replaces it after a back-off.
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": self.spec.grace_seconds,
            "serviceAccountName": self.spec.service_account_name,
            # Workers review tokens; an account of the user's may be hardened not to give pods its own.
            "automountServiceAccountToken": True,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": WORKER_USER_ID,
                "runAsGroup": WORKER_USER_ID,
                "fsGroup": WORKER_USER_ID,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
                **overlay.get("securityContext", {}),
            },
            "tolerations": [*overlay.get("tolerations", ()), *_node_tolerations(overlay)],
            "volumes": [*self._own_volumes(), *overlay.get("volumes", ())],
            "containers": [self._worker_container(replica, rank)],
        }
        if rank == 0:
            out["readinessGates"] = [{"conditionType": names.GATE_SERVING}]
        if others := _init_containers(overlay):
            out["initContainers"] = others
        if overlay.get("hostNetwork"):
            # By default such a pod could not look up names of the cluster, such as its gang's leader.
            out["dnsPolicy"] = "ClusterFirstWithHostNet"
        return out | {field: overlay[field] for field in COPIED_FIELDS if field in overlay}

    def _worker_container(self, replica: int, rank: int) -> Obj:
        engine, own = self.spec.engine, self.overlay.get("container", {})
        out: Obj = {
            "name": names.WORKER_CONTAINER,
            "image": self.image,
            "args": ["serve", *(f"--engine-arg={a}" for a in engine.args)],
            "env": self._worker_env(replica, rank),
            "ports": gang_pods.container_ports(self.spec, rank),
            "resources": self._container_resources(),
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
                **own.get("securityContext", {}),
            },
            "volumeMounts": join_by_key(
                "mountPath", self._own_mounts(), self.overlay.get("volumeMounts", ())
            ),
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }
        policy = engine.image_pull_policy or self.defaults.image_pull_policy
        if policy:
            out["imagePullPolicy"] = policy
        if own.get("lifecycle"):
            out["lifecycle"] = own["lifecycle"]
        probes = gang_pods.worker_probes(rank, tls=self._control_speaks_tls)
        return out | {name: {**probe, **own.get(name, {})} for name, probe in probes.items()}

    def _own_volumes(self) -> list[Obj]:
        gang = self.spec.parallelism.nodes > 1
        token = [gang_pods.token_volume(self.name, self.namespace)] if gang else []
        return pod_volumes(self.spec) + token

    def _own_mounts(self) -> list[Obj]:
        gang = self.spec.parallelism.nodes > 1
        return volume_mounts(self.spec) + ([gang_pods.TOKEN_MOUNT] if gang else [])

    @property
    def _control_speaks_tls(self) -> bool:
        return any(entry["name"] == names.CONTROL_TLS_CERT for entry in self.defaults.env)

    @property
    def _has_certificate(self) -> bool:
        return any(entry["name"] == names.CONTROL_TLS_CERT for entry in self._worker_env(0, 0))

    def _worker_env(self, replica: int, rank: int) -> list[Obj]:
        ours = worker_environment(self.name, self.namespace, self.spec, self.overlay, replica, rank)
        defaults = (dict(entry) for entry in self.defaults.env)
        return join_by_key("name", ours, defaults, spec_environment(self.spec))

    def _container_resources(self) -> Obj:
        out: Obj = self.spec.resources.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        if self.spec.accelerator is not None:
            amount = {self.spec.accelerator.resource: str(self.spec.accelerators_per_pod)}
            for part in ("limits", "requests"):
                out[part] = {**out.get(part, {}), **amount}
        return out


def _node_tolerations(overlay: Mapping[str, Any]) -> list[Obj]:
    """Short tolerations of a lost node, unless the template sets its own."""
    known = {t.get("key") for t in overlay.get("tolerations", ())}
    return [
        {
            "key": key,
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": NODE_TOLERATION_SECONDS,
        }
        for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
        if key not in known and None not in known
    ]


def _init_containers(overlay: Mapping[str, Any]) -> list[Obj]:
    """Init containers and sidecars; to Kubernetes a sidecar is an init container that always restarts.

    In `containers`, a sidecar that runs on would keep the pod of a dead worker from ending.
    """
    first = overlay.get("initContainers", ())
    return [*first, *({**each, "restartPolicy": "Always"} for each in overlay.get("sidecars", ()))]


def merge_templates(base: Mapping[str, Any], over: Mapping[str, Any]) -> Obj:
    """Overlay the pool's template on the operator's: maps merge, named lists merge by name."""
    out: Obj = dict(base)
    for key, value in over.items():
        if key in ("labels", "annotations", "nodeSelector", "container"):
            out[key] = {**base.get(key, {}), **value}
        elif key in ("volumes", "initContainers", "sidecars", "resourceClaims", "imagePullSecrets"):
            out[key] = join_by_key("name", base.get(key, ()), value)
        elif key == "volumeMounts":
            out[key] = join_by_key("mountPath", base.get(key, ()), value)
        elif key == "tolerations":
            out[key] = [*base.get(key, ()), *value]
        else:
            out[key] = value
    return out


def join_by_key(key: str, *parts: Iterable[Obj]) -> list[Obj]:
    """Join lists of entries; a later one replaces an earlier one of the same key in its place."""
    return list({entry[key]: entry for part in parts for entry in part}.values())
