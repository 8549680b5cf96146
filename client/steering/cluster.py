"""Epochs, weights and state of a pool with an operator: the RolloutReplica is patched and followed.

The client only says what shall be; the operator does it, even when this process is gone. What is
returned or raised is what the status says, in the operator's own words.

Which trainer has the pool is written in an annotation, `rollout.dev/trainer-epoch`, which only rises
and is only changed by compare-and-swap. The epoch of `spec.weights.target` would not do: it can't
rise without another weights update.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from rollout_client.errors import ClusterError, EpochLost, PublishFailed, SteeringFailed
from rollout_client.kube.access import Obj
from rollout_client.kube.client import Kube
from rollout_worker.schemas import WeightsId, WeightsSource

from .protocol import OnProgress, PoolState, Published, PublishProgress
from .replica_status import (
    ANNOTATION_EPOCH,
    Underway,
    check_epoch,
    has_target,
    highest_epoch,
    published,
    reached,
    wanted_state,
)

CONFLICT, INVALID = 409, 422
RETRY_SECONDS = 0.02
LOOK_SECONDS = 0.2
STRAGGLER_SECONDS = 60.0
"""How long waking waits for the last replicas once one serves: broken ones are for the operator."""


class ClusterSteering:
    """See the module.

    Args:
        kube: The API server.
        name: Of the RolloutReplica.
        namespace: Its namespace.
    """

    floor: WeightsId | None = None

    def __init__(self, kube: Kube, name: str, namespace: str) -> None:
        self._kube = kube
        self._name = name
        self._collection = f"/apis/rollout.dev/v1alpha1/namespaces/{namespace}/rolloutreplicas"
        self._path = f"{self._collection}/{name}"
        self._epoch = 0

    async def close(self) -> None:
        """Close all connections."""
        await self._kube.close()

    async def state(self) -> PoolState | None:
        """Return what `spec.state` asks for."""
        return wanted_state(await self._kube.get(self._path))

    # Epoch.

    async def acquire(self, seconds: float) -> int:
        """Take the next epoch by compare-and-swap.

        Raises:
            EpochLost: Another trainer took it at the same time.
            ClusterError: Not allowed, or no answer.
        """
        first = highest_epoch(await self._kube.get(self._path))

        def change(pool: Obj) -> Obj:
            if (held := highest_epoch(pool)) != first:
                raise EpochLost(f"another trainer took epoch {held} at the same time")
            return {"metadata": {"annotations": {ANNOTATION_EPOCH: str(first + 1)}}}

        await self._swap(change, seconds)
        self._epoch = first + 1
        return self._epoch

    async def _swap(self, change: Callable[[Obj], Obj | None], seconds: float) -> Obj:
        """Change the object as it is now; try again if somebody else wrote meanwhile.

        Args:
            change: Returns what to merge, None for nothing, or raises.
            seconds: Deadline.
        """
        until = time.monotonic() + seconds
        while True:
            pool = await self._kube.get(self._path)
            body = change(pool)
            if body is None:
                return pool
            meta = {**body.get("metadata", {})}
            meta["resourceVersion"] = pool["metadata"]["resourceVersion"]
            try:
                return await self._kube.merge(self._path, {**body, "metadata": meta})
            except ClusterError as error:
                if error.status != CONFLICT or time.monotonic() >= until:
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    # Weights.

    async def publish(
        self, identity: WeightsId, source: WeightsSource, seconds: float, tell: OnProgress
    ) -> Published:
        """Move the target and follow the status until it serves.

        Raises:
            PublishFailed: In the operator's or the API server's words.
            Superseded: Newer weights took their place.
            EpochLost: Another trainer has the pool.
        """
        began = time.monotonic()
        wanted = {"epoch": identity.epoch, "version": identity.version}
        # A merge patch keeps what it does not name: the other kind of source must go.
        where: Obj = {"path": source.path, "checkpoint": None if source.path else {}}

        def change(pool: Obj) -> Obj | None:
            check_epoch(pool, identity.epoch)
            if has_target(pool, identity, source):
                return None
            return {"spec": {"weights": {"target": {**wanted, "source": where}}}}

        try:
            pool = await self._swap(change, seconds)
        except ClusterError as error:
            if error.status == INVALID:
                raise PublishFailed(error.cause) from error
            raise
        generation = pool["metadata"]["generation"]

        def judge(pool: Obj) -> Published | Underway:
            return published(pool, identity, generation, time.monotonic() - began)

        return await self._follow(judge, seconds - (time.monotonic() - began), tell, identity)

    async def _follow(
        self,
        judge: Callable[[Obj], Published | Underway],
        seconds: float,
        tell: OnProgress,
        identity: WeightsId,
    ) -> Published:
        message = "nothing was seen of the pool"
        try:
            async with asyncio.timeout(seconds), aclosing(self._objects()) as objects:
                async for pool in objects:
                    found = judge(pool)
                    total = pool["spec"].get("replicas", 1)
                    message = found.message
                    if isinstance(found, Published):
                        tell(PublishProgress("Complete", total, total, message))
                        return found
                    weights = (pool.get("status") or {}).get("weights") or {}
                    staged = weights.get("stagedReplicas", 0)
                    tell(PublishProgress(found.phase, staged, total, message))
        except TimeoutError:
            why = f"weights {identity} were not committed within {seconds:.0f} s: {message}"
            raise PublishFailed(f"{why}; the operator goes on trying") from None
        raise PublishFailed(message)  # pragma: no cover - the objects come for ever

    async def _objects(self) -> AsyncGenerator[Obj]:
        """Yield the object now and after each change.

        Raises:
            SteeringFailed: It was deleted.
        """
        params = {"fieldSelector": f"metadata.name={self._name}"}
        async with aclosing(
            self._kube.follow(self._collection, params, lambda trouble: None)
        ) as found:
            async for objects in found:
                if self._name not in objects:
                    raise SteeringFailed(f"the RolloutReplica {self._name} does not exist any more")
                yield objects[self._name]

    # State.

    async def change_state(self, state: PoolState, seconds: float) -> None:
        """Ask for a state in spec, then wait for what the workers say.

        Raises:
            SteeringFailed: Somebody else changed the state meanwhile, or it took too long.
            ClusterError: Not allowed, or no answer.
        """
        began = time.monotonic()

        def change(pool: Obj) -> Obj | None:
            if self._epoch:
                check_epoch(pool, self._epoch)
            return None if wanted_state(pool) == state else {"spec": {"state": state}}

        pool = await self._swap(change, seconds)
        generation, served_since, message = pool["metadata"]["generation"], None, ""
        try:
            async with asyncio.timeout(seconds - (time.monotonic() - began)):
                while not reached(pool := await self._kube.get(self._path), state, generation):
                    status = pool.get("status") or {}
                    message = str(status.get("message", ""))
                    if state == "Active" and status.get("readyReplicas", 0) > 0:
                        served_since = served_since or time.monotonic()
                        if time.monotonic() - served_since > STRAGGLER_SECONDS:
                            return
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError:
            raise SteeringFailed(f"not {state} within {seconds:g} s: {message}") from None
