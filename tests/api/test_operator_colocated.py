"""Pools beside a trainer on a real API server: its pods and claims come in any order, and are replaced.

There is no scheduler, no kubelet and no driver: the test binds the trainer's pods and allocates claims itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest
import pytest_asyncio

from localkube import Cluster
from tests.support.api.apiclient import Obj
from tests.support.api.poollab import PoolLab, pool_lab

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLICES = "/apis/resource.k8s.io/v1/resourceslices"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/{}/resourceclaims"
DRIVER = "gpu.example.com"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(crd: Cluster) -> AsyncIterator[PoolLab]:
    async with pool_lab(crd, "beside") as made:
        yield made


class Job:
    """A trainer's pods and claims, called after its name."""

    def __init__(self, lab: PoolLab, name: str) -> None:
        self.lab = lab
        self.name = name
        self._claims = CLAIMS.format(lab.namespace)

    @property
    def colocation(self) -> Obj:
        """What a pool says to run beside it."""
        return {"trainerSelector": {"matchLabels": {"job": self.name}}}

    def add_pod(self, index: int) -> Obj:
        """Create a pod that nobody has scheduled yet."""
        uses = [{"name": "gpus", "resourceClaimName": f"{self.name}-gpus-{index}"}]
        container = {
            "name": "c",
            "image": "localhost/none",
            "resources": {"claims": [{"name": "gpus"}]},
        }
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"{self.name}-{index}", "labels": {"job": self.name}},
            "spec": {"containers": [container], "resourceClaims": uses},
        }
        return self.lab.api.create(self.lab.path("pods"), body)

    def add_claim(self, index: int, owner: Obj | None = None) -> Obj:
        """Create a claim that nobody has allocated yet; `owner`: as if generated for this pod."""
        meta: Obj = {"name": f"{self.name}-gpus-{index}"}
        if owner is not None:
            ref = {"apiVersion": "v1", "kind": "Pod", "controller": True}
            meta["ownerReferences"] = [
                {**ref, "name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}
            ]
        wants = {"name": "gpus", "exactly": {"deviceClassName": DRIVER, "count": 1}}
        body = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": meta,
            "spec": {"devices": {"requests": [wants]}},
        }
        return self.lab.api.create(self._claims, body)

    def bind(self, index: int) -> None:
        """Schedule a pod to a node of its own."""
        name = f"{self.name}-{index}"
        target = {"apiVersion": "v1", "kind": "Node", "name": f"node-{index}"}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        self.lab.api.create(f"{self.lab.path('pods', name)}/binding", body)

    def allocate(self, index: int) -> None:
        """Give a claim a device of that node."""
        given = {"request": "gpus", "driver": DRIVER, "pool": f"node-{index}", "device": "gpu-0"}
        path = f"{self._claims}/{self.name}-gpus-{index}/status"
        self.lab.api.patch(path, {"status": {"allocation": {"devices": {"results": [given]}}}})

    def remove_pod(self, index: int) -> None:
        """Delete a pod for good."""
        self.lab.api.delete(self.lab.path("pods", f"{self.name}-{index}"), gracePeriodSeconds=0)

    def remove_claim(self, index: int) -> None:
        """Delete a claim for good."""
        self.lab.api.delete(f"{self._claims}/{self.name}-gpus-{index}")


def seat(pod: Obj) -> tuple[str, str, str]:
    """Trainer, claim and devices of a pod, which its spec must name, too."""
    notes = pod["metadata"]["annotations"]
    (claim,) = pod["spec"]["resourceClaims"]
    assert claim["name"] == "rollout-devices"
    used = pod["spec"]["containers"][0]["resources"]["claims"]
    assert used == [{"name": "rollout-devices", "request": "gpus"}]
    assert "nodeName" not in pod["spec"]
    return notes["rollout.dev/trainer"], claim["resourceClaimName"], notes["rollout.dev/devices"]


def progress_tells(lab: PoolLab, words: str) -> bool:
    return words in lab.condition("waits", "Progressing")[2]


ORDERS = {
    "pool first": ["pool", "pods", "claims", "bind", "allocate"],
    "claims first": ["claims", "allocate", "pool", "pods", "bind"],
    "trainer first": ["pods", "claims", "allocate", "bind", "pool"],
    "bound before it has a claim": ["pods", "bind", "pool", "claims", "allocate"],
}


@pytest.mark.parametrize("order", ORDERS)
async def test_pods_are_made_on_the_right_claims_whatever_comes_first(
    lab: PoolLab, order: str
) -> None:
    name = order.replace(" ", "-")[:12].strip("-")
    job = Job(lab, f"job-{name}")
    do: dict[str, Callable[[int], object]] = {
        "pool": lambda index: None,
        "pods": job.add_pod,
        "claims": job.add_claim,
        "bind": job.bind,
        "allocate": job.allocate,
    }
    for step in ORDERS[order]:
        if step == "pool":
            lab.create(name, mode="Colocated", colocation=job.colocation, replicas=2)
        for index in (1, 0):
            do[step](index)
    await lab.reaches(name)
    assert {pod: seat(found) for pod, found in lab.pods(name).items()} == {
        f"{name}-{i}-0": (f"{job.name}-{i}", f"{job.name}-gpus-{i}", f"{DRIVER}/node-{i}/gpu-0")
        for i in range(2)
    }
    columns = lab.cluster.kubectl("-n", lab.namespace, "get", "rr", name).split()
    assert "Colocated" in columns


async def test_what_is_waited_for_is_told_by_pod_and_claim(lab: PoolLab) -> None:
    job = Job(lab, "slow")
    lab.create("waits", mode="Colocated", colocation=job.colocation, replicas=1)
    few = (
        "the pool needs 1 of the trainer's pods for 1 of its own (spec.colocation.slots 1), and "
        "spec.colocation.trainerSelector (job=slow) selects 0"
    )
    await lab.until(
        "it says that there is no trainer", lambda: few in lab.condition("waits", "Degraded")[2]
    )
    assert lab.condition("waits", "Degraded")[:2] == ("True", "TooFewTrainers")
    steps: list[tuple[Callable[[], object], str]] = [
        (lambda: job.add_pod(0), "ResourceClaim 'slow-gpus-0' of the trainer's pod 'slow-0', which does"),
        (lambda: job.add_claim(0), "waits for the trainer's pod 'slow-0' to be scheduled, which needs"),
        (lambda: job.bind(0), "ResourceClaim 'slow-gpus-0' of the trainer's pod 'slow-0' to be allocated"),
    ]  # fmt: skip
    for step, told in steps:
        step()
        await lab.until(told, partial(progress_tells, lab, told))
        status = lab.get("waits")["status"]
        assert (status["phase"], told in status["message"]) == ("Pending", True)
        assert lab.condition("waits", "Progressing")[1] == "WaitingForTrainer"
        assert not lab.pods("waits")
    job.allocate(0)
    await lab.reaches("waits")


async def test_a_claim_that_is_replaced_replaces_the_pod_and_counts_no_failure(
    lab: PoolLab,
) -> None:
    """As a StatefulSet with a claim template does: with the trainer's pod goes its claim."""
    job = Job(lab, "reborn")
    for index in range(2):
        job.add_claim(index, owner=job.add_pod(index))
        job.bind(index)
        job.allocate(index)
    lab.create("follows", mode="Colocated", colocation=job.colocation, replicas=2)
    await lab.reaches("follows")
    before = {name: pod["metadata"]["uid"] for name, pod in lab.pods("follows").items()}
    lab.writes()
    job.remove_pod(0)
    job.remove_claim(0)
    await lab.until("the pod follows", lambda: list(lab.pods("follows")) == ["follows-1-0"])
    kinds: list[tuple[str, str]] = []

    def is_deleted() -> bool:
        """Whether the audit log has it: the API server writes the line after the pod is gone."""
        writes = [w for w in lab.writes() if w.name == "follows-0-0"]
        kinds.extend((w.verb, w.resource) for w in writes if w.resource in ("pods", "pods/status"))
        return ("delete", "pods") in kinds

    await lab.until("the delete is in the audit log", is_deleted)
    # Who has not seen its end yet may write the gate once more.
    assert kinds[:2] == [("patch", "pods/status"), ("delete", "pods")], "its gate went off first"
    assert ("delete", "pods") not in kinds[2:]
    claim = job.add_claim(0, owner=job.add_pod(0))
    job.allocate(0)
    job.bind(0)
    await lab.reaches("follows")
    pods = lab.pods("follows")
    assert pods["follows-0-0"]["metadata"]["uid"] != before["follows-0-0"]
    assert pods["follows-1-0"]["metadata"]["uid"] == before["follows-1-0"], "nothing happened to it"
    notes = pods["follows-0-0"]["metadata"]["annotations"]
    assert notes["rollout.dev/claim-uid"] == claim["metadata"]["uid"]
    assert notes["rollout.dev/restarts"] == "0"
    assert lab.get("follows")["status"].get("restarts", 0) == 0
