"""A small world for `decide`: pods and workers that do what a plan says, one step at a time.

Not a stand-in for the API server or the worker (the api and cluster tests have the real ones): it
lets unit tests and hypothesis walk thousands of histories through the pure core. It can be slow (a
watch that lags, pods that take their grace, stagings and commits that last), silent, and it holds
objects of strangers. After each pass it asserts what must hold of all of them (`safety`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from poolspecs import a_pod
from rollout_operator.api.spec import RolloutReplicaSpec
from rollout_operator.api.status import RolloutReplicaStatus
from rollout_operator.core.decide import decide
from rollout_operator.core.plan import DeletePod, Plan
from rollout_operator.core.world import Observed, Pod
from rollout_worker.schemas import WeightsId
from safety import Pass, check
from simcalls import SimCalls
from simworker import SimWorker

NO_FINISHED_AT = False  # 12.1.8: a pod that failed without `finishedAt` is never replaced


class World(SimCalls):
    """One pool: its stored status, pods and workers, and a clock."""

    def __init__(self, spec: RolloutReplicaSpec) -> None:
        super().__init__()
        self.spec = spec
        self.generation = 1
        self.status = RolloutReplicaStatus()
        self.pods: dict[str, Pod] = {}
        self.strangers: dict[str, Pod] = {}
        """Pods of others that bear our names."""
        self.barrier: frozenset[str] | None = None
        self.restarts_of: dict[int, int] = {}
        self.conflicts: dict[str, str] = {}
        self.uids = 0
        self.retry = ""
        self.autoload = True
        self.lag = 0.0
        """Seconds until the watch shows a write or the end of a pod."""
        self.grace = 0.0
        """Seconds that a deleted pod takes to go."""
        self._unshown: dict[tuple[str, str], float] = {}
        """Writes that the watch has not shown, by verb and uid: when it will."""
        self._ghosts: dict[str, tuple[Pod, float]] = {}
        """Pods that are gone, as the watch shows them still."""

    def set(self, **changes: Any) -> None:
        """Change the spec as a user would."""
        document = self.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        weights = {**document.get("weights", {}), **changes.pop("weights", {})}
        self.spec = RolloutReplicaSpec.model_validate({**document, **changes, "weights": weights})
        self.generation += 1

    def observed(self) -> Observed:
        """What a pass sees now."""
        shown = {name: ghost for name, (ghost, _) in self._ghosts.items()} | self.strangers
        for name, pod in self.pods.items():
            late = pod.deleting and ("delete", pod.uid) in self._unshown
            shown[name] = replace(pod, deletion_at=None) if late else pod
        return Observed(
            name="pool",
            namespace="ns",
            uid="owner",
            generation=self.generation,
            pods=tuple(shown[n] for n in sorted(shown)),
            workers={p.uid: self.known(p) for p in self.pods.values() if self._is_polled(p)},
            conflicts=self.conflicts,
            rejections={},
            unsettled=len(self._unshown),
            restarts_of=self.restarts_of,
            barrier=self.barrier,
            paused=False,
            retry=self.retry,
        )

    def _is_polled(self, pod: Pod) -> bool:
        return pod.rank == 0 and not pod.finished and pod.uid in self.workers

    def forget(self) -> None:
        """The operator restarts: what it only remembered is gone."""
        self.barrier = None
        self.restarts_of = {}
        self.conflicts = {}
        self.failures = {}
        self.answers = {}
        self.hung = set()
        self._unshown = {}
        for flight in self.flights.values():
            flight.ours = False

    def step(self) -> Plan:
        """One pass and its effects; the clock moves a second."""
        self._catch_up()
        seen, stored = self.observed(), self.status
        plan = decide(self.spec, seen, stored, self.now)
        going = frozenset(p.uid for p in self.pods.values() if p.deleting)
        check(Pass(self.spec, seen, stored, plan, going))
        self._carry_out(plan)
        self._settle()
        self._check_bytes()
        self.now += 1.0
        return plan

    def _carry_out(self, plan: Plan) -> None:
        self.status = plan.status
        self.barrier = plan.barrier
        self.restarts_of.update(plan.restarts)
        for gate in sorted(plan.gates, key=lambda g: g.serving):
            pod = self.pods.get(gate.name)
            if pod is not None and pod.uid == gate.uid:
                self.pods[gate.name] = replace(
                    pod, gate=gate.serving, gate_boot=gate.boot, gate_since=self.now
                )
                self.log.append(f"gate {gate.name} {gate.serving}")
        for deletion in plan.delete:
            self._delete(deletion)
        self.conflicts = {}
        for creation in plan.create:
            self.make(creation.replica, creation.rank, creation.restarts)
        for call in plan.calls:
            self.call(call)

    def run(self, steps: int = 40) -> RolloutReplicaStatus:
        """Passes until nothing changes."""
        before: object = None
        for _ in range(steps):
            plan = self.step()
            after = (self.status.model_copy(update={"message": ""}), tuple(sorted(self.pods)))
            acted = plan.calls or plan.create or plan.delete or plan.gates or self.flights
            if after == before and not acted and not any(p.deleting for p in self.pods.values()):
                break
            before = after
        return self.status

    def make(self, replica: int, rank: int, restarts: int = 0) -> None:
        """Create a pod; a name that is taken stays with whoever has it."""
        name = f"pool-{replica}-{rank}"
        self.restarts_of.pop(replica, None)
        if name in self.strangers:
            self.conflicts[f"pod/{name}"] = f"pod/{name} exists and is not ours"
        if name in self.strangers or name in self.pods:
            return
        self.log.append(f"create {name}")
        self.pods[name] = self._pod(name, replica, rank, restarts)
        self._unshow("create", self.pods[name].uid)
        if rank == 0:
            self.workers[f"uid{self.uids}"] = SimWorker(boot=f"boot{self.uids}")

    def _pod(self, name: str, replica: int, rank: int, restarts: int = 0) -> Pod:
        self.uids += 1
        return a_pod(
            self.spec,
            replica,
            rank,
            name=name,
            uid=f"uid{self.uids}",
            ready=False,
            ip="10.0.0.1",
            node="node-1",
            restarts=restarts,
            retry=self.retry,
        )

    def intrude(self, replica: int) -> None:
        """Somebody else has a pod of this name, with our labels, unless we were first."""
        name = f"pool-{replica}-0"
        if name not in self.pods and name not in self._ghosts:
            self.strangers[name] = replace(self._pod(name, replica, 0), owned=False)

    def kill(self, name: str) -> None:
        """The pod is gone, process and all."""
        pod = self.pods.pop(name)
        self._end_process(pod.uid)
        if self.lag and ("create", pod.uid) not in self._unshown:
            self._ghosts[name] = (pod, self.now + self.lag)
        for verb in ("create", "delete"):
            self._unshown.pop((verb, pod.uid), None)

    def fail(self, name: str) -> None:
        """The pod's process ended by itself."""
        pod = self.pods[name]
        self._end_process(pod.uid)
        finished_at = None if NO_FINISHED_AT else self.now
        self.pods[name] = replace(
            pod, phase="Failed", ready=False, finished_at=finished_at, trouble="exit code 137"
        )

    def reboot(self, replica: int) -> None:
        """Another process answers in the head's pod."""
        pod = self.pods[f"pool-{replica}-0"]
        if pod.uid in self.workers:
            self._end_process(pod.uid)
            self.uids += 1
            self.workers[pod.uid] = SimWorker(boot=f"boot{self.uids}")

    def worker(self, replica: int) -> SimWorker:
        """The worker of a replica's head."""
        return self.workers[self.pods[f"pool-{replica}-0"].uid]

    def _end_process(self, uid: str) -> None:
        self.workers.pop(uid, None)
        self.flights = {slot: f for slot, f in self.flights.items() if slot[0] != uid}

    def _unshow(self, verb: str, uid: str) -> None:
        if self.lag:
            self._unshown[verb, uid] = self.now + self.lag

    def _delete(self, deletion: DeletePod) -> None:
        pod = self.pods.get(deletion.name)
        if pod is None or pod.uid != deletion.uid:
            return  # gone, or another one: the precondition holds
        self.log.append(f"delete {deletion.name}")
        if deletion.grace == 0 or not self.grace:
            self.kill(deletion.name)
            self._ghosts.update(
                {n: (replace(g, deletion_at=self.now), d) for n, (g, d) in self._ghosts.items()}
            )
        elif not pod.deleting:
            self.pods[deletion.name] = replace(pod, deletion_at=self.now + self.grace)
            self._unshow("delete", pod.uid)

    def _catch_up(self) -> None:
        """What is due by now: pods go, the watch shows, calls end."""
        for name, pod in list(self.pods.items()):
            if pod.deletion_at is not None and self.now >= pod.deletion_at:
                self.kill(name)
        self._unshown = {k: due for k, due in self._unshown.items() if due > self.now}
        self._ghosts = {n: (g, due) for n, (g, due) in self._ghosts.items() if due > self.now}
        for slot, flight in list(self.flights.items()):
            if flight.due <= self.now:
                del self.flights[slot]
                self.end(flight)

    def _check_bytes(self) -> None:
        """An identity is one content, in the whole pool."""
        content: dict[WeightsId, str] = {}
        for worker in self.workers.values():
            known = content.setdefault(worker.active, worker.active_hash)
            assert known == worker.active_hash, f"two contents of {worker.active}"

    def _settle(self) -> None:
        for name, pod in self.pods.items():
            worker = self.workers.get(pod.uid)
            if worker is not None and self.autoload:
                worker.loading = False
            serving = worker.serving if worker else pod.rank > 0
            ready = not pod.finished and serving and (pod.gate or pod.rank > 0)
            self.pods[name] = replace(pod, ready=ready)
