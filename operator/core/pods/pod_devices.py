"""What a colocated pod has of the trainer's: its claim, its share of the devices, and the turn."""

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


def placement_annotations(place: PodPlacement) -> dict[str, str]:
    """Return what a pod says of its place; the operator finds by it what has to be replaced."""
    return {
        names.ANNOTATION_TRAINER: place.trainer,
        names.ANNOTATION_CLAIM: place.claim_uid,
        names.ANNOTATION_DEVICES: ",".join(place.devices),
    }


def pod_claim(place: PodPlacement) -> Obj:
    """Return the entry of the pod's `resourceClaims`: the scheduler puts it where the claim is."""
    return {"name": DEVICES_CLAIM_NAME, "resourceClaimName": place.claim}


def container_claim(place: PodPlacement) -> Obj:
    """Return the entry of the worker container's `resources.claims`."""
    return {"name": DEVICES_CLAIM_NAME, "request": place.request}


def device_environment(
    spec: RolloutReplicaSpec,
    place: PodPlacement,
    rank: int,
    pod: str,
    namespace: str,
    turn_claim: str,
) -> dict[str, str]:
    """Return which devices the worker sees, which locks it takes, and where its trainer reaches it.

    Of a gang each pod takes the locks of its own node, and only the head is reached.

    The folder is one for all pools of a node: the socket's name says the namespace, too, and is
    short, for the path of a socket has at most 107 bytes.
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
        digest = hashlib.sha256(f"{namespace}/{pod}".encode()).hexdigest()[:10]
        values["ROLLOUT_WEIGHTS_SOCKET"] = f"{names.TURN_MOUNT}/weights-{digest}.sock"
    return values


def torch_device(of: Iterable[str]) -> dict[str, str]:
    """Return which device the engine is told to run on: with none in sight it fails, and takes no CPU.

    Args:
        of: resources, or devices of claims. Their vendor's domain comes first. PyTorch calls the
            devices of two vendors `cuda`; of others the worker looks at what is there.
    """
    domains = [f".{name.partition('/')[0]}" for name in of]
    known = all(domain.endswith(CUDA_VENDORS) for domain in domains)
    return {"ROLLOUT_DEVICE": "cuda"} if domains and known else {}


def turn_volume(turn_claim: str) -> Obj:
    """Return the volume with the node's lock directory."""
    return {"name": _TURN_VOLUME, "persistentVolumeClaim": {"claimName": turn_claim}}


def turn_mount() -> Obj:
    """Return where it is mounted, to be written to: who holds a lock says so in its file."""
    return {"name": _TURN_VOLUME, "mountPath": names.TURN_MOUNT}
