"""The first third of a pass: what it starts from. It calls no worker; polls bring the answers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from rollout_operator.api import names
from rollout_operator.api.names import ConditionType
from rollout_operator.api.objects import Obj, PoolKey
from rollout_operator.api.spec import PoolMode, RolloutReplicaSpec
from rollout_operator.api.status import LastUpdate, RolloutReplicaStatus, UpdatePhase
from rollout_operator.core.observed_pool import (
    ObservedPool,
    ObservedScheduling,
    ObservedWorker,
    Pod,
)
from rollout_operator.core.pass_plan import ControlVerb
from rollout_operator.core.pods.pod_groups import queue_trouble
from rollout_operator.core.pods.pod_reader import sort_pods
from rollout_operator.core.replicas.hybrid import (
    MemberCandidate,
    foreign_pod_messages,
    select_members,
)
from rollout_operator.core.replicas.replica_choice import surplus_replicas
from rollout_operator.core.services import read_gates
from rollout_operator.core.trainer_pods import (
    DeviceClaim,
    DeviceSlice,
    ObservedTrainers,
    TrainerPod,
    published_uuids,
)

from .pass_context import PassContext
from .pool_memory import PoolMemory
from .settings import FIRST_POLLS_SECONDS

MAX_FRESH_HEADS = 200
"""So many polls take the operator 60 ms."""


@dataclass(frozen=True, slots=True)
class PassInput:
    """What one pass starts from: the object, its spec and stored status, and the world."""

    key: PoolKey
    pool: Obj
    spec: RolloutReplicaSpec
    stored: RolloutReplicaStatus
    seen: ObservedPool


def observe_pool(
    ctx: PassContext, key: PoolKey, pool: Obj, spec: RolloutReplicaSpec, memory: PoolMemory
) -> ObservedPool:
    """Turn what the store and the polls hold about a pool into plain values."""
    meta = pool["metadata"]
    notes = meta.get("annotations") or {}
    if spec.mode is PoolMode.HYBRID:
        pods, trainers, foreign = _observe_members(ctx, key, spec, meta["uid"])
        predecessors: tuple[Pod, ...] = ()
    else:
        records = ctx.store.pool_pods(key)
        ours, others, foreign = sort_pods(records, key.name, meta["uid"], spec)
        found = memory.ended_pods.with_seen_seconds((*ours, *others), ctx.monotonic())
        pods, predecessors = found[: len(ours)], found[len(ours) :]
        trainers = _observe_trainers(ctx, key, spec, memory)
    heads = [p for p in pods if p.rank == 0]
    return ObservedPool(
        name=key.name,
        namespace=key.namespace,
        uid=meta["uid"],
        generation=meta.get("generation", 0),
        pods=pods,
        workers={p.uid: ctx.workers.observe_worker(p) for p in heads if not p.is_finished},
        conflicts=memory.obstacles.conflicts,
        rejections=memory.obstacles.rejections,
        restarts_of={r.replica: r.restarts for r in memory.believed_status.replacing},
        barrier=memory.barrier,
        paused=is_paused(pool),
        retry=notes.get(names.ANNOTATION_RETRY, ""),
        predecessors=predecessors,
        awaited=memory.obstacles.awaited,
        api_errors=memory.obstacles.api_errors,
        undeleted=memory.obstacles.undeleted,
        trainers=trainers,
        scheduling=_observe_scheduling(ctx, key, spec),
        cordoned=_observe_cordons(ctx, key, spec, memory),
        strangers=foreign,
    )


def is_paused(pool: Obj) -> bool:
    """Return whether the user wants nothing of the pool changed."""
    return (pool["metadata"].get("annotations") or {}).get(names.ANNOTATION_PAUSED) == "true"


def _observe_scheduling(
    ctx: PassContext, key: PoolKey, spec: RolloutReplicaSpec
) -> ObservedScheduling:
    wants_gang = spec.scheduling.gang is not None
    ctx.gangs.note_pool(key, wants_gang=wants_gang)
    if not wants_gang:
        return ObservedScheduling()
    scheduler = ctx.gangs.scheduler
    trouble = ctx.gangs.find_trouble() if scheduler is None else queue_trouble(spec, scheduler)
    taken = None if trouble else scheduler
    return ObservedScheduling(taken, lacking=taken is None, trouble=trouble)


def _observe_cordons(
    ctx: PassContext, key: PoolKey, spec: RolloutReplicaSpec, memory: PoolMemory
) -> frozenset[str]:
    """The cordoned nodes, for a pool of its own pods whose weights no volume has; empty while unknown."""
    if spec.mode is not PoolMode.STANDALONE:
        return frozenset()
    committed = memory.believed_status.weights.committed
    if committed is None or committed.source.pushed is None:
        ctx.neighbours.unsubscribe_pool(key)
        return frozenset()
    return frozenset(map(str, ctx.neighbours.subscribe_cordons(key).nodes))


def _observe_members(
    ctx: PassContext, key: PoolKey, spec: RolloutReplicaSpec, uid: str
) -> tuple[tuple[Pod, ...], ObservedTrainers, tuple[str, ...]]:
    """The members of a Hybrid pool, none while they are not listed; and sentences on selected others."""
    assert spec.colocation is not None, "the CRD demands a selector"
    found = ctx.neighbours.subscribe_inside(key, spec.colocation.trainer_selector)
    if found.unknown is not None:
        return (), ObservedTrainers(unknown=found.unknown), ()
    gates = read_gates(ctx.store.pool_slices(key), key.name, uid)
    candidates = [pod for pod in found.pods if isinstance(pod, MemberCandidate)]
    return (
        select_members(spec, candidates, gates),
        ObservedTrainers(claims={}),
        foreign_pod_messages(spec, candidates),
    )


def _observe_trainers(
    ctx: PassContext, key: PoolKey, spec: RolloutReplicaSpec, memory: PoolMemory
) -> ObservedTrainers:
    """The trainer's pods and devices, for a colocated pool."""
    if spec.colocation is None:
        return ObservedTrainers()
    selector, shared = spec.colocation.trainer_selector, spec.colocation.slots > 1
    found = ctx.neighbours.subscribe_beside(key, selector, slices=shared)
    if found.unknown is not None:
        return ObservedTrainers(unknown=found.unknown)
    trainers = tuple(pod for pod in found.pods if isinstance(pod, TrainerPod))
    return ObservedTrainers(
        trainers=trainers,
        claims={c.name: c for c in found.claims if isinstance(c, DeviceClaim)},
        uuids=published_uuids(each for each in found.slices if isinstance(each, DeviceSlice)),
        stable_seconds=memory.trainers.note_trainers(trainers, ctx.monotonic()),
        has_shrunk=memory.trainers.has_shrunk,
    )


def wait_for_first_polls(
    ctx: PassContext, key: PoolKey, seen: ObservedPool, memory: PoolMemory
) -> float | None:
    """Poll every head once before the first decision; return how long that may still take.

    A process that has just started knows no worker's answer. To decide without would flip the
    conditions of a pool that serves, and take an update for one without workers.
    """
    memory.first_look = ctx.monotonic() if memory.first_look is None else memory.first_look
    heads = [p for p in seen.pods if p.rank == 0]
    memory.polled = ctx.workers.watch_heads(key, heads, {p.uid for p in heads})
    left = seconds_until_first_polls(ctx, memory)
    memory.first_polls_done = left <= 0
    return None if memory.first_polls_done else left


def seconds_until_first_polls(ctx: PassContext, memory: PoolMemory) -> float:
    """How long the first answers of the heads asked so far may still take; 0 or less: they are there."""
    if memory.first_look is None or memory.first_polls_done:
        return 0.0
    waiting = any(ctx.workers.poller.last_observation(uid) is None for uid in memory.polled)
    waited = min(ctx.monotonic() - memory.first_look, ctx.workers.poller.seconds_since_first_poll())
    return FIRST_POLLS_SECONDS - waited if waiting else 0.0


def stop_polling(ctx: PassContext, memory: PoolMemory) -> None:
    """Poll no head of a pool whose object can't be read: no pass would notice which pods are gone.

    After it can be read again, the first decision waits for polls of all, as in a new process.
    """
    for uid in memory.polled:
        ctx.workers.poller.unwatch_head(uid)
    memory.first_look, memory.first_polls_done = None, False


async def refresh_surplus_heads(
    ctx: PassContext, pass_input: PassInput, memory: PoolMemory
) -> PassInput:
    """Look again after asking those heads of which a scale-down is about to choose what they have to do.

    A change of load wakes no pass, so what is known of it is as old as the last poll. Heads that don't answer
    keep nobody waiting. In a large pool the polls must do: a scale-down by one would ask thousands.
    """
    surplus = surplus_replicas(pass_input.spec, pass_input.seen)
    heads = [p.uid for p in pass_input.seen.pods if p.rank == 0 and p.replica in surplus]
    if pass_input.seen.paused or not 0 < len(heads) <= MAX_FRESH_HEADS:
        return pass_input
    workers = pass_input.seen.workers
    answering = [uid for uid in heads if uid in workers and workers[uid].error is None]
    await asyncio.gather(*map(ctx.workers.poller.refresh_state, answering))
    return replace(
        pass_input, seen=observe_pool(ctx, pass_input.key, pass_input.pool, pass_input.spec, memory)
    )


def poll_heads(
    ctx: PassContext,
    key: PoolKey,
    seen: ObservedPool,
    status: RolloutReplicaStatus,
    memory: PoolMemory,
) -> None:
    """Have the heads polled: often while something is under way, seldom otherwise."""
    watched = (ConditionType.PROGRESSING, ConditionType.DEGRADED)
    moving = any(c.type in watched and c.status == "True" for c in status.conditions)
    updating = update_phase(status) in (UpdatePhase.STAGING, UpdatePhase.COMMITTING)
    heads = [p for p in seen.pods if p.rank == 0]
    update = status.weights.last_update if updating else None
    # A head that serves has nothing new to say while its pool waits for the others.
    fast = {
        p.uid
        for p in heads
        if moving
        and (_is_starting(p, worker := seen.workers.get(p.uid)) or _has_news(worker, update))
    }
    polled = ctx.workers.watch_heads(key, heads, fast)
    for uid in memory.polled - polled:
        ctx.workers.forget_head(uid)
    memory.polled = polled


def _is_starting(pod: Pod, worker: ObservedWorker | None) -> bool:
    """Whether its first good answer is yet to come; after that only the API server has anything left to do."""
    serves = worker is not None and worker.state is not None and worker.state.serving
    return not (pod.gate or serves)


def _has_news(worker: ObservedWorker | None, update: LastUpdate | None) -> bool:
    """Whether a poll may show how far an update is: not of a head that has it staged or commits it."""
    if update is None or worker is None or worker.state is None:
        return update is not None
    slot, wanted = worker.state.weights.staged, update.identity.as_tuple()
    staged = slot is not None and slot.phase == "Staged" and (slot.epoch, slot.version) == wanted
    return not (staged or worker.active == update.identity or ControlVerb.COMMIT in worker.running)


def update_phase(status: RolloutReplicaStatus) -> UpdatePhase | None:
    """Return the phase of the last weights update."""
    return status.weights.last_update.phase if status.weights.last_update else None
