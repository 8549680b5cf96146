"""What a pass sees, in plain values: pods, workers' answers, and what became of earlier writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollout_common.wire import Lifecycle, WeightsId, WorkerState
from rollout_operator.api.gangs import GangScheduler

from .trainer_pods import ObservedTrainers, RecordedPlacement


@dataclass(frozen=True, slots=True)
class Pod:
    """One worker pod as the API server shows it; times are wall-clock seconds."""

    name: str
    uid: str
    replica: int
    rank: int
    revision: str
    phase: str
    """Of a pod whose worker has ended: how, also while another container runs on."""
    owned: bool
    """Our object is its controller."""
    mislabelled: bool = False
    """Somebody changed one of the labels by which Services and monitors find it."""
    deletion_at: float | None = None
    """When its grace period ends or ended; None: it is not being deleted."""
    grace: float | None = None
    """Seconds that its deletion grants it, if it is being deleted."""
    own_grace: int | None = None
    """Seconds that a deletion grants it which names none."""
    lingers: bool = False
    """A container that somebody else added, such as a mesh's proxy, outlives its worker."""
    finalizers: tuple[str, ...] = ()
    """Of others: they keep a pod that has ended, and the operator sets none."""
    started: bool = False
    """Some container has run."""
    ready: bool = False
    """The Ready condition: containers ready and the gate on."""
    gate: bool = False
    gate_boot: str | None = None
    """The worker process that the gate was set for."""
    gate_since: float | None = None
    proven_since: float | None = None
    """When it first did what its pool asks for: served, paused or slept."""
    ip: str | None = None
    node: str | None = None
    restarts: int = 0
    """Failures of this replica that were answered by a new pod before this one."""
    retry: str = ""
    """Value of the retry annotation of the object when the pod was made."""
    followed: bool = False
    """Its worker ended because another rank of its gang had."""
    finished_at: float | None = None
    """When its last container ended, if it ran any."""
    last_known_at: float = 0.0
    """If it has ended and no container says when: the latest time of a condition, its start, its creation."""
    trouble: str = ""
    """What the kubelet or the scheduler reports as wrong, for a person."""
    last_log: str = ""
    """The end of the log of the container that failed, as far as the kubelet keeps it in the pod."""
    is_surge: bool = False
    """It was made in addition to the wanted ones, for a time: of a rolling update, or of a node's drain."""
    waits_on: str = ""
    """What it does before its worker starts, for a person; empty if nothing is known."""
    lacks_node: bool = False
    """All that `trouble` says is that the scheduler finds no node for it, or that gates hold it back."""
    is_gated: bool = False
    """Scheduling gates hold it back, such as those of a queue."""
    unscheduled_since: float | None = None
    """Since when it is held back by gates, or the scheduler finds no node for it."""
    is_booting: bool = False
    """The kubelet says that the worker has not passed its startup probe."""
    seen_seconds: float = 0.0
    """Seconds for which this process has seen it terminating, or else finished: an interval that
    holds even if somebody sets a clock."""
    forced_ago: float | None = None
    """Seconds since this process tried to remove it by force."""
    ended: bool = False
    """Of a trainer's pod: its process has ended, and the pod may start another one."""
    colocated: bool = False
    """It uses a trainer's devices: never removed by force, because its engine may still hold them."""
    taken: RecordedPlacement | None = None
    """The place that it was made for, if it is colocated."""

    @property
    def ended_at(self) -> float:
        """When it ended, as well as that is known: no container says so if none ever ran."""
        return self.last_known_at if self.finished_at is None else self.finished_at

    @property
    def is_deleting(self) -> bool:
        """It is terminating."""
        return self.deletion_at is not None

    @property
    def is_finished(self) -> bool:
        """Its process has ended and won't come back; in a trainer's pod another one may."""
        return self.ended or self.phase in ("Failed", "Succeeded")


@dataclass(frozen=True, slots=True)
class FailedCall:
    """A call to a worker that failed, and in how many seconds it may be tried again."""

    message: str
    count: int
    retry_in: float
    slug: str | None = None
    about: WeightsId | None = None
    """The weights that the call was about, if it was about any."""


def is_loaded(state: WorkerState) -> bool:
    """Whether a worker in this state has a model; its weights may still wait for a commit."""
    without = (Lifecycle.STARTING, Lifecycle.LOADING, Lifecycle.FAILED)
    known = state.weights.active is not None or state.lifecycle is Lifecycle.ASLEEP
    return known and state.lifecycle not in without


def is_asleep(state: WorkerState) -> bool:
    """Whether a worker in this state has given all its memory back; a wake takes it in steps.

    Weights that a trainer lends are in memory while it sleeps.
    """
    there = state.resident
    weights = there.weights and not (state.turn is not None and state.turn.lent)
    return state.lifecycle is Lifecycle.ASLEEP and not (weights or there.kv_cache)


@dataclass(frozen=True, slots=True)
class ObservedWorker:
    """A head's own answer, and our calls to it."""

    state: WorkerState | None = None
    error: str | None = None
    running: frozenset[str] = frozenset()
    """Names of calls in flight."""
    failures: Mapping[str, FailedCall] = field(default_factory=dict)
    last: WorkerState | None = None
    """Its last answer to this process, however old; `state`, as long as that is believed."""
    slot_seconds: float = 0.0
    """For how long this process has seen the same version and phase in its slot."""
    silent_since: float | None = None
    """Wall clock, seconds: its last answer before polls failed, or the first poll; None: it answers."""
    silent_seconds: float = 0.0
    """How long ago that was, by the monotonic clock."""
    active: WeightsId | None = field(init=False, default=None)
    """Identity of the weights it would serve with."""

    def __post_init__(self) -> None:
        """Take the identity once: a pass compares it many times."""
        if self.state is None:
            return
        object.__setattr__(self, "last", self.state)
        if self.state.weights.active is not None:
            object.__setattr__(self, "active", self.state.weights.active.identity)

    @property
    def is_loaded(self) -> bool:
        """It has a model and takes calls."""
        return self.state is not None and is_loaded(self.state)


@dataclass(frozen=True, slots=True)
class ObservedScheduling:
    """The gang scheduler of a pool whose spec asks for one."""

    scheduler: GangScheduler | None = None
    """Takes the pods; None: spec asks for none, or none does."""
    lacking: bool = False
    """Spec asks for one, and none takes the pods, or none is known yet: no pod can be made."""
    trouble: str = ""
    """Why none does, with the fix; empty: one does, or it is not known yet."""


RECALLED_KEY = "status"
"""Key of an obstacle of the process before this one, until the write is tried again."""


@dataclass(frozen=True, slots=True)
class ObservedPool:
    """Everything `plan_pass` may look at."""

    name: str
    namespace: str
    uid: str
    generation: int
    pods: tuple[Pod, ...]
    workers: Mapping[str, ObservedWorker]
    """By pod uid; heads only."""
    conflicts: Mapping[str, str]
    """Objects of others that have the names we need: `kind/name` → sentence."""
    rejections: Mapping[str, str]
    """Writes that the API server rejected, creations by `kind/name` → sentence."""
    restarts_of: Mapping[int, int]
    """Failures of replicas whose failed pods are deleted and not yet replaced, as status has them."""
    barrier: frozenset[str] | None
    """Boot ids of the barrier of the update under way; None: this process has not formed one."""
    paused: bool
    retry: str
    predecessors: tuple[Pod, ...] = ()
    """Pods of a deleted RolloutReplica of this name, which have yet to go."""
    awaited: frozenset[str] = frozenset()
    """Children that wait to be created, as `kind/name`: their name gets free, or others were refused."""
    api_errors: Mapping[str, str] = field(default_factory=dict)
    """Writes that the API server could not do, creations by `kind/name` → sentence."""
    undeleted: frozenset[str] = frozenset()
    """Uids of pods whose deletion the API server refused: they go on working for the pool."""
    trainers: ObservedTrainers = field(default_factory=ObservedTrainers)
    """The trainer's pods and claims, of a colocated pool."""
    scheduling: ObservedScheduling = field(default_factory=ObservedScheduling)
    """What the cluster has that starts pods together."""
    cordoned: frozenset[str] = frozenset()
    """Nodes that take no new pods, and may be drained; known only for a pool with pushed weights."""
    strangers: tuple[str, ...] = ()
    """A sentence on each pod that looks like the pool's and is not: no pass touches them."""


UNKNOWN_WORKER = ObservedWorker()
