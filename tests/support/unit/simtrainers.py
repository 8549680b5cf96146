"""A simulated trainer: its pods come, go and come back, and claims are made, kept and given back.

As in a cluster: a claim that was generated for a pod begins to go with it, and is there until the last
pod that uses it has gone; its devices are free only then. A claim that somebody made stays, and is
allocated anew, perhaps elsewhere, once nobody has used it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rollout_common.device_claims import natural_sort_key
from rollout_operator.api.spec import RolloutReplicaSpec
from rollout_operator.core.observed_pool import Pod
from rollout_operator.core.settings import TRAINERS_SETTLED_SECONDS
from rollout_operator.core.trainer_pods import (
    AllocatedDevice,
    DeviceClaim,
    ObservedTrainers,
    TrainerPod,
    TrainerWatch,
)

GONE_SECONDS = 2.0
"""How long a pod of the trainer's terminates."""


class SimTrainers:
    """The trainer beside one pool; a part of `World`."""

    def __init__(self, spec: RolloutReplicaSpec, *, generated: bool) -> None:
        assert spec.colocation is not None
        self.generated = generated
        self.slots, self.nodes = spec.colocation.slots, spec.parallelism.nodes
        self.count = spec.colocation.slots * spec.world_size // spec.parallelism.nodes
        self.pods: dict[str, TrainerPod] = {}
        self.claims: dict[str, DeviceClaim] = {}
        self.wanted = ["t-0", "t-1"]
        self.listed = True
        self.watch = TrainerWatch()
        self.tick = 0.0
        self.uids = 0
        self.sites = 0
        """Claims that stay are allocated on a node of this number from now on."""
        self._gone_at: dict[str, float] = {}

    def beside(self) -> ObservedTrainers:
        """What a pass sees."""
        if not self.listed:
            self.listed = True  # the next list brings it
            return ObservedTrainers(unknown="list pods: no answer")
        stable = self.watch.note_trainers(self.pods.values(), self.tick)
        devices = [device.name for claim in self.claims.values() for device in claim.devices]
        return ObservedTrainers(
            tuple(reversed(self.pods.values())),
            dict(self.claims),
            stable_seconds=stable,
            has_shrunk=self.watch.has_shrunk,
            uuids={name: f"GPU-{name}" for name in devices},
        )

    def settles(self, pods: Iterable[Pod]) -> bool:
        """Whether one of the pool's pods may have to move once the trainer has not changed for a while."""
        if self.watch.has_shrunk and self.watch.changed_at > self.tick - TRAINERS_SETTLED_SECONDS:
            return True
        order = [self.pods[name] for name in sorted(self.pods, key=natural_sort_key)]
        claims = [self.claims[name].uid for pod in order for name in pod.claims]
        return any(
            claims[(pod.replica * self.nodes + pod.rank) // self.slots :][:1]
            != [pod.taken.claim_uid]
            for pod in pods
            if pod.taken is not None
        )

    def restart(self, name: str) -> None:
        """A pod of the trainer's is deleted; whoever made it makes it again."""
        if name in self.pods and not self.pods[name].deleting:
            self.pods[name] = replace(self.pods[name], deleting=True)

    def lose(self, name: str) -> None:
        """A pod fails: it counts no more at once, and the claim that was made for it goes."""
        self._end_claim(self.pods.pop(name))

    def catch_up(self, tick: float, users: Iterable[Pod]) -> None:
        """Whatever is due by now: pods go and come, claims go and are allocated."""
        self.tick = tick
        by_claim: dict[str, list[str]] = {}
        for pod in users:
            if pod.taken is not None:
                by_claim.setdefault(pod.taken.claim_uid, []).append(pod.name)
        used = by_claim.keys()
        for name, beside in list(self.pods.items()):
            due = self._gone_at.setdefault(name, tick + GONE_SECONDS)
            if not beside.deleting:
                del self._gone_at[name]
            elif due <= tick:
                del self.pods[name], self._gone_at[name]
                self._end_claim(beside)
        for name, claim in list(self.claims.items()):
            if claim.deleting and claim.uid not in used:
                del self.claims[name]
            elif not self._has_user(name) and claim.uid not in used:
                self.claims[name] = replace(claim, allocated=False, devices=(), users=())
            else:
                self.claims[name] = replace(claim, users=tuple(by_claim.get(claim.uid, ())))
        for name in self.wanted:
            self._advance(name)

    def _has_user(self, claim: str) -> bool:
        return any(claim in pod.claims and pod.node is not None for pod in self.pods.values())

    def _end_claim(self, pod: TrainerPod) -> None:
        for name in pod.claims:
            if self.claims[name].pod_uid == pod.uid:
                self.claims[name] = replace(self.claims[name], deleting=True)

    def _advance(self, name: str) -> None:
        """One step of a pod's way: it is made, gets its claim, and is scheduled with it."""
        pod = self.pods.get(name)
        if pod is None:
            self.uids += 1
            self.pods[name] = TrainerPod(name, f"trainer{self.uids}", unmade=("gpus",))
        elif pod.unmade:
            claim = f"{name}-{pod.uid}" if self.generated else f"{name}-gpus"
            if claim not in self.claims:
                self.uids += 1
                self.claims[claim] = DeviceClaim(
                    claim,
                    f"claim{self.uids}",
                    requests=("gpus",),
                    pod_uid=pod.uid if self.generated else None,
                )
            self.pods[name] = replace(pod, unmade=(), claims=(claim,))
        elif pod.node is None and not pod.deleting:
            self._schedule(name, pod)

    def _schedule(self, name: str, pod: TrainerPod) -> None:
        claim = self.claims[pod.claims[0]]
        if not claim.allocated:
            node = f"node-{name}-{self.sites}"
            found = [
                AllocatedDevice("gpus", "gpu.example.com", node, f"gpu-{i}")
                for i in range(self.count)
            ]
            taken = {d.name for c in self.claims.values() for d in c.devices}
            if taken & {d.name for d in found}:
                return  # the claim that goes has them still
            claim = replace(claim, allocated=True, devices=tuple(found))
            self.claims[claim.name] = claim
        self.pods[name] = replace(pod, node=claim.devices[0].pool)
