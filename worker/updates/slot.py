"""The one staging slot: what is being staged beside the serving weights, or was."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from rollout_worker.schemas import StagedWeights, StageRequest, WeightsId, WeightsSource
from rollout_worker.wire.problems import ProblemError, conflict


class Slot:
    """The one staging slot: what is being staged, or was."""

    def __init__(self, request: StageRequest, resolved: WeightsSource) -> None:
        self.identity = WeightsId(epoch=request.epoch, version=request.version)
        self.source = request.source
        self.resolved = resolved
        self.expected = request.root_hash
        self.labels: Mapping[str, str] = request.labels
        self.deadline_seconds = request.deadline_seconds
        self.root_hash: str | None = None
        self.done = 0
        self.total = 0
        self.error: str | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def staged(self) -> bool:
        """Whether the bytes are there and verified."""
        return self.root_hash is not None and self.error is None

    def report(self, done: int, total: int) -> None:
        """Note progress; may be called from any thread."""
        self.done, self.total = done, total

    def view(self) -> StagedWeights:
        """The slot as clients see it."""
        phase = "Failed" if self.error else "Staged" if self.staged else "Staging"
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
            }
        )

    def repeated(self, request: StageRequest, resolved: WeightsSource) -> StagedWeights:
        """Answer another stage of this identity.

        Raises:
            ProblemError: 409, it means other content.
        """
        known = self.root_hash or self.expected
        if not same_content(request, known, same_source=resolved == self.resolved):
            raise mismatch(self.identity, known)
        self.expected = self.expected or request.root_hash
        return self.view()


def same_content(request: StageRequest, known: str | None, *, same_source: bool) -> bool:
    """Whether a request for a known identity means its content: the hash decides, then the source.

    `known`: the content's hash, None while nobody knows it.
    """
    if request.root_hash is not None and known is not None:
        return request.root_hash == known
    return same_source


def mismatch(identity: WeightsId, root_hash: str | None) -> ProblemError:
    """A 409: the identity is known with other content."""
    return conflict(
        "content-mismatch",
        f"weights {identity} are bound to other content (root_hash {root_hash}): publish new bytes"
        " under a higher version",
        root_hash=root_hash,
    )
