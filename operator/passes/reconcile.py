"""One pass over one pool: observe, decide, act."""

from __future__ import annotations

import logging
from dataclasses import replace

from rollout_operator.api import names
from rollout_operator.api.names import Condition
from rollout_operator.api.objects import Key, Obj
from rollout_operator.api.spec import InvalidSpec, RolloutReplicaSpec
from rollout_operator.api.status import RolloutReplicaStatus, UpdatePhase
from rollout_operator.core.decide import decide
from rollout_operator.core.gangs import STUCK_SECONDS
from rollout_operator.core.plan import DeletePod, Plan
from rollout_operator.core.pods.builder import PodBuilder
from rollout_operator.core.report import conditions_for_invalid
from rollout_operator.core.status_changes import essence, own
from rollout_operator.core.world import Observed, Pod, parse_pod
from rollout_operator.kube.errors import Conflict, NotFound
from rollout_operator.telemetry import PoolFigures

from .context import Context
from .memory import Memory
from .writes import Obstacles, Writer

logger = logging.getLogger(__name__)

MINOR_SECONDS = 1.0
"""Least time between two writes of status that only report progress."""

MEET_SECONDS = 5.0
"""What the first answers of a pool's heads may take: a poll's deadline, and its turn."""

OBSTACLE_SECONDS = 10.0
"""How soon a name that was taken or a pod that was refused is tried again."""


class Reconciler:
    """Passes over pools; the queue runs one at a time for each."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self._memory: dict[Key, Memory] = {}

    async def reconcile(self, key: Key) -> float | None:
        """Bring the pool one step nearer to its spec.

        Returns:
            Seconds until the next look if nothing happens before, None: none is needed.

        Raises:
            KubeError: the API server did not take a write; the queue tries again with back-off.
        """
        pool = self.ctx.store.pool(key)
        if pool is None or pool["metadata"].get("deletionTimestamp"):
            return await self._let_go(key, pool)
        memory = self._memory.setdefault(key, Memory())
        stored = memory.read_status(pool)
        try:
            spec = memory.read_spec(pool)
        except InvalidSpec as error:
            status = conditions_for_invalid(stored, pool, str(error), self.ctx.clock())
            await self._write_status(key, pool, status, memory)
            return None
        seen = self._observe(key, pool, memory)
        if not memory.acquainted and (left := self._meet(key, seen, memory)):
            return left
        plan = decide(spec, seen, stored, self.ctx.clock())
        if seen.paused:
            plan = _paused(plan, stored)
        try:
            return await self._act(key, pool, spec, seen, stored, plan, memory)
        except Conflict as error:
            # Somebody wrote the object since it was read: look again with what the watch brings.
            logger.debug("%s changed meanwhile: %s", key, error)
            return 0.2

    def _observe(self, key: Key, pool: Obj, memory: Memory) -> Observed:
        meta = pool["metadata"]
        notes = meta.get("annotations") or {}
        pods = memory.pods.read(self.ctx.store.pods(key), meta["uid"])
        heads = [p for p in pods if p.rank == 0]
        return Observed(
            name=key.name,
            namespace=key.namespace,
            uid=meta["uid"],
            generation=meta.get("generation", 0),
            pods=pods,
            workers={p.uid: self.ctx.workers.known(p) for p in heads if not p.finished},
            conflicts=memory.obstacles.conflicts,
            rejections=memory.obstacles.rejections,
            unsettled=self.ctx.expectations.pending(key),
            restarts_of=memory.restarts_of,
            barrier=memory.barrier,
            paused=notes.get(names.ANNOTATION_PAUSED) == "true",
            retry=notes.get(names.ANNOTATION_RETRY, ""),
        )

    def _meet(self, key: Key, seen: Observed, memory: Memory) -> float | None:
        """Ask every head once before the first decision; return how long that may still take.

        A process that has just started knows no worker's answer. To decide without would flip
        conditions of a fleet that serves, and take an update for one without workers.
        """
        now = self.ctx.clock()
        memory.first_look = now if memory.first_look is None else memory.first_look
        left = memory.first_look + MEET_SECONDS - now
        heads = [p for p in seen.pods if p.rank == 0]
        memory.polled = self.ctx.workers.watch(key, heads, {p.uid for p in heads})
        strangers = any(self.ctx.workers.poller.last(uid) is None for uid in memory.polled)
        memory.acquainted = left <= 0 or not strangers
        return None if memory.acquainted else left

    async def _act(
        self,
        key: Key,
        pool: Obj,
        spec: RolloutReplicaSpec,
        seen: Observed,
        stored: RolloutReplicaStatus,
        plan: Plan,
        memory: Memory,
    ) -> float | None:
        """Status first: it holds the decisions that everything else relies on."""
        later = await self._write_status(key, pool, plan.status, memory)
        memory.barrier = plan.barrier
        memory.restarts_of.update(plan.restarts)
        self._tell(pool, stored, plan, memory)
        self._poll(key, seen, plan, memory)
        if not seen.paused:
            found = await self._write_children(key, spec, seen, plan, memory)
            self._start_calls(key, seen, plan)
            if found != memory.obstacles:
                memory.obstacles = found
                return 0.0
            if found.conflicts or found.rejections:
                later = _soonest(later, OBSTACLE_SECONDS)
        if _phase(plan.status) is UpdatePhase.COMMITTING and _phase(stored) is not _phase(
            plan.status
        ):
            return 0.0  # the decision stands in status now: go on with the commit calls
        return _soonest(later, plan.requeue)

    async def _write_children(
        self, key: Key, spec: RolloutReplicaSpec, seen: Observed, plan: Plan, memory: Memory
    ) -> Obstacles:
        writer = Writer(self.ctx, key, seen.uid)
        builder = PodBuilder(
            key.name,
            key.namespace,
            seen.uid,
            seen.retry,
            spec,
            self.ctx.config.engine(spec.engine.type),
        )
        await writer.services()
        # Out of the Service first, then away.
        await writer.all(writer.gate(g) for g in plan.gates if not g.serving)
        await writer.all(writer.delete(p) for p in plan.delete)
        for creation in plan.create:
            memory.restarts_of.pop(creation.replica, None)
        if builder.image:
            bodies = [builder.build(c.replica, c.rank, c.restarts) for c in plan.create]
            await writer.all(writer.create("pods", body) for body in bodies)
        elif plan.create:
            engine = spec.engine.type.value
            writer.obstacles.rejections["image"] = (
                f"engine {engine} has no image: set spec.engine.image, or engines.{engine}.image "
                "of the operator's chart"
            )
        await writer.all(writer.gate(g) for g in plan.gates if g.serving)
        return writer.obstacles

    def _start_calls(self, key: Key, seen: Observed, plan: Plan) -> None:
        by_uid = {p.uid: p for p in seen.pods}
        for call in plan.calls:
            pod = by_uid[call.uid]
            if self.ctx.workers.start(key, pod, call):
                logger.info("calling %s on %s", call.verb, call.pod, extra={"pool": str(key)})

    def _poll(self, key: Key, seen: Observed, plan: Plan, memory: Memory) -> None:
        """Ask the heads often while something is under way, seldom otherwise."""
        progressing = plan.status.condition(Condition.PROGRESSING)
        degraded = plan.status.condition(Condition.DEGRADED)
        moving = any(c is not None and c.status == "True" for c in (progressing, degraded))
        updating = _phase(plan.status) in (UpdatePhase.STAGING, UpdatePhase.COMMITTING)
        heads = [p for p in seen.pods if p.rank == 0]
        # A head that serves has nothing new to say while its pool waits for the others.
        fast = {p.uid for p in heads if moving and (updating or not p.gate)}
        polled = self.ctx.workers.watch(key, heads, fast)
        for uid in memory.polled - polled:
            self.ctx.workers.forget(uid)
        memory.polled = polled

    async def _write_status(
        self,
        key: Key,
        pool: Obj,
        status: RolloutReplicaStatus,
        memory: Memory,
    ) -> float | None:
        """Write if something changed; mere progress at most once a second."""
        self._show(key, pool, status)
        before, after = memory.before, own(status)
        if before == after and pool.get("status"):
            return None
        now = self.ctx.clock()
        wait = memory.written_at + MINOR_SECONDS - now
        if wait > 0 and essence(before) == essence(after):
            return wait
        writer = Writer(self.ctx, key, pool["metadata"]["uid"])
        try:
            await writer.status(pool["metadata"]["resourceVersion"], status)
        except NotFound:
            return None  # the object is gone; the watch will say so
        memory.written_at = now
        return None

    def _show(self, key: Key, pool: Obj, status: RolloutReplicaStatus) -> None:
        target = (pool["spec"].get("weights") or {}).get("target") or {"epoch": 0, "version": 0}
        weights = {"target": (int(target["epoch"]), int(target["version"]))}
        if status.weights.committed is not None:
            weights["committed"] = status.weights.committed.identity.as_tuple()
        if status.weights.active is not None:
            weights["active_min"] = status.weights.active.min.identity.as_tuple()
            weights["active_max"] = status.weights.active.max.identity.as_tuple()
        figures = PoolFigures(
            replicas=status.replicas,
            ready=status.ready_replicas,
            asleep=status.asleep_replicas,
            restarts=status.restarts,
            weights=weights,
            conditions={c.type: c.status for c in status.conditions},
        )
        self.ctx.telemetry.pool(key, figures)

    def _tell(self, pool: Obj, stored: RolloutReplicaStatus, plan: Plan, memory: Memory) -> None:
        """Events for people, and one line of log when the sentence changes."""
        raw = dict(pool)
        for note in plan.notes:
            kind = "Warning" if note.type == "Warning" else "Normal"
            self.ctx.recorder.event(raw, kind, note.reason, note.message)  # type: ignore[arg-type]
        for condition in plan.status.conditions:
            before = stored.condition(condition.type)
            known = before.status if before else "False"
            if condition.status != known or (
                condition.type == Condition.DEGRADED
                and condition.status == "True"
                and before is not None
                and before.reason != condition.reason
            ):
                kind, reason = _event_of(condition.type, condition.status, condition.reason)
                if kind:
                    self.ctx.recorder.event(raw, kind, reason, condition.message)  # type: ignore[arg-type]
        if plan.sentence != memory.sentence:
            memory.sentence = plan.sentence
            name = f"{raw['metadata']['namespace']}/{raw['metadata']['name']}"
            logger.info("%s", plan.sentence, extra={"pool": name})

    async def _let_go(self, key: Key, pool: Obj | None) -> float | None:
        """The object goes or is gone: the garbage collector has the rest, but for stuck pods."""
        memory = self._memory.get(key, Memory())
        for uid in memory.polled:
            self.ctx.workers.forget(uid)
        memory.polled = frozenset()
        self.ctx.telemetry.forget(key)
        if pool is None:
            self._memory.pop(key, None)
            self.ctx.expectations.forget(key)
        return await self._free_stuck_orphans(key)

    async def _free_stuck_orphans(self, key: Key) -> float | None:
        soonest: float | None = None
        now = self.ctx.clock()
        for obj in self.ctx.store.pods(key):
            pod = _orphan(obj)
            if pod is None or pod.deletion_at is None:
                continue
            left = pod.deletion_at + STUCK_SECONDS - now
            if left <= 0:
                stuck = DeletePod(pod.name, pod.uid, 0, "it outlived its grace period")
                await Writer(self.ctx, key, "").delete(stuck)
                left = STUCK_SECONDS
            soonest = _soonest(soonest, left)
        return soonest


def _orphan(obj: Obj) -> Pod | None:
    """A pod of ours whose object is gone, parsed under whatever owner it names."""
    for ref in obj["metadata"].get("ownerReferences") or ():
        if ref.get("controller") and ref.get("kind") == names.KIND:
            return parse_pod(obj, ref["uid"])
    return None


def _soonest(*seconds: float | None) -> float | None:
    return min((s for s in seconds if s is not None), default=None)


def _phase(status: RolloutReplicaStatus) -> UpdatePhase | None:
    return status.weights.last_update.phase if status.weights.last_update else None


def _paused(plan: Plan, stored: RolloutReplicaStatus) -> Plan:
    """Look and report, but touch nothing; decisions about weights wait, too."""
    text = f"the annotation {names.ANNOTATION_PAUSED} stops this pool's reconciling"
    status = plan.status.model_copy(
        update={
            "message": text,
            "weights": plan.status.weights.model_copy(
                update={
                    "committed": stored.weights.committed,
                    "last_update": stored.weights.last_update,
                }
            ),
            "restarts": stored.restarts,
        }
    )
    return replace(
        plan, status=status, notes=(), barrier=None, restarts={}, requeue=None, sentence=text
    )


def _event_of(kind: str, status: str, reason: str) -> tuple[str, str]:
    """Type and reason of the event for a condition's change; empty for those nobody needs."""
    table = {
        ("Ready", "True"): ("Normal", "Ready"),
        ("Ready", "False"): ("Normal", "NotReady"),
        ("Degraded", "True"): ("Warning", reason),
        ("Degraded", "False"): ("Normal", "Recovered"),
        ("Asleep", "True"): ("Normal", "Asleep"),
        ("Suspended", "True"): ("Normal", "Suspended"),
    }
    return table.get((kind, status), ("", ""))
