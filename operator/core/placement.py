"""Next to which trainer pod each colocated pod runs, and with which of its devices. Pure.

Pod number i = replica · nodes + rank runs next to trainer pod ⌊i / slots⌋, ordered by name, and has the
(i mod slots)-th equal share of the devices of its claim. That is so whatever came first.

While a trainer's pod restarts it is missing, and the next ones have its number. So a pod stays in its place
while its claim lives, and moves once the trainer's pods have been the same for `TRAINERS_SETTLED_SECONDS`.
A pod without a place gets one at once, but not just after one of the trainer's pods has gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rollout_common.device_claims import natural_sort_key
from rollout_operator.api.spec import Colocation, RolloutReplicaSpec

from .observed_pool import ObservedPool, Pod
from .settings import TRAINERS_SETTLED_SECONDS
from .trainer_pods import AllocatedDevice, DeviceClaim, ObservedTrainers, TrainerPod


@dataclass(frozen=True, slots=True)
class PodPlacement:
    """Where a pod belongs, and what it has there."""

    trainer: str
    node: str
    claim: str
    claim_uid: str
    request: str
    devices: tuple[str, ...]
    """Names of its devices, in the order of the claim's."""
    uuids: tuple[str, ...] = ()
    """Theirs, in the same order, where its container sees devices of others, too."""


@dataclass(frozen=True, slots=True)
class PlacementPending:
    """No place yet: `why` says for what, of a subject that goes before it ("waits for …")."""

    why: str


@dataclass(frozen=True, slots=True)
class PlacementProblem:
    """No place until somebody changes something; the message has the numbers."""

    reason: str
    message: str


PlacementResult = PodPlacement | PlacementPending | PlacementProblem


class PlacementPlanner:
    """Finds the places of a colocated pool's pods among the trainer's pods and claims."""

    def __init__(self, spec: RolloutReplicaSpec, observed: ObservedTrainers) -> None:
        assert spec.colocation is not None, "only colocated pools have places"
        self._spec = spec
        self._with: Colocation = spec.colocation
        self._observed = observed
        self.strangers: list[PlacementProblem] = []
        """Why selected pods don't count as the trainer's."""
        self.moves_in: float | None = None
        """Seconds until the order of the trainer's pods counts, if a pod waits for that."""
        self._trainers = self._count_trainers()
        self._known = {claim.uid: claim for claim in (observed.claims or {}).values()}

    def placement_for(self, replica: int, rank: int) -> PlacementResult:
        """Return the place of a pod."""
        if self._observed.claims is None:
            why = f": {self._observed.unknown}" if self._observed.unknown else ""
            return PlacementPending(f"waits for the list of the trainer's pods and claims{why}")
        if few := self._too_few_trainers():
            return few
        if self._observed.has_shrunk and self._is_unsettled():
            return PlacementPending(
                f"waits {TRAINERS_SETTLED_SECONDS:.0f} s at most for the trainer's pod that has gone to come back"
            )
        number = replica * self._spec.parallelism.nodes + rank
        trainer = self._trainers[number // self._with.slots]
        claim = self._trainer_claim(trainer, self._observed.claims)
        if not isinstance(claim, DeviceClaim):
            return claim
        return self._device_share(trainer, claim, number % self._with.slots)

    def lost_reason(self, pod: Pod) -> str | None:
        """Why a pod that was made for a place has to go: it has lost it, or belongs elsewhere.

        While no place is known for it, it stays as long as it may keep its claim.
        """
        if self._observed.claims is None or pod.taken is None:
            return None
        claim = self._known.get(pod.taken.claim_uid)
        if claim is None:
            return "its claim is gone"
        if claim.deleting:
            return f"its claim {claim.name!r} is being deleted"
        ends = (t.name for t in self._observed.trainers if t.deleting and t.uid == claim.pod_uid)
        if trainer := next(ends, None):
            return f"the trainer's pod {trainer!r} goes, and takes its claim {claim.name!r} along"
        return self._changed_share_reason(pod, self.placement_for(pod.replica, pod.rank))

    def move_reason(self, pod: Pod) -> str | None:
        """Why a pod that may stay belongs elsewhere; None: it is there, or that is not known yet."""
        now = self.placement_for(pod.replica, pod.rank)
        if not isinstance(now, PodPlacement) or pod.taken is None:
            return None
        if pod.taken.claim_uid == now.claim_uid:
            return None
        # Its trainer may only have another number for a moment; a trainer that uses another claim has left it.
        if self._is_used(pod.taken.claim_uid) and self._is_unsettled():
            return None
        return f"its place is next to the trainer's pod {now.trainer!r}, with claim {now.claim!r}"

    def _is_used(self, claim_uid: str) -> bool:
        """Whether any of the trainer's pods uses a claim."""
        claim = self._known.get(claim_uid)
        return claim is not None and any(claim.name in t.claims for t in self._observed.trainers)

    def _is_unsettled(self) -> bool:
        left = TRAINERS_SETTLED_SECONDS - self._observed.stable_seconds
        if left > 0:
            self.moves_in = left
        return left > 0

    def _changed_share_reason(self, pod: Pod, now: PlacementResult) -> str | None:
        if not isinstance(now, PodPlacement) or pod.taken is None:
            return None
        if pod.taken.claim_uid != now.claim_uid:
            return None  # that can wait: see `move_reason`
        if pod.taken.devices != now.devices:
            return f"its share of claim {now.claim!r} is {', '.join(now.devices)}"
        if pod.node not in (None, now.node):
            return f"its claim {now.claim!r} is on node {now.node!r} now"
        return None

    def _count_trainers(self) -> list[TrainerPod]:
        """The trainer's pods by name. A label alone makes none, and of two with one claim the older counts."""
        users: dict[tuple[str, ...], TrainerPod] = {}
        counted: list[TrainerPod] = []
        for each in sorted(self._observed.trainers, key=lambda t: (t.deleting, t.created, t.name)):
            whole = each.claims and not each.unmade and not (each.extended and each.node is None)
            # Before all of its claims are made, its set of claims may equal another pod's.
            twin = users.setdefault(tuple(sorted(each.claims)), each) if whole else each
            if each.has_devices and twin is each:
                counted.append(each)
            elif not each.deleting:
                self.strangers.append(_uncounted_trainer_problem(each, twin))
        return sorted(counted, key=lambda t: (natural_sort_key(t.name), t.name))

    def _too_few_trainers(self) -> PlacementProblem | None:
        """It is unknown which one is missing, so nothing is made and nothing moves."""
        pods = self._spec.replicas * self._spec.parallelism.nodes
        needed = -(-pods // self._with.slots)
        have = len(self._trainers)
        if have >= needed:
            return None
        if self.strangers and have + len(self.strangers) >= needed:
            return self.strangers[0]
        return PlacementProblem(
            "TooFewTrainers",
            f"the pool needs {needed} of the trainer's pods for {pods} of its own (spec.colocation.slots "
            f"{self._with.slots}), and spec.colocation.trainerSelector "
            f"({self._with.trainer_selector.to_query()}) selects "
            f"{have}: start more of them or lower spec.replicas",
        )

    def _trainer_claim(
        self, trainer: TrainerPod, known: Mapping[str, DeviceClaim]
    ) -> DeviceClaim | PlacementPending | PlacementProblem:
        """The claim of a trainer's pod that has the devices, once all is there."""
        what = f"the trainer's pod {trainer.name!r}"
        if trainer.deleting:
            return PlacementPending(f"waits for {what} to go and come back")
        if trainer.unmade:
            return PlacementPending(
                f"waits for the ResourceClaim {trainer.unmade[0]!r} of {what} to be made"
            )
        missing = next((name for name in trainer.claims if name not in known), None)
        if missing is not None:
            return PlacementPending(
                f"waits for the ResourceClaim {missing!r} of {what}, which does not exist yet"
            )
        if trainer.node is None:  # a claim for an extended resource is made as it is scheduled
            listed = f", which needs ResourceClaim {trainer.claims[0]!r}" if trainer.claims else ""
            return PlacementPending(f"waits for {what} to be scheduled{listed}")
        chosen = self._choose_claim(what, [known[name] for name in trainer.claims])
        if isinstance(chosen, PlacementProblem):
            return chosen
        if chosen.deleting:
            return PlacementPending(
                f"waits for a new ResourceClaim of {what}: {chosen.name!r} is being deleted"
            )
        if not chosen.allocated:
            return PlacementPending(
                f"waits for the ResourceClaim {chosen.name!r} of {what} to be allocated"
            )
        return chosen

    def _choose_claim(self, what: str, claims: list[DeviceClaim]) -> DeviceClaim | PlacementProblem:
        """Of all claims of a trainer's pod the one that has the request."""
        wanted = self._with.request
        having = [c for c in claims if wanted is None or wanted in c.requests]
        if not having:
            listed = "; ".join(f"{c.name} has {', '.join(c.requests)}" for c in claims)
            return PlacementProblem(
                "NoClaim",
                f"no ResourceClaim of {what} has a request {wanted!r} as in spec.colocation.request: {listed}",
            )
        count = sum(len(c.requests) for c in having) if wanted is None else len(having)
        if count == 1:
            return having[0]
        listed = ", ".join(
            f"{c.name}/{r}" for c in having for r in c.requests if wanted in (None, r)
        )
        fix = "set spec.colocation.request" if wanted is None else "name their requests differently"
        return PlacementProblem(
            "AmbiguousClaim", f"{what} has {count} requests of devices ({listed}): {fix}"
        )

    def _device_share(
        self, trainer: TrainerPod, claim: DeviceClaim, share: int
    ) -> PodPlacement | PlacementProblem:
        request = self._with.request or claim.requests[0]
        devices = _devices_of_request(claim.devices, request)
        slots, wanted = self._with.slots, self._spec.world_size // self._spec.parallelism.nodes
        if len(devices) != slots * wanted:
            return PlacementProblem(
                "UnequalShares",
                f"request {request!r} of ResourceClaim {claim.name!r} has {len(devices)} devices, and "
                f"{slots} slots of {wanted} (tensor·pipeline·data of spec.parallelism) need "
                f"{slots * wanted}: change spec.colocation.slots, spec.parallelism or the claim",
            )
        first = share * wanted
        mine = tuple(d.name for d in devices[first : first + wanted])
        if slots > 1 and (unknown := [name for name in mine if name not in self._observed.uuids]):
            return PlacementProblem(
                "NoDeviceUuid",
                f"the driver of {unknown[0]} publishes no attribute uuid of it in a ResourceSlice, so a pod "
                f"can't know which of the {len(devices)} devices of ResourceClaim {claim.name!r} are its own: "
                "use a driver that does, or spec.colocation.slots 1",
            )
        uuids = tuple(self._observed.uuids[name] for name in mine) if slots > 1 else ()
        assert trainer.node is not None, "an allocated claim is looked at on its node only"
        return PodPlacement(trainer.name, trainer.node, claim.name, claim.uid, request, mine, uuids)


def foreign_pod_problems(seen: ObservedPool) -> list[PlacementProblem]:
    """Return the pods that look like the pool's own and are not."""
    return [PlacementProblem("PodTrouble", why) for why in seen.strangers]


def _uncounted_trainer_problem(pod: TrainerPod, twin: TrainerPod) -> PlacementProblem:
    if twin is not pod:
        return PlacementProblem(
            "NoClaim",
            f"the trainer's pod {pod.name!r} has no ResourceClaim of its own but that of {twin.name!r}, and "
            "does not count as one: give it another claim, or remove the labels of "
            "spec.colocation.trainerSelector from it",
        )
    return PlacementProblem(
        "NoClaim",
        f"the trainer's pod {pod.name!r} has no ResourceClaim: give it one in spec.resourceClaims of its "
        "template, or limits of an extended resource that a DeviceClass has; a pod that is none of the "
        "trainer's must not have the labels of spec.colocation.trainerSelector",
    )


def _devices_of_request(devices: Iterable[AllocatedDevice], request: str) -> list[AllocatedDevice]:
    """Devices of one request, or of its alternatives, which are named `request/alternative`."""
    mine = (d for d in devices if d.request == request or d.request.startswith(f"{request}/"))
    return sorted(
        mine, key=lambda d: (d.driver, natural_sort_key(d.pool), natural_sort_key(d.device))
    )
