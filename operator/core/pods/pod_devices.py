"""What a colocated pod shares with its trainer: the claim, devices, and the locks of the turn."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from rollout_operator.api import names
from rollout_operator.api.objects import Obj
from rollout_operator.api.spec import RolloutReplicaSpec
from rollout_operator.api.spec_colocation import DEVICES_CLAIM_NAME
from rollout_operator.core.placement import PodPlacement

CUDA_VENDORS = (".nvidia.com", ".amd.com")
"""Domains of resources and DRA drivers whose devices PyTorch calls `cuda`."""

_TURN_VOLUME = "rollout-turn"


def apply_placement(
    pod: Obj, spec: RolloutReplicaSpec, rank: int, place: PodPlacement, turn_claim: str
) -> None:
    """Put a pod in its place: on the claim and the node of the trainer's pod, with its share."""
    meta, worker = pod["metadata"], pod["spec"]["containers"][0]
    # By these the operator finds pods that have to be replaced.
    meta["annotations"] |= {
        names.ANNOTATION_TRAINER: place.trainer,
        names.ANNOTATION_CLAIM: place.claim_uid,
        names.ANNOTATION_DEVICES: ",".join(place.devices),
    }
    claim = {"name": DEVICES_CLAIM_NAME, "resourceClaimName": place.claim}
    pod["spec"]["resourceClaims"] = [*pod["spec"].get("resourceClaims", ()), claim]
    used = {"name": DEVICES_CLAIM_NAME, "request": place.request}
    claims = [*worker["resources"].get("claims", ()), used]
    worker["resources"] = {**worker["resources"], "claims": claims}
    values = _device_environment(spec, place, rank, meta["name"], meta["namespace"], turn_claim)
    worker["env"] = [*worker["env"], *({"name": k, "value": v} for k, v in values.items())]
    if turn_claim:
        volume = {"name": _TURN_VOLUME, "persistentVolumeClaim": {"claimName": turn_claim}}
        pod["spec"]["volumes"] = [*pod["spec"]["volumes"], volume]
        # Writable: the holder of a lock writes its name into the lock's file.
        mount = {"name": _TURN_VOLUME, "mountPath": names.TURN_MOUNT}
        worker["volumeMounts"] = [*worker["volumeMounts"], mount]


def _device_environment(
    spec: RolloutReplicaSpec,
    place: PodPlacement,
    rank: int,
    pod: str,
    namespace: str,
    turn_claim: str,
) -> dict[str, str]:
    """Return which devices the worker sees, which locks it takes, and where its trainer reaches it.

    Each pod of a gang takes the locks of its own node, and the trainer reaches only the head.
    """
    values = torch_device(place.devices)
    if spec.colocation is not None and spec.colocation.slots > 1:
        # Not by index: neither names nor CUDA's own order need follow the bus.
        values["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        values["CUDA_VISIBLE_DEVICES"] = ",".join(place.uuids)
    if turn_claim:
        values["ROLLOUT_TURN_DIRECTORY"] = names.TURN_MOUNT
        values["ROLLOUT_TURN_DEVICES"] = ",".join(place.devices)
        values["ROLLOUT_TURN_HOLDER"] = pod
    if turn_claim and rank == 0:
        # All pools of a node share the folder, so the namespace counts; a socket's path has 107 bytes.
        digest = hashlib.sha256(f"{namespace}/{pod}".encode()).hexdigest()[:10]
        values["ROLLOUT_WEIGHTS_SOCKET"] = f"{names.TURN_MOUNT}/weights-{digest}.sock"
    return values


def torch_device(of: Iterable[str]) -> dict[str, str]:
    """Return the device that the engine must run on: where none is in sight it fails, and uses no CPU.

    `of` are resources, or devices of claims; they begin with their vendor's domain. PyTorch calls
    the devices of two vendors `cuda`; with others the worker looks for a device itself.
    """
    domains = [f".{name.partition('/')[0]}" for name in of]
    known = all(domain.endswith(CUDA_VENDORS) for domain in domains)
    return {"ROLLOUT_DEVICE": "cuda"} if domains and known else {}
