"""Builder of worker pods. Pure: spec and the operator's defaults in, a plain dict out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_operator.api import names
from rollout_operator.api.objects import Obj
from rollout_operator.api.revision import pod_revision
from rollout_operator.api.spec import RolloutReplicaSpec
from rollout_operator.config import EngineDefaults
from rollout_operator.core.placement import PodPlacement

from . import gang_pods, pod_devices
from .overlay import join_by_key, merge_templates
from .settings import NODE_TOLERATION_SECONDS
from .volumes import pod_volumes, volume_mounts
from .worker_environment import spec_environment, worker_environment

WORKER_USER_ID = 65532
"""The unprivileged user of our images."""


class PodBuilder:
    """Builds the pods of one pool.

    Args:
        name: the RolloutReplica.
        namespace: its namespace.
        uid: its uid, for the owner reference.
        retry: its retry annotation, copied onto pods.
        spec: what it wants.
        defaults: the operator's image, environment and pod template for the engine.
        turn_claim: PersistentVolumeClaim with a node's lock directory, for colocated pods; empty: none.
    """

    def __init__(
        self,
        name: str,
        namespace: str,
        uid: str,
        retry: str,
        spec: RolloutReplicaSpec,
        defaults: EngineDefaults,
        turn_claim: str = "",
    ) -> None:
        self.name = name
        self.namespace = namespace
        self.uid = uid
        self.retry = retry
        self.spec = spec
        self.defaults = defaults
        self.turn_claim = turn_claim
        self.overlay = merge_templates(
            defaults.pod_template,
            spec.pod_template.model_dump(mode="json", by_alias=True, exclude_defaults=True),
        )

    @property
    def image(self) -> str | None:
        """Image of the worker; None if neither the pool nor the operator names one."""
        return self.spec.engine.image or self.defaults.image

    @property
    def missing_setting(self) -> tuple[str, str] | None:
        """What pods can't be made without: what it is about, and what to set. None: nothing."""
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
        self, replica: int, rank: int, restarts: int, place: PodPlacement | None = None
    ) -> Obj:
        """Return the pod of `(replica, rank)`; a colocated one has a place."""
        made = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": self._pod_metadata(replica, rank, restarts),
            "spec": self._pod_spec(replica, rank),
        }
        if place is not None:
            self._apply_placement(made, rank, place)
        return made

    def _apply_placement(self, pod: Obj, rank: int, place: PodPlacement) -> None:
        """Put a pod in its place: beside the trainer's, on the same claim."""
        meta, spec = pod["metadata"], pod["spec"]
        worker = spec["containers"][0]
        meta["annotations"] |= pod_devices.placement_annotations(place)
        spec["resourceClaims"] = [*spec.get("resourceClaims", ()), pod_devices.pod_claim(place)]
        claims = [*worker["resources"].get("claims", ()), pod_devices.container_claim(place)]
        worker["resources"] = {**worker["resources"], "claims": claims}
        told = pod_devices.device_environment(
            self.spec, place, rank, meta["name"], meta["namespace"], self.turn_claim
        )
        worker["env"] = [*worker["env"], *({"name": k, "value": v} for k, v in told.items())]
        if self.turn_claim:
            spec["volumes"] = [*spec["volumes"], pod_devices.turn_volume(self.turn_claim)]
            worker["volumeMounts"] = [*worker["volumeMounts"], pod_devices.turn_mount()]

    def _pod_metadata(self, replica: int, rank: int, restarts: int) -> Obj:
        annotations = gang_pods.without_scraping(self.overlay.get("annotations", {}), rank)
        annotations[names.ANNOTATION_RESTARTS] = str(restarts)
        if self.retry:
            annotations[names.ANNOTATION_RETRY] = self.retry
        return {
            "name": names.pod_name(self.name, replica, rank),
            "namespace": self.namespace,
            "labels": {
                **self.overlay.get("labels", {}),
                **names.worker_labels(self.name, replica, rank),
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
            # A process that ends takes its gang down, and restarts with our own back-off.
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": self.spec.grace_seconds,
            "serviceAccountName": self.spec.service_account_name,
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
            "volumes": [*self._pod_volumes(), *overlay.get("volumes", ())],
            "containers": [self._worker_container(replica, rank)],
        }
        if rank == 0:
            out["readinessGates"] = [{"conditionType": names.GATE_SERVING}]
        if beside := _init_containers(overlay):
            out["initContainers"] = beside
        if overlay.get("hostNetwork"):
            # Else names of the cluster, such as the leader's of a gang, could not be looked up.
            out["dnsPolicy"] = "ClusterFirstWithHostNet"
        for field in (
            "hostNetwork",
            "hostIPC",
            "shareProcessNamespace",
            "resourceClaims",
            "nodeSelector",
            "affinity",
            "topologySpreadConstraints",
            "imagePullSecrets",
            "priorityClassName",
            "runtimeClassName",
            "schedulerName",
        ):
            if field in overlay:
                out[field] = overlay[field]
        return out

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
                "mountPath", self._volume_mounts(), self.overlay.get("volumeMounts", ())
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

    def _pod_volumes(self) -> list[Obj]:
        ours = pod_volumes(self.spec)
        if self.spec.parallelism.nodes > 1:
            ours.append(gang_pods.token_volume(self.name, self.namespace))
        return ours

    def _volume_mounts(self) -> list[Obj]:
        ours = volume_mounts(self.spec)
        return [*ours, gang_pods.token_mount()] if self.spec.parallelism.nodes > 1 else ours

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
    told = {t.get("key") for t in overlay.get("tolerations", ())}
    return [
        {
            "key": key,
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": NODE_TOLERATION_SECONDS,
        }
        for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
        if key not in told and None not in told
    ]


def _init_containers(overlay: Mapping[str, Any]) -> list[Obj]:
    """Init containers and sidecars; a sidecar is one that is kept running (Kubernetes' own words).

    In `containers`, a sidecar that runs on would keep the pod of a dead worker from ending.
    """
    first = overlay.get("initContainers", ())
    return [*first, *({**each, "restartPolicy": "Always"} for each in overlay.get("sidecars", ()))]
