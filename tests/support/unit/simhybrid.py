"""A simulated trainer whose own pods are the pool: they come, end, start again in place and go.

What the operator has of it are its EndpointSlices, which the world keeps as an API server would.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rollout_operator.api.objects import Obj
from rollout_operator.core.observed_pool import ObservedPool, Pod
from rollout_operator.core.pass_plan import PassPlan
from rollout_operator.core.replicas.hybrid import (
    MemberCandidate,
    foreign_pod_messages,
    select_members,
)
from rollout_operator.core.services import (
    pool_slices,
    read_gates,
    slice_difference,
    slice_patch,
    with_gates,
)
from tests.support.unit.poolspecs import a_pod
from tests.support.unit.simworker import SimWorker

if TYPE_CHECKING:
    from tests.support.unit.world import World


STRANGER = "t-10"
"""A pod of this name has the right label and another service account."""


class SimHybrid:
    """The trainer of one Hybrid pool; a part of `World`, whose pods are the trainer's."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.wanted = ["t-0", "t-1"]
        self.slices: dict[str, Obj] = {}
        self.listed = True
        self.writes = 0
        self.down_seconds = 3.0
        """How long a container that ended is down before the kubelet starts it again."""
        self._down: dict[str, float] = {}
        """Uids of pods whose container has ended, and when it starts again."""

    def members(self) -> list[Pod]:
        """The trainer's pods as a pass sees them."""
        gates = read_gates(self.slices.values(), "pool", "owner")
        return list(select_members(self.world.spec, self._selected(), gates))

    def strangers(self) -> tuple[str, ...]:
        """What is told of selected pods that are no members."""
        return foreign_pod_messages(self.world.spec, self._selected())

    def _selected(self) -> list[MemberCandidate]:
        shown = (p for p in self.world.pods.values() if p.uid not in self.world.unlabelled)
        return [MemberCandidate(pod, self.account(pod)) for pod in shown]

    def account(self, pod: Pod) -> str:
        """The service account of a pod."""
        return "other" if pod.name == STRANGER else self.world.spec.service_account_name

    def catch_up(self) -> bool:
        """What is due by now; whether the operator has its list of the pods."""
        for name in self.wanted:
            if name not in self.world.pods:
                self._make(name)
        for name, pod in self.world.pods.items():
            if not pod.ended:
                self._down.pop(pod.uid, None)
                continue
            due = self._down.setdefault(pod.uid, self.world.tick + self.down_seconds)
            if due <= self.world.tick:
                self._start(name)
        for name in list(self.world.pods):
            if name not in self.wanted and not self.world.pods[name].is_deleting:
                self.world.ask_to_go(name)
        listed, self.listed = self.listed, True  # the next look finds the list
        return listed

    def _make(self, name: str) -> None:
        self.world.uids += 1
        uid = f"uid{self.world.uids}"
        self.world.pods[name] = a_pod(
            self.world.spec, name=name, uid=uid, owned=False, revision="", ip="10.0.0.1", node="n"
        )
        self._start(name)

    def _start(self, name: str) -> None:
        """Another process begins in the pod."""
        pod = self.world.pods[name]
        self.world.end_process(pod.uid)
        self.world.uids += 1
        if name != STRANGER:  # whatever it runs, nobody asks it
            self.world.workers[pod.uid] = SimWorker(boot=f"boot{self.world.uids}", drain=30)
        self.world.pods[name] = replace(pod, ended=False, ready=True, trouble="")

    def end(self, name: str) -> None:
        """The container ends by itself; its pod stays."""
        pod = self.world.pods[name]
        self.world.end_process(pod.uid)
        self.world.pods[name] = replace(pod, ended=True, ready=False, trouble="exit code 137")

    def restart(self, name: str) -> None:
        """It ends and starts again before anybody has looked."""
        self._start(name)

    def carry_out(self, seen: ObservedPool, plan: PassPlan) -> None:
        """What a pass does, in its order; where a write fails the others go on."""
        world = self.world
        decided = world.write_status(plan)
        if not world.refuses("gate"):
            self._write(seen, plan)
        world.call_all(plan, decided=decided)

    def _write(self, seen: ObservedPool, plan: PassPlan) -> None:
        shown = with_gates(seen.pods, plan.gates, self.world.now)
        for want in pool_slices("pool", "ns", "owner", shown, self.slices.values()):
            name = want["metadata"]["name"]
            have = self.slices.get(name)
            if have is None:
                self.slices[name] = _stored(want)
            elif slice_difference(want, have):
                patch = slice_patch(want, have)
                meta = {**have["metadata"], **patch.pop("metadata")}
                self.slices[name] = _stored({**have, **patch, "metadata": meta})
            else:
                continue
            self.writes += 1
        self._check(seen)

    def _check(self, seen: ObservedPool) -> None:
        """Whoever gets requests serves, as far as anybody knows."""
        ready = {pod["targetRef"]["uid"] for pod in self.endpoints() if pod["conditions"]["ready"]}
        there = {pod.uid: pod for pod in seen.pods}
        for uid in ready:
            assert uid in there, "an endpoint of nobody"
            assert not there[uid].is_deleting
            assert not there[uid].is_finished
        by_name = [e["hostname"] for e in self.endpoints("pool-heads")]
        assert by_name == [f"pool-{p.replica}-0" for p in seen.pods]

    def endpoints(self, service: str = "pool") -> list[dict[str, Any]]:
        """Endpoints of a Service, in the order of its slices."""
        return [
            endpoint
            for name in sorted(self.slices)
            if self.slices[name]["metadata"]["labels"]["kubernetes.io/service-name"] == service
            for endpoint in self.slices[name]["endpoints"]
        ]


def _stored(obj: Obj) -> Obj:
    meta = obj["metadata"]
    version = int(meta.get("resourceVersion", 0)) + 1
    return {**obj, "metadata": {**meta, "resourceVersion": str(version)}}
