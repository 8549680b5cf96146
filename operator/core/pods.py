"""Builder of worker pods. Pure: spec and the operator's defaults in, a plain dict out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rollout_operator.api import names
from rollout_operator.api.objects import Obj
from rollout_operator.api.revision import revision
from rollout_operator.api.spec import RolloutReplicaSpec
from rollout_operator.api.spec_engine import EngineType
from rollout_operator.config import EngineDefaults

NODE_TOLERATION_SECONDS = 30
"""A pod on a node that is gone is given up this soon (Kubernetes' default is 300 s)."""

USER = 65532
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
    """

    def __init__(
        self,
        name: str,
        namespace: str,
        uid: str,
        retry: str,
        spec: RolloutReplicaSpec,
        defaults: EngineDefaults,
    ) -> None:
        self.name = name
        self.namespace = namespace
        self.uid = uid
        self.retry = retry
        self.spec = spec
        self.defaults = defaults
        self.overlay = _merged(
            defaults.pod_template,
            spec.pod_template.model_dump(mode="json", by_alias=True, exclude_defaults=True),
        )

    @property
    def image(self) -> str | None:
        """Image of the worker; None if neither the pool nor the operator names one."""
        return self.spec.engine.image or self.defaults.image

    def build(self, replica: int, rank: int, restarts: int) -> Obj:
        """Return the pod of `(replica, rank)`."""
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": self._metadata(replica, rank, restarts),
            "spec": self._spec(replica, rank),
        }

    def _metadata(self, replica: int, rank: int, restarts: int) -> Obj:
        annotations = {**self.overlay.get("annotations", {})}
        annotations[names.ANNOTATION_RESTARTS] = str(restarts)
        if self.retry:
            annotations[names.ANNOTATION_RETRY] = self.retry
        return {
            "name": names.pod_name(self.name, replica, rank),
            "namespace": self.namespace,
            "labels": {
                **self.overlay.get("labels", {}),
                **pool_labels(self.name),
                names.LABEL_REPLICA: str(replica),
                names.LABEL_RANK: str(rank),
                names.LABEL_ROLE: names.ROLE_HEAD if rank == 0 else names.ROLE_MEMBER,
                names.LABEL_REVISION: revision(self.spec),
            },
            "annotations": annotations,
            "ownerReferences": [names.controller_reference(self.name, self.uid)],
        }

    def _spec(self, replica: int, rank: int) -> Obj:
        overlay = self.overlay
        out: Obj = {
            "hostname": names.pod_name(self.name, replica, rank),
            "subdomain": names.heads_service(self.name),
            # A process that ended takes its gang with it and comes back with our own back-off.
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": self.spec.grace_seconds,
            "serviceAccountName": self.spec.service_account_name,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
                **overlay.get("securityContext", {}),
            },
            "tolerations": [*overlay.get("tolerations", ()), *_node_tolerations(overlay)],
            "volumes": [*self._volumes(), *overlay.get("volumes", ())],
            "containers": [self._container(replica, rank)],
        }
        if rank == 0:
            out["readinessGates"] = [{"conditionType": names.GATE_SERVING}]
        for field in (
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

    def _container(self, replica: int, rank: int) -> Obj:
        engine = self.spec.engine
        out: Obj = {
            "name": names.WORKER_CONTAINER,
            "image": self.image,
            "args": ["serve", *(f"--engine-arg={a}" for a in engine.args)],
            "env": self._env(replica, rank),
            "ports": [
                {"name": "data", "containerPort": names.DATA_PORT, "protocol": "TCP"},
                {"name": "control", "containerPort": names.CONTROL_PORT, "protocol": "TCP"},
            ],
            "resources": self._resources(),
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": _by("mountPath", self._mounts(), self.overlay.get("volumeMounts", ())),
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }
        policy = engine.image_pull_policy or self.defaults.image_pull_policy
        if policy:
            out["imagePullPolicy"] = policy
        if rank == 0:
            out |= _probes()
        return out

    def _env(self, replica: int, rank: int) -> list[Obj]:
        spec, parallel = self.spec, self.spec.parallelism
        values = {
            "ROLLOUT_ENGINE": spec.engine.type.value,
            "ROLLOUT_MODEL": self._model(),
            "ROLLOUT_SERVED_NAME": spec.model.served_name or self.name,
            "ROLLOUT_DTYPE": spec.model.dtype,
            "ROLLOUT_LOGPROBS": spec.engine.logprobs_of,
            "ROLLOUT_POOL": self.name,
            "ROLLOUT_NAMESPACE": self.namespace,
            "ROLLOUT_AUTH": "kubernetes",
            "ROLLOUT_DATA_PORT": str(names.DATA_PORT),
            "ROLLOUT_CONTROL_PORT": str(names.CONTROL_PORT),
            "ROLLOUT_WEIGHTS_ROOTS": ":".join(self._roots()),
            "ROLLOUT_DRAIN_SECONDS": str(spec.drain_seconds),
            "ROLLOUT_SPILL_DIR": "/tmp",
            "HOME": "/tmp",
        }
        if spec.model.max_length is not None:
            values["ROLLOUT_MAX_LENGTH"] = str(spec.model.max_length)
        if spec.model.source.hub and spec.model.source.hub.revision:
            values["ROLLOUT_MODEL_REVISION"] = spec.model.source.hub.revision
        if parallel.world > 1 or parallel.nodes > 1:
            leader = names.pod_name(self.name, replica, 0)
            values |= {
                "ROLLOUT_TENSOR": str(parallel.tensor),
                "ROLLOUT_PIPELINE": str(parallel.pipeline),
                "ROLLOUT_DATA": str(parallel.data),
                "ROLLOUT_NODES": str(parallel.nodes),
                "ROLLOUT_RANK": str(rank),
                "ROLLOUT_LEADER_ADDRESS": f"{leader}.{names.heads_service(self.name)}",
            }
        ours: list[Obj] = [{"name": k, "value": v} for k, v in values.items()]
        ours += self._hub_token()
        user = [
            e.model_dump(mode="json", by_alias=True, exclude_none=True) for e in spec.engine.env
        ]
        return _by("name", ours, (dict(e) for e in self.defaults.env), user)

    def _hub_token(self) -> list[Obj]:
        hub = self.spec.model.source.hub
        if hub is None or hub.token_secret is None:
            return []
        ref = {"name": hub.token_secret.name, "key": hub.token_secret.key}
        return [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": ref}}]

    def _model(self) -> str:
        source = self.spec.model.source
        if source.hub is not None:
            return source.hub.repo
        return source.path or names.MODEL_MOUNT

    def _roots(self) -> list[str]:
        """Folders below which weights may lie; a relative path is looked up below the last."""
        source = self.spec.model.source
        roots = []
        if source.claim is not None:
            roots.append(names.MODEL_MOUNT)
        elif source.path is not None:
            roots.append(self._mount_of(source.path))
        if self.spec.weights.volume is not None:
            roots.append(names.WEIGHTS_MOUNT)
        return roots or [names.WEIGHTS_MOUNT]

    def _mount_of(self, path: str) -> str:
        """The mount that holds the model, or its parent folder where the image holds it."""
        mounts: list[str] = [
            m["mountPath"].rstrip("/") for m in self.overlay.get("volumeMounts", ())
        ]
        holding = [m for m in mounts if path == m or path.startswith(m + "/")]
        return max(holding, key=len, default=path.rstrip("/").rpartition("/")[0] or path)

    @property
    def _shares_memory(self) -> bool:
        """Engines of several processes hand tensors over in /dev/shm; a container's has 64 MB."""
        return self.spec.engine.type is not EngineType.HF

    def _volumes(self) -> list[Obj]:
        out: list[Obj] = [{"name": "rollout-tmp", "emptyDir": {}}]
        if self._shares_memory:
            out.append({"name": "rollout-shm", "emptyDir": {"medium": "Memory"}})
        for name, claim in self._claims().items():
            source = {"claimName": claim.name, "readOnly": True}
            out.append({"name": name, "persistentVolumeClaim": source})
        return out

    def _mounts(self) -> list[Obj]:
        out: list[Obj] = [{"name": "rollout-tmp", "mountPath": "/tmp"}]
        if self._shares_memory:
            out.append({"name": "rollout-shm", "mountPath": "/dev/shm"})
        paths = {"rollout-model": names.MODEL_MOUNT, "rollout-weights": names.WEIGHTS_MOUNT}
        for name, claim in self._claims().items():
            mount: Obj = {"name": name, "mountPath": paths[name], "readOnly": True}
            if claim.sub_path:
                mount["subPath"] = claim.sub_path
            out.append(mount)
        return out

    def _claims(self) -> dict[str, Any]:
        claims = {}
        if self.spec.model.source.claim is not None:
            claims["rollout-model"] = self.spec.model.source.claim
        if self.spec.weights.volume is not None:
            claims["rollout-weights"] = self.spec.weights.volume.claim
        return claims

    def _resources(self) -> Obj:
        out: Obj = self.spec.resources.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        if self.spec.accelerator is not None:
            amount = {self.spec.accelerator.resource: str(self.spec.accelerators_per_pod)}
            for part in ("limits", "requests"):
                out[part] = {**out.get(part, {}), **amount}
        return out


def pool_labels(name: str) -> dict[str, str]:
    """Labels that every child of a pool bears."""
    return {
        names.LABEL_NAME: names.WORKER_APP,
        names.LABEL_MANAGED_BY: names.MANAGER,
        names.LABEL_INSTANCE: name,
        names.LABEL_POOL: name,
    }


def _probes() -> Obj:
    health = {"path": "/health", "port": "data"}
    return {
        # The port opens within seconds of the start; loading shows in /ready, not here.
        "startupProbe": {"httpGet": health, "periodSeconds": 1, "failureThreshold": 300},
        "livenessProbe": {
            "httpGet": health,
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
        "readinessProbe": {
            "httpGet": {"path": "/ready", "port": "data"},
            "periodSeconds": 2,
            "timeoutSeconds": 2,
            "failureThreshold": 2,
        },
    }


def _node_tolerations(overlay: Mapping[str, Any]) -> list[Obj]:
    """Short tolerations of a lost node, unless the template speaks of them itself."""
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


def _by(key: str, *parts: Iterable[Obj]) -> list[Obj]:
    """Join lists of entries; a later one replaces an earlier one of the same key in its place."""
    return list({entry[key]: entry for part in parts for entry in part}.values())


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> Obj:
    """Overlay the pool's template on the operator's: maps merge, named lists merge by name."""
    out: Obj = dict(base)
    for key, value in over.items():
        if key in ("labels", "annotations", "nodeSelector"):
            out[key] = {**base.get(key, {}), **value}
        elif key == "volumes":
            out[key] = _by("name", base.get(key, ()), value)
        elif key == "volumeMounts":
            out[key] = _by("mountPath", base.get(key, ()), value)
        elif key == "tolerations":
            out[key] = [*base.get(key, ()), *value]
        else:
            out[key] = value
    return out
