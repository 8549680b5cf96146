"""Epochs, weights and state of a pool with an operator: the client patches and follows the RolloutReplica.

The client only declares what it wants; the operator carries it out, even when this process is gone.
Results and errors come from the status, in the operator's own words.

The annotation `rollout.dev/trainer-epoch` records which trainer has the pool; it only rises and is
only changed by compare-and-swap. The epoch of `spec.weights.target` could not serve: it can't rise
without another weights update.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from typing_extensions import override

from rollout_client.cluster_client import ClusterClient, ReportTrouble, pools_path
from rollout_client.errors import (
    ClusterError,
    EpochLost,
    PublishFailed,
    RolloutError,
    SteeringFailed,
)
from rollout_common import tracing
from rollout_common.kube.access import Obj
from rollout_common.kube.reflector import retry_pause
from rollout_common.wire import WeightsDtypes, WeightsId, WeightsSource

from .control_ports import ControlPorts
from .pushing.push import Push
from .replica_status import (
    ANNOTATION_EPOCH,
    check_epoch,
    has_reached,
    has_target,
    highest_epoch,
    publish_progress,
    wanted_replicas,
    wanted_state,
)
from .settings import (
    QUICK_SECONDS,
    RETRY_SECONDS,
    SLOW_HEAD_SECONDS,
    STATUS_POLL_SECONDS,
    STRAGGLER_SECONDS,
)
from .staging_barrier import Barrier, Version, takes_pushes
from .steering_protocol import (
    OnProgress,
    PoolState,
    Published,
    PublishProgress,
    Steering,
    content_mismatch_error,
)

logger = logging.getLogger(__name__)

CONFLICT, OVERLOADED, INVALID = 409, 429, 422


class ClusterSteering(Steering):
    """Steers a pool through its RolloutReplica; without `heads`, the members' control ports, weights can't be pushed."""

    lowest_identity: WeightsId | None = None

    def __init__(
        self, kube: ClusterClient, name: str, namespace: str, heads: ControlPorts | None = None
    ) -> None:
        self._kube = kube
        self._heads = heads
        self._name, self._namespace = name, namespace
        self._collection = pools_path(namespace)
        self._path = f"{self._collection}/{name}"
        self._epoch = 0

    @override
    async def close(self) -> None:
        if self._heads is not None:
            await self._heads.close()
        await self._kube.close()

    @override
    async def wanted_state(self) -> PoolState | None:
        return wanted_state(await self._kube.get(self._path, seconds=QUICK_SECONDS))

    @override
    async def acquire_epoch(self, seconds: float) -> int:
        first: int | None = None

        def change(pool: Obj, unsure: bool) -> Obj:
            nonlocal first
            held = highest_epoch(pool)
            # The epoch may come from a write of ours whose answer was lost: the next one shuts out both.
            if first is not None and held != first and not unsure:
                raise EpochLost(f"another trainer took epoch {held} at the same time")
            first = held
            return {"metadata": {"annotations": {ANNOTATION_EPOCH: str(held + 1)}}}

        self._epoch = highest_epoch(await self._swap(change, seconds))
        return self._epoch

    async def _swap(self, change: Callable[[Obj, bool], Obj | None], seconds: float) -> Obj:
        """Change the current object; retry conflicts and transient failures of the API server.

        Args:
            change: Gets the object, and whether an earlier write may have taken effect although it
                failed. Returns what to merge, None for nothing, or raises.
            seconds: Deadline.
        """
        until, attempt, unsure = time.monotonic() + seconds, 0, False
        while True:
            left = max(0.0, until - time.monotonic())
            pool = await self._kube.get(self._path, seconds=left)
            body = change(pool, unsure)
            if body is None:
                return pool
            meta = {**body.get("metadata", {})}
            meta["resourceVersion"] = pool["metadata"]["resourceVersion"]
            try:
                left = until - time.monotonic()
                return await self._kube.merge_patch(self._path, {**body, "metadata": meta}, left)
            except ClusterError as error:
                pause = RETRY_SECONDS if error.status == CONFLICT else retry_pause(attempt)
                again = error.status == CONFLICT or error.is_transient
                if not again or time.monotonic() + pause > until:
                    raise
                unsure |= error.status not in (CONFLICT, OVERLOADED)
            await asyncio.sleep(pause)
            attempt += 1

    @override
    async def publish_identity(
        self,
        identity: WeightsId,
        source: WeightsSource,
        seconds: float,
        tell: OnProgress,
        push: Push | None = None,
        root_hash: str | None = None,
    ) -> Published:
        """Push the bytes if there are any, move the target, and follow the status until it serves."""
        tracing.link_span(tracing.update_ids(self._namespace, self._name, *identity.as_tuple()))
        began = time.monotonic()
        barrier = None
        if push is not None:
            check_epoch(await self._kube.get(self._path, seconds=seconds), identity.epoch)
            version = Version(identity, source, root_hash)
            barrier = await self._stage_on_heads(version, push, began + seconds, tell)
        try:
            pool = await self._move(identity, source, seconds - (time.monotonic() - began))
        except RolloutError as error:
            # If nobody knows whether the target moved, the operator decides about the bytes.
            if barrier is not None and not (isinstance(error, ClusterError) and error.is_transient):
                await barrier.discard()
            raise
        generation = pool["metadata"]["generation"]
        if barrier is not None:
            root_hash = barrier.version.root_hash

        def judge(pool: Obj) -> Published | PublishProgress:
            found = publish_progress(pool, identity, generation, time.monotonic() - began)
            has = found.root_hash if isinstance(found, Published) else None
            if root_hash is not None and has not in (None, root_hash):
                raise content_mismatch_error(identity, root_hash, has)
            return found

        done = await self._follow(judge, seconds - (time.monotonic() - began), tell, identity)
        return done if push is None or barrier is None else push.reported(done, barrier.left)

    @override
    async def describe_checkpoint(self) -> WeightsDtypes:
        return await self._head_ports().describe_checkpoint()

    async def _stage_on_heads(
        self, version: Version, push: Push, until: float, tell: OnProgress
    ) -> Barrier:
        """Bring the bytes to every head that has loaded, also to those that don't serve yet, or sleep."""
        heads = self._head_ports()
        states = await heads.get_states(min(SLOW_HEAD_SECONDS, until - time.monotonic()))
        loaded = [name for name, state in states.items() if takes_pushes(state)]
        waiting = [name for name in loaded if not states[name].serving]
        barrier = Barrier(heads, version, loaded, push=push, spared=waiting)
        await barrier.stage(until, tell)
        return barrier

    def _head_ports(self) -> ControlPorts:
        if self._heads is None:
            raise PublishFailed("this pool knows no control ports: make it with from_cluster")
        return self._heads

    async def _move(self, identity: WeightsId, source: WeightsSource, seconds: float) -> Obj:
        """Move the target, and return the object that has it."""
        wanted = {"epoch": identity.epoch, "version": identity.version}
        # A merge patch keeps what it does not name, so the other kinds of source are set to null.
        where: Obj = {"path": None, "checkpoint": None, "pushed": None}
        where |= source.model_dump(exclude_none=True)

        def change(pool: Obj, unsure: bool) -> Obj | None:
            check_epoch(pool, identity.epoch)
            if has_target(pool, identity, source):
                return None
            return {"spec": {"weights": {"target": {**wanted, "source": where}}}}

        try:
            return await self._swap(change, seconds)
        except ClusterError as error:
            if error.status == INVALID:
                raise PublishFailed(error.cause) from error
            raise

    async def _follow(
        self,
        judge: Callable[[Obj], Published | PublishProgress],
        seconds: float,
        tell: OnProgress,
        identity: WeightsId,
    ) -> Published:
        message, trouble = "nothing was seen of the pool", ""

        def note_trouble(error: ClusterError | None) -> None:
            nonlocal trouble
            if error is not None and not error.is_transient:
                raise error
            trouble = "" if error is None else f"; the API server: {error}"

        try:
            async with asyncio.timeout(seconds), aclosing(self._objects(note_trouble)) as objects:
                async for pool in objects:
                    found = judge(pool)
                    message = found.message
                    if isinstance(found, PublishProgress):
                        tell(found)
                        continue
                    total = wanted_replicas(pool)
                    tell(PublishProgress("Complete", total, total, message))
                    return found
        except TimeoutError:
            why = f"weights {identity} were not committed within {seconds:.0f} s: {message}"
            raise PublishFailed(f"{why}{trouble}; the operator goes on trying") from None
        raise PublishFailed(message)  # pragma: no cover - the stream of objects has no end

    async def _objects(self, trouble: ReportTrouble) -> AsyncGenerator[Obj]:
        """Yield the object now and after each change.

        Raises:
            SteeringFailed: It was deleted.
        """
        params = {"fieldSelector": f"metadata.name={self._name}"}
        async with aclosing(self._kube.follow_objects(self._collection, params, trouble)) as found:
            async for objects in found:
                if self._name not in objects:
                    raise SteeringFailed(f"the RolloutReplica {self._name} does not exist any more")
                yield objects[self._name]

    @override
    async def change_state(self, state: PoolState, seconds: float) -> int:
        """Ask for a state in spec, then wait until the status reports it."""
        began = time.monotonic()
        pool = await self._ask(state, seconds)
        generation, message = pool["metadata"]["generation"], ""
        first_at: float | None = None
        try:
            async with asyncio.timeout(seconds - (time.monotonic() - began)):
                while True:
                    try:
                        pool = await self._kube.get(self._path)
                        status = pool.get("status") or {}
                        message = str(status.get("message", ""))
                        ready = int(status.get("readyReplicas", 0))
                        if has_reached(pool, state, generation):
                            return ready
                    except ClusterError as error:
                        if not error.is_transient:
                            raise
                        message, ready = f"the API server: {error}", 0
                    if state == "Active" and ready:
                        first_at = first_at or time.monotonic()
                        if time.monotonic() - first_at > STRAGGLER_SECONDS:
                            logger.warning("not waiting for the last replicas to wake: %s", message)
                            return ready
                    await asyncio.sleep(STATUS_POLL_SECONDS)
        except TimeoutError:
            raise SteeringFailed(f"not {state} within {seconds:g} s: {message}") from None

    @override
    async def ask_state(self, state: PoolState, seconds: float) -> None:
        await self._ask(state, seconds)

    async def _ask(self, state: PoolState, seconds: float) -> Obj:
        def change(pool: Obj, unsure: bool) -> Obj | None:
            if self._epoch:
                check_epoch(pool, self._epoch)
            return None if wanted_state(pool) == state else {"spec": {"state": state}}

        return await self._swap(change, seconds)
