"""What is mounted into a worker: scratch space, room for sleep, the claims of model and weights."""

from __future__ import annotations

from typing import NamedTuple

from rollout_operator.api import names
from rollout_operator.api.objects import Obj
from rollout_operator.api.spec import EngineType, RolloutReplicaSpec, SpillSpec, VolumeClaim
from rollout_operator.api.spec_engine import CacheClaim


def pod_volumes(spec: RolloutReplicaSpec) -> list[Obj]:
    """Return the operator's volumes of a pod."""
    out: list[Obj] = [{"name": "rollout-tmp", "emptyDir": {}}]
    if spec.sleep.spill.path is None:
        out.append({"name": "rollout-spill", "emptyDir": _spill_volume(spec.sleep.spill)})
    if _needs_shared_memory(spec):
        out.append({"name": "rollout-shm", "emptyDir": {"medium": "Memory"}})
    for each in _mounted_claims(spec):
        source = {"claimName": each.claim.name, **each.access}
        out.append({"name": each.volume, "persistentVolumeClaim": source})
    return out


def volume_mounts(spec: RolloutReplicaSpec) -> list[Obj]:
    """Return where these volumes are mounted in the worker container."""
    out: list[Obj] = [{"name": "rollout-tmp", "mountPath": "/tmp"}]
    if spec.sleep.spill.path is None:
        out.append({"name": "rollout-spill", "mountPath": names.SPILL_MOUNT})
    if _needs_shared_memory(spec):
        out.append({"name": "rollout-shm", "mountPath": "/dev/shm"})
    for each in _mounted_claims(spec):
        mount: Obj = {"name": each.volume, "mountPath": each.path, **each.access}
        if each.claim.sub_path:
            mount["subPath"] = each.claim.sub_path
        out.append(mount)
    return out


def weights_roots(spec: RolloutReplicaSpec, overlay: Obj) -> list[str]:
    """Folders that weights must lie below; a relative path is looked up below the last."""
    source = spec.model.source
    roots = []
    if source.claim is not None:
        roots.append(names.MODEL_MOUNT)
    elif source.path is not None:
        roots.append(_model_mount(source.path, overlay))
    if spec.weights.volume is not None:
        roots.append(names.WEIGHTS_MOUNT)
    return roots or [names.WEIGHTS_MOUNT]


def _model_mount(path: str, overlay: Obj) -> str:
    """The mount that holds the model, or its parent folder where the image holds it."""
    found: list[str] = [m["mountPath"].rstrip("/") for m in overlay.get("volumeMounts", ())]
    holding = [m for m in found if path == m or path.startswith(m + "/")]
    return max(holding, key=len, default=path.rstrip("/").rpartition("/")[0] or path)


def _spill_volume(spill: SpillSpec) -> Obj:
    """The emptyDir for weights that sleep moves out of memory: of its own, so that its limit is theirs."""
    out: Obj = {}
    if spill.medium == "Memory":
        out["medium"] = "Memory"
    if spill.size_limit is not None:
        out["sizeLimit"] = spill.size_limit
    return out


def _needs_shared_memory(spec: RolloutReplicaSpec) -> bool:
    """Engines of several processes hand tensors over in /dev/shm; a container's has 64 MB."""
    return spec.engine.type is not EngineType.HF


class _MountedClaim(NamedTuple):
    """A claim, its volume, and where it is mounted."""

    volume: str
    path: str
    claim: VolumeClaim | CacheClaim
    access: Obj


def _mounted_claims(spec: RolloutReplicaSpec) -> list[_MountedClaim]:
    read: Obj = {"readOnly": True}
    found = []
    if (model := spec.model.source.claim) is not None:
        found.append(_MountedClaim("rollout-model", names.MODEL_MOUNT, model, read))
    if (weights := spec.weights.volume) is not None:
        found.append(_MountedClaim("rollout-weights", names.WEIGHTS_MOUNT, weights.claim, read))
    if (cache := spec.engine.cache) is not None:
        found.append(_MountedClaim("rollout-cache", names.CACHE_MOUNT, cache.claim, {}))
    return found
