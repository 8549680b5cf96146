"""What is mounted into a worker: scratch space, room for sleep, the claims of model and weights."""

from __future__ import annotations

from rollout_operator.api import names
from rollout_operator.api.objects import Obj
from rollout_operator.api.spec import Claim, EngineType, RolloutReplicaSpec, Spill


def volumes(spec: RolloutReplicaSpec) -> list[Obj]:
    """Return the operator's volumes of a pod."""
    out: list[Obj] = [{"name": "rollout-tmp", "emptyDir": {}}]
    if spec.sleep.spill.path is None:
        out.append({"name": "rollout-spill", "emptyDir": _spill(spec.sleep.spill)})
    if _shares_memory(spec):
        out.append({"name": "rollout-shm", "emptyDir": {"medium": "Memory"}})
    for name, claim in _claims(spec).items():
        source = {"claimName": claim.name, "readOnly": True}
        out.append({"name": name, "persistentVolumeClaim": source})
    if spec.engine.cache is not None:
        cached = {"claimName": spec.engine.cache.claim.name}
        out.append({"name": "rollout-cache", "persistentVolumeClaim": cached})
    return out


def mounts(spec: RolloutReplicaSpec) -> list[Obj]:
    """Return where these volumes are mounted in the worker container."""
    out: list[Obj] = [{"name": "rollout-tmp", "mountPath": "/tmp"}]
    if spec.sleep.spill.path is None:
        out.append({"name": "rollout-spill", "mountPath": names.SPILL_MOUNT})
    if _shares_memory(spec):
        out.append({"name": "rollout-shm", "mountPath": "/dev/shm"})
    paths = {"rollout-model": names.MODEL_MOUNT, "rollout-weights": names.WEIGHTS_MOUNT}
    for name, claim in _claims(spec).items():
        mount: Obj = {"name": name, "mountPath": paths[name], "readOnly": True}
        if claim.sub_path:
            mount["subPath"] = claim.sub_path
        out.append(mount)
    if spec.engine.cache is not None:
        folder = spec.engine.cache.claim.sub_path
        below = {"subPath": folder} if folder else {}
        out.append({"name": "rollout-cache", "mountPath": names.CACHE_MOUNT, **below})
    return out


def weights_roots(spec: RolloutReplicaSpec, overlay: Obj) -> list[str]:
    """Folders that weights must lie below; a relative path is looked up below the last."""
    source = spec.model.source
    roots = []
    if source.claim is not None:
        roots.append(names.MODEL_MOUNT)
    elif source.path is not None:
        roots.append(_mount_of(source.path, overlay))
    if spec.weights.volume is not None:
        roots.append(names.WEIGHTS_MOUNT)
    return roots or [names.WEIGHTS_MOUNT]


def _mount_of(path: str, overlay: Obj) -> str:
    """The mount that holds the model, or its parent folder where the image holds it."""
    found: list[str] = [m["mountPath"].rstrip("/") for m in overlay.get("volumeMounts", ())]
    holding = [m for m in found if path == m or path.startswith(m + "/")]
    return max(holding, key=len, default=path.rstrip("/").rpartition("/")[0] or path)


def _spill(spill: Spill) -> Obj:
    """The emptyDir for weights that sleep moves out of memory: of its own, so that its limit is theirs."""
    out: Obj = {}
    if spill.medium == "Memory":
        out["medium"] = "Memory"
    if spill.size_limit is not None:
        out["sizeLimit"] = spill.size_limit
    return out


def _shares_memory(spec: RolloutReplicaSpec) -> bool:
    """Engines of several processes hand tensors over in /dev/shm; a container's has 64 MB."""
    return spec.engine.type is not EngineType.HF


def _claims(spec: RolloutReplicaSpec) -> dict[str, Claim]:
    claims = {}
    if spec.model.source.claim is not None:
        claims["rollout-model"] = spec.model.source.claim
    if spec.weights.volume is not None:
        claims["rollout-weights"] = spec.weights.volume.claim
    return claims
