"""Simulated pods: how they come, fail, terminate and go, and what the watch shows of that."""

from __future__ import annotations

from dataclasses import replace

from rollout_operator.api.spec import PoolMode, RolloutReplicaSpec
from rollout_operator.core.observed_pool import Pod
from rollout_operator.core.pass_plan import DeletePod, SetGate
from rollout_operator.core.placement import PodPlacement
from rollout_operator.core.trainer_pods import RecordedPlacement
from rollout_worker.schemas import KeptWeights
from tests.support.unit.poolspecs import a_pod
from tests.support.unit.simcalls import SimCalls
from tests.support.unit.simworker import SimWorker

LIVENESS_SECONDS = 60.0
"""How long a process may stand still."""


class SimPods(SimCalls):
    """The pods of one pool; a part of `World`."""

    def __init__(self, spec: RolloutReplicaSpec) -> None:
        super().__init__()
        self.spec = spec
        self.pods: dict[str, Pod] = {}
        self.strangers: dict[str, Pod] = {}
        """Pods of others that bear our names."""
        self.predecessors: dict[str, Pod] = {}
        """Pods of a deleted pool of our name."""
        self.held: set[str] = set()
        """Uids of pods that somebody else's finalizer keeps."""
        self.unlabelled: set[str] = set()
        """Uids of pods that lost the labels by which they are found."""
        self.conflicts: dict[str, str] = {}
        self.uids = 0
        self.retry = ""
        self.left_on_node: KeptWeights | None = None
        """What a former worker has left for those that start."""
        self.autoload = True
        self.lag = 0.0
        """Seconds until the watch shows the end of a pod."""
        self.grace = 0.0
        """Seconds that a deleted pod takes to go."""
        self.gangs: dict[int, frozenset[str]] = {}
        """Uids of the ranks that have found each other, by replica."""
        self.frozen_ranks: dict[str, float] = {}
        """Uids of pods whose process stands still, and when their liveness probe ends them."""
        self.gang_seconds = 0.0
        """How long a rank takes to notice that another one is gone or stands still."""
        self.noticed: dict[frozenset[str], float] = {}
        """Gangs that have broken: when the ranks that are left end."""
        self.ghosts: dict[str, tuple[Pod, float]] = {}
        """Pods that are gone, as the watch shows them still."""

    def _at(self, addresses: tuple[str, ...]) -> list[SimWorker]:
        found = (p.uid for p in self.pods.values() if p.ip in addresses)
        return [self.workers[uid] for uid in found if uid in self.workers]

    def set_gate(self, gate: SetGate) -> None:
        pod = self.pods.get(gate.name)
        if pod is not None and pod.uid == gate.uid:
            self.pods[gate.name] = replace(
                pod,
                gate=gate.serving,
                gate_boot=gate.boot,
                gate_since=self.now,
                proven_since=gate.proven_since,
            )
            self.log.append(f"gate {gate.name} {gate.serving}")

    def make(
        self,
        replica: int,
        rank: int,
        restarts: int = 0,
        place: PodPlacement | None = None,
        *,
        surge: bool = False,
    ) -> None:
        """Create a pod; a name that is taken stays with whoever has it."""
        name = f"pool-{replica}-{rank}"
        assert name not in self.predecessors, "it is known that the name is taken"
        if name in self.pods:
            self.unlabelled.discard(self.pods[name].uid)
        if name in self.strangers:
            self.conflicts[f"pod/{name}"] = f"pod/{name} exists and is not ours"
        if name in self.strangers or name in self.pods:
            return
        self.log.append(f"create {name}")
        self.pods[name] = _seated(self._pod(name, replica, rank, restarts, surge=surge), place)
        if rank == 0:
            self.workers[f"uid{self.uids}"] = SimWorker(
                boot=f"boot{self.uids}", drain=self.spec.drain_seconds, kept=self.left_on_node
            )

    def _pod(
        self, name: str, replica: int, rank: int, restarts: int = 0, *, surge: bool = False
    ) -> Pod:
        self.uids += 1
        return a_pod(
            self.spec,
            replica,
            rank,
            name=name,
            uid=f"uid{self.uids}",
            ready=False,
            ip=f"10.0.0.{self.uids}",
            node="node-1",
            restarts=restarts,
            is_surge=surge,
            retry=self.retry,
            last_known_at=self.tick,
            own_grace=self.spec.grace_seconds,
        )

    def intrude(self, replica: int, rank: int = 0) -> None:
        """Somebody else has a pod of this name, with our labels, unless we were first."""
        name = f"pool-{replica}-{rank}"
        if name not in self.pods and name not in self.ghosts:
            self.strangers[name] = replace(self._pod(name, replica, rank, surge=True), owned=False)

    def kill(self, name: str) -> None:
        """The process ends and the pod is gone, unless a finalizer keeps it."""
        pod = self.pods[name]
        self.end_process(pod.uid)
        if pod.uid in self.held:
            self.pods[name] = replace(pod, deletion_at=pod.deletion_at or self.tick, grace=0.0)
            return
        del self.pods[name]
        self.unlabelled.discard(pod.uid)
        if self.lag:
            self.ghosts[name] = (pod, self.tick + self.lag)

    def fail(self, name: str, *, told: bool = True) -> None:
        """The pod's process ended by itself; `told`: its container says when."""
        pod = self.pods[name]
        self.end_process(pod.uid)
        finished_at = self.tick if told else None
        self.pods[name] = replace(
            pod, phase="Failed", ready=False, finished_at=finished_at, trouble="exit code 137"
        )

    def place(self, name: str, node: str) -> None:
        """The pod runs on another node."""
        self.pods[name] = replace(self.pods[name], node=node)

    def ask_to_go(self, name: str) -> None:
        """Somebody deletes a pod, as `kubectl delete pod` and evictions do."""
        pod = self.pods[name]
        if self.grace:
            self.pods[name] = replace(pod, deletion_at=self.tick + self.grace, grace=self.grace)
        else:
            self.kill(name)

    def freeze(self, name: str) -> None:
        """A process of a gang stands still: nobody gets an answer, and nothing ends by itself."""
        uid = self.pods[name].uid
        self.frozen_ranks[uid] = self.tick + LIVENESS_SECONDS
        if uid in self.workers:
            self.workers[uid].silent = True

    def _form_gangs(self) -> None:
        by_replica: dict[int, list[Pod]] = {}
        for pod in self.pods.values():
            if not pod.is_deleting and not pod.is_finished:
                by_replica.setdefault(pod.replica, []).append(pod)
        for replica, pods in by_replica.items():
            if len(pods) == self.spec.parallelism.nodes > 1:
                self.gangs[replica] = frozenset(p.uid for p in pods)

    def _break_gangs(self) -> None:
        """Ranks end some time after one of them did: an engine can't be joined again."""
        for name, pod in list(self.pods.items()):
            if self.frozen_ranks.get(pod.uid, self.tick + 1) <= self.tick and not pod.is_finished:
                self._end_rank(name)
        runs = {
            p.uid: name
            for name, p in self.pods.items()
            if not p.is_finished and p.uid not in self.frozen_ranks
        }
        for replica, uids in list(self.gangs.items()):
            if uids <= runs.keys():
                continue
            due = self.noticed.setdefault(uids, self.tick + self.gang_seconds)
            if due <= self.tick:
                del self.gangs[replica], self.noticed[uids]
                for uid in sorted(uids & runs.keys()):
                    self._end_rank(runs[uid])

    def _end_rank(self, name: str) -> None:
        if self.pods[name].is_deleting:
            self.kill(name)
        else:
            self.fail(name)

    def reboot(self, replica: int) -> None:
        """Another process answers in the head's pod."""
        pod = self.pods[f"pool-{replica}-0"]
        if self.spec.parallelism.nodes > 1:
            self.fail(pod.name)  # its members would not know another one
        elif pod.uid in self.workers:
            self.end_process(pod.uid)
            self.uids += 1
            self.workers[pod.uid] = SimWorker(boot=f"boot{self.uids}", kept=self.left_on_node)

    def worker(self, replica: int) -> SimWorker:
        return self.workers[self.pods[f"pool-{replica}-0"].uid]

    def end_process(self, uid: str) -> None:
        self.workers.pop(uid, None)
        self.flights = {slot: f for slot, f in self.flights.items() if slot[0] != uid}

    def delete(self, deletion: DeletePod) -> None:
        old = self.predecessors.get(deletion.name)
        if old is not None and (old.uid, old.uid in self.held) == (deletion.uid, False):
            del self.predecessors[deletion.name]
        pod = self.pods.get(deletion.name)
        if pod is None or pod.uid != deletion.uid:
            return  # gone, or another one: the precondition holds
        self.log.append(f"delete {deletion.name}")
        if deletion.grace == 0 or not self.grace:
            self.kill(deletion.name)
            self.ghosts.update(
                {n: (replace(g, deletion_at=self.tick), d) for n, (g, d) in self.ghosts.items()}
            )
        elif not pod.is_deleting:
            ends = self.tick + self.grace
            self.pods[deletion.name] = replace(pod, deletion_at=ends, grace=self.grace)

    def catch_up(self) -> None:
        """What is due by now: pods go, the watch shows, calls end."""
        for name, pod in list(self.pods.items()):
            if pod.deletion_at is not None and self.tick >= pod.deletion_at:
                self.kill(name)
        self._break_gangs()
        for name, pod in list(self.predecessors.items()):
            if self.tick >= (pod.deletion_at or 0) and pod.uid not in self.held:
                del self.predecessors[name]
        self.ghosts = {n: (g, due) for n, (g, due) in self.ghosts.items() if due > self.tick}
        for slot, flight in list(self.flights.items()):
            if flight.due <= self.tick:
                del self.flights[slot]
                self.end(flight)

    def settle(self) -> None:
        self._form_gangs()
        for name, pod in self.pods.items():
            worker = self.workers.get(pod.uid)
            joined = self.spec.parallelism.nodes == 1 or pod.uid in self.gangs.get(
                pod.replica, frozenset()
            )
            if worker is not None and self.autoload and joined:
                worker.loading = False
            serving = worker.serving if worker else pod.rank > 0 and joined
            ready = not pod.is_finished and serving and (pod.gate or pod.rank > 0)
            if self.spec.mode is PoolMode.HYBRID:
                ready = (
                    not pod.is_finished
                )  # the trainer's pods have no gate of ours, nor our probes
            self.pods[name] = replace(pod, ready=ready)


def _seated(pod: Pod, place: PodPlacement | None) -> Pod:
    """The pod in its place, if it is a colocated one."""
    if place is None:
        return pod
    taken = RecordedPlacement(place.trainer, place.claim_uid, place.devices)
    return replace(pod, colocated=True, taken=taken, node=place.node)
