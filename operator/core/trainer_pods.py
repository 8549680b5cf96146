"""A trainer's pods and their ResourceClaims, read once into plain values. Pure.

The trainer reads some of it, too: that is in `rollout_common.device_claims`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rollout_common.device_claims import device_lock_name, device_uuids, pod_claims
from rollout_operator.api import names
from rollout_operator.api.objects import Obj

from .settings import TRAINERS_SETTLED_SECONDS

IMPLICIT_RESOURCE_PREFIX = "deviceclass.resource.kubernetes.io/"
"""Before the name of a DeviceClass: the extended resource that each one has."""


@dataclass(frozen=True, slots=True)
class TrainerPod:
    """A pod that the pool's `trainerSelector` selects."""

    name: str
    uid: str
    node: str | None = None
    deleting: bool = False
    claims: tuple[str, ...] = ()
    """Names of its ResourceClaims, as far as they are there."""
    unmade: tuple[str, ...] = ()
    """Names of entries of its `resourceClaims` whose ResourceClaim has yet to be made."""
    extended: bool = False
    """Its limits name an extended resource, whose ResourceClaim is made as it is scheduled."""
    created: str = ""
    """Its creationTimestamp; later ones are greater."""

    @property
    def has_devices(self) -> bool:
        """It has a ResourceClaim, or is about to get one: a pod without any is not a trainer's."""
        return bool(self.claims or self.unmade) or (self.extended and self.node is None)


@dataclass(frozen=True, slots=True)
class AllocatedDevice:
    """One allocated device."""

    request: str
    driver: str
    pool: str
    device: str

    @property
    def name(self) -> str:
        """What its lock is called."""
        return device_lock_name(self.driver, self.pool, self.device)


@dataclass(frozen=True, slots=True)
class DeviceClaim:
    """A ResourceClaim."""

    name: str
    uid: str
    deleting: bool = False
    requests: tuple[str, ...] = ()
    allocated: bool = False
    devices: tuple[AllocatedDevice, ...] = ()
    pod_uid: str | None = None
    """The pod that it was generated for and goes with; None: somebody made it to stay."""
    users: tuple[str, ...] = ()
    """Names of the pods for which it is reserved."""


@dataclass(frozen=True, slots=True)
class DeviceSlice:
    """What a driver publishes of devices of one pool."""

    driver: str
    pool: str
    generation: int
    uuids: tuple[tuple[str, str], ...]
    """Names and uuids of the devices that have one."""


@dataclass(frozen=True, slots=True)
class ObservedTrainers:
    """The trainer's pods and claims, as far as a colocated pool needs them."""

    trainers: tuple[TrainerPod, ...] = ()
    claims: Mapping[str, DeviceClaim] | None = None
    """By name; None: not known yet, and `unknown` says why."""
    unknown: str = ""
    stable_seconds: float = math.inf
    """For how long the trainer's pods have been the same ones."""
    has_shrunk: bool = False
    """There were more of them a short time ago."""
    uuids: Mapping[str, str] = field(default_factory=dict)
    """Of devices by name, as their drivers publish them; only if the pool divides a claim's devices."""


@dataclass(slots=True)
class TrainerWatch:
    """For how long this process has seen the same pods of a trainer; to forget it costs a wait."""

    changed_at: float = -math.inf
    """Monotonic seconds."""
    _uids: frozenset[str] = frozenset()
    _most: int = 0
    """How many there have been since they were the same for long."""

    @property
    def has_shrunk(self) -> bool:
        """There were more of them a short time ago."""
        return len(self._uids) < self._most

    def note_trainers(self, trainers: Iterable[TrainerPod], now: float) -> float:
        """Note which pods there are at `now`, monotonic; return seconds since that last changed."""
        uids = frozenset(each.uid for each in trainers if each.has_devices)
        if uids != self._uids:
            self._uids, self.changed_at = uids, now
        seconds = now - self.changed_at
        settled = seconds >= TRAINERS_SETTLED_SECONDS
        self._most = len(uids) if settled else max(self._most, len(uids))
        return seconds


@dataclass(frozen=True, slots=True)
class RecordedPlacement:
    """The place that a colocated pod was made for, as its annotations have it."""

    trainer: str
    claim_uid: str
    devices: tuple[str, ...]


def parse_trainer(obj: Obj) -> TrainerPod | None:
    """Read a pod; None if it is not a trainer's: it has ended, or a pool of ours has it."""
    meta, spec = obj["metadata"], obj.get("spec") or {}
    if not may_be_trainer(obj):
        return None
    claims, unmade = pod_claims(obj)
    return TrainerPod(
        name=meta["name"],
        uid=meta["uid"],
        node=spec.get("nodeName"),
        deleting=meta.get("deletionTimestamp") is not None,
        claims=tuple(claims),
        unmade=tuple(unmade),
        extended=_requests_extended_resource(spec),
        created=meta.get("creationTimestamp") or "",
    )


def may_be_trainer(obj: Obj) -> bool:
    """Return whether a pod has not ended and is not in a pool of ours."""
    labels, status = obj["metadata"].get("labels") or {}, obj.get("status") or {}
    ours = labels.get(names.LABEL_MANAGED_BY) == names.MANAGER_NAME
    return not ours and status.get("phase") not in ("Failed", "Succeeded")


def _requests_extended_resource(spec: Obj) -> bool:
    """Whether a limit of the pod has the name of an extended resource, by the rule of Kubernetes."""
    names_of = (
        name
        for container in spec.get("containers") or ()
        for name in (container.get("resources") or {}).get("limits") or ()
    )
    return any(
        "/" in name and ("kubernetes.io/" not in name or name.startswith(IMPLICIT_RESOURCE_PREFIX))
        for name in names_of
    )


def parse_resource_slice(obj: Obj) -> DeviceSlice:
    """Read a ResourceSlice."""
    spec, pool = obj["spec"], obj["spec"]["pool"]
    uuids = tuple(sorted(device_uuids(obj).items()))
    return DeviceSlice(spec["driver"], pool["name"], pool.get("generation", 0), uuids)


def published_uuids(slices: Iterable[DeviceSlice]) -> dict[str, str]:
    """Return the uuids of all devices; of a pool's slices those of its latest generation count."""
    ordered = sorted(slices, key=lambda each: each.generation)
    return {name: uuid for each in ordered for name, uuid in each.uuids}


def parse_resource_claim(obj: Obj) -> DeviceClaim:
    """Read a ResourceClaim."""
    meta = obj["metadata"]
    requests = ((obj.get("spec") or {}).get("devices") or {}).get("requests") or ()
    status = obj.get("status") or {}
    allocation, users = status.get("allocation"), status.get("reservedFor") or ()
    results = ((allocation or {}).get("devices") or {}).get("results") or ()
    owners = meta.get("ownerReferences") or ()
    return DeviceClaim(
        name=meta["name"],
        uid=meta["uid"],
        deleting=meta.get("deletionTimestamp") is not None,
        requests=tuple(r["name"] for r in requests),
        allocated=allocation is not None,
        devices=tuple(
            AllocatedDevice(r["request"], r["driver"], r["pool"], r["device"]) for r in results
        ),
        pod_uid=next((o["uid"] for o in owners if o["kind"] == "Pod"), None),
        users=tuple(user["name"] for user in users if user.get("resource") == "pods"),
    )
