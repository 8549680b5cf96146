"""Which weights are active, which are staged, and the one staging slot.

Identities are ordered lexicographically by (epoch, version), and each is bound to its content.
`weight_commits` flips the weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from rollout_common.wire import (
    CHECKPOINT,
    ActiveWeights,
    Checkpoint,
    DiscardRequest,
    DiscardResponse,
    OfferRequest,
    OfferResponse,
    RequireRequest,
    StagedWeights,
    StageRequest,
    StageSource,
    WeightsDtypes,
    WeightsId,
    WeightsSource,
    WeightsState,
)
from rollout_common.wire.problems import ProblemError, conflict_problem
from rollout_worker.core.weights_fence import WeightsFence
from rollout_worker.core.worker_runtime import WorkerRuntime
from rollout_worker.engine import (
    Engine,
    EngineInfo,
    HandedTensors,
    Sink,
    TensorEntry,
    TrainerTensors,
)
from rollout_worker.engines.shared_memory.staging_budget import StagingBudget
from rollout_worker.lora.lora_checks import check_base, holds_adapters
from rollout_worker.sources import tensor_bytes
from rollout_worker.sources.tensor_filling import locate_source, resolve_within

from .active_refill import ActiveRefill
from .pushed_weights import PushedWeights, fill_elsewhere
from .settings import DTYPE_LOOKUP_SECONDS
from .staging_slot import (
    StagingSlot,
    content_mismatch,
    is_same_content,
    regression_problem,
)

logger = logging.getLogger(__name__)

CHECKPOINT_SOURCE = WeightsSource(checkpoint=Checkpoint())


class WeightUpdates:
    """The weights' state of one worker."""

    def __init__(self, runtime: WorkerRuntime, staging: StagingBudget) -> None:
        self._runtime = runtime
        self.pushes = PushedWeights(runtime, staging)
        self._refill = ActiveRefill(runtime, self.pushes)
        self.freeing, self._settle = staging.freeing, staging.wait_until_freed
        self.active: ActiveWeights | None = None
        self.source = CHECKPOINT_SOURCE
        """Where the active weights' bytes are, resolved; sleep at level 2 and restarts read it."""
        self._given_source = CHECKPOINT_SOURCE
        self.given: TrainerTensors | None = None
        """The active weights' bytes, if they are tensors of this process and still exist."""
        self.empty = False
        """Whether the weights have memory but no values; then nothing is generated."""
        self.dropped = False
        """Whether the engine sleeps without a copy of the weights, which come from elsewhere when it wakes."""
        self.previous: ActiveWeights | None = None
        self.slot: StagingSlot | None = None
        self.slot_lock = asyncio.Lock()
        """Held while the slot is replaced or committed, and while the weights fall asleep."""
        self._room = asyncio.Lock()
        """Held while a slot is filled: a thread that ends late still holds its memory."""
        self.fence = WeightsFence()
        self.commit_seq = 0

    async def wait_until_freed(self) -> None:
        """Wait, for a limited time, until the memory of former weights is free."""
        await asyncio.to_thread(self._settle)

    @property
    def active_identity(self) -> WeightsId | None:
        """Identity of the active weights."""
        return None if self.active is None else self.active.identity

    @property
    def refusal_facts(self) -> dict[str, dict[str, int] | None]:
        """The facts of every refusal: which weights are active."""
        return {
            "active": None if self.active_identity is None else self.active_identity.model_dump()
        }

    def to_view(self) -> WeightsState:
        """The state as clients see it."""
        return WeightsState(
            active=None if self.empty else self.active,
            previous=self.previous,
            staged=None if self.slot is None else self.slot.to_view(),
            required=self.fence.floor,
            fence_epoch=self.fence.epoch,
            commit_seq=self.commit_seq,
            kept=self.pushes.to_view(),
        )

    def checkpoint_dtypes(self) -> WeightsDtypes:
        """Return the dtypes of the model's checkpoint, which every version must have.

        Raises:
            ProblemError: No model is loaded.
        """
        info = self._runtime.loaded_engine()[1]
        layout = info.layout
        specs = {**layout.optional, **layout.required}
        dtypes = {name: spec.dtype for name, spec in specs.items()}
        return WeightsDtypes(dtypes=dtypes, root_hash=info.root_hash)

    def raise_fence(self, caller: str, request: RequireRequest) -> WeightsState:
        """Raise the fence.

        Raises:
            ProblemError: 409, it would go down.
        """
        self.fence.raise_to(caller, request)
        if request.drain_seconds is not None:
            self._runtime.drain_seconds = request.drain_seconds
        self._runtime.changed.notify_all()
        return self.to_view()

    def check_order(self, identity: WeightsId) -> None:
        """Refuse identities below the active weights or of a fenced epoch.

        Raises:
            ProblemError: 409 `stale-epoch` or `version-regressed`.
        """
        self.fence.check_epoch(identity.epoch, **self.refusal_facts)
        active = self.active_identity
        if active is not None and identity < active:
            raise regression_problem(identity, active, "active")

    async def stage_weights(
        self, caller: str, request: StageRequest, given: HandedTensors | None = None
    ) -> StagedWeights:
        """Begin to stage `given`, or else the request's source, next to the serving weights; return at once.

        Raises:
            ProblemError: 409, the state or the order of identities forbids it; 422, the path is not allowed;
                503, the engine has just died.
        """
        self._runtime.loaded_engine()
        if not self._runtime.is_alive:
            raise ProblemError("failed", "the engine died and is being restarted", retry_after=5)
        identity = request.identity
        self._check_memory(request, given)
        self.check_order(identity)
        if request.source.pushed is not None and given is None:
            self.pushes.check_pushed(request.source.pushed)
        seconds = max(request.deadline_seconds, DTYPE_LOOKUP_SECONDS)
        source, settings = request.source.without_bytes, self._runtime.settings
        resolved = await resolve_within(source, settings, seconds)
        if isinstance(given, TrainerTensors) and identity in (known_hashes := self._known_hashes()):
            root_hash = await tensor_bytes.content_of(given, known_hashes[identity])
            request = request.model_copy(update={"root_hash": root_hash})
        if (known := self._answer_if_active(request, resolved)) is not None:
            return known
        try:
            async with asyncio.timeout(request.deadline_seconds), self.slot_lock:
                return await self._begin_stage(caller, request, resolved, given)
        except TimeoutError:
            raise ProblemError(
                "deadline-exceeded", "the staging slot was busy: try again", retry_after=1
            ) from None

    def check_resident(self) -> None:
        """Refuse if the weights are not in memory.

        Raises:
            ProblemError: 409 `asleep`.
        """
        if not self._runtime.engine_stats().resident.weights:
            raise conflict_problem(
                "asleep",
                'the weights\' memory is given back: POST /v1/wake {"tags": ["weights"]}',
                **self.refusal_facts,
            )

    def _check_memory(self, request: StageRequest, given: HandedTensors | None) -> None:
        """Refuse (409 `asleep`) to stage while weights sleep, but for pushed bytes: those wait in main memory."""
        if request.source.pushed is None or given is not None:
            self.check_resident()

    def _known_hashes(self) -> dict[WeightsId, str | None]:
        """The root hashes of what serves and of what is in the slot; None: not known yet."""
        active, staged = self.active, self.slot
        known = {} if active is None else {active.identity: active.root_hash}
        return known if staged is None else {**known, staged.identity: staged.known_hash}

    async def _begin_stage(
        self,
        caller: str,
        request: StageRequest,
        resolved: WeightsSource,
        given: HandedTensors | None,
    ) -> StagedWeights:
        identity = request.identity
        # A commit or a sleep may have happened during the wait for the lock.
        self._runtime.loaded_engine()
        self._check_memory(request, given)
        self.check_order(identity)
        if (known := self._answer_if_active(request, resolved)) is not None:
            return known
        if self.active is not None and identity == self.active.identity:  # its very bytes, again
            request = request.model_copy(update={"root_hash": self.active.root_hash})
        if request.source.pushed is not None:
            await self.pushes.check_base(request, self.active, self.slot)
        slot = self.slot
        if slot is not None and slot.error is None:
            if identity == slot.identity:
                slot.answer_repeated(request, resolved)
                return self.pushes.view_with_ticket(caller, slot)
            if identity < slot.identity:
                raise regression_problem(identity, slot.identity, "staged", **self.refusal_facts)
        await self.clear_slot()
        self._runtime.loaded_engine()  # again: to clear the slot may have taken long
        pushed = request.source.pushed is not None and given is None
        incoming = self.pushes.begin_incoming(request) if pushed else None
        slot = self.slot = StagingSlot(request, resolved, given, caller=caller, incoming=incoming)
        logger.info("staging weights %s for %r", identity, caller)
        slot.task = asyncio.create_task(self._stage_slot(slot))
        return self.pushes.view_with_ticket(caller, slot)

    def offer_weights(self, caller: str, request: OfferRequest) -> OfferResponse:
        """Offer pushed weights that are kept here; see `PushedWeights.offer_kept`."""
        return self.pushes.offer_kept(caller, request, self.refusal_facts)

    def _answer_if_active(
        self, request: StageRequest, resolved: WeightsSource
    ) -> StagedWeights | None:
        """Answer a stage of the active weights, or refuse other content; None: of others, or the bytes must come again."""
        active = self.active
        if active is None or active.identity != request.identity:
            return None
        if not is_same_content(request, active.root_hash, same_source=resolved == self.source):
            raise content_mismatch(active.identity, active.root_hash)
        if self.empty or (self.dropped and self.has_no_copy):
            return None
        return StagedWeights(
            epoch=active.epoch,
            version=active.version,
            source=self._given_source,
            phase="Staged",
            root_hash=active.root_hash,
            labels=active.labels,
            adapters=active.adapters,
        )

    async def _stage_slot(self, slot: StagingSlot) -> None:
        start = time.monotonic()
        # Without a limit: the slot's deadline ends it.
        call = self._runtime.call_engine(self._fill_slot(slot), inf, "stage", fatal=False)
        await slot.await_filling(call)
        self._runtime.telemetry.update_seconds.labels("stage").observe(time.monotonic() - start)
        self._runtime.changed.notify_all()

    async def _fill_slot(self, slot: StagingSlot) -> None:
        engine, info = self._runtime.loaded_engine()
        async with self._room:
            if slot.incoming is not None:
                located, source = None, self.pushes.source_for_members(slot.incoming)
            else:
                located = locate_source(slot.resolved, self._runtime.settings, Path(info.model))
                source = partial(StageSource.of, slot.resolved)
            others = fill_elsewhere(
                self._runtime.gang, source, slot.expected, slot.deadline_seconds
            )
            open_slot = partial(self._open_slot, engine, info)
            await slot.fill_slot(open_slot, info.layout, located, others)

    async def _open_slot(
        self, engine: Engine, info: EngineInfo, entries: Sequence[TensorEntry], **options: Any
    ) -> Sink:
        """Open the engine's slot; adapters only where the weights that they change serve."""
        active = self.active
        assert active is not None, "an engine has loaded weights"
        if holds_adapters(entries):
            resident = self._runtime.engine_stats().resident.weights
            check_base(active, info.root_hash, empty=self.empty, resident=resident)
        return await engine.open_slot(entries, **options)

    @property
    def has_no_copy(self) -> bool:
        """Whether `refill_active` could read the active weights' bytes nowhere."""
        handed_over = self.given is not None and bool(self.given.tensors)
        pushed = self.source.pushed is not None and not self.serves_adapters
        return pushed and not handed_over and self.pushes.kept is None

    @property
    def serves_adapters(self) -> bool:
        """Whether the active weights are adapters on the model's own checkpoint."""
        return self.active is not None and bool(self.active.adapters)

    async def refill_active(self, *, on_disk: bool = False) -> Sink:
        """Load the active weights again, adapters if they are such; see `engine.WeightsRefill`."""
        assert self.active is not None, "an engine has loaded weights"
        want = self.active.root_hash
        if self.source.pushed is None:
            return await self._refill.read_source(self.source, want, on_disk=on_disk)
        return await self._refill.read_pushed(self.active, self.given, on_disk=on_disk)

    async def refill_base(self, *, on_disk: bool = False) -> Sink:
        """Load the model's weights that are active again, without their adapters; see `engine.WeightsRefill`."""
        if not self.serves_adapters:
            return await self.refill_active(on_disk=on_disk)
        info = self._runtime.info
        assert info is not None, "a model is loaded"
        return await self._refill.read_source(CHECKPOINT_SOURCE, info.root_hash, on_disk=on_disk)

    async def clear_slot(self) -> None:
        """Cancel and drop what is staged; the caller holds `slot_lock`."""
        slot, self.slot = self.slot, None
        if slot is not None:
            await slot.drop_slot()

    async def discard_staged(self, caller: str, request: DiscardRequest) -> DiscardResponse:
        """Drop this identity from the slot; leave any other alone."""
        identity = request.identity
        async with self.slot_lock:
            if self.slot is None or self.slot.identity != identity:
                return DiscardResponse(outcome="unchanged")
            logger.info("discarding weights %s for %r", identity, caller)
            await self.clear_slot()
        self._runtime.changed.notify_all()
        return DiscardResponse(outcome="discarded")

    def activate_slot(self, slot: StagingSlot) -> None:
        """Make the slot's weights the active ones; call it right after the engine has flipped."""
        if self.active_identity != slot.identity:
            self.previous = self.active
        self.empty = False
        self.active = ActiveWeights(
            epoch=slot.identity.epoch,
            version=slot.identity.version,
            root_hash=slot.root_hash,
            labels=slot.labels,
            adapters=slot.adapters,
        )
        self.source, self._given_source = slot.resolved, slot.source
        self.given = slot.given if isinstance(slot.given, TrainerTensors) else None
        self.slot = None
        pushes = self.pushes
        if slot.incoming is not None or pushes.kept is not None or pushes.restoring is not None:
            pushes.keep_slot(slot)
        self.commit_seq += 1
        self.fence.follow_commit(slot.identity)
        self._runtime.telemetry.export_weights(slot.identity)

    async def drop_lost_engine(self) -> None:
        """Give up the staged bytes: they were the dead engine's."""
        slot = self.slot
        if slot is not None:
            slot.error = "the engine was restarted: stage again"
            await slot.drop_slot(slot.error)

    def note_loaded(self, info: EngineInfo) -> None:
        """Note that an engine started with the checkpoint, which is active unless others were before."""
        self.empty = False
        if self.active_identity in (None, CHECKPOINT):
            self._reset_to_checkpoint(info)

    def _reset_to_checkpoint(self, info: EngineInfo) -> None:
        self.active = ActiveWeights(
            epoch=CHECKPOINT.epoch, version=CHECKPOINT.version, root_hash=info.root_hash
        )
        self.source = self._given_source = CHECKPOINT_SOURCE
        self.given = None
        self._runtime.telemetry.export_weights(CHECKPOINT)

    def fall_back_to_checkpoint(self, info: EngineInfo) -> None:
        """Make the checkpoint active, fenced, because the active weights could not be loaded again."""
        active = self.active_identity
        if active is not None and (self.fence.floor is None or self.fence.floor < active):
            self.fence.floor = active
        self.previous = None
        self.pushes.drop_kept()
        self._reset_to_checkpoint(info)
