"""Nodes, their kubelets and the garbage collector over a `MemoryApi`: one turn a second makes of pods what nodes do.

A worker is a `SimWorker` behind the address of its pod.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from rollout_operator.api import names
from rollout_operator.api.objects import Obj
from rollout_operator.core.pods.pod_trouble import parse_timestamp
from tests.support.faults.memory_api import Key, MemoryApi, format_time
from tests.support.unit.simworker import SimWorker

BIND_SECONDS = 1.0
LOAD_SECONDS = 2.0
DRAIN_SECONDS = 2.0
"""How long a process needs to end once it is asked to."""
NOTICE_SECONDS = 10.0
"""After which the control plane says that a node is lost; its pods are evicted 30 s later."""
EVICT_SECONDS = 40.0
COLLECT_SECONDS = 2.0


@dataclass
class Process:
    """A worker's process: of which pod, where, since when."""

    pod: str
    uid: str
    node: str
    ip: str
    worker: SimWorker
    since: float
    ends: float | None = None


@dataclass
class Nodes:
    """See the module.

    Attributes:
        api: The API server.
        lost: Names of nodes that are cut off, and since when.
        stagger: Seconds after which each pod is bound later than the one before it, by replica.
        processes: By uid of the pod.
    """

    api: MemoryApi
    names: tuple[str, ...] = ("node-1", "node-2")
    lost: dict[str, float] = field(default_factory=dict)
    stagger: float = 0.0
    processes: dict[str, Process] = field(default_factory=dict)
    boots: int = 0
    orphans: dict[Key, float] = field(default_factory=dict)

    def copy_to(self, api: MemoryApi) -> Nodes:
        """Return the same nodes over another API server."""
        processes = copy.deepcopy(self.processes)
        return Nodes(api, self.names, dict(self.lost), self.stagger, processes, self.boots)

    def worker_at(self, address: str) -> SimWorker | None:
        """Return who answers at `host:port`."""
        host = address.rpartition(":")[0]
        for process in self.processes.values():
            if process.ip == host and process.node not in self.lost:
                return process.worker
        return None

    def worker_of(self, pod: str) -> SimWorker:
        return next(p.worker for p in self.processes.values() if p.pod == pod)

    def lose(self, node: str) -> None:
        self.lost[node] = self.api.clock()

    def crash(self, name: str) -> None:
        """The process of a pod ends by itself."""
        [pod] = [p for p in self.api.of("pods") if p["metadata"]["name"] == name]
        del self.processes[pod["metadata"]["uid"]]
        ended = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": self._now}
        self._set_status(pod, phase="Failed", containers={"terminated": ended}, ready=False)

    def turn(self) -> None:
        """Do what is due."""
        ours = (p for p in self.api.of("pods") if names.LABEL_POOL in p["metadata"]["labels"])
        pods = {p["metadata"]["uid"]: p for p in ours}
        for uid, process in list(self.processes.items()):
            if uid not in pods and process.node not in self.lost:
                del self.processes[uid]  # its kubelet sees that the pod is gone
        for uid, pod in pods.items():
            node = pod["spec"].get("nodeName")
            if node in self.lost:
                self._turn_lost(pod, self.api.clock() - self.lost[node])
            elif pod["metadata"].get("deletionTimestamp"):
                self._end(pod, self.processes.get(uid))
            elif node is None:
                self._bind(pod)
            elif pod["status"]["phase"] != "Failed":
                self._run(pod, self.processes.get(uid))
        self._collect()

    @property
    def _now(self) -> str:
        return format_time(self.api.clock())

    def _bind(self, pod: Obj) -> None:
        made = parse_timestamp(pod["metadata"]["creationTimestamp"]) or 0.0
        free = [name for name in self.names if name not in self.lost]
        number = int(pod["metadata"]["labels"].get(names.LABEL_REPLICA, "0"))
        if free and self.api.clock() - made >= BIND_SECONDS + self.stagger * number:
            spec = {**pod["spec"], "nodeName": free[number % len(free)]}
            self._write(pod, {**pod, "spec": spec})

    def _run(self, pod: Obj, process: Process | None) -> None:
        meta = pod["metadata"]
        if process is None:
            self.boots += 1
            worker = SimWorker(boot=f"boot{self.boots}", drain=30)
            process = self.processes[meta["uid"]] = Process(
                meta["name"],
                meta["uid"],
                pod["spec"]["nodeName"],
                f"10.0.0.{self.boots}",
                worker,
                self.api.clock(),
            )
        if self.api.clock() - process.since >= LOAD_SECONDS:
            process.worker.loading = False
        gate = any(
            c["type"] == names.GATE_SERVING and c["status"] == "True"
            for c in pod["status"].get("conditions", ())
        )
        running = {"running": {"startedAt": format_time(process.since)}}
        ready = gate and process.worker.serving
        self._set_status(pod, phase="Running", containers=running, ready=ready, ip=process.ip)

    def _end(self, pod: Obj, process: Process | None) -> None:
        if process is not None:
            process.ends = process.ends or self.api.clock() + DRAIN_SECONDS
            if self.api.clock() < process.ends:
                return
            del self.processes[process.uid]
        self.api.delete(_key("pods", pod), uid=pod["metadata"]["uid"], grace=0)

    def _turn_lost(self, pod: Obj, seconds: float) -> None:
        if seconds >= NOTICE_SECONDS:
            self._set_status(pod, phase=pod["status"]["phase"], ready=False)
        if seconds >= EVICT_SECONDS and not pod["metadata"].get("deletionTimestamp"):
            self.api.delete(_key("pods", pod), uid=pod["metadata"]["uid"])

    def _set_status(
        self,
        pod: Obj,
        *,
        phase: str,
        ready: bool,
        containers: Obj | None = None,
        ip: str | None = None,
    ) -> None:
        status = pod["status"]
        kept = [c for c in status.get("conditions", ()) if c["type"] != "Ready"]
        before = [c for c in status.get("conditions", ()) if c["type"] == "Ready"]
        said = "True" if ready else "False"
        if not before or before[0]["status"] != said:
            before = [{"type": "Ready", "status": said, "lastTransitionTime": self._now}]
        changed = {**status, "phase": phase, "conditions": [*before, *kept]}
        if containers is not None:
            changed["containerStatuses"] = [{"name": names.WORKER_CONTAINER, "state": containers}]
        if ip is not None:
            changed["podIP"] = ip
        if {**changed, "conditions": 0} != {**status, "conditions": 0} or sorted(
            map(str, changed["conditions"])
        ) != sorted(map(str, status.get("conditions", ()))):
            self._write(pod, {**pod, "status": changed})

    def _write(self, pod: Obj, changed: Obj) -> None:
        """Write it as its kubelet or the scheduler, which have routes of their own."""
        self.api._store(_key("pods", pod), "MODIFIED", changed)

    def _collect(self) -> None:
        """Delete what has no owner left."""
        owners = {o["metadata"]["uid"] for o in self.api.of("rolloutreplicas")}
        found: dict[Key, float] = {}
        for key, obj in list(self.api.objects.items()):
            refs = obj["metadata"].get("ownerReferences") or ()
            if not refs or any(ref["uid"] in owners for ref in refs):
                continue
            found[key] = self.orphans.get(key, self.api.clock())
            if self.api.clock() - found[key] >= COLLECT_SECONDS:
                self.api.delete(key, uid=obj["metadata"]["uid"])
        self.orphans = found


def make_trainer(api: MemoryApi, number: int) -> None:
    """Make a trainer's pod on a node of its own, with its claim of one device there."""
    node, claim = f"node-{number + 1}", f"gpus-{number}"
    given = {"request": "gpus", "driver": "gpu.example.com", "pool": node, "device": "gpu-0"}
    meta = {"namespace": "rl", "labels": {"job": "grpo"}}
    api.create(
        "resourceclaims",
        {
            "metadata": {**meta, "name": claim},
            "spec": {"devices": {"requests": [{"name": "gpus"}]}},
            "status": {"allocation": {"devices": {"results": [given]}}},
        },
    )
    uses = [{"name": "gpus", "resourceClaimName": claim}]
    spec = {"nodeName": node, "resourceClaims": uses, "containers": []}
    api.create("pods", {"metadata": {**meta, "name": f"t-{number}"}, "spec": spec})


def _key(resource: str, obj: Obj) -> Key:
    return resource, obj["metadata"]["namespace"], obj["metadata"]["name"]
