"""The last third of a pass: the plan's writes and calls, in the order that makes them safe."""

from __future__ import annotations

import logging
import math
from contextlib import suppress

from rollout_operator.api import names
from rollout_operator.api.objects import Key, Obj
from rollout_operator.api.spec import Mode
from rollout_operator.api.status import RolloutReplicaStatus, UpdatePhase
from rollout_operator.core.endpoints import with_gates
from rollout_operator.core.plan import Plan
from rollout_operator.core.pods.builder import PodBuilder
from rollout_operator.core.status_changes import owned_fields, same_decision, without_progress
from rollout_operator.core.unreadable import status_kept_as_is
from rollout_operator.kube.errors import Conflict, FencedError, KubeError, NotFound

from .context import Context
from .memory import Memory
from .observe import Look, phase_of, poll
from .obstacles import REJECTED, STATUS
from .slices import write_slices
from .tell import count_update, post_events, show_figures
from .writes import Writer

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 1.0
"""Least time between two writes of status that only report progress."""


async def act(ctx: Context, look: Look, plan: Plan, memory: Memory) -> float | None:
    """Carry the plan out; return when to look again.

    Status goes first: it holds the decisions that others rely on. Where the API server does not take
    it, everything goes on but what takes weights from a worker or gives it others.
    """
    obstacles = memory.obstacles
    obstacles.begin_pass()
    # Looks change nothing, and their answers come while status is written.
    poll(ctx, look.key, look.seen, plan.status, memory)
    writer = Writer(ctx, look.key, look.seen.uid, obstacles)
    try:
        later = await write_status(writer, look.pool, plan, memory)
    except NotFound:
        return None  # the object is gone: nothing is made for it, and the watch will say so
    decided = memory.unwritten is None or same_decision(look.stored.weights, plan.status.weights)
    post_events(ctx, look, plan, memory)
    if decided:
        memory.barrier = plan.barrier
        count_update(ctx, look, plan)
    if not look.seen.paused:
        before = obstacles.labels
        await _write_children(writer, look, plan, memory)
        if not writer.relabelled:
            obstacles.end_pass()  # else nothing was tried that could show them gone
        writer.check_alive()
        _start_calls(ctx, look, plan, decided=decided)
        if obstacles.labels != before or writer.relabelled or writer.changed:
            return 0.0
        later = soonest(later, obstacles.seconds_left(ctx.monotonic()))
    if not decided:
        return soonest(later, max(1.0, plan.requeue or 1.0))
    phase = phase_of(plan.status)
    if phase is UpdatePhase.COMMITTING and phase_of(look.stored) is not phase:
        return 0.0  # the decision is in status now: commit calls may start
    return soonest(later, plan.requeue)


async def write_status(writer: Writer, pool: Obj, plan: Plan, memory: Memory) -> float | None:
    """Write the status if it changed; mere progress at most once a second.

    What the API server does not take is kept in `memory.unwritten`.

    Returns:
        Seconds until it may be written, if it waits for that.

    Raises:
        NotFound: the object is gone; the watch will say so.
        Conflict: somebody else has written the object since it was read.
    """
    ctx, key, status = writer.ctx, writer.key, plan.status
    show_figures(ctx, key, pool, status, plan)
    before, after = memory.stored_fields, owned_fields(status)
    if before == after:
        memory.unwritten = None
        memory.obstacles.overcome(STATUS)
        return None
    now = ctx.monotonic()
    if memory.unwritten is not None and memory.obstacles.waits(STATUS, now):
        memory.unwritten = status
        return memory.obstacles.retry_in(STATUS, now)
    wait = 0.0 if memory.written_at is None else memory.written_at + PROGRESS_SECONDS - now
    if wait > 0 and without_progress(before) == without_progress(after):
        return wait
    version = pool["metadata"]["resourceVersion"]
    try:
        await writer.status(version, status.document())
    except (NotFound, FencedError):
        raise
    except KubeError as error:
        if isinstance(error, Conflict) and memory.overtaken != version:
            # A trainer that writes each second is no refusal; only the same version over and over is.
            memory.overtaken = version
            memory.obstacles.overcome(STATUS)
        request = ("patch", names.PLURAL)
        met = writer.note_failure(STATUS, f"the status of {key.name!r}", request, error)
        if not met.reason:
            raise
        memory.unwritten = status
        ctx.recorder.event(pool, "Warning", met.reason, met.text)
        return memory.obstacles.retry_in(STATUS, now)
    memory.unwritten = None
    memory.obstacles.overcome(STATUS)
    memory.written_at = now
    return None


async def keep_status(
    ctx: Context, key: Key, pool: Obj, why: str, stored: RolloutReplicaStatus
) -> None:
    """Say that the status can't be read, and write back all that it holds."""
    show_figures(ctx, key, pool, stored)
    document = status_kept_as_is(stored, pool, why, ctx.clock())
    if document is None:
        return
    logger.warning("%s", why, extra={"pool": str(key)})
    ctx.recorder.event(pool, "Warning", "UnreadableStatus", why)
    writer = Writer(ctx, key, pool["metadata"]["uid"])
    with suppress(NotFound):
        await writer.status(pool["metadata"]["resourceVersion"], document)


async def _write_children(writer: Writer, look: Look, plan: Plan, memory: Memory) -> None:
    ctx, key, spec, seen = writer.ctx, look.key, look.spec, look.seen
    if spec.mode is Mode.HYBRID:
        await writer.services(selecting=False)
        members = with_gates(seen.pods, plan.gates, ctx.clock())
        writer.changed |= await write_slices(writer, members)
        return
    defaults = ctx.config.engine(spec.engine.type)
    turn = ctx.config.turn_claim
    builder = PodBuilder(key.name, key.namespace, seen.uid, seen.retry, spec, defaults, turn)
    await writer.services(spec.weights.transport.port)
    await writer.all(
        writer.relabel(p.name, p.uid, names.worker_labels(key.name, p.replica, p.rank))
        for p in seen.pods
        if p.mislabelled
    )
    before = writer.relabelled
    await writer.all(writer.seek(builder.build(s.replica, s.rank, 0)) for s in plan.seek)
    if writer.relabelled > before:
        return  # its gang is whole: the plan was made without it
    # Out of the Service first, then away.
    await writer.all(writer.gate(g) for g in plan.gates if not g.serving)
    for deletion in plan.delete:
        if deletion.forced:
            memory.witness.forced(deletion.uid, ctx.monotonic())
    await writer.all(writer.delete(p) for p in plan.delete)
    if builder.lacking is None:
        creates = (builder.build(c.replica, c.rank, c.restarts, c.place) for c in plan.create)
        await writer.create_pods(creates)
    elif plan.create:
        writer.obstacles.note(builder.lacking[0], REJECTED, builder.lacking[1], math.inf)
    await writer.all(writer.gate(g) for g in plan.gates if g.serving)


def _start_calls(ctx: Context, look: Look, plan: Plan, *, decided: bool) -> None:
    """Start calls to workers; what changes weights for good only if that stands in status."""
    by_uid = {p.uid: p for p in look.seen.pods}
    for call in plan.calls:
        if call.is_final and not decided:
            continue
        if ctx.workers.start(look.key, by_uid[call.uid], call):
            logger.info("calling %s on %s", call.verb, call.pod, extra={"pool": str(look.key)})


def soonest(*seconds: float | None) -> float | None:
    """Return the least of these waits; None: none of them asks for a look."""
    return min((s for s in seconds if s is not None), default=None)
