"""What a pass sees: raw objects and workers' answers, parsed once into plain values.

`observe` is the only place that knows the shape of pods; everything after it is pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rollout_operator.api import names
from rollout_operator.api.objects import Obj
from rollout_worker.schemas import Lifecycle, WeightsId, WorkerState


def timestamp(text: str | None) -> float | None:
    """Seconds since the epoch of a Kubernetes time, None for none."""
    if not text:
        return None
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


@dataclass(frozen=True, slots=True)
class Pod:
    """One worker pod as the API server shows it; times are wall-clock seconds."""

    name: str
    uid: str
    replica: int
    rank: int
    revision: str
    phase: str
    owned: bool
    """Our object is its controller."""
    deletion_at: float | None = None
    """When its grace period ends or ended; None: it is not being deleted."""
    started: bool = False
    """Some container has run."""
    ready: bool = False
    """The Ready condition: containers ready and the gate on."""
    gate: bool = False
    gate_boot: str | None = None
    """The worker process that the gate was set for."""
    gate_since: float | None = None
    ip: str | None = None
    node: str | None = None
    restarts: int = 0
    """Failures of this replica that were answered by a new pod before this one."""
    retry: str = ""
    """Value of the retry annotation of the object when the pod was made."""
    finished_at: float | None = None
    trouble: str = ""
    """What the kubelet or the scheduler reports as wrong, for a person."""

    @property
    def deleting(self) -> bool:
        """It is terminating."""
        return self.deletion_at is not None

    @property
    def finished(self) -> bool:
        """Its process has ended and won't come back."""
        return self.phase in ("Failed", "Succeeded")


LAST_WORDS = 300
"""Maximum characters of a container's log in one of our sentences."""


@dataclass(frozen=True, slots=True)
class CallError:
    """A call to a worker that failed, and when it may be tried again."""

    message: str
    count: int
    retry_at: float
    slug: str | None = None
    about: WeightsId | None = None
    """The weights that the call was about, if it was about any."""


def is_loaded(state: WorkerState) -> bool:
    """Whether a worker that says this has a model."""
    without = (Lifecycle.STARTING, Lifecycle.LOADING, Lifecycle.FAILED)
    return state.weights.active is not None and state.lifecycle not in without


@dataclass(frozen=True, slots=True)
class Worker:
    """A head's own answer, and our calls to it."""

    state: WorkerState | None = None
    error: str | None = None
    running: frozenset[str] = frozenset()
    """Names of calls in flight."""
    failures: Mapping[str, CallError] = field(default_factory=dict)
    last: WorkerState | None = None
    """Its last answer to this process, however old; `state`, as long as that is believed."""
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
    def loaded(self) -> bool:
        """It has a model and can be told what to do."""
        return self.state is not None and is_loaded(self.state)


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything `decide` may look at."""

    name: str
    namespace: str
    uid: str
    generation: int
    pods: tuple[Pod, ...]
    workers: Mapping[str, Worker]
    """By pod uid; heads only."""
    conflicts: Mapping[str, str]
    """Objects of others that have the names we need: `kind/name` → sentence."""
    rejections: Mapping[str, str]
    """Creations that the API server rejected: `kind/name` → sentence."""
    unsettled: int
    """Own writes that the watch has not shown yet."""
    restarts_of: Mapping[int, int]
    """Failures of replicas whose failed pods are deleted and not yet replaced."""
    barrier: frozenset[str] | None
    """Boot ids of the barrier of the update under way; None: this process has not formed one."""
    paused: bool
    retry: str

    def worker(self, pod: Pod) -> Worker:
        """What is known of a head's worker."""
        return self.workers.get(pod.uid, UNKNOWN)


UNKNOWN = Worker()


def parse_pod(obj: Obj, owner_uid: str) -> Pod | None:
    """Parse a labelled pod; None if its labels are not ours."""
    meta = obj["metadata"]
    labels: Mapping[str, str] = meta.get("labels") or {}
    notes: Mapping[str, str] = meta.get("annotations") or {}
    status: Obj = obj.get("status") or {}
    try:
        replica, rank = int(labels[names.LABEL_REPLICA]), int(labels[names.LABEL_RANK])
        restarts = int(notes.get(names.ANNOTATION_RESTARTS, "0"))
    except (KeyError, ValueError):
        return None
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    gate = conditions.get(names.GATE_SERVING, {})
    ends, started = _run_times(status)
    return Pod(
        name=meta["name"],
        uid=meta["uid"],
        replica=replica,
        rank=rank,
        revision=labels.get(names.LABEL_REVISION, ""),
        phase=status.get("phase", "Pending"),
        owned=_controller(meta) == owner_uid,
        deletion_at=timestamp(meta.get("deletionTimestamp")),
        started=started,
        ready=conditions.get("Ready", {}).get("status") == "True",
        gate=gate.get("status") == "True",
        gate_boot=boot_of(gate.get("message", "")),
        gate_since=timestamp(gate.get("lastTransitionTime")),
        ip=status.get("podIP"),
        node=(obj.get("spec") or {}).get("nodeName"),
        restarts=restarts,
        retry=notes.get(names.ANNOTATION_RETRY, ""),
        finished_at=max(ends, default=None),
        trouble=_trouble(status, conditions),
    )


BOOT_PREFIX = "boot "


def boot_of(message: str) -> str | None:
    """The boot id that a gate's message names."""
    head, found, rest = message.partition(BOOT_PREFIX)
    return rest.split(":")[0].strip() if found and not head else None


def _controller(meta: Obj) -> str | None:
    for ref in meta.get("ownerReferences") or ():
        if ref.get("controller"):
            uid: str = ref["uid"]
            return uid
    return None


def _run_times(status: Obj) -> tuple[list[float], bool]:
    """When containers ended, and whether any has run."""
    ends: list[float] = []
    started = False
    for container in status.get("containerStatuses") or ():
        for state in (container.get("state") or {}, container.get("lastState") or {}):
            terminated = state.get("terminated") or {}
            ended = timestamp(terminated.get("finishedAt"))
            ends += [ended] if ended else []
            run = terminated or state.get("running") or {}
            started = started or bool(run.get("startedAt"))
    return ends, started


def _last_words(log: str) -> str:
    """Return why a container ended, as the end of its log says: one line, often none.

    Our workers log JSON: the last line of level error counts. Of anything else, such as a
    traceback, the last line does; the other lines are in the log.
    """
    plain, told = "", ""
    for line in log.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            plain = line.strip() or plain
            continue
        if isinstance(entry, dict) and entry.get("level") in ("error", "critical"):
            told = str(entry.get("message", ""))
    # The kubelet cuts the log at its beginning, which leaves a piece of a line of ours.
    return (told or ("" if plain.endswith("}") else plain))[:LAST_WORDS]


def _trouble(status: Obj, conditions: Mapping[str, Any]) -> str:
    """One sentence on what is wrong with the pod, empty if nothing is."""
    for container, is_worker in _containers(status):
        state = container.get("state") or {}
        ended = state.get("terminated")
        # An init container that did its work is no trouble, whatever became of the worker.
        if ended and (ended.get("exitCode") or (is_worker and status.get("phase") == "Failed")):
            text = f"{ended.get('reason', 'Error')}, exit code {ended.get('exitCode')}"
            why = _last_words(ended.get("message") or "")
            return f"container {container['name']!r} ended: {text}{why and ': '}{why}"
        waiting = state.get("waiting") or {}
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return (
                f"container {container['name']!r}: {waiting['reason']} {waiting.get('message', '')}"
            )
    if status.get("reason"):
        return f"{status['reason']}: {status.get('message', '')}".rstrip(": ")
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return f"{scheduled.get('reason', 'not scheduled')}: {scheduled.get('message', '')}"
    return ""


def _containers(status: Obj) -> Iterator[tuple[Obj, bool]]:
    """Each container's status and whether it is the worker's, which comes first: its end is the pod's."""
    for part, is_worker in (("containerStatuses", True), ("initContainerStatuses", False)):
        for container in status.get(part) or ():
            yield container, is_worker


class PodReader:
    """Parses the pods of a pool, each object once: the store replaces objects and changes none."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Obj, Pod | None]] = {}
        self._owner = ""

    def read(self, objs: Iterable[Obj], owner_uid: str) -> tuple[Pod, ...]:
        """Return the pods that our object controls; others' show when a name is taken."""
        before = self._known if owner_uid == self._owner else {}
        self._known, self._owner = {}, owner_uid
        for obj in objs:
            # The object is kept beside its pod, so its id is nobody else's.
            self._known[id(obj)] = before.get(id(obj)) or (obj, parse_pod(obj, owner_uid))
        return tuple(pod for _, pod in self._known.values() if pod is not None and pod.owned)
