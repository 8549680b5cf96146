"""Which devices this pod has, by the API server: pod → ResourceClaims → devices of their allocation."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from rollout_client.errors import ClusterError, TurnFailed
from rollout_client.kube.access import Obj, access
from rollout_client.kube.client import Kube
from rollout_worker.claims import claims_of, device_name, natural

from .plan import ENV_DEVICES, ENV_POD

LOOK_SECONDS = 10.0
"""How long each look is tried while the API server fails."""

FORBIDDEN, NOT_FOUND = 403, 404
CLAIMS = "/apis/resource.k8s.io/v1/namespaces"
BY_HAND = f"or name the devices: devices=[…], {ENV_DEVICES}, --devices"


async def pod_devices(
    kubeconfig: str | Path | None = None, context: str | None = None
) -> list[str]:
    """Return the names of this pod's devices, `<driver>/<pool>/<device>`, in their natural order.

    The pod is $POD_NAME, or what the host is called, in the service account's namespace. All devices
    of all its claims are meant.

    Raises:
        TurnFailed: The pod has no claim, or one is not allocated.
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
        return await devices_by(kube, kube.namespace)
    finally:
        await kube.close()


async def devices_by(kube: Kube, namespace: str) -> list[str]:
    """As `pod_devices`, over connections that are there."""
    name = os.environ.get(ENV_POD) or socket.gethostname()
    where = f"{namespace}/{name}"
    pod = await _get(kube, "pods", f"/api/v1/namespaces/{namespace}/pods/{name}", where)
    found: set[str] = set()
    for claim in _claims(pod, where):
        path = f"{CLAIMS}/{namespace}/resourceclaims/{claim}"
        claimed = await _get(kube, "resourceclaims", path, f"{namespace}/{claim}")
        found.update(devices_of(claimed, f"{namespace}/{claim}", where))
    return sorted(found, key=natural)


async def _get(kube: Kube, kind: str, path: str, what: str) -> Obj:
    try:
        return await kube.get(path, seconds=LOOK_SECONDS)
    except ClusterError as error:
        fix = {
            FORBIDDEN: f"bind this pod's service account to the role rollout-trainer, which may get {kind}",
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
    found, unmade = claims_of(pod)
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
    return [device_name(each["driver"], each["pool"], each["device"]) for each in results]
