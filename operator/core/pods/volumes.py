"""What is mounted into a worker: scratch space, space for sleep, the claims of model and weights."""

from __future__ import annotations

from typing import NamedTuple

from rollout_operator.api import names
from rollout_operator.api.objects import Obj
from rollout_operator.api.spec import EngineType, RolloutReplicaSpec, VolumeClaim
from rollout_operator.api.spec_engine import CacheClaim


def pod_volumes(spec: RolloutReplicaSpec) -> list[Obj]:
    """Return the operator's volumes of a pod."""
    return [{"name": each.volume, **each.source} for each in _mounts(spec)]


def volume_mounts(spec: RolloutReplicaSpec) -> list[Obj]:
    """Return where these volumes are mounted in the worker container."""
    return [{"name": each.volume, "mountPath": each.path, **each.how} for each in _mounts(spec)]


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


class _Mount(NamedTuple):
    """A volume, its source, and where and how the worker container has it."""

    volume: str
    path: str
    source: Obj
    how: Obj


def _mounts(spec: RolloutReplicaSpec) -> list[_Mount]:
    found = [_Mount("rollout-tmp", "/tmp", {"emptyDir": {}}, {})]
    spill = spec.sleep.spill
    if spill.path is None:
        # A volume of its own, so that its limit is for the weights that sleep moves out of memory.
        limits: Obj = {"medium": "Memory"} if spill.medium == "Memory" else {}
        limits |= {"sizeLimit": spill.size_limit} if spill.size_limit is not None else {}
        found.append(_Mount("rollout-spill", names.SPILL_MOUNT, {"emptyDir": limits}, {}))
    if spec.engine.type is not EngineType.HF:
        # Engines of several processes hand tensors over in /dev/shm; a container's has 64 MB.
        memory: Obj = {"emptyDir": {"medium": "Memory"}}
        found.append(_Mount("rollout-shm", "/dev/shm", memory, {}))
    if (model := spec.model.source.claim) is not None:
        found.append(_claim_mount("rollout-model", names.MODEL_MOUNT, model, read_only=True))
    if (weights := spec.weights.volume) is not None:
        found.append(
            _claim_mount("rollout-weights", names.WEIGHTS_MOUNT, weights.claim, read_only=True)
        )
    if (cache := spec.engine.cache) is not None:
        found.append(_claim_mount("rollout-cache", names.CACHE_MOUNT, cache.claim, read_only=False))
    return found


def _claim_mount(
    volume: str, path: str, claim: VolumeClaim | CacheClaim, *, read_only: bool
) -> _Mount:
    access = {"readOnly": True} if read_only else {}
    below = {"subPath": claim.sub_path} if claim.sub_path else {}
    source = {"persistentVolumeClaim": {"claimName": claim.name, **access}}
    return _Mount(volume, path, source, access | below)
