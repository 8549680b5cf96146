"""The staging slot: memory of the engine that is filled next to the serving weights.

`sources/tensor_filling.py` fills it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from typing import Any

from rollout_common.wire import (
    ServedAdapter,
    StagedWeights,
    StageRequest,
    WeightsId,
    WeightsSource,
)
from rollout_common.wire.problems import ProblemError, conflict_problem
from rollout_worker.engine import (
    ContentMismatch,
    EngineError,
    HandedTensors,
    LentTensors,
    Sink,
    WeightsLayout,
    WeightsRejected,
)
from rollout_worker.lora.lora_sink import LoraSink
from rollout_worker.sources import tensor_bytes
from rollout_worker.sources.pushed.incoming_version import IncomingVersion
from rollout_worker.sources.pushed.pushed_source import receive
from rollout_worker.sources.tensor_filling import Elsewhere, Located, OpenSlot, SinkFilling

from .settings import DISCARD_TIMEOUT_SECONDS

logger = logging.getLogger(__name__)

GIVEN_UP = "the slot was given up for another one, or discarded"


class StagingSlot:
    """One version that is being staged, or is staged."""

    def __init__(
        self,
        request: StageRequest,
        resolved: WeightsSource,
        given: HandedTensors | None = None,
        *,
        caller: str = "",
        incoming: IncomingVersion | None = None,
    ) -> None:
        self.caller = caller
        self.incoming = incoming
        """The transfer of pushed bytes; None: the bytes come from files, or were handed over."""
        self.identity = request.identity
        self.source = request.source.without_bytes
        self.resolved = resolved
        self.given = given
        self.expected = request.root_hash
        self.labels: Mapping[str, str] = request.labels
        self.deadline_seconds = request.deadline_seconds
        self.root_hash: str | None = None
        self.adapters: tuple[ServedAdapter, ...] = ()
        """What it holds, once it is staged, if it holds adapters."""
        self.done = 0
        self.total = 0
        self.error: str | None = None
        self.slug: str | None = None
        self.task: asyncio.Task[None] | None = None
        self._sink: Sink | None = None
        self._filled = False

    @property
    def is_staged(self) -> bool:
        """Whether all bytes are in memory and verified."""
        return self._filled and self.error is None

    @property
    def is_lent(self) -> bool:
        """Whether its values are read from a trainer's device memory into that of the weights."""
        return isinstance(self.given, LentTensors)

    @property
    def known_hash(self) -> str | None:
        """The root hash that was found, or is expected; None: neither."""
        return self.root_hash or self.expected

    async def fill_slot(
        self,
        open_slot: OpenSlot,
        layout: WeightsLayout,
        located: Located | None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """Fill the slot from handed tensors, the push or the located files; raise what `SinkFilling` raises."""
        filling = SinkFilling(
            *(open_slot, layout, self._verify_hash, self.report_progress, elsewhere, self.expected)
        )
        if isinstance(self.given, LentTensors):
            self._sink = await open_slot((), given=self.given)
            self._verify_hash(await self.given.read_root())
            await asyncio.to_thread(self._sink.seal)
        elif self.given is not None:
            self._sink = await tensor_bytes.fill(filling, self.given)
        elif self.incoming is not None:
            self._sink = await receive(filling, self.incoming)
        else:
            assert located is not None, "files are located first"
            self._sink = await filling.fill_from_files(located)
        if isinstance(self._sink, LoraSink):
            self.adapters = tuple(each.to_wire() for each in self._sink.adapters)
        self._filled = True

    async def await_filling(self, filling: Awaitable[None]) -> None:
        """Await the filling until the deadline; note and log the outcome."""
        try:
            async with asyncio.timeout(self.deadline_seconds):
                await filling
        except TimeoutError:
            limit = self.deadline_seconds
            self.error = f"not staged within {limit:g} s: raise deadline_seconds and stage again"
        except EngineError as error:
            self.error, self.slug = str(error), error.slug
        except Exception as error:
            logger.exception("staging %s failed", self.identity)
            self.error = f"internal error: {error}"
        if self.error:
            self.give_up_push(self.error)
            logger.warning("staging weights %s failed: %s", self.identity, self.error)
        else:
            logger.info("staged weights %s", self.identity)

    @property
    def shared_sink_id(self) -> str:
        """Id of the filled sink, which the members of a gang share."""
        return "" if self._sink is None else self._sink.slot

    def _verify_hash(self, root_hash: str) -> None:
        if self.expected not in (None, root_hash):
            raise ContentMismatch(
                f"content-mismatch: {self.identity} should have root_hash {self.expected}, its "
                f"source has {root_hash}: publish the right bytes under a higher version"
            )
        self.root_hash = root_hash

    def take_sink(self) -> Sink:
        """Return the filled sink; from now on the engine frees it."""
        sink, self._sink = self._sink, None
        assert sink is not None, "taken once, after staging"
        return sink

    async def drop_slot(self, why: str = GIVEN_UP) -> None:
        """Stop filling and give the memory back; the sender of pushed bytes gets the reason."""
        try:
            if self.task is not None and not self.task.done():
                self.task.cancel()
                await asyncio.wait({self.task}, timeout=DISCARD_TIMEOUT_SECONDS)
                logger.info("staging of weights %s was cancelled", self.identity)
        finally:  # also if a stage's deadline ends the wait: nobody else knows the slot by then
            self.give_up_push(why)
        sink, self._sink = self._sink, None
        if sink is not None:
            await asyncio.to_thread(sink.close)

    def give_up_push(self, why: str) -> None:
        """Let go of pushed bytes; their sender gets the reason."""
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
                "root_hash": self.known_hash,
                "labels": self.labels,
                "adapters": self.adapters,
                "error": self.error,
                "slug": self.slug,
                "chunks": 0 if self.incoming is None else self.incoming.chunks,
            }
        )

    def answer_repeated(self, request: StageRequest, resolved: WeightsSource) -> StagedWeights:
        """Answer a repeated stage of this identity.

        Raises:
            ProblemError: 409, it means other content.
        """
        known = self.known_hash
        if not is_same_content(request, known, same_source=resolved == self.resolved):
            raise content_mismatch(self.identity, known)
        self.expected = self.expected or request.root_hash
        return self.to_view()


def is_same_content(request: StageRequest, known: str | None, *, same_source: bool) -> bool:
    """Return whether a request for a known identity means its content: the hash decides, then the source.

    `known`: the content's hash, None while it is not computed.
    """
    if known is not None and (request.root_hash is not None or request.source.pushed is not None):
        # A sender knows its hash only at the end, and compares it with the answer's then.
        return request.root_hash in (None, known)
    return same_source


def content_mismatch(identity: WeightsId, root_hash: str | None) -> ProblemError:
    """Return a 409: the identity is bound to other content."""
    return conflict_problem(
        "content-mismatch",
        f"weights {identity} are bound to other content (root_hash {root_hash}): publish new bytes"
        " under a higher version",
        root_hash=root_hash,
    )


def regression_problem(
    identity: WeightsId, than: WeightsId, what: str, **facts: Any
) -> ProblemError:
    """Return a 409: the identity is below another one, named by `what`."""
    slug = "stale-epoch" if identity.epoch < than.epoch else "version-regressed"
    return conflict_problem(
        slug,
        f"weights {identity} are below the {what} {than}: raise the version, or the epoch to go"
        " back",
        **{**facts, what: than.model_dump()},
    )


def no_copy_error(identity: WeightsId, *, handed_over: bool) -> EngineError:
    """Return the error of weights whose bytes this worker keeps no longer."""
    if handed_over:
        return EngineError(
            f"weights {identity} were handed over, and this worker keeps no copy of their tensors: hand over new"
            " ones, or sleep at level 2"
        )
    return WeightsRejected(
        f"NoLiveCopy: weights {identity} were pushed, and this worker keeps no copy of them; stage them again, from"
        " peers or from the trainer"
    )
