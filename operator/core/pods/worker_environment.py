"""What the worker container is given: its environment, scratch space, space for sleep, the claims of model and weights."""

from __future__ import annotations

from typing import NamedTuple

from rollout_operator.api import names
from rollout_operator.api.objects import Obj
from rollout_operator.api.spec import EngineType, RolloutReplicaSpec, VolumeClaim
from rollout_operator.api.spec_engine import CacheClaim

from . import gang_pods, pod_devices

COMPILE_CACHE_VARIABLES = {
    "XDG_CACHE_HOME": "",
    "VLLM_CACHE_ROOT": "/vllm",
    "SGLANG_CACHE_DIR": "/sglang",
    "TORCHINDUCTOR_CACHE_DIR": "/inductor",
    "TRITON_CACHE_DIR": "/triton",
    "FLASHINFER_WORKSPACE_BASE": "",  # it adds .cache/flashinfer itself
    "DG_JIT_CACHE_DIR": "/deep_gemm",
    "TVM_FFI_CACHE_DIR": "/tvm-ffi",
    "QUACK_CACHE_DIR": "/quack",
    "CUDA_CACHE_PATH": "/nv",
}
"""Folders in the cache volume for what engines and their compilers compile."""


def worker_environment(
    pool: str, namespace: str, spec: RolloutReplicaSpec, overlay: Obj, replica: int, rank: int
) -> list[Obj]:
    """Return the operator's part of the environment of `(replica, rank)`."""
    values = {
        "ROLLOUT_ENGINE": spec.engine.type.value,
        "ROLLOUT_MODEL": _model_location(spec),
        "ROLLOUT_SERVED_NAME": spec.model.served_name or pool,
        "ROLLOUT_DTYPE": spec.model.dtype,
        "ROLLOUT_LOGPROBS": spec.engine.logprobs_of,
        "ROLLOUT_POOL": pool,
        "ROLLOUT_NAMESPACE": namespace,
        "ROLLOUT_AUTH": "kubernetes",
        "ROLLOUT_DATA_PORT": str(names.DATA_PORT),
        "ROLLOUT_CONTROL_PORT": str(names.CONTROL_PORT),
        "ROLLOUT_WEIGHTS_ROOTS": ":".join(_weights_roots(spec, overlay)),
        "ROLLOUT_DRAIN_SECONDS": str(spec.drain_seconds),
        "ROLLOUT_SPILL_DIR": spec.sleep.spill.path or names.SPILL_MOUNT,
        "ROLLOUT_START_TIMEOUT": str(spec.worker.start_timeout_seconds),
        "ROLLOUT_MAX_QUEUE": str(spec.worker.max_queue),
        "ROLLOUT_LOG_LEVEL": spec.worker.log_level,
        "HOME": "/tmp",
        # Caches are named after the user, and the image's uid has no name in its passwd.
        "USER": "rollout",
        "LOGNAME": "rollout",
    }
    if spec.accelerator is not None:
        values |= pod_devices.torch_device([spec.accelerator.resource])
    if spec.engine.cache is not None:
        values |= {
            name: f"{names.CACHE_MOUNT}{folder}" for name, folder in COMPILE_CACHE_VARIABLES.items()
        }
        values["HF_HOME"] = "/tmp/.cache/huggingface"  # else models would fill the cache's volume
    if rank == 0:  # the other ranks of a gang fetch from it
        values["ROLLOUT_WEIGHTS_PORT"] = str(spec.weights.transport.port)
    if spec.weights.transport.tls == "Required":
        values["ROLLOUT_WEIGHTS_TLS"] = "required"
    if spec.weights.transport.egress is not None:
        values["ROLLOUT_WEIGHTS_EGRESS"] = str(spec.weights.transport.egress)
    if spec.weights.transport.gang_fetch == "All":
        values["ROLLOUT_GANG_FETCH"] = "all"
    if spec.model.max_length is not None:
        values["ROLLOUT_MAX_LENGTH"] = str(spec.model.max_length)
    if spec.weights.staging_memory is not None:
        values["ROLLOUT_STAGING_MEMORY"] = str(spec.weights.staging_memory)
    if spec.model.source.hub and spec.model.source.hub.revision:
        values["ROLLOUT_MODEL_REVISION"] = spec.model.source.hub.revision
    values |= gang_pods.gang_environment(pool, spec, replica, rank)
    return [*({"name": k, "value": v} for k, v in values.items()), *_hub_token_entries(spec)]


def spec_environment(spec: RolloutReplicaSpec) -> list[Obj]:
    """Return `spec.engine.env` as a container has it."""
    return [e.model_dump(mode="json", by_alias=True, exclude_none=True) for e in spec.engine.env]


def _hub_token_entries(spec: RolloutReplicaSpec) -> list[Obj]:
    hub = spec.model.source.hub
    if hub is None or hub.token_secret is None:
        return []
    ref = {"name": hub.token_secret.name, "key": hub.token_secret.key}
    return [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": ref}}]


def _model_location(spec: RolloutReplicaSpec) -> str:
    source = spec.model.source
    if source.hub is not None:
        return source.hub.repo
    return source.path or names.MODEL_MOUNT


def pod_volumes(spec: RolloutReplicaSpec) -> list[Obj]:
    """Return the operator's volumes of a pod."""
    return [{"name": each.volume, **each.source} for each in _mounts(spec)]


def volume_mounts(spec: RolloutReplicaSpec) -> list[Obj]:
    """Return where these volumes are mounted in the worker container."""
    return [{"name": each.volume, "mountPath": each.path, **each.how} for each in _mounts(spec)]


def _weights_roots(spec: RolloutReplicaSpec, overlay: Obj) -> list[str]:
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
