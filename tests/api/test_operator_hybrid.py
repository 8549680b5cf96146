"""Pools in a trainer's pods on a real API server: members, their slices, and what the operator writes.

There is no kubelet for the trainer's pods: the test says itself what runs and at which address.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from localkube import Cluster
from tests.support.api.apiclient import SLICES, ApiError, Obj
from tests.support.api.poollab import STRATEGIC, PoolLab, pool_lab
from tests.support.manifests import target

pytestmark = pytest.mark.asyncio(loop_scope="module")

LABELS = {"job": "grpo"}
HYBRID = {
    "mode": "Hybrid",
    "model": None,
    "colocation": {"trainerSelector": {"matchLabels": LABELS}},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(crd: Cluster) -> AsyncIterator[PoolLab]:
    async with pool_lab(crd, "inside") as made:
        yield made


def start(lab: PoolLab, index: int) -> str:
    """Create a pod of the trainer's that runs and is Ready; returns its address."""
    name, ip = f"t-{index}", f"10.78.0.{index + 1}"
    spec = {
        "serviceAccountName": "rollout-worker",
        "containers": [{"name": "c", "image": "localhost/none"}],
    }
    meta = {"name": name, "labels": LABELS}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
    lab.api.create(lab.path("pods"), body)
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    ran = {
        "name": "c", "image": "none", "imageID": "", "ready": True,
        "restartCount": 0, "state": {"running": {"startedAt": moment}},
    }  # fmt: skip
    status = {
        "phase": "Running",
        "podIP": ip,
        "podIPs": [{"ip": ip}],
        "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": moment}],
        "containerStatuses": [ran],
    }
    lab.api.patch(f"{lab.path('pods', name)}/status", {"status": status}, kind=STRATEGIC)
    return ip


def slices(lab: PoolLab, service: str) -> list[Obj]:
    return lab.api.items(
        SLICES.format(lab.namespace), f"kubernetes.io/service-name={service}", fresh=True
    )


def ready(lab: PoolLab) -> list[str]:
    """Addresses to which the data Service leads."""
    return sorted(
        endpoint["addresses"][0]
        for each in slices(lab, "inside")
        for endpoint in each.get("endpoints") or ()
        if endpoint["conditions"]["ready"]
    )


async def test_a_pool_lives_in_its_trainers_pods(lab: PoolLab) -> None:
    lab.create("inside", **HYBRID)
    await lab.until("it waits", lambda: "waits for a pod" in message(lab))
    addresses = [start(lab, index) for index in range(2)]
    await lab.reaches("inside")
    assert ready(lab) == addresses
    lab.patch("inside", **target(1, 1))
    await lab.committed("inside", 1, 1)
    lab.patch("inside", state="Asleep")
    await lab.reaches("inside", "Asleep")
    assert ready(lab) == []
    lab.patch("inside", state="Active")
    await lab.reaches("inside")
    assert ready(lab) == addresses


def message(lab: PoolLab) -> str:
    text: str = lab.get("inside").get("status", {}).get("message", "")
    return text


async def test_services_select_nobody_and_slices_go_with_the_pool(lab: PoolLab) -> None:
    for service in ("inside", "inside-heads"):
        assert "selector" not in lab.api.get(lab.path("services", service))["spec"]
        (found,) = slices(lab, service)
        (owner,) = found["metadata"]["ownerReferences"]
        assert owner["uid"] == lab.get("inside")["metadata"]["uid"]
    (heads,) = slices(lab, "inside-heads")
    assert [e["hostname"] for e in heads["endpoints"]] == ["inside-0-0", "inside-1-0"]


async def test_slices_that_somebody_changes_are_mended(lab: PoolLab) -> None:
    await lab.reaches("inside")
    await lab.until("it rests", lambda: not lab.writes(), 10)
    (before,) = slices(lab, "inside")
    path = f"{SLICES.format(lab.namespace)}/{before['metadata']['name']}"
    lab.api.patch(path, {"endpoints": []})
    await lab.until("it is mended", lambda: len(ready(lab)) == 2)
    lab.api.delete(path)
    await lab.until("it is made again", lambda: len(ready(lab)) == 2)
    written = {(w.verb, w.resource) for w in lab.writes() if w.code < 300}
    assert written <= {
        ("patch", "endpointslices"),
        ("create", "endpointslices"),
        ("patch", "rolloutreplicas/status"),
    }


async def test_who_goes_leaves_and_no_pod_was_ever_written(lab: PoolLab) -> None:
    lab.api.delete(lab.path("pods", "t-1"), gracePeriodSeconds=0)
    await lab.until("it has left", lambda: ready(lab) == ["10.78.0.1"])
    await lab.reaches("inside")
    assert lab.get("inside")["status"]["desiredReplicas"] == 1
    with pytest.raises(ApiError, match="404"):
        lab.api.get(lab.path("pods", "t-1"))
    user = f"system:serviceaccount:{lab.namespace}:operator"
    with lab.cluster.audit_log.open() as log:
        done = [line for line in log if user in line and '"resource":"pods"' in line]
    assert not [line for line in done if '"verb":"create"' in line or '"verb":"patch"' in line]
    assert not [line for line in done if '"verb":"delete"' in line]
