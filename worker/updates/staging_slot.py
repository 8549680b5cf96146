"""The staging slot: memory of the engine that is filled beside the serving weights.

`sources/tensor_filling.py` is the whole way of bytes into it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from rollout_common.wire import StagedWeights, StageRequest, WeightsId, WeightsSource
from rollout_common.wire.problems import ProblemError, conflict_problem
from rollout_worker.engine import ContentMismatch, Engine, Sink, TrainerTensors, WeightsLayout
from rollout_worker.sources import tensor_bytes
from rollout_worker.sources.incoming import Incoming
from rollout_worker.sources.pushed import receive
from rollout_worker.sources.tensor_filling import Elsewhere, Located, fill_sink

from .settings import DISCARD_TIMEOUT_SECONDS

logger = logging.getLogger(__name__)

GIVEN_UP = "the slot was given up for another one, or discarded"


class StagingSlot:
    """What is being staged, or was."""

    def __init__(
        self,
        request: StageRequest,
        resolved: WeightsSource,
        given: TrainerTensors | None = None,
        *,
        caller: str = "",
        incoming: Incoming | None = None,
    ) -> None:
        self.caller = caller
        self.incoming = incoming
        """What is pushed, or fetched from peers; None: the bytes are read from files, or handed over."""
        self.identity = WeightsId(epoch=request.epoch, version=request.version)
        self.source = request.source.without_bytes
        self.resolved = resolved
        self.given = given
        self.expected = request.root_hash
        self.labels: Mapping[str, str] = request.labels
        self.deadline_seconds = request.deadline_seconds
        self.root_hash: str | None = None
        self.done = 0
        self.total = 0
        self.error: str | None = None
        self.slug: str | None = None
        self.task: asyncio.Task[None] | None = None
        self._sink: Sink | None = None
        self._filled = False

    @property
    def is_staged(self) -> bool:
        """Whether the bytes are there and verified."""
        return self._filled and self.error is None

    async def fill_slot(
        self,
        engine: Engine,
        layout: WeightsLayout,
        located: Located,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """Bring the bytes; raises what `fill` raises."""
        if self.given is not None:
            self._sink = await tensor_bytes.fill(
                engine.open_slot, layout, self.given, self._verify_hash, self.report_progress
            )
        else:
            self._sink = await fill_sink(
                engine.open_slot,
                layout,
                located,
                self._verify_hash,
                self.report_progress,
                elsewhere,
            )
        self._filled = True

    async def receive_pushed(
        self, engine: Engine, layout: WeightsLayout, elsewhere: Elsewhere | None
    ) -> None:
        """Bring pushed bytes; raises what `receive` raises."""
        assert self.incoming is not None
        self._sink = await receive(
            engine.open_slot,
            layout,
            self.incoming,
            self._verify_hash,
            self.report_progress,
            elsewhere,
        )
        self._filled = True

    @property
    def shared_sink_id(self) -> str:
        """Id of the filled sink in a gang."""
        return "" if self._sink is None else self._sink.slot

    def _verify_hash(self, root_hash: str) -> None:
        if self.expected not in (None, root_hash):
            raise ContentMismatch(
                f"content-mismatch: {self.identity} should have root_hash {self.expected}, its "
                f"source has {root_hash}: publish the right bytes under a higher version"
            )
        self.root_hash = root_hash

    def take_sink(self) -> Sink:
        """Hand the filled sink over; from now on the engine frees it."""
        sink, self._sink = self._sink, None
        assert sink is not None, "taken once, when it is staged"
        return sink

    async def drop_slot(self, why: str = GIVEN_UP) -> None:
        """End the filling and give the memory back; who brings pushed bytes is told why."""
        if self.task is not None and not self.task.done():
            self.task.cancel()
            await asyncio.wait({self.task}, timeout=DISCARD_TIMEOUT_SECONDS)
            logger.info("staging of weights %s was cancelled", self.identity)
        self.give_up_push(why)
        sink, self._sink = self._sink, None
        if sink is not None:
            await asyncio.to_thread(sink.close)

    def give_up_push(self, why: str) -> None:
        """Let go of pushed bytes; who brings them is told why."""
        if self.incoming is not None:
            self.incoming.close(why)

    def report_progress(self, done: int, total: int) -> None:
        """Note progress; may be called from any thread."""
        self.done, self.total = done, total

    def to_view(self) -> StagedWeights:
        """The slot as clients see it."""
        phase = "Failed" if self.error else "Staged" if self.is_staged else "Staging"
        return StagedWeights.model_validate(
            {
                "epoch": self.identity.epoch,
                "version": self.identity.version,
                "source": self.source,
                "phase": phase,
                "bytes_done": self.done,
                "bytes_total": self.total,
                "root_hash": self.root_hash or self.expected,
                "labels": self.labels,
                "error": self.error,
                "slug": self.slug,
                "chunks": 0 if self.incoming is None else self.incoming.chunks,
            }
        )

    def answer_repeated(self, request: StageRequest, resolved: WeightsSource) -> StagedWeights:
        """Answer another stage of this identity.

        Raises:
            ProblemError: 409, it means other content.
        """
        known = self.root_hash or self.expected
        if not is_same_content(request, known, same_source=resolved == self.resolved):
            raise content_mismatch(self.identity, known)
        self.expected = self.expected or request.root_hash
        return self.to_view()


def is_same_content(request: StageRequest, known: str | None, *, same_source: bool) -> bool:
    """Whether a request for a known identity means its content: the hash decides, then the source.

    `known`: the content's hash, None while nobody knows it.
    """
    if known is not None and (request.root_hash is not None or request.source.pushed is not None):
        # Whoever pushes learns its hash only at the end, and compares it with the answer's then.
        return request.root_hash in (None, known)
    return same_source


def content_mismatch(identity: WeightsId, root_hash: str | None) -> ProblemError:
    """A 409: the identity is known with other content."""
    return conflict_problem(
        "content-mismatch",
        f"weights {identity} are bound to other content (root_hash {root_hash}): publish new bytes"
        " under a higher version",
        root_hash=root_hash,
    )
