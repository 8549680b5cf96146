"""A small world for `plan_pass`: pods and workers that do what a plan says, one step at a time.

Not a stand-in for the API server or the worker (the api and cluster tests have the real ones): it
lets unit tests and hypothesis walk thousands of histories through the pure core. It can be slow (a
watch that lags, pods that take their grace, stagings and commits that last), silent, its writes may
fail and its clock jump, and it holds objects and finalizers of strangers. After each pass it asserts
what must hold of all of them (`safety`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from rollout_operator.api.spec import PoolMode, RolloutReplicaSpec
from rollout_operator.api.status import (
    CommittedWeights,
    LastUpdate,
    RolloutReplicaStatus,
    StateTransition,
)
from rollout_operator.core.observed_pool import ObservedPool, Pod
from rollout_operator.core.pass_plan import PassPlan
from rollout_operator.core.pass_planning import plan_pass
from rollout_operator.core.replicas.hybrid import with_member_count
from rollout_operator.core.settings import FORCED_DELETION_SECONDS
from rollout_operator.core.status_changes import is_same_decision
from rollout_operator.core.trainer_pods import ObservedTrainers, TrainerWatch
from rollout_operator.passes.pool_memory import EndedPodClock
from rollout_worker.schemas import WeightsId
from tests.support.unit.poolspecs import condition_of, spec_of
from tests.support.unit.safety import Pass, check
from tests.support.unit.simhybrid import SimHybrid
from tests.support.unit.simpods import SimPods
from tests.support.unit.simtrainers import SimTrainers

T = TypeVar("T")


class World(SimPods):
    """One pool: its stored status, pods and workers, and a clock."""

    def __init__(self, spec: RolloutReplicaSpec) -> None:
        super().__init__(spec)
        self.generation = 1
        self.cordoned: frozenset[str] = frozenset()
        """Nodes that are cordoned."""
        self.status = RolloutReplicaStatus()
        self.ended_pods = EndedPodClock()
        self.refuses: Callable[[str], bool] = lambda kind: False
        """Whether the API server refuses a write: of status, a gate, a deletion, a creation."""
        self.barrier: frozenset[str] | None = None
        self.trainers: SimTrainers | None = None
        """Of a colocated pool; whoever makes the world gives it one."""
        self.hybrid = SimHybrid(self) if spec.mode is PoolMode.HYBRID else None
        """The trainer whose pods are a Hybrid pool's."""
        self._forced_at: dict[str, float] = {}
        self._counted: set[str] = set()
        """Uids of pods whose end status.restarts has counted."""
        self._unwritten: RolloutReplicaStatus | None = None
        """The newest status, while the API server refuses it, as `passes.memory` keeps it."""
        self._written: set[str] = set()
        """Those of the counted that a status which was written has counted."""

    def set(self, **changes: Any) -> None:
        """Change the spec as a user would."""
        document = self.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        weights = {**document.get("weights", {}), **changes.pop("weights", {})}
        self.spec = RolloutReplicaSpec.model_validate({**document, **changes, "weights": weights})
        self.generation += 1

    def run_with(self, **changes: Any) -> RolloutReplicaStatus:
        """Change the spec as a user would, and run passes until nothing changes."""
        self.set(**changes)
        return self.run()

    @property
    def committed(self) -> CommittedWeights:
        """The committed weights, which status must have."""
        assert self.status.weights.committed is not None
        return self.status.weights.committed

    @property
    def update(self) -> LastUpdate:
        """The last update of weights, which status must have."""
        assert self.status.weights.last_update is not None
        return self.status.weights.last_update

    @property
    def transition(self) -> StateTransition:
        """The lifecycle's last change, which status must have."""
        assert self.status.last_transition is not None
        return self.status.last_transition

    def verdict(self, kind: str) -> tuple[str, str]:
        """Status and reason of a condition, which must be there."""
        found = condition_of(self.status, kind)
        return found.status, found.reason

    def observed(self) -> ObservedPool:
        """What a pass sees now."""
        shown = {name: ghost for name, (ghost, _) in self.ghosts.items()} | self.strangers
        shown |= self.pods
        pods = [shown[n] for n in sorted(shown) if shown[n].uid not in self.unlabelled]
        if self.hybrid is not None:
            pods = self.hybrid.members()
        told = self.ended_pods.with_seen_seconds((*pods, *self.predecessors.values()), self.tick)
        return ObservedPool(
            name="pool",
            namespace="ns",
            uid="owner",
            generation=self.generation,
            pods=told[: len(pods)],
            workers={p.uid: self.known(p) for p in self.pods.values() if self._is_polled(p)},
            conflicts=self.conflicts,
            rejections={},
            restarts_of={r.replica: r.restarts for r in self.believed.replacing},
            barrier=self.barrier,
            paused=False,
            retry=self.retry,
            predecessors=told[len(pods) :],
            cordoned=self.cordoned,
            trainers=self.trainers.beside() if self.trainers else ObservedTrainers(),
            strangers=self.hybrid.strangers() if self.hybrid is not None else (),
        )

    def _is_polled(self, pod: Pod) -> bool:
        seen = pod.uid not in self.unlabelled
        return seen and pod.rank == 0 and not pod.is_finished and pod.uid in self.workers

    def forget(self) -> None:
        """The operator restarts: what it only remembered is gone."""
        self.barrier = None
        self._unwritten, self._counted = None, set(self._written)
        self.ended_pods, self._forced_at = EndedPodClock(), {}
        if self.trainers is not None:
            self.trainers.watch = TrainerWatch()
        self.conflicts = {}
        self.failures = {}
        self.answers = {}
        self.hung = set()
        for flight in self.flights.values():
            flight.ours = False

    def step(self) -> PassPlan:
        """One pass and its effects; the clock moves a second."""
        self.catch_up()
        if self.hybrid is not None and not self.hybrid.catch_up():
            return PassPlan(self.status)  # its pods are not listed, and nothing is decided
        if self.trainers is not None:
            self.trainers.catch_up(self.tick, (*self.pods.values(), *self.predecessors.values()))
        seen, stored = self.observed(), self.believed
        plan = plan_pass(self.spec, seen, stored, self.now)
        going = frozenset(p.uid for p in self.pods.values() if p.is_deleting)
        check(Pass(with_member_count(self.spec, seen), seen, stored, plan, going))
        if self.hybrid is not None:
            self.hybrid.carry_out(seen, plan)
        else:
            self._carry_out(seen, plan)
        self.settle()
        self._check_bytes()
        self.tick += 1.0
        return plan

    def _carry_out(self, seen: ObservedPool, plan: PassPlan) -> None:
        """What a pass does, in its order; where a write fails the others go on."""
        self._count_restarts(seen, plan)
        decided = self.write_status(plan)
        if self._found(plan):
            return
        gates = sorted(plan.gates, key=lambda g: g.serving)
        off = [g for g in gates if not g.serving]
        for deletion in plan.delete:
            if deletion.forced:
                self._forced(deletion.uid)
        self._each("gate", off, self.set_gate)
        self._each("delete", plan.delete, self.delete)
        self.conflicts = {}
        self._each(
            "create",
            plan.create,
            lambda c: self.make(c.replica, c.rank, c.restarts, c.place, surge=c.surge),
        )
        self._each("gate", gates[len(off) :], self.set_gate)
        self.call_all(plan, decided=decided)

    def call_all(self, plan: PassPlan, *, decided: bool) -> None:
        """Call the workers; what changes weights for good only if that stands in status."""
        for call in plan.calls:
            if decided or not call.is_irreversible:
                self.call(call)

    @property
    def believed(self) -> RolloutReplicaStatus:
        """What the next status follows."""
        if self._unwritten is None:
            return self.status
        return self._unwritten.model_copy(update={"weights": self.status.weights})

    def write_status(self, plan: PassPlan) -> bool:
        """Write it, or keep it; whether what was decided about weights stands written."""
        if not self.refuses("status"):
            self.status, self._unwritten, self._written = plan.status, None, set(self._counted)
            self.barrier = plan.barrier
            return True
        self._unwritten = plan.status
        decided = is_same_decision(self.status.weights, plan.status.weights)
        if decided:
            self.barrier = plan.barrier
        return decided

    def _found(self, plan: PassPlan) -> bool:
        """Whether some that were missing are there, without their labels: they get them back."""
        sought = (self.pods.get(f"pool-{each.replica}-{each.rank}") for each in plan.seek)
        found = {pod.uid for pod in sought if pod is not None} & self.unlabelled
        self.unlabelled -= found
        return bool(found)

    def _count_restarts(self, seen: ObservedPool, plan: PassPlan) -> None:
        """However many pods of a replica end, and in whatever order: it has failed once."""
        fresh = {i for i, count in plan.restarts.items() if seen.restarts_of.get(i) != count}
        assert plan.status.restarts == self.believed.restarts + len(fresh)
        ended = {p.uid for p in seen.pods if p.replica in fresh}
        assert not ended & self._counted, "a failure is counted twice"
        self._counted |= ended

    def _each(self, kind: str, writes: Iterable[T], carry_out: Callable[[T], None]) -> None:
        """Try all of these writes."""
        for write in writes:
            if not self.refuses(kind):
                carry_out(write)

    def _forced(self, uid: str) -> None:
        last = self._forced_at.get(uid)
        assert last is None or self.tick - last >= FORCED_DELETION_SECONDS, (
            "it was forced a moment ago"
        )
        self._forced_at[uid] = self.tick
        self.ended_pods.note_forced(uid, self.tick)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def run(self, steps: int = 40) -> RolloutReplicaStatus:
        """Passes until nothing changes."""
        before: object = None
        for _ in range(steps):
            plan = self.step()
            after = (self.status.model_copy(update={"message": ""}), tuple(sorted(self.pods)))
            acted = bool(
                plan.calls or plan.create or plan.delete or plan.gates or self.flights
            ) or (self.trainers is not None and self.trainers.settles(self.pods.values()))
            if after == before and not acted and not any(p.is_deleting for p in self.pods.values()):
                break
            before = after
        return self.status

    def recreate(self) -> None:
        """The pool is deleted, its pods begin to terminate, and one of its name is made at once."""
        kept = self.pods if self.hybrid else {}
        for name, pod in ((n, p) for n, p in self.pods.items() if n not in kept):
            self.end_process(pod.uid)
            ends = self.tick + self.grace + 1
            self.predecessors[name] = replace(pod, deletion_at=ends, grace=self.grace + 1)
        self.pods, self.unlabelled, self.ghosts = {**kept}, set(), {}
        if self.hybrid is not None:
            self.hybrid.slices = {}
        self.status = RolloutReplicaStatus()
        self.generation = 1
        self.forget()

    def _check_bytes(self) -> None:
        """An identity is one content, in the whole pool."""
        content: dict[WeightsId, str] = {}
        for worker in self.workers.values():
            known = content.setdefault(worker.active, worker.active_hash)
            assert known == worker.active_hash, f"two contents of {worker.active}"


def settled_world(**spec: Any) -> World:
    """The world of a pool with these top-level fields, once nothing changes any more."""
    world = World(spec_of(**spec))
    world.run()
    return world
