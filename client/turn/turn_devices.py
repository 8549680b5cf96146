"""Asks the API server for the devices of this pod: pod → ResourceClaims → allocated devices."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout_client.cluster_client import ClusterClient, load_access
from rollout_client.errors import ClusterError, TurnFailed
from rollout_common.device_claims import (
    device_lock_name,
    device_uuids,
    natural_sort_key,
    pod_claims,
)
from rollout_common.kube.access import Obj

from .plan import ENV_DEVICES, ENV_POD
from .settings import DEVICE_LOOKUP_SECONDS

HTTP_FORBIDDEN, HTTP_NOT_FOUND = 403, 404
CLAIMS_PATH = "/apis/resource.k8s.io/v1/namespaces"
SLICES_PATH = "/apis/resource.k8s.io/v1/resourceslices"
NAME_DEVICES_ADVICE = f"or name the devices: devices=[…], {ENV_DEVICES}, --devices"


async def pod_devices(
    kubeconfig: str | Path | None = None,
    context: str | None = None,
    *,
    uuids: Sequence[str] | None = None,
) -> list[str]:
    """Return the names of this pod's devices, `<driver>/<pool>/<device>`, in their natural order.

    CUDA may count them in another order. The pod is $POD_NAME, or the host's name, in the service account's
    namespace. The names are those of all devices of all its claims.

    Args:
        kubeconfig: Where the API server is; default: the pod's own, or as kubectl finds it.
        context: Its context; default: the current one.
        uuids: Only these devices, in this order, by the uuids that their driver publishes in its
            ResourceSlices; `GPU-` before them may be left out, as PyTorch does
            (`torch.cuda.get_device_properties(i).uuid`).

    Raises:
        TurnFailed: The pod has no claim, a claim is not allocated, or none of its devices has such a uuid.
        ClusterError: No rights, no credentials, or no answer.
    """
    try:
        kube = ClusterClient(load_access(kubeconfig, context))
    except ClusterError as error:
        raise ClusterError(
            f"the API server can't be asked which devices this process has: {error}; run in a pod with "
            f"ResourceClaims, {NAME_DEVICES_ADVICE}"
        ) from error
    try:
        return await query_pod_devices(kube, kube.namespace, uuids)
    finally:
        await kube.close()


async def query_pod_devices(
    kube: ClusterClient, namespace: str, uuids: Sequence[str] | None = None
) -> list[str]:
    """As `pod_devices`, with an existing client."""
    name = os.environ.get(ENV_POD) or socket.gethostname()
    where = f"{namespace}/{name}"
    pod = await _get_object(kube, "pods", f"/api/v1/namespaces/{namespace}/pods/{name}", where)
    found: set[str] = set()
    for claim in _claim_names(pod, where):
        path = f"{CLAIMS_PATH}/{namespace}/resourceclaims/{claim}"
        claimed = await _get_object(kube, "resourceclaims", path, f"{namespace}/{claim}")
        found.update(allocated_devices(claimed, f"{namespace}/{claim}", where))
    names = sorted(found, key=natural_sort_key)
    if uuids is None:
        return names
    node = str((pod.get("spec") or {}).get("nodeName") or "")
    return _devices_with_uuids(names, await _node_device_uuids(kube, node), uuids, where)


async def _node_device_uuids(kube: ClusterClient, node: str) -> dict[str, str]:
    selector = {"fieldSelector": f"spec.nodeName={node}"}
    listed = await _get_object(
        kube, "resourceslices", SLICES_PATH, f"devices of node {node}", selector
    )
    found: dict[str, str] = {}
    slices: list[Obj] = listed.get("items") or []
    for each in sorted(slices, key=lambda each: int(each["spec"]["pool"].get("generation", 0))):
        found |= device_uuids(each)
    return found


def _devices_with_uuids(
    names: Sequence[str], known: dict[str, str], uuids: Sequence[str], where: str
) -> list[str]:
    by_uuid = {_bare_uuid(known[name]): name for name in names if name in known}
    unknown = [uuid for uuid in map(str, uuids) if _bare_uuid(uuid) not in by_uuid]
    if unknown:
        published = ", ".join(f"{name}: {known.get(name, 'no uuid')}" for name in names)
        raise TurnFailed(
            f"no device of the pod {where} is published with the uuid {unknown[0]} ({published}): pass "
            f"uuids of its own devices, {NAME_DEVICES_ADVICE}"
        )
    return [by_uuid[_bare_uuid(str(uuid))] for uuid in uuids]


def _bare_uuid(uuid: str) -> str:
    return uuid.removeprefix("GPU-").lower()


async def _get_object(
    kube: ClusterClient, kind: str, path: str, what: str, params: dict[str, str] | None = None
) -> Obj:
    try:
        return await kube.get(path, params, seconds=DEVICE_LOOKUP_SECONDS)
    except ClusterError as error:
        bind = f"bind this pod's service account to the role rollout-trainer, which may get {kind}"
        if kind == "resourceslices":
            bind = (
                "put this namespace into the chart's colocation.namespaces, which lets it list them"
            )
        fix = {
            HTTP_FORBIDDEN: bind,
            HTTP_NOT_FOUND: "set POD_NAME by the downward API (fieldRef: metadata.name)"
            if kind == "pods"
            else "it was deleted, so this pod can't keep its devices: start it again",
        }.get(error.status, "try again")
        raise ClusterError(
            f"{what} can't be read: {error}; {fix}, {NAME_DEVICES_ADVICE}",
            status=error.status,
            reason=error.reason,
        ) from error


def _claim_names(pod: Obj, where: str) -> list[str]:
    found, unmade = pod_claims(pod)
    if unmade:
        raise TurnFailed(
            f"the pod {where} has no ResourceClaim yet for its entry {unmade[0]!r}: wait until "
            "its status.resourceClaimStatuses names one"
        )
    if not found:
        raise TurnFailed(
            f"the pod {where} has no ResourceClaim, so which devices it shares is not known: give it "
            f"spec.resourceClaims, {NAME_DEVICES_ADVICE}"
        )
    return sorted(found)


def allocated_devices(claim: Obj, name: str, pod: str) -> list[str]:
    """Return the devices allocated to a claim, as `<driver>/<pool>/<device>`.

    Raises:
        TurnFailed: It has none.
    """
    allocation: Any = (claim.get("status") or {}).get("allocation")
    results = ((allocation or {}).get("devices") or {}).get("results") or ()
    if not results:
        state = "is not allocated yet" if not allocation else "was allocated without a device"
        raise TurnFailed(
            f"the ResourceClaim {name} of the pod {pod} {state}: look at kubectl describe "
            f"resourceclaim, {NAME_DEVICES_ADVICE}"
        )
    return [device_lock_name(each["driver"], each["pool"], each["device"]) for each in results]
