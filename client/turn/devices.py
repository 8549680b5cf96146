"""Which devices this pod has, by the API server: pod → ResourceClaims → devices of their allocation."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout_client.errors import ClusterError, TurnFailed
from rollout_client.kube.access import Obj, access
from rollout_client.kube.client import Kube
from rollout_worker.claims import device_lock_name, device_uuids, natural_sort_key, pod_claims

from .plan import ENV_DEVICES, ENV_POD

LOOK_SECONDS = 10.0
"""How long each look is tried while the API server fails."""

FORBIDDEN, NOT_FOUND = 403, 404
CLAIMS = "/apis/resource.k8s.io/v1/namespaces"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
BY_HAND = f"or name the devices: devices=[…], {ENV_DEVICES}, --devices"


async def pod_devices(
    kubeconfig: str | Path | None = None,
    context: str | None = None,
    *,
    uuids: Sequence[str] | None = None,
) -> list[str]:
    """Return the names of this pod's devices, `<driver>/<pool>/<device>`, in their natural order.

    That is not the order in which CUDA counts them. The pod is $POD_NAME, or what the host is called, in
    the service account's namespace. All devices of all its claims are meant.

    Args:
        kubeconfig: Where the API server is; default: the pod's own, or as kubectl finds it.
        context: Its context; default: the current one.
        uuids: Only these devices, in this order, by the uuids that their driver publishes in its
            ResourceSlices; `GPU-` before them may be left out, as PyTorch does
            (`torch.cuda.get_device_properties(i).uuid`).

    Raises:
        TurnFailed: The pod has no claim, one is not allocated, or no device of its has such a uuid.
        ClusterError: No rights, no credentials, or no answer.
    """
    try:
        kube = Kube(access(kubeconfig, context))
    except ClusterError as error:
        raise ClusterError(
            f"the API server can't be asked which devices this process has: {error}; run in a pod with "
            f"ResourceClaims, {BY_HAND}"
        ) from error
    try:
        return await devices_by(kube, kube.namespace, uuids)
    finally:
        await kube.close()


async def devices_by(kube: Kube, namespace: str, uuids: Sequence[str] | None = None) -> list[str]:
    """As `pod_devices`, over connections that are there."""
    name = os.environ.get(ENV_POD) or socket.gethostname()
    where = f"{namespace}/{name}"
    pod = await _get(kube, "pods", f"/api/v1/namespaces/{namespace}/pods/{name}", where)
    found: set[str] = set()
    for claim in _claims(pod, where):
        path = f"{CLAIMS}/{namespace}/resourceclaims/{claim}"
        claimed = await _get(kube, "resourceclaims", path, f"{namespace}/{claim}")
        found.update(devices_of(claimed, f"{namespace}/{claim}", where))
    names = sorted(found, key=natural_sort_key)
    if uuids is None:
        return names
    node = str((pod.get("spec") or {}).get("nodeName") or "")
    return _chosen(names, await _uuids_on(kube, node), uuids, where)


async def _uuids_on(kube: Kube, node: str) -> dict[str, str]:
    """Uuids of a node's devices by name, as their drivers publish them."""
    selector = {"fieldSelector": f"spec.nodeName={node}"}
    listed = await _get(kube, "resourceslices", SLICES, f"devices of node {node}", selector)
    found: dict[str, str] = {}
    for each in sorted(listed.get("items") or (), key=_generation):
        found |= device_uuids(each)
    return found


def _generation(piece: Obj) -> int:
    found: int = piece["spec"]["pool"].get("generation", 0)
    return found


def _chosen(
    names: Sequence[str], known: dict[str, str], uuids: Sequence[str], where: str
) -> list[str]:
    """Return the names that belong to these uuids, in their order."""
    by_uuid = {_plain(known[name]): name for name in names if name in known}
    unknown = [uuid for uuid in map(str, uuids) if _plain(uuid) not in by_uuid]
    if unknown:
        told = ", ".join(f"{name}: {known.get(name, 'no uuid')}" for name in names)
        raise TurnFailed(
            f"no device of the pod {where} is published with the uuid {unknown[0]} ({told}): pass "
            f"uuids of its own devices, {BY_HAND}"
        )
    return [by_uuid[_plain(str(uuid))] for uuid in uuids]


def _plain(uuid: str) -> str:
    return uuid.removeprefix("GPU-").lower()


async def _get(
    kube: Kube, kind: str, path: str, what: str, params: dict[str, str] | None = None
) -> Obj:
    try:
        return await kube.get(path, params, seconds=LOOK_SECONDS)
    except ClusterError as error:
        bind = f"bind this pod's service account to the role rollout-trainer, which may get {kind}"
        if kind == "resourceslices":
            bind = (
                "put this namespace into the chart's colocation.namespaces, which lets it list them"
            )
        fix = {
            FORBIDDEN: bind,
            NOT_FOUND: "set POD_NAME by the downward API (fieldRef: metadata.name)"
            if kind == "pods"
            else "it was deleted, so this pod can't keep its devices: start it again",
        }.get(error.status, "try again")
        raise ClusterError(
            f"{what} can't be read: {error}; {fix}, {BY_HAND}",
            status=error.status,
            reason=error.reason,
        ) from error


def _claims(pod: Obj, where: str) -> list[str]:
    """Return the names of a pod's ResourceClaims, each once.

    Raises:
        TurnFailed: It has none, or not yet.
    """
    found, unmade = pod_claims(pod)
    if unmade:
        raise TurnFailed(
            f"the pod {where} has no ResourceClaim yet for its entry {unmade[0]!r}: wait until "
            "its status.resourceClaimStatuses names one"
        )
    if not found:
        raise TurnFailed(
            f"the pod {where} has no ResourceClaim, so which devices it shares is not known: give it "
            f"spec.resourceClaims, {BY_HAND}"
        )
    return sorted(found)


def devices_of(claim: Obj, name: str, pod: str) -> list[str]:
    """Return the devices that a claim was given, as `<driver>/<pool>/<device>`.

    Raises:
        TurnFailed: It was given none.
    """
    allocation: Any = (claim.get("status") or {}).get("allocation")
    results = ((allocation or {}).get("devices") or {}).get("results") or ()
    if not results:
        state = "is not allocated yet" if not allocation else "was allocated without a device"
        raise TurnFailed(
            f"the ResourceClaim {name} of the pod {pod} {state}: look at kubectl describe "
            f"resourceclaim, {BY_HAND}"
        )
    return [device_lock_name(each["driver"], each["pool"], each["device"]) for each in results]
