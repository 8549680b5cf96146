"""A pass over the largest pools that the CRD allows: what it costs grows as the pool does."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from types import FrameType
from typing import Any

import pytest

from rollout_operator.api.objects import PoolKey
from rollout_operator.api.spec import RolloutReplicaSpec
from rollout_operator.api.status import (
    CommittedWeights,
    LastUpdate,
    RolloutReplicaStatus,
    WeightsStatus,
)
from rollout_operator.core.observed_pool import FailedCall, ObservedPool, ObservedWorker, Pod
from rollout_operator.core.pass_plan import PassPlan
from rollout_operator.core.pass_planning import plan_pass
from rollout_operator.core.trainer_pods import (
    AllocatedDevice,
    DeviceClaim,
    ObservedTrainers,
    RecordedPlacement,
    TrainerPod,
)
from rollout_operator.passes.pass_input import PassInput
from rollout_operator.passes.reconcile import THREADED_PLAN_PODS, compute_plan
from rollout_worker.schemas import (
    KeptWeights,
    Pushed,
    TurnState,
    WeightsId,
    WeightsSource,
)
from tests.support.unit.poolspecs import NOW, a_pod, colocated_spec, pushed, spec_of
from tests.support.unit.simworker import SimWorker, root_hash

MOST = 9999
"""The largest `spec.replicas` that the CRD takes."""

V0, V1 = (WeightsId(epoch=0, version=version) for version in (0, 1))
BY_PUSH = WeightsSource(pushed=Pushed())
KEPT = KeptWeights(epoch=0, version=1, root_hash=root_hash(V1), bytes=1)


def serving(index: int) -> ObservedWorker:
    return ObservedWorker(SimWorker(f"b{index}", loading=False, required=V0).state())


def silent(index: int) -> ObservedWorker:
    return replace(serving(index), state=None, error="no answer within 3 s")


@dataclass
class Pool:
    """What one pass sees of a pool of some size."""

    spec: RolloutReplicaSpec
    pods: list[Pod]
    workers: dict[str, ObservedWorker] = field(default_factory=dict)
    status: RolloutReplicaStatus = field(default_factory=RolloutReplicaStatus)
    seen: dict[str, Any] = field(default_factory=dict)

    def seen_now(self) -> ObservedPool:
        """What a pass sees."""
        known: dict[str, Any] = {
            "name": "pool",
            "namespace": "ns",
            "uid": "owner",
            "generation": 1,
            "conflicts": {},
            "rejections": {},
            "restarts_of": {},
            "barrier": None,
            "paused": False,
            "retry": "",
        }
        return ObservedPool(pods=tuple(self.pods), workers=self.workers, **(known | self.seen))

    def decided(self) -> PassPlan:
        """What a pass decides."""
        return plan_pass(self.spec, self.seen_now(), self.status, NOW)


def pool(count: int, worker: Callable[[int], ObservedWorker] = serving, **changes: Any) -> Pool:
    """A pool that runs, whose workers are so."""
    spec = changes.pop("spec", None) or spec_of(replicas=count, **changes)
    pods = [
        a_pod(spec, n, ip=f"10.0.{n // 250}.{n % 250}", gate=True, gate_boot=f"b{n}")
        for n in range(count)
    ]
    return Pool(spec, pods, {pod.uid: worker(n) for n, pod in enumerate(pods)})


def updating(
    count: int, strategy: str, phase: str, worker: Callable[[int], ObservedWorker]
) -> Pool:
    """A pool that moves to version 1, which a trainer has pushed."""
    made = pool(count, worker, weights={"strategy": strategy, **pushed(0, 1)})
    started: dict[str, Any] = {"started_at": "1970-01-12T13:46:40Z"}
    if phase == "Committing":
        started |= {"commit_started_at": "1970-01-12T13:46:40Z", "root_hash": root_hash(V1)}
    update = LastUpdate(epoch=0, version=1, source=BY_PUSH, phase=phase, **started)
    made.status = RolloutReplicaStatus(weights=WeightsStatus(last_update=update))
    return made


def joiners(count: int, *, givers: int) -> Pool:
    """Pushed weights are committed; all but a few have lost them."""

    def worker(index: int) -> ObservedWorker:
        has = index < givers
        sim = SimWorker(f"b{index}", loading=False, required=V1, active=V1 if has else V0)
        sim.active_hash = root_hash(sim.active)
        sim.kept = KEPT if has else None
        return ObservedWorker(sim.state())

    made = pool(count, worker, weights=pushed(0, 1))
    committed = CommittedWeights(epoch=0, version=1, source=BY_PUSH, root_hash=root_hash(V1))
    made.status = RolloutReplicaStatus(weights=WeightsStatus(committed=committed))
    return made


def half_staged(index: int) -> ObservedWorker:
    sim = SimWorker(f"b{index}", loading=False, required=V0)
    if index % 2:
        sim.push(V1)
    return ObservedWorker(sim.state())


def half_there(index: int) -> ObservedWorker:
    sim = SimWorker(f"b{index}", loading=False, required=V0, active=V1 if index % 2 else V0)
    sim.active_hash = root_hash(sim.active)
    return ObservedWorker(sim.state())


def refusing(index: int) -> ObservedWorker:
    failure = FailedCall("no", 9, 0.0, about=V1)
    return replace(serving(index), failures={"stage": failure, "commit": failure})


WORKERS = {
    "none has it": serving,
    "half staged": half_staged,
    "half there": half_there,
    "refused": refusing,
}


def waiting_for_a_turn(index: int) -> ObservedWorker:
    sim = SimWorker(
        f"b{index}", loading=False, hold="Asleep", turn=TurnState(state="Waiting", devices=("g",))
    )
    return ObservedWorker(sim.state(), failures={"wake": FailedCall("no", 9, 1.0)})


def colocated(count: int, *, made: bool, held: bool = False) -> Pool:
    spec = colocated_spec(replicas=count)
    device = [AllocatedDevice("gpus", "gpu.example.com", "n", f"g{n}") for n in range(count)]
    claims = {
        f"c-{n}": DeviceClaim(
            f"c-{n}", f"uid c-{n}", requests=("gpus",), allocated=True, devices=(device[n],)
        )
        for n in range(count)
    }
    trainers = [
        TrainerPod(f"t-{n}", f"uid t-{n}", "node", claims=(f"c-{n}",)) for n in range(count)
    ]
    there = pool(count, spec=spec)
    taken = [
        replace(
            pod,
            colocated=True,
            node="node",
            taken=RecordedPlacement(f"t-{n}", f"uid c-{n}", (device[n].name,)),
        )
        for n, pod in enumerate(there.pods)
    ]
    there.pods = taken if made else []
    there.seen["trainers"] = ObservedTrainers(tuple(trainers), claims)
    if held:
        there.seen["predecessors"] = tuple(
            replace(pod, name=f"old-{pod.name}", replica=count + n, deletion_at=NOW)
            for n, pod in enumerate(taken)
        )
    return there


def hybrid(count: int, worker: Callable[[int], ObservedWorker]) -> Pool:
    colocation = {"trainerSelector": {"matchLabels": {"job": "grpo"}}}
    made = pool(count, worker, spec=spec_of(mode="Hybrid", colocation=colocation))
    made.pods = [replace(pod, owned=False) for pod in made.pods]
    return made


def gangs(count: int) -> Pool:
    """Of two ranks; the API server refuses the second one of each."""
    made = pool(count, parallelism={"nodes": 2, "tensor": 2}, engine={"type": "vllm"})
    made.seen["rejections"] = {f"pod/pool-{n}-1": "quota" for n in range(count)}
    return made


def scenes(count: int) -> Iterator[tuple[str, Callable[[], Pool]]]:
    yield "at rest", lambda: pool(count)
    yield "silent", lambda: pool(count, silent)
    yield "without pods", lambda: Pool(spec_of(replicas=count), [])
    yield "to be deleted", lambda: replace(pool(count), spec=spec_of(replicas=0))
    yield "suspended", lambda: replace(pool(count), spec=spec_of(replicas=count, suspend=True))
    yield (
        "old template",
        lambda: replace(
            pool(count), spec=spec_of(replicas=count, resources={"limits": {"cpu": "1"}})
        ),
    )
    for strategy, phase, (name, worker) in product(
        ("AllAtOnce", "Rolling", "Eager"), ("Staging", "Committing"), WORKERS.items()
    ):
        yield f"{strategy} {phase} {name}", partial(updating, count, strategy, phase, worker)
    yield "joiners", lambda: joiners(count, givers=count // 2)
    yield "no copy", lambda: joiners(count, givers=0)
    yield "waiting for a turn", lambda: pool(count, waiting_for_a_turn)
    yield "asleep", lambda: pool(count, waiting_for_a_turn, state="Asleep")
    yield "colocated", lambda: colocated(count, made=True)
    yield "colocated to be made", lambda: colocated(count, made=False)
    yield "colocated held", lambda: colocated(count, made=False, held=True)
    yield "hybrid", lambda: hybrid(count, serving)
    yield "hybrid silent", lambda: hybrid(count, silent)
    yield "gangs", lambda: gangs(count)


def lines_of(act: Callable[[], object]) -> int:
    """How many lines of Python it runs; turns of a loop count one by one."""
    found = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal found
        found += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return found


@pytest.mark.parametrize("name", [name for name, _ in scenes(1)])
def test_what_a_pass_decides_costs_in_proportion_to_its_pool(name: str) -> None:
    small, large = (dict(scenes(count))[name]() for count in (50, 200))
    few, many = lines_of(small.decided), lines_of(large.decided)
    assert many / few < 5, (few, many)


def test_the_largest_pool_is_decided_about() -> None:
    plan = joiners(MOST, givers=MOST // 2).decided()
    assert len(plan.calls) == MOST - MOST // 2
    assert all(len(call.peers) == 3 for call in plan.calls)
    assert Pool(spec_of(replicas=MOST), []).decided().create[-1].replica == MOST - 1


@pytest.mark.parametrize(
    ("count", "beside"), [(THREADED_PLAN_PODS - 1, False), (3 * THREADED_PLAN_PODS, True)]
)
async def test_the_event_loop_goes_on_while_a_large_pool_is_decided_about(
    count: int, beside: bool
) -> None:
    large = joiners(count, givers=1)
    look = PassInput(PoolKey("ns", "pool"), {}, large.spec, large.status, large.seen_now())
    deciding = asyncio.create_task(compute_plan(look, NOW))
    turns = 0
    while not deciding.done():
        await asyncio.sleep(0)
        turns += 1
    assert (turns > 2) is beside
    assert (await deciding).status == large.decided().status
