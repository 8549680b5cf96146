"""A small world for `decide`: pods and workers that do what a plan says, one step at a time.

Not a stand-in for the API server or the worker (the api and cluster tests have the real ones): it
lets unit tests and hypothesis walk thousands of histories through the pure core.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from rollout_operator.api.revision import revision
from rollout_operator.api.spec import RolloutReplicaSpec
from rollout_operator.api.status import RolloutReplicaStatus
from rollout_operator.core.decide import decide
from rollout_operator.core.plan import CallWorker, Plan, Verb
from rollout_operator.core.world import CallError, Observed, Pod, Worker
from rollout_worker.schemas import (
    ActiveWeights,
    CommitRequest,
    Hold,
    Lifecycle,
    Progress,
    RequireRequest,
    Resident,
    StagedWeights,
    StageRequest,
    WeightsId,
    WeightsState,
    WorkerState,
)

ME = "operator"


def spec_of(**changes: Any) -> RolloutReplicaSpec:
    """A pool of `hf` workers on CPU with these top-level fields."""
    document: dict[str, Any] = {
        "replicas": 2,
        "engine": {"type": "hf"},
        "model": {"source": {"path": "/models/tiny"}},
    }
    document.update(changes)
    return RolloutReplicaSpec.model_validate(document)


def target(epoch: int, version: int, path: str | None = None) -> dict[str, Any]:
    """A weights section with this pointer."""
    source = path or f"/rollout/weights/{epoch}-{version}"
    return {"target": {"epoch": epoch, "version": version, "source": {"path": source}}}


@dataclass
class SimWorker:
    """What a real worker would answer."""

    boot: str
    active: WeightsId = field(default_factory=lambda: WeightsId(epoch=0, version=0))
    staged: StagedWeights | None = None
    required: WeightsId | None = None
    fence_epoch: int = 0
    hold: str | None = None
    foreign_hold: str | None = None
    loading: bool = True
    broken_stage: bool = False
    broken_commit: bool = False
    progress: Progress | None = None
    commits: list[WeightsId] = field(default_factory=list)

    @property
    def lifecycle(self) -> Lifecycle:
        if self.loading:
            return Lifecycle.LOADING
        holds = {self.hold, self.foreign_hold}
        if "Asleep" in holds:
            return Lifecycle.ASLEEP
        return Lifecycle.PAUSED if "Paused" in holds else Lifecycle.ACTIVE

    @property
    def serving(self) -> bool:
        return (
            self.lifecycle is Lifecycle.ACTIVE
            and self.required is not None
            and self.active >= self.required
        )

    def state(self) -> WorkerState:
        holds = []
        if self.hold:
            holds.append(Hold(holder=ME, state=self.hold))
        if self.foreign_hold:
            holds.append(Hold(holder="trainer", state=self.foreign_hold))
        return WorkerState(
            boot_id=self.boot,
            engine="hf",
            lifecycle=self.lifecycle,
            serving=self.serving,
            weights=WeightsState(
                active=ActiveWeights(
                    epoch=self.active.epoch,
                    version=self.active.version,
                    root_hash=f"hash{self.active}",
                ),
                staged=self.staged,
                required=self.required,
                fence_epoch=self.fence_epoch,
            ),
            resident=Resident(weights=True, kv_cache=True),
            holds=tuple(holds),
            caller=ME,
            progress=self.progress,
        )

    def stage(self, body: StageRequest) -> str | None:
        identity = WeightsId(epoch=body.epoch, version=body.version)
        if body.epoch < self.fence_epoch:
            return "stale-epoch"
        if self.broken_stage:
            failed = {"phase": "Failed", "error": "tensor 'lm_head.weight' has shape [3]"}
            self.staged = StagedWeights(
                epoch=body.epoch, version=body.version, source=body.source, **failed
            )
            return "tensor 'lm_head.weight' has shape [3]"
        self.staged = StagedWeights(
            epoch=identity.epoch,
            version=identity.version,
            source=body.source,
            phase="Staged",
            root_hash=f"hash{identity}",
        )
        return None

    def commit(self, body: CommitRequest) -> str | None:
        identity = WeightsId(epoch=body.epoch, version=body.version)
        if self.broken_commit:
            return "commit broke"
        if self.staged is None or (self.staged.epoch, self.staged.version) != identity.as_tuple():
            return "not-staged"
        assert identity > self.active, "never rolled back"
        self.active, self.staged = identity, None
        self.commits.append(identity)
        return None

    def require(self, body: RequireRequest) -> str | None:
        self.fence_epoch = max(self.fence_epoch, body.epoch)
        if body.min_version is not None:
            floor = WeightsId(epoch=body.epoch, version=body.min_version)
            self.required = floor if self.required is None else max(self.required, floor)
        return None


class World:
    """One pool: its stored status, pods and workers, and a clock."""

    def __init__(self, spec: RolloutReplicaSpec) -> None:
        self.spec = spec
        self.now = 1_000_000.0
        self.generation = 1
        self.status = RolloutReplicaStatus()
        self.pods: dict[str, Pod] = {}
        self.workers: dict[str, SimWorker] = {}
        self.failures: dict[tuple[str, str], CallError] = {}
        self.barrier: frozenset[str] | None = None
        self.restarts_of: dict[int, int] = {}
        self.uids = 0
        self.log: list[str] = []
        self.retry = ""
        self.autoload = True
        self.frozen: set[str] = set()
        """Verbs whose calls never end."""
        self.hung: set[tuple[str, str]] = set()
        """Calls under way of such verbs, by pod uid."""
        self.backoff = 1.0
        """Seconds until a failed call may be repeated."""

    def set(self, **changes: Any) -> None:
        """Change the spec as a user would."""
        document = self.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        weights = {**document.get("weights", {}), **changes.pop("weights", {})}
        self.spec = RolloutReplicaSpec.model_validate({**document, **changes, "weights": weights})
        self.generation += 1

    def observed(self) -> Observed:
        workers = {}
        for pod in self.pods.values():
            if pod.rank or pod.finished or pod.uid not in self.workers:
                continue
            failures = {v: e for (uid, v), e in self.failures.items() if uid == pod.uid}
            hung = frozenset(v for uid, v in self.hung if uid == pod.uid and v in self.frozen)
            workers[pod.uid] = Worker(self.workers[pod.uid].state(), None, hung, failures)
        return Observed(
            name="pool",
            namespace="ns",
            uid="owner",
            generation=self.generation,
            pods=tuple(self.pods[n] for n in sorted(self.pods)),
            workers=workers,
            conflicts={},
            rejections={},
            unsettled=0,
            restarts_of=self.restarts_of,
            barrier=self.barrier,
            paused=False,
            retry=self.retry,
        )

    def forget(self) -> None:
        """The operator restarts: what it only remembered is gone."""
        self.barrier = None
        self.restarts_of = {}
        self.failures = {}
        self.hung = set()

    def step(self) -> Plan:
        """One pass and its effects; the clock moves a second."""
        plan = decide(self.spec, self.observed(), self.status, self.now)
        self.status = plan.status
        self.barrier = plan.barrier
        self.restarts_of.update(plan.restarts)
        for gate in plan.gates:
            pod = self.pods[gate.name]
            self.pods[gate.name] = replace(
                pod, gate=gate.serving, gate_boot=gate.boot, gate_since=self.now
            )
            self.log.append(f"gate {gate.name} {gate.serving}")
        for deletion in plan.delete:
            self.log.append(f"delete {deletion.name}")
            self.kill(deletion.name)
        for creation in plan.create:
            self.make(creation.replica, creation.rank, creation.restarts)
        for call in plan.calls:
            self._call(call)
        self._settle()
        self.now += 1.0
        return plan

    def run(self, steps: int = 40) -> RolloutReplicaStatus:
        """Passes until nothing changes."""
        before: object = None
        for _ in range(steps):
            plan = self.step()
            after = (self.status.model_copy(update={"message": ""}), tuple(sorted(self.pods)))
            if after == before and not (plan.calls or plan.create or plan.delete or plan.gates):
                break
            before = after
        return self.status

    def make(self, replica: int, rank: int, restarts: int = 0) -> None:
        name = f"pool-{replica}-{rank}"
        assert name not in self.pods, "names are unique"
        self.uids += 1
        self.restarts_of.pop(replica, None)
        self.log.append(f"create {name}")
        self.pods[name] = Pod(
            name=name,
            uid=f"uid{self.uids}",
            replica=replica,
            rank=rank,
            revision=revision(self.spec),
            phase="Running",
            owned=True,
            started=True,
            ip="10.0.0.1",
            node="node-1",
            restarts=restarts,
            retry=self.retry,
        )
        if rank == 0:
            self.workers[f"uid{self.uids}"] = SimWorker(boot=f"boot{self.uids}")

    def kill(self, name: str) -> None:
        """The pod is gone, process and all."""
        pod = self.pods.pop(name)
        self.workers.pop(pod.uid, None)

    def fail(self, name: str) -> None:
        """The pod's process ended by itself."""
        pod = self.pods[name]
        self.workers.pop(pod.uid, None)
        self.pods[name] = replace(
            pod, phase="Failed", ready=False, finished_at=self.now, trouble="exit code 137"
        )

    def worker(self, replica: int) -> SimWorker:
        """The worker of a replica's head."""
        return self.workers[self.pods[f"pool-{replica}-0"].uid]

    def _call(self, call: CallWorker) -> None:
        self.log.append(f"{call.verb} {call.pod}")
        worker = self.workers.get(call.uid)
        if worker is None or call.verb in self.frozen:
            self.hung.add((call.uid, call.verb.value))
            return
        self.hung.discard((call.uid, call.verb.value))
        problem: str | None = None
        match call.verb:
            case Verb.STAGE:
                problem = worker.stage(call.body)  # type: ignore[arg-type]
            case Verb.COMMIT:
                problem = worker.commit(call.body)  # type: ignore[arg-type]
            case Verb.REQUIRE:
                problem = worker.require(call.body)  # type: ignore[arg-type]
            case Verb.DISCARD:
                worker.staged = None
            case Verb.PAUSE:
                worker.hold = "Paused"
            case Verb.SLEEP:
                worker.hold = "Asleep"
            case Verb.RESUME | Verb.WAKE:
                worker.hold = None
        slot = (call.uid, call.verb.value)
        if problem is None:
            self.failures.pop(slot, None)
        else:
            before = self.failures.get(slot)
            count = before.count + 1 if before and before.about == call.about else 1
            self.failures[slot] = CallError(
                problem, count, self.now + self.backoff, about=call.about
            )

    def _settle(self) -> None:
        for name, pod in self.pods.items():
            worker = self.workers.get(pod.uid)
            if worker is not None and self.autoload:
                worker.loading = False
            serving = worker.serving if worker else pod.rank > 0
            ready = not pod.finished and serving and (pod.gate or pod.rank > 0)
            self.pods[name] = replace(pod, ready=ready)
