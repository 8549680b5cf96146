"""Pushed weights of one worker: which may come, what is kept of them, and which peers may fetch that."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rollout_common.transfer.connections.transfer_loop import run_on_loop
from rollout_common.transfer.memory.slot import Slot
from rollout_common.wire import (
    ActiveWeights,
    Base,
    KeptWeights,
    OfferRequest,
    OfferResponse,
    Peer,
    PushedBytes,
    StagedWeights,
    StageRequest,
    StageSource,
)
from rollout_common.wire.problems import ProblemError, conflict_problem
from rollout_worker.core.worker_runtime import WorkerRuntime
from rollout_worker.engine import EngineError
from rollout_worker.engines.shared_memory.staging_budget import StagingBudget, StagingLimitReached
from rollout_worker.gang.gang_head import GangHead
from rollout_worker.sources.pushed.arrived_deltas import DeltaBase
from rollout_worker.sources.pushed.incoming_version import IncomingVersion
from rollout_worker.sources.pushed.kept_folder import KeptFolder
from rollout_worker.sources.pushed.kept_version import KeptVersion, kept_of, take_kept
from rollout_worker.sources.pushed.pushed_memory import Memory, OwnMemory, Refusal
from rollout_worker.sources.pushed.pushed_source import PushedSource
from rollout_worker.sources.pushed.version_fetching import VersionFetching
from rollout_worker.sources.tensor_filling import Elsewhere
from rollout_worker.threads import run_in_thread
from rollout_worker.weights import check_layout

from .staging_slot import StagingSlot

logger = logging.getLogger(__name__)


class PushedWeights:
    """The pushed weights of one worker.

    Args:
        runtime: Of the worker.
        staging: What memory of staged weights is charged to.
    """

    def __init__(self, runtime: WorkerRuntime, staging: StagingBudget) -> None:
        self._runtime = runtime
        self._claim, self._freeing = staging.claim_memory, staging.freeing
        self.spare = staging.spare
        self.pushed_source = PushedSource()
        self.kept: KeptVersion | None = None
        """The pushed bytes of the active weights, for joiners and for our own refills; those of a former worker first."""
        self._folder = KeptFolder.of(runtime.settings)
        self._found: KeptWeights | None = None
        self.restoring = None if self._folder is None else threading.Event()
        """Ends the reading of a former worker's copy, as long as one is looked for and read."""

    def to_view(self) -> KeptWeights | None:
        """What is kept, as clients see it; what is still read counts, since nobody else may have it."""
        if self.kept is not None:
            return self.kept.to_view()
        return None if self.restoring is None else self._found

    async def restore_kept(self) -> None:
        """Keep what a former worker of this pool and node has left, unless weights are committed first."""
        if (folder := self._folder) is None or (over := self.restoring) is None:
            return
        private = self._runtime.settings.engine == "hf" or self._runtime.gang is not None

        def make_memory(nbytes: int) -> Memory:
            slot = Slot(nbytes, expected=nbytes if private else None, private=private)
            return OwnMemory(slot, self._recycle_memory)

        file = await asyncio.to_thread(folder.find_newest)
        if file is not None and not over.is_set():
            self._found = file.weights
            self._runtime.changed.notify_all()
            kept = await run_in_thread(partial(folder.read_version, file, make_memory), over)
            if kept is not None and over.is_set():
                kept.release()
            elif kept is not None:
                self.kept = kept
                logger.info("weights %s are kept again, from the folder", kept.identity)
        self.restoring = None
        self._runtime.changed.notify_all()

    def _end_restoring(self) -> None:
        restoring, self.restoring = self.restoring, None
        if restoring is not None:
            restoring.set()

    def check_pushed(self, pushed: PushedBytes) -> None:
        """Refuse pushed bytes where nobody could bring them.

        Raises:
            ProblemError: 422.
        """
        address = self.pushed_source.address
        if self._runtime.gang is not None and address.port is None:
            fix = "the other nodes can't fetch them here: start the head with --weights-port"
        elif not pushed.peers and address.port is None and address.socket is None:
            fix = "nobody can reach this worker: start it with --weights-port or --weights-socket"
        else:
            return
        errors = [{"field": "source.pushed", "message": fix}]
        raise ProblemError("unsupported", fix, errors=errors)

    def begin_incoming(self, request: StageRequest) -> IncomingVersion | None:
        """Return what is going to arrive, if bytes are pushed; peers are asked at once."""
        pushed = request.source.pushed
        if pushed is None:
            return None
        _, info = self._runtime.loaded_engine()
        check = partial(check_layout, info.layout, where="what was pushed")
        base = None if pushed.base is None else self._hold_delta_base(pushed.base)
        # A delta is applied in place, which a page that can't be had later would end.
        # Nor does any process map what a gang receives: all nodes copy it.
        private = not info.by_path or self._runtime.gang is not None

        def room(nbytes: int) -> tuple[Memory, Callable[[], None]]:
            by_nixl = incoming.by_nixl  # its process maps what others read from here
            return self._allocate_memory(
                nbytes, hollow=base is None, private=private and not by_nixl, by_nixl=by_nixl
            )

        incoming = IncomingVersion(
            request.identity, pushed, check, room, base, free_soon=self._freeing.free_soon
        )
        if pushed.peers:
            run_on_loop(self._fill_incoming(incoming, request, pushed.peers))
        return incoming

    async def _fill_incoming(
        self, incoming: IncomingVersion, request: StageRequest, peers: Sequence[Peer]
    ) -> None:
        """Take the bytes from what is kept here, if that is the very content, else fetch them."""
        kept = self.kept
        if kept is not None and (kept.identity, kept.end.root_hash) == (
            request.identity,
            request.root_hash,
        ):
            try:
                # In a thread: large versions have ten thousands of pieces.
                await asyncio.to_thread(take_kept, incoming, kept)
                return
            except (Refusal, EngineError) as error:
                logger.info("what is kept of weights %s is not staged: %s", kept.identity, error)
        fetching = VersionFetching(incoming, self.pushed_source.peer_route, request.root_hash)
        await fetching.fetch_from_peers(peers)

    def view_with_ticket(self, caller: str, slot: StagingSlot) -> StagedWeights:
        """Return the slot's view, with a ticket if the caller is to bring the bytes."""
        view, incoming = slot.to_view(), slot.incoming
        if incoming is None or incoming.fetched or slot.caller != caller or view.phase != "Staging":
            return view
        return view.model_copy(update={"transfer": self.pushed_source.expect(incoming)})

    def source_for_members(
        self, source: KeptVersion | IncomingVersion
    ) -> Callable[[], StageSource]:
        """Return what gives each other node of a gang the source from which it fetches these bytes here."""
        host = self._runtime.settings.leader_address or ""
        return partial(self.pushed_source.for_member, source, host)

    async def check_base(
        self, request: StageRequest, active: ActiveWeights | None, slot: StagingSlot | None
    ) -> None:
        """Refuse a delta unless its base serves here, its bytes are kept, and there is room for the result.

        Raises:
            ProblemError: 409 `wrong-base`.
        """
        pushed = request.source.pushed
        if pushed is None or (base := pushed.base) is None:
            return
        if active is None or (active.identity, active.root_hash) != (base.identity, base.root_hash):
            raise self._wrong_base_problem(base, "it does not serve here")
        kept = self._hold_delta_base(base)
        kept.release()
        if pushed.layout_id not in (None, kept.layout_id):
            raise self._wrong_base_problem(base, f"it has the layout {kept.layout_id}")
        begun = None if slot is None or slot.incoming is None else slot.incoming
        if begun is not None and begun.identity == request.identity and begun.deltas.base is None:
            raise self._wrong_base_problem(base, "these weights are being staged without one")
        if pushed.bytes is not None:
            try:
                await asyncio.to_thread(self._try_claim, pushed.bytes)
            except EngineError as error:
                raise self._wrong_base_problem(base, str(error)) from error

    def _try_claim(self, nbytes: int) -> None:
        """Raise `EngineError` if there is no room for so many bytes; waits for memory that is still being freed."""
        self._claim(nbytes, self.spare.nbytes)()

    def _hold_delta_base(self, base: Base) -> DeltaBase:
        """Hold what is kept of the base.

        Raises:
            ProblemError: 409 `wrong-base`, it is not kept.
        """
        kept = self.kept
        if kept is None or kept.identity != base.identity or kept.end.root_hash != base.root_hash:
            raise self._wrong_base_problem(base, "this worker does not keep its bytes")
        memory = kept.memory
        return DeltaBase(base, kept.layout.layout_id, memory, memory.add_hold(), kept.patch)

    def _wrong_base_problem(self, base: Base, why: str) -> ProblemError:
        return conflict_problem(
            "wrong-base",
            f"no delta of weights {base.identity} (root_hash {base.root_hash}) can come: {why}; stage"
            " without source.pushed.base, and send all bytes",
        )

    def _allocate_memory(
        self, nbytes: int, *, hollow: bool, private: bool, by_nixl: bool
    ) -> tuple[Memory, Callable[[], None]]:
        """Allocate memory for pushed bytes, or use the former one again; free what is kept if memory is short.

        Raises:
            EngineError: There is none.
            SharedMemoryError: The kernel gives none.
        """
        used = self.spare.take_memory(max(nbytes, 1), writable=by_nixl)
        try:
            give_back = self._charge_memory(nbytes, 0 if used is None else used.size)
        except EngineError:
            if used is not None:
                used.close()
            raise
        try:
            expected = nbytes if hollow else None
            slot = used or Slot(nbytes, expected=expected, private=private, writable=by_nixl)
            return OwnMemory(slot, self._recycle_memory), give_back
        except BaseException:
            give_back()
            raise

    def _charge_memory(self, nbytes: int, there: int) -> Callable[[], None]:
        try:
            return self._claim(nbytes, there)
        except EngineError as error:
            # What is kept is not charged to the limit.
            if self.kept is None or isinstance(error, StagingLimitReached):
                raise
            self.drop_kept()
            return self._claim(nbytes, there)

    def keep_slot(self, slot: StagingSlot) -> None:
        """Keep the pushed bytes of a slot that serves now, and none from before."""
        former = self.kept
        self._end_restoring()
        self.kept = kept = None if slot.incoming is None else kept_of(slot.incoming)
        if kept is None:
            self._freeing.free_soon(self.spare.drop_memory)
        elif (folder := self._folder) is not None:
            # What is freed soon waits for the end of the commit's pause: so does the start of a thread.
            self._freeing.free_soon(lambda: folder.start_writing(kept, lambda: self.kept is kept))
        self._free_former(former)

    def _recycle_memory(self, used: Slot) -> None:
        """Have memory used again, as long as this worker's weights are pushed ones."""
        if self.kept is None:
            used.close()
        else:
            self.spare.keep_memory(used)

    def close(self) -> None:
        """Keep nothing, and no memory for what might come."""
        self.drop_kept()
        self.spare.drop_memory()

    def drop_kept(self) -> None:
        """Keep nothing; may be called from any thread."""
        self._end_restoring()
        former, self.kept = self.kept, None
        self._free_former(former)

    def _free_former(self, former: KeptVersion | None) -> None:
        """Offer what was kept no more, and free it."""
        if former is not None:
            self.pushed_source.withdraw()
            self._freeing.free_soon(former.release)

    def offer_kept(
        self, caller: str, request: OfferRequest, facts: Mapping[str, Any]
    ) -> OfferResponse:
        """Return what another worker has to know to fetch what is kept here.

        Raises:
            ProblemError: 409 `no-copy`, with these facts.
        """
        kept, identity = self.kept, request.identity
        if (
            kept is not None
            and kept.identity == identity
            and self.pushed_source.address.port is not None
        ):
            logger.info("offering weights %s to a peer of %r", identity, caller)
            return self.pushed_source.offer(kept)
        why = "nothing" if kept is None else str(kept.identity)
        if kept is None and (found := self.to_view()) is not None:
            why += f" yet (it still reads {found.identity})"
        if kept is not None and self.pushed_source.address.port is None:
            why += ", but has no --weights-port"
        raise conflict_problem(
            "no-copy",
            f"weights {identity} can't be fetched here: this worker keeps {why}; ask another"
            " member, or publish again",
            **facts,
        )


def fill_elsewhere(
    gang: GangHead | None,
    source: Callable[[], StageSource] | None,
    root_hash: str | None,
    seconds: float,
    *,
    on_disk: bool = False,
) -> Elsewhere | None:
    """Return how the other nodes of a gang fill the same slot; None if there are none, or no source for them."""
    if gang is None or source is None:
        return None
    return partial(
        gang.fill_slots, source=source, root_hash=root_hash, on_disk=on_disk, seconds=seconds
    )
