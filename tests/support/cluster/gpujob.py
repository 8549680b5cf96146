"""A trainer of eight pods with eight devices each, and a pool of 32 beside it, on fake nodes.

The scheduler allocates, nobody computes. The devices are published as their driver would do it. Pods of even numbers have a claim that stays, those of odd
numbers one that is generated for them. The test plays whoever makes the pods, as a StatefulSet would.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from localkube.fakedevices import DRIVER, device_class
from rollout_common.device_claims import pod_claims
from tests.support.api.apiclient import PODS, Obj
from tests.support.cluster.scalelab import NAMESPACE, Lab, processless_pool
from tests.support.waiting import eventually

JOB, POOL, DEVICES, TRAINERS = "grpo", "beside", 8, 8
SLOTS, EACH = 4, 2
"""So many rollout pods beside each of the trainer's, with so many devices each."""
LOST, SPARE = 2, TRAINERS
"""The trainer's pod whose node is lost, and whose claim stays; the node that takes its place."""
SECONDS = 60.0
LABEL = "example.org/devices"
FINALIZER = "example.org/no-kubelet"
RESOURCE = "/apis/resource.k8s.io/v1"
CLAIMS = f"{RESOURCE}/namespaces/{NAMESPACE}/resourceclaims"
NODES = "/api/v1/nodes"


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rollout pod is."""

    trainer: str
    node: str
    claim_uid: str
    devices: tuple[str, ...]


def pool() -> Obj:
    """The pool beside the trainer."""
    return processless_pool(
        POOL,
        mode="Colocated",
        colocation={"trainerSelector": {"matchLabels": {"job": JOB}}, "slots": SLOTS},
        engine={"type": "vllm"},
        parallelism={"tensor": EACH},
        replicas=TRAINERS * SLOTS,
        podTemplate={},
    )


def rollout_pods(trainer: int) -> set[str]:
    """Names of the rollout pods beside a trainer's pod."""
    return {f"{POOL}-{trainer * SLOTS + slot}-0" for slot in range(SLOTS)}


class Job:
    """See the module."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.api = lab.api
        self.pods = PODS.format(NAMESPACE)
        wants = {"name": "gpus", "exactly": {"deviceClassName": DRIVER, "count": DEVICES}}
        self._wants = {"devices": {"requests": [wants]}}
        self.api.create(f"{RESOURCE}/deviceclasses", device_class())
        template = {"metadata": {"name": JOB}, "spec": {"spec": self._wants}}
        self.api.create(f"{RESOURCE}/namespaces/{NAMESPACE}/resourceclaimtemplates", template)

    def name(self, index: int) -> str:
        """Name of a pod of the trainer."""
        return f"{JOB}-{index}"

    def add_node(self, index: int) -> None:
        """Add a node that kwok plays; its driver has yet to publish what it has."""
        capacity = {"cpu": "100", "memory": "1Ti", "pods": "100"}
        name = f"gpus-{index}"
        meta: Obj = {
            "name": name,
            "annotations": {"kwok.x-k8s.io/node": "fake"},
            "labels": {"kubernetes.io/hostname": name, LABEL: "yes"},
        }
        node = {"metadata": meta, "status": {"capacity": capacity, "allocatable": capacity}}
        self.api.create(NODES, node)

    def publish(self, index: int) -> None:
        """Publish a node's devices: from now on the scheduler may allocate them."""
        node = f"gpus-{index}"
        spec = {
            "driver": DRIVER,
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": [
                {"name": f"gpu-{i}", "attributes": {"uuid": {"string": f"GPU-{index}-{i}"}}}
                for i in range(DEVICES)
            ],
        }
        self.api.create(f"{RESOURCE}/resourceslices", {"metadata": {"name": node}, "spec": spec})

    def add_claim(self, index: int) -> None:
        """Create the claim of a trainer's pod that has one that stays."""
        if index % 2 == 0:
            body = {"metadata": {"name": f"{self.name(index)}-gpus"}, "spec": self._wants}
            self.api.create(CLAIMS, body)

    def add_pod(self, index: int) -> None:
        source = (
            {"resourceClaimTemplateName": JOB}
            if index % 2
            else {"resourceClaimName": f"{self.name(index)}-gpus"}
        )
        spec = {
            "containers": [
                {"name": "c", "image": "none", "resources": {"claims": [{"name": "gpus"}]}}
            ],
            "resourceClaims": [{"name": "gpus", **source}],
            "nodeSelector": {LABEL: "yes"},
        }
        meta = {"name": self.name(index), "labels": {"job": JOB}}
        self.api.create(self.pods, {"metadata": meta, "spec": spec})

    def remove_pod(self, index: int) -> None:
        """Delete a pod of the trainer's, with a claim that was generated for it."""
        self.api.delete(f"{self.pods}/{self.name(index)}")

    def remove_claim(self, index: int) -> None:
        """Delete a claim; it is there until nobody uses it."""
        self.api.delete(f"{CLAIMS}/{self.name(index)}-gpus")

    def make_all(self, random: Random) -> None:
        """Make the trainer, its claims, its devices and the pool in any order."""
        steps: dict[str, Callable[[int], None]] = {
            "pod": self.add_pod, "claim": self.add_claim, "devices": self.publish,
            "pool": lambda _: self.lab.create(pool()),
        }  # fmt: skip
        for index in range(TRAINERS):
            self.add_node(index)
        todo = [(kind, i) for kind in ("pod", "claim", "devices") for i in range(TRAINERS)]
        random.shuffle(todo)
        todo.insert(random.randrange(len(todo)), ("pool", 0))
        for kind, index in todo:
            steps[kind](index)

    def await_places(self) -> None:
        """Wait until the pool is Ready and every pod where it belongs."""
        eventually(
            "each is in its place", lambda: not self.mistakes(), SECONDS, 0.2, seen=self.mistakes
        )
        self.lab.await_condition("Ready", {POOL}, SECONDS)

    def lose_node(self) -> str:
        """Let a node be lost with all its pods: evicted, they stay, for no kubelet ends them; return its name."""
        names = (*rollout_pods(LOST), f"{JOB}-{LOST}")
        (node,) = {self.seats()[name][1].node for name in rollout_pods(LOST)}
        for name in names:
            self.api.patch(f"{self.pods}/{name}", {"metadata": {"finalizers": [FINALIZER]}})
        taints = [{"key": "example.org/lost", "effect": "NoExecute"}]
        self.api.patch(f"{NODES}/{node}", {"spec": {"taints": taints}})

        def evicted() -> bool:
            found = {p["metadata"]["name"]: p["metadata"] for p in self.lab.pods()}
            return all("deletionTimestamp" in found[name] for name in names)

        eventually("the node's pods are evicted", evicted, SECONDS)
        return node

    def give_up(self, node: str) -> None:
        """Let the node be off for good, as whoever removes it says, and its pods with it."""
        for name in (*rollout_pods(LOST), f"{JOB}-{LOST}"):
            body = {"metadata": {"finalizers": None}}
            self.api.patch(f"{self.pods}/{name}", body, missing=True)
        self.api.delete(f"{NODES}/{node}")

    def gone(self, index: int) -> bool:
        """Whether neither a trainer's pod nor a deleted claim of its is there."""
        name = self.name(index)
        pods = {p["metadata"]["name"] for p in self.api.items(self.pods, f"job={JOB}", fresh=True)}
        going = (c for c in self._claims().values() if "deletionTimestamp" in c["metadata"])
        return name not in pods and not any(
            c["metadata"]["name"].startswith(f"{name}-") for c in going
        )

    def _claims(self) -> dict[str, Obj]:
        return {c["metadata"]["name"]: c for c in self.api.items(CLAIMS, fresh=True)}

    def seats(self) -> dict[str, tuple[str, Seat]]:
        """Uid and place of each rollout pod."""
        return {
            pod["metadata"]["name"]: (pod["metadata"]["uid"], _seat(pod))
            for pod in self.lab.pods(POOL)
        }

    def mistakes(self) -> list[str]:
        """Return what is wrong with where the rollout pods are, as the API server has it."""
        return list(self._mistakes())

    def _mistakes(self) -> Iterator[str]:
        claims = self._claims()
        trainers = {
            p["metadata"]["name"]: p for p in self.api.items(self.pods, f"job={JOB}", fresh=True)
        }
        used: Counter[tuple[str, str]] = Counter()
        users: dict[str, set[str]] = {name: set() for name in claims}
        for name, (_, seat) in self.seats().items():
            beside, share = divmod(int(name.split("-")[1]), SLOTS)
            if f"{JOB}-{beside}" not in trainers:
                yield f"{name}: there is no trainer {beside}"
                continue
            theirs = trainers[f"{JOB}-{beside}"]
            node = theirs["spec"].get("nodeName")
            (own,), _ = pod_claims(theirs)
            first = share * EACH
            devices = tuple(f"{DRIVER}/{node}/gpu-{i}" for i in range(first, first + EACH))
            right = Seat(f"{JOB}-{beside}", node, claims[own]["metadata"]["uid"], devices)
            if seat != right:
                yield f"{name} is at {seat}, not {right}"
            used.update((seat.claim_uid, device) for device in seat.devices)
            users[own] |= {name, theirs["metadata"]["name"]}
        yield from (f"{where} has {n} users" for where, n in used.items() if n != 1)
        if len(used) != TRAINERS * DEVICES:
            yield f"{len(used)} devices are used"
        for name, claim in claims.items():
            reserved = {user["name"] for user in claim.get("status", {}).get("reservedFor", ())}
            if reserved != users[name]:
                yield f"claim {name} is used by {sorted(reserved)}, not {sorted(users[name])}"


def _seat(pod: Obj) -> Seat:
    notes, spec = pod["metadata"]["annotations"], pod["spec"]
    return Seat(
        notes["rollout.dev/trainer"],
        spec.get("nodeName", ""),
        notes["rollout.dev/claim-uid"],
        tuple(notes["rollout.dev/devices"].split(",")),
    )
