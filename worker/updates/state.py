"""Which weights are active, which are staged, and the one staging slot.

Order is lexicographic (epoch, version) everywhere, and an identity is bound to its content. The
flip itself is in `commits`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from rollout_worker.core.runtime import Runtime
from rollout_worker.engine import EngineCrashed, EngineError, EngineInfo
from rollout_worker.schemas import (
    CHECKPOINT,
    ActiveWeights,
    Checkpoint,
    DiscardRequest,
    DiscardResponse,
    RequireRequest,
    StagedWeights,
    StageRequest,
    WeightsId,
    WeightsSource,
    WeightsState,
)
from rollout_worker.sources.resolve import resolve
from rollout_worker.wire.problems import ProblemError, conflict

from .fence import Fence
from .slot import Slot, mismatch, same_content

logger = logging.getLogger(__name__)

CHECKPOINT_SOURCE = WeightsSource(checkpoint=Checkpoint())
DISCARD_SECONDS = 60.0


class Updates:
    """The weights' state of one worker."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.active: ActiveWeights | None = None
        self.source = CHECKPOINT_SOURCE
        """Where the active weights' bytes are, resolved; sleep at level 2 and restarts read it."""
        self._given_source = CHECKPOINT_SOURCE
        self.previous: ActiveWeights | None = None
        self.slot: Slot | None = None
        self.slot_lock = asyncio.Lock()
        """Held while the slot is replaced or committed."""
        self.fence = Fence()
        self.commit_seq = 0

    @property
    def identity(self) -> WeightsId | None:
        """Identity of the active weights."""
        return None if self.active is None else self.active.identity

    @property
    def facts(self) -> dict[str, dict[str, int] | None]:
        """What every refusal says besides its reason: which weights are active."""
        return {"active": None if self.identity is None else self.identity.model_dump()}

    def view(self) -> WeightsState:
        """The state as clients see it."""
        return WeightsState(
            active=self.active,
            previous=self.previous,
            staged=None if self.slot is None else self.slot.view(),
            required=self.fence.floor,
            fence_epoch=self.fence.epoch,
            commit_seq=self.commit_seq,
        )

    def require(self, request: RequireRequest) -> WeightsState:
        """Raise the fence.

        Raises:
            ProblemError: 409, it would go down.
        """
        self.fence.raise_to(request)
        self._runtime.changed.fire()
        return self.view()

    def check_order(self, identity: WeightsId) -> None:
        """Refuse identities below the active weights or of a fenced epoch.

        Raises:
            ProblemError: 409 `stale-epoch` or `version-regressed`.
        """
        self.fence.check(identity.epoch, **self.facts)
        active = self.identity
        if active is not None and identity < active:
            raise _regressed(identity, active, "active")

    # Stage.

    async def stage(self, request: StageRequest) -> StagedWeights:
        """Begin to stage beside the serving weights; returns at once.

        Raises:
            ProblemError: 409, the state or the order of identities forbids it; 422, the path.
        """
        self._runtime.loaded()
        self.check_resident()
        identity = WeightsId(epoch=request.epoch, version=request.version)
        self.check_order(identity)
        resolved = resolve(request.source, self._runtime.settings)
        if self.active is not None and identity == self.active.identity:
            return self._already_active(request, self.active, resolved)
        try:
            async with asyncio.timeout(request.deadline_seconds), self.slot_lock:
                return await self._begin(request, identity, resolved)
        except TimeoutError:
            raise ProblemError(
                "deadline-exceeded", "the staging slot was busy: try again", retry_after=1
            ) from None

    def check_resident(self) -> None:
        """Refuse to touch weights that are not in memory.

        Raises:
            ProblemError: 409 `asleep`.
        """
        if not self._runtime.stats().resident.weights:
            raise conflict(
                "asleep",
                'the weights\' memory is given back: POST /v1/wake {"tags": ["weights"]}',
                **self.facts,
            )

    async def _begin(
        self, request: StageRequest, identity: WeightsId, resolved: WeightsSource
    ) -> StagedWeights:
        self.check_order(identity)  # a commit may have gone by while we waited for the slot
        slot = self.slot
        if slot is not None and slot.error is None:
            if identity == slot.identity:
                return slot.repeated(request, resolved)
            if identity < slot.identity:
                raise _regressed(identity, slot.identity, "staged", **self.facts)
        await self.clear_slot()
        self._runtime.loaded()
        slot = self.slot = Slot(request, resolved)
        logger.info("staging weights %s", identity)
        slot.task = asyncio.create_task(self._stage(slot))
        return slot.view()

    def _already_active(
        self, request: StageRequest, active: ActiveWeights, resolved: WeightsSource
    ) -> StagedWeights:
        if not same_content(request, active.root_hash, same_source=resolved == self.source):
            raise mismatch(active.identity, active.root_hash)
        return StagedWeights(
            epoch=active.epoch,
            version=active.version,
            source=self._given_source,
            phase="Staged",
            root_hash=active.root_hash,
            labels=active.labels,
        )

    async def _stage(self, slot: Slot) -> None:
        start = time.monotonic()
        seconds = slot.deadline_seconds
        try:
            engine, _ = self._runtime.loaded()
            async with asyncio.timeout(seconds):
                info = await self._runtime.call(
                    engine.stage(slot.identity, slot.resolved, slot.report),
                    seconds * 2 + 60,  # the timeout above ends it first
                    "stage",
                    fatal=False,
                )
        except TimeoutError:
            slot.error = f"not staged within {seconds:g} s: raise deadline_seconds and stage again"
        except EngineError as error:
            slot.error = str(error)
        except Exception as error:
            logger.exception("staging %s failed", slot.identity)
            slot.error = f"internal error: {error}"
        else:
            slot.done = slot.total = info.bytes_total
            await self._verify(slot, info.root_hash)
        self._runtime.telemetry.update_seconds.labels("stage").observe(time.monotonic() - start)
        if slot.error:
            logger.warning("staging weights %s failed: %s", slot.identity, slot.error)
        else:
            logger.info("staged weights %s", slot.identity)
        self._runtime.changed.fire()

    async def _verify(self, slot: Slot, root_hash: str) -> None:
        if slot.expected is None or slot.expected == root_hash:
            slot.root_hash = root_hash
            return
        slot.error = (
            f"content-mismatch: {slot.identity} should have root_hash {slot.expected}, its source"
            f" has {root_hash}: publish the right bytes under a higher version"
        )
        await self._discard_engine()

    async def _discard_engine(self) -> None:
        engine = self._runtime.engine
        if engine is None or not self._runtime.alive:
            return
        try:
            await self._runtime.call(engine.discard(), DISCARD_SECONDS, "discard")
        except EngineCrashed:
            logger.warning("the engine died while staged weights were discarded")

    async def clear_slot(self) -> None:
        """Cancel and drop what is staged; the caller holds `slot_lock`."""
        slot, self.slot = self.slot, None
        if slot is None:
            return
        if slot.task is not None and not slot.task.done():
            slot.task.cancel()
            await asyncio.wait({slot.task}, timeout=DISCARD_SECONDS)
            logger.info("staging of weights %s was cancelled", slot.identity)
        await self._discard_engine()

    async def discard(self, request: DiscardRequest) -> DiscardResponse:
        """Drop this identity from the slot; anything else is left alone."""
        identity = WeightsId(epoch=request.epoch, version=request.version)
        async with self.slot_lock:
            if self.slot is None or self.slot.identity != identity:
                return DiscardResponse(outcome="unchanged")
            await self.clear_slot()
        self._runtime.changed.fire()
        return DiscardResponse(outcome="discarded")

    # What happens to the active weights.

    def activate(self, slot: Slot) -> None:
        """Make the slot's weights the active ones; right after the engine flipped."""
        self.previous = self.active
        self.active = ActiveWeights(
            epoch=slot.identity.epoch,
            version=slot.identity.version,
            root_hash=slot.root_hash,
            labels=slot.labels,
        )
        self.source, self._given_source = slot.resolved, slot.source
        self.slot = None
        self.commit_seq += 1
        self._runtime.telemetry.weights(slot.identity)

    def engine_lost(self) -> None:
        """Note that the staged bytes died with the engine."""
        if self.slot is not None:
            if self.slot.task is not None:
                self.slot.task.cancel()
            self.slot.error = "the engine was restarted: stage again"

    def loaded(self, info: EngineInfo) -> None:
        """Note that an engine started with the checkpoint; the first one makes it active."""
        if self.active is None:
            self._to_checkpoint(info)

    def _to_checkpoint(self, info: EngineInfo) -> None:
        self.active = ActiveWeights(
            epoch=CHECKPOINT.epoch, version=CHECKPOINT.version, root_hash=info.root_hash
        )
        self.source = self._given_source = CHECKPOINT_SOURCE
        self._runtime.telemetry.weights(CHECKPOINT)

    def lost(self, info: EngineInfo) -> None:
        """Fall back to the checkpoint, fenced: the active weights could not be loaded again."""
        active = self.identity
        if active is not None and (self.fence.floor is None or self.fence.floor < active):
            self.fence.floor = active
        self.previous = None
        self._to_checkpoint(info)


def _regressed(identity: WeightsId, than: WeightsId, what: str, **facts: Any) -> ProblemError:
    slug = "stale-epoch" if identity.epoch < than.epoch else "version-regressed"
    return conflict(
        slug,
        f"weights {identity} are below the {what} {than}: raise the version, or the epoch to go"
        " back",
        **{**facts, what: than.model_dump()},
    )
