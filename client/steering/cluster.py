"""Epochs, weights and state of a pool with an operator: the RolloutReplica is patched and followed.

The client only says what shall be; the operator does it, also when this process is gone. What is
returned or raised is what the status says, in the operator's own words.

Who holds the pool is written in an annotation, `rollout.dev/trainer-epoch`, which only rises and is
only changed by compare-and-swap. The epoch of `spec.weights.target` would not do: it can't rise
without another weights update.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, NamedTuple

from rollout_client.errors import ClusterError, EpochLost, PublishFailed, SteeringFailed, Superseded
from rollout_client.kube.access import Obj
from rollout_client.kube.client import Kube
from rollout_worker.schemas import WeightsId, WeightsSource

from .protocol import OnProgress, PoolState, Published, PublishProgress

ANNOTATION_EPOCH = "rollout.dev/trainer-epoch"
CONFLICT = 409
PATIENCE_SECONDS = 60.0
"""How long waking waits for the last replicas once one serves: a broken one is the operator's care."""


class _Progress(NamedTuple):
    phase: str
    message: str


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
        """What `spec.state` asks for."""
        spec = (await self._kube.get(self._path))["spec"]
        state: PoolState = spec.get("state") or "Active"
        return state

    # Epoch.

    async def acquire(self, seconds: float) -> int:
        """Take the next epoch by compare-and-swap.

        Raises:
            EpochLost: Another trainer took it at the same time.
            ClusterError: Not allowed, or no answer.
        """
        first = _held(await self._kube.get(self._path))

        def change(pool: Obj) -> Obj:
            if _held(pool) != first:
                raise EpochLost(f"another trainer took epoch {_held(pool)} at the same time")
            return {"metadata": {"annotations": {ANNOTATION_EPOCH: str(first + 1)}}}

        await self._swap(change, seconds)
        self._epoch = first + 1
        return self._epoch

    async def _swap(self, change: Callable[[Obj], Obj | None], seconds: float) -> Obj:
        """Change the object as it is now; again if somebody else wrote meanwhile.

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
            await asyncio.sleep(0.02)

    def _check_epoch(self, pool: Obj, epoch: int) -> None:
        held = _held(pool)
        if held > epoch:
            raise EpochLost(f"a trainer with epoch {held} has the pool, this one holds {epoch}")

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
            self._check_epoch(pool, identity.epoch)
            target = (pool["spec"].get("weights") or {}).get("target")
            if target and _identity(target) == identity and _same(target, source):
                return None
            return {"spec": {"weights": {"target": {**wanted, "source": where}}}}

        try:
            pool = await self._swap(change, seconds)
        except ClusterError as error:
            if error.status == 422:
                raise PublishFailed(error.cause) from error
            raise
        generation = pool["metadata"]["generation"]

        def judge(pool: Obj) -> Published | _Progress:
            status = pool.get("status") or {}
            if _observed(status) < generation:
                return _Progress("Staging", "waiting for the operator to see the new target")
            return _judge(identity, status, time.monotonic() - began)

        return await self._follow(judge, seconds - (time.monotonic() - began), tell, identity)

    async def _follow(
        self,
        judge: Callable[[Obj], Published | _Progress],
        seconds: float,
        tell: OnProgress,
        identity: WeightsId,
    ) -> Published:
        message = "nothing was seen of the pool"
        try:
            async with asyncio.timeout(seconds), aclosing(self._objects()) as objects:
                async for pool in objects:
                    verdict = judge(pool)
                    status = (pool.get("status") or {}).get("weights") or {}
                    total = pool["spec"].get("replicas", 1)
                    if isinstance(verdict, Published):
                        tell(PublishProgress("Complete", total, total, verdict.message))
                        return verdict
                    message = verdict.message
                    staged = status.get("stagedReplicas", 0)
                    tell(PublishProgress(verdict.phase, staged, total, message))
        except TimeoutError:
            why = f"weights {identity} were not committed within {seconds:.0f} s: {message}"
            raise PublishFailed(f"{why}; the operator goes on trying") from None
        raise PublishFailed(message)  # pragma: no cover - the objects come for ever

    async def _objects(self) -> AsyncGenerator[Obj]:
        """The object after each change.

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

    async def bring(self, state: PoolState, seconds: float) -> None:
        """Ask for a state in spec, then wait for what the workers say.

        Raises:
            SteeringFailed: Somebody changed the state meanwhile, or it took too long.
            ClusterError: Not allowed, or no answer.
        """
        until = time.monotonic() + seconds

        def change(pool: Obj) -> Obj | None:
            if self._epoch:
                self._check_epoch(pool, self._epoch)
            same = (pool["spec"].get("state") or "Active") == state
            return None if same else {"spec": {"state": state}}

        pool = await self._swap(change, seconds)
        generation, served_since, message = pool["metadata"]["generation"], None, ""
        try:
            async with asyncio.timeout_at(
                asyncio.get_running_loop().time() + until - time.monotonic()
            ):
                while True:
                    pool = await self._kube.get(self._path)
                    _check_wanted(pool, state)
                    status = pool.get("status") or {}
                    if _observed(status) >= generation and _reached(status, state):
                        return
                    message = str(status.get("message", ""))
                    if state == "Active" and status.get("readyReplicas", 0) > 0:
                        served_since = served_since or time.monotonic()
                        if time.monotonic() - served_since > PATIENCE_SECONDS:
                            return
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise SteeringFailed(f"not {state} within {seconds:g} s: {message}") from None


def _judge(identity: WeightsId, status: Obj, seconds: float) -> Published | _Progress:
    """Say how far an update is.

    Raises:
        PublishFailed: The operator says so.
        Superseded: Other weights were committed, or are being brought.
    """
    weights = status.get("weights") or {}
    last, committed = weights.get("lastUpdate") or {}, weights.get("committed") or {}
    phase, message = str(last.get("phase", "")), str(last.get("message", ""))
    ours = bool(last) and _identity(last) == identity
    if committed and _identity(committed) == identity:
        return Published(
            identity=identity,
            root_hash=committed.get("rootHash"),
            replicas=int(status.get("readyReplicas", 0)),
            seconds=seconds,
            pause_seconds=None,
            message=f"weights {identity} are committed" + (f": {message}" if ours else ""),
        )
    newer = [each for each in (committed, last) if each and _identity(each) > identity]
    if newer:
        raise Superseded(f"weights {_identity(newer[0])} took the place of {identity}")
    if ours and phase == "Superseded":
        raise Superseded(message or f"weights {identity} were given up")
    if ours and phase == "Failed":
        raise PublishFailed(message or f"weights {identity} failed")
    told = message if ours else f"waiting for the update before it: {message}"
    return _Progress(phase if ours else "Staging", told or str(status.get("message", "")))


def _held(pool: Obj) -> int:
    """The highest epoch that anybody has taken or used."""
    annotations = pool["metadata"].get("annotations") or {}
    text = str(annotations.get(ANNOTATION_EPOCH, "0"))
    weights = (pool.get("status") or {}).get("weights") or {}
    used = [
        (pool["spec"].get("weights") or {}).get("target"),
        weights.get("committed"),
        weights.get("lastUpdate"),
    ]
    return max(int(text) if text.isdigit() else 0, *(int(u["epoch"]) for u in used if u), 0)


def _identity(value: Any) -> WeightsId:
    return WeightsId(epoch=value["epoch"], version=value["version"])


def _same(target: Obj, source: WeightsSource) -> bool:
    return (target.get("source") or {}).get("path") == source.path


def _observed(status: Obj) -> int:
    return int(status.get("observedGeneration") or 0)


def _check_wanted(pool: Obj, state: PoolState) -> None:
    wanted = pool["spec"].get("state") or "Active"
    if wanted != state:
        raise SteeringFailed(f"somebody set spec.state to {wanted} while it should become {state}")
    if pool["spec"].get("suspend"):
        raise SteeringFailed(f"the pool is suspended: it can't become {state}")


def _reached(status: Obj, state: PoolState) -> bool:
    """What the workers said, as the operator noted it: every replica has come to the state."""
    last = status.get("lastTransition") or {}
    return bool(last.get("to") == state and last.get("completedAt"))
