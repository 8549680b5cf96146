"""Pushed weights of one worker: who may bring them, what is kept of them, who may fetch that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rollout_worker.core.runtime import Runtime
from rollout_worker.engine import EngineError
from rollout_worker.schemas import (
    KeptWeights,
    OfferRequest,
    OfferResponse,
    PushedBytes,
    StagedWeights,
    StageRequest,
    WeightsId,
)
from rollout_worker.sources.fetching import Fetching
from rollout_worker.sources.giving import Kept, kept_of
from rollout_worker.sources.incoming import Claim, Incoming
from rollout_worker.sources.pushed import Desk
from rollout_worker.weights import check_layout
from rollout_worker.wire.problems import ProblemError, conflict

from .slot import Slot

logger = logging.getLogger(__name__)


class Pushes:
    """See the module.

    Args:
        runtime: Of the worker.
        claim: Charges memory of staged weights.
    """

    def __init__(self, runtime: Runtime, claim: Claim) -> None:
        self._runtime = runtime
        self._claim = claim
        self.desk = Desk()
        self.kept: Kept | None = None
        """The pushed bytes of the active weights, for joiners and for our own refills."""

    def view(self) -> KeptWeights | None:
        """What is kept, as clients see it."""
        return None if self.kept is None else self.kept.view()

    def check(self, pushed: PushedBytes) -> None:
        """Refuse pushed bytes where nobody could bring them.

        Raises:
            ProblemError: 422.
        """
        if self._runtime.gang is not None:
            fix = "a replica of several nodes takes no pushed weights: publish them as files"
        elif not pushed.peers and not self.desk.address.anywhere:
            fix = "nobody can reach this worker: start it with --weights-port or --weights-socket"
        else:
            return
        errors = [{"field": "source.pushed", "message": fix}]
        raise ProblemError("unsupported", fix, errors=errors)

    def incoming(self, identity: WeightsId, request: StageRequest) -> Incoming | None:
        """Return what is going to arrive, if bytes are pushed; peers are asked at once."""
        pushed = request.source.pushed
        if pushed is None:
            return None
        _, info = self._runtime.loaded()
        check = partial(check_layout, info.layout, where="what was pushed")
        incoming = Incoming(identity, pushed, check, self._room_for)
        if pushed.peers:
            Fetching(incoming, pushed.peers).start()
        return incoming

    def ticketed(self, caller: str, slot: Slot) -> StagedWeights:
        """Return the slot's view, with a ticket if the caller is to bring the bytes."""
        view, incoming = slot.view(), slot.incoming
        if incoming is None or incoming.fetched or slot.caller != caller or view.phase != "Staging":
            return view
        return view.model_copy(update={"transfer": self.desk.expect(incoming)})

    def _room_for(self, nbytes: int) -> Callable[[], None]:
        """Charge memory for pushed bytes; what is kept goes first if there is no room else.

        Raises:
            EngineError: There is none.
        """
        try:
            return self._claim(nbytes)
        except EngineError:
            if self.kept is None:
                raise
            self.drop()
            return self._claim(nbytes)

    def keep(self, slot: Slot) -> None:
        """Keep the pushed bytes of a slot that serves now, and none from before."""
        self.drop()
        if slot.incoming is not None:
            self.kept = kept_of(slot.incoming)

    def drop(self) -> None:
        """Keep nothing; may be called from any thread."""
        former, self.kept = self.kept, None
        if former is not None:
            self.desk.withdraw()
            former.release()

    def offer(self, caller: str, request: OfferRequest, facts: Mapping[str, Any]) -> OfferResponse:
        """Return what another worker has to know to fetch what is kept here.

        Raises:
            ProblemError: 409 `no-copy`, with these facts.
        """
        kept = self.kept
        identity = WeightsId(epoch=request.epoch, version=request.version)
        if kept is not None and kept.identity == identity and self.desk.address.port is not None:
            logger.info("offering weights %s to a peer of %r", identity, caller)
            return self.desk.offer(kept)
        why = "nothing" if kept is None else str(kept.identity)
        if kept is not None and self.desk.address.port is None:
            why += ", but has no --weights-port"
        raise conflict(
            "no-copy",
            f"weights {identity} can't be fetched here: this worker keeps {why}; ask another"
            " member, or publish again",
            **facts,
        )
