"""One worker for test after test: each finds it as if it had just started, but in a later epoch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import httpx

from tests.support.engine.workers import START_SECONDS, InProcess
from tests.support.waiting import until_sync

HEAL_SECONDS = 30.0


class Shared(InProcess):
    """Serves its checkpoint as version 0 of `epoch`; tests count their versions up from there."""

    def __init__(self, model: Path, flags: Sequence[str]) -> None:
        super().__init__(model, flags, None)
        self.epoch = 0
        loaded = self.worker.runtime.lifecycle
        until_sync(lambda: loaded.has_engine, START_SECONDS, what="the engine")
        self.settled = self.state()["weights"]
        """The weights at the beginning of a test."""

    @property
    def commits(self) -> int:
        """Commits since the beginning of the test."""
        return int(self.state()["weights"]["commit_seq"] - self.settled["commit_seq"])

    def heal(self) -> None:
        """Undo what a test left: requests, everybody's holds, the slot, the weights, the fence.

        Raises:
            AssertionError: it can't be healed.
        """
        assert self.state()["restarts"] == 0, "its next restart would wait longer"
        self.post("abort", all=True)
        self.call(self._let_go)
        until_sync(self._at_rest, HEAL_SECONDS, what="the shared worker to come to rest")
        if self.state()["weights"] != self.settled:
            self._begin_epoch()

    def _let_go(self) -> None:
        runtime = self.worker.runtime
        for hold in self.worker.worker_state().holds:
            runtime.holds.release_hold(hold.holder)
        runtime.changed.notify_all()

    def _at_rest(self) -> bool:
        state = self.state()
        busy = state["in_flight"] or state["queued"] or state["holds"]
        return bool(state["lifecycle"] == "Active" and not busy)

    def _begin_epoch(self) -> None:
        weights = self.state()["weights"]
        known = (weights["active"], weights["staged"], weights["required"])
        self.epoch = 1 + max(weights["fence_epoch"], *(each["epoch"] for each in known if each))
        staged = self.post("weights/stage", epoch=self.epoch, version=0, source={"checkpoint": {}})
        assert staged.status_code == 202, staged.text
        until_sync(self._staged, HEAL_SECONDS, what="the checkpoint to be staged")
        self.commit(self.epoch, 0)
        assert self.ready()
        self.settled = self.state()["weights"]

    def _staged(self) -> bool:
        return bool(self.state()["weights"]["staged"]["phase"] == "Staged")


class Lender:
    """Lends the shared worker; one that can't be healed is replaced."""

    def __init__(self, model: Path, *flags: str) -> None:
        self._model, self._flags = model, flags
        self._worker: Shared | None = None

    def lend(self) -> Shared:
        """The worker, as a test may expect it."""
        if self._worker is not None:
            try:
                self._worker.heal()
            except (AssertionError, httpx.HTTPError):
                self.close()
        if self._worker is None:
            self._worker = Shared(self._model, self._flags)
        return self._worker

    def close(self) -> None:
        """End the present worker."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop()
