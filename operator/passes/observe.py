"""The first third of a pass: what it starts from. Nobody is asked; polls bring the answers."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_operator.api import names
from rollout_operator.api.names import Condition
from rollout_operator.api.objects import Key, Obj
from rollout_operator.api.spec import Mode, RolloutReplicaSpec
from rollout_operator.api.status import LastUpdate, RolloutReplicaStatus, UpdatePhase
from rollout_operator.core.endpoints import read_gates
from rollout_operator.core.hybrid import Candidate, members, strangers
from rollout_operator.core.plan import Verb
from rollout_operator.core.trainers import (
    Beside,
    DeviceClaim,
    DeviceSlice,
    Trainer,
    published_uuids,
)
from rollout_operator.core.world import Observed, Pod, Worker

from .context import Context
from .memory import Memory

FIRST_POLLS_SECONDS = 5.0
"""How long the first answers of a pool's heads may take: a poll's deadline, and its turn."""


@dataclass(frozen=True, slots=True)
class Look:
    """What one pass starts from: the object, its spec and stored status, and the world."""

    key: Key
    pool: Obj
    spec: RolloutReplicaSpec
    stored: RolloutReplicaStatus
    seen: Observed


def observe(
    ctx: Context, key: Key, pool: Obj, spec: RolloutReplicaSpec, memory: Memory
) -> Observed:
    """Turn what the store and the polls hold about a pool into plain values."""
    meta = pool["metadata"]
    notes = meta.get("annotations") or {}
    if spec.mode is Mode.HYBRID:
        told, beside, foreign = _members(ctx, key, spec, meta["uid"])
        pods = told
    else:
        ours, predecessors = memory.pods.read(ctx.store.pods(key), key.name, meta["uid"], spec)
        foreign = memory.pods.strangers
        told = memory.witness.testify((*ours, *predecessors), ctx.monotonic())
        pods, beside = told[: len(ours)], _beside(ctx, key, spec, memory)
    heads = [p for p in pods if p.rank == 0]
    return Observed(
        name=key.name,
        namespace=key.namespace,
        uid=meta["uid"],
        generation=meta.get("generation", 0),
        pods=pods,
        workers={p.uid: ctx.workers.known(p) for p in heads if not p.finished},
        conflicts=memory.obstacles.conflicts,
        rejections=memory.obstacles.rejections,
        restarts_of={r.replica: r.restarts for r in memory.believed.replacing},
        barrier=memory.barrier,
        paused=notes.get(names.ANNOTATION_PAUSED) == "true",
        retry=notes.get(names.ANNOTATION_RETRY, ""),
        predecessors=told[len(pods) :],
        awaited=memory.obstacles.awaited,
        api_errors=memory.obstacles.api_errors,
        undeleted=memory.obstacles.undeleted,
        beside=beside,
        strangers=foreign,
    )


def _members(
    ctx: Context, key: Key, spec: RolloutReplicaSpec, uid: str
) -> tuple[tuple[Pod, ...], Beside, tuple[str, ...]]:
    """The trainer's pods as members of a Hybrid pool; none while they are not listed. And who is none."""
    assert spec.colocation is not None, "the CRD demands a selector"
    found = ctx.neighbours.inside(key, spec.colocation.trainer_selector)
    if found.unknown is not None:
        return (), Beside(unknown=found.unknown), ()
    gates = read_gates(ctx.store.slices(key), key.name, uid)
    candidates = [pod for pod in found.pods if isinstance(pod, Candidate)]
    return members(spec, candidates, gates), Beside(claims={}), strangers(spec, candidates)


def _beside(ctx: Context, key: Key, spec: RolloutReplicaSpec, memory: Memory) -> Beside:
    """What the trainer has; only colocated pools ask."""
    if spec.colocation is None:
        return Beside()
    selector, shared = spec.colocation.trainer_selector, spec.colocation.slots > 1
    found = ctx.neighbours.look(key, selector, slices=shared)
    if found.unknown is not None:
        return Beside(unknown=found.unknown)
    trainers = tuple(pod for pod in found.pods if isinstance(pod, Trainer))
    return Beside(
        trainers=trainers,
        claims={c.name: c for c in found.claims if isinstance(c, DeviceClaim)},
        uuids=published_uuids(each for each in found.slices if isinstance(each, DeviceSlice)),
        stable_seconds=memory.trainers.stable_seconds(trainers, ctx.monotonic()),
        has_shrunk=memory.trainers.has_shrunk,
    )


def wait_for_first_polls(ctx: Context, key: Key, seen: Observed, memory: Memory) -> float | None:
    """Poll every head once before the first decision; return how long that may still take.

    A process that has just started knows no worker's answer. To decide without would flip the
    conditions of a pool that serves, and take an update for one without workers.
    """
    now = ctx.monotonic()
    memory.first_look = now if memory.first_look is None else memory.first_look
    left = memory.first_look + FIRST_POLLS_SECONDS - now
    heads = [p for p in seen.pods if p.rank == 0]
    memory.polled = ctx.workers.watch(key, heads, {p.uid for p in heads})
    waiting = any(ctx.workers.poller.last(uid) is None for uid in memory.polled)
    memory.first_polls_done = left <= 0 or not waiting
    return None if memory.first_polls_done else left


def stop_polling(ctx: Context, memory: Memory) -> None:
    """Poll no head of a pool about which nothing can be decided: nobody would notice who goes.

    Once something can, all are polled before it is, as by a process that has just started.
    """
    for uid in memory.polled:
        ctx.workers.poller.unwatch(uid)
    memory.first_look, memory.first_polls_done = None, False


def poll(
    ctx: Context, key: Key, seen: Observed, status: RolloutReplicaStatus, memory: Memory
) -> None:
    """Have the heads polled: often while something is under way, seldom otherwise."""
    conditions = (status.condition(c) for c in (Condition.PROGRESSING, Condition.DEGRADED))
    moving = any(c is not None and c.status == "True" for c in conditions)
    updating = phase_of(status) in (UpdatePhase.STAGING, UpdatePhase.COMMITTING)
    heads = [p for p in seen.pods if p.rank == 0]
    update = status.weights.last_update if updating else None
    # A head that serves has nothing new to say while its pool waits for the others.
    fast = {
        p.uid
        for p in heads
        if moving and (not p.gate or _has_news(seen.workers.get(p.uid), update))
    }
    polled = ctx.workers.watch(key, heads, fast)
    for uid in memory.polled - polled:
        ctx.workers.forget(uid)
    memory.polled = polled


def _has_news(worker: Worker | None, update: LastUpdate | None) -> bool:
    """Whether a look may show how far an update is: not of who has come to it, or is told to commit."""
    if update is None or worker is None or worker.state is None:
        return update is not None
    slot, wanted = worker.state.weights.staged, update.identity.as_tuple()
    staged = slot is not None and slot.phase == "Staged" and (slot.epoch, slot.version) == wanted
    return not (staged or worker.active == update.identity or Verb.COMMIT in worker.running)


def phase_of(status: RolloutReplicaStatus) -> UpdatePhase | None:
    """Return the phase of the last weights update."""
    return status.weights.last_update.phase if status.weights.last_update else None
