"""A whole worker without sockets over the tiny engine, in the test's own loop."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Collection, Coroutine
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from rollout_common.wire.problems import ProblemError
from rollout_worker.engine import Engine
from rollout_worker.requests.in_flight_requests import InFlightRequest
from rollout_worker.requests.running_output import RunningOutput
from rollout_worker.schemas import (
    Capabilities,
    CommitRequest,
    CommitResponse,
    GenerateRequest,
    Lifecycle,
    PauseRequest,
    ReleaseRequest,
    SleepRequest,
    StagedWeights,
    StageRequest,
    WakeRequest,
    WeightsId,
)
from rollout_worker.service import WorkerService
from rollout_worker.settings import WorkerSettings, add_flags, parse_settings
from rollout_worker.updates.staging_slot import StagingSlot
from tests.support.unit.tiny_engine import ABLE, Gate, TinyEngine, write_weights
from tests.support.waiting import until

T = TypeVar("T")

LONG = 40
"""Tokens of a request that lasts until a test lets the engine step freely."""


def settings(*flags: str) -> WorkerSettings:
    """Settings of a worker by itself."""
    alone = ["--model", "model", "--auth", "none", "--control-host", "127.0.0.1"]
    return parse_settings(_parser().parse_args([*alone, "--restart-delays", "0", *flags]), {})


@functools.cache
def _parser() -> argparse.ArgumentParser:
    """A parser of the worker's flags, which takes longer to make than most tests."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parser


class TinyWorker:
    """A worker, its present engine, and the calls that tests make most."""

    def __init__(self, home: Path, flags: Collection[str]) -> None:
        self.home = home
        self.model = write_weights(home / "model", 100)
        self.rows = 8
        self.engines: list[TinyEngine] = []
        self.able = ABLE
        """Capabilities of the next engine."""
        self.before_start: dict[str, Any] = {}
        """`before` of the next engine."""
        self.worker = WorkerService(settings(*flags), self._make)
        self.runtime = self.worker.runtime
        self.updates, self.commits = self.worker.updates, self.worker.commits
        self.verbs, self.flights = self.worker.verbs, self.worker.flights

    def _make(self) -> Engine:
        engine = TinyEngine(self.model, self.rows)
        engine.capabilities = self.able
        engine.before.update(self.before_start)
        self.engines.append(engine)
        return cast(Engine, engine)

    @property
    def engine(self) -> TinyEngine:
        return self.engines[-1]

    @property
    def state(self) -> Lifecycle:
        return self.runtime.lifecycle.current_state

    async def hold_call(
        self, call: str, doing: Coroutine[Any, Any, T]
    ) -> tuple[Gate, asyncio.Task[T]]:
        """Do something until it has called the engine so, which waits there until the gate is opened."""
        gate = self.engine.before[call] = Gate()
        task = asyncio.create_task(doing)
        await gate.reached.wait()
        return gate, task

    async def reaches(self, state: Lifecycle) -> None:
        await until(lambda: self.state is state, what=f"{state.value}, it is {self.state.value}")

    async def is_replaced(self) -> None:
        """Wait until the next engine serves in the place of the first."""
        await until(lambda: self.runtime.restarts == 1, what="the restart")
        await self.reaches(Lifecycle.ACTIVE)

    # Weights.

    @property
    def slot(self) -> StagingSlot:
        """What is being staged, or is staged."""
        assert self.updates.slot is not None
        return self.updates.slot

    def weights(self, number: int) -> Path:
        """A folder of weights whose tokens are `number`."""
        return write_weights(self.home / f"w{number}", number)

    async def begin_stage(self, version: int, number: int, **fields: Any) -> StagedWeights:
        """Begin to stage (1, version)."""
        body = {
            "epoch": 1,
            "version": version,
            "source": {"path": str(self.weights(number))},
            **fields,
        }
        return await self.updates.stage_weights("me", StageRequest.model_validate(body))

    async def stage(self, version: int, number: int, **fields: Any) -> StagedWeights:
        """Stage (1, version) to the end, good or bad, or until the slot is given up."""
        begun = await self.begin_stage(version, number, **fields)
        slot = self.updates.slot
        if slot is None:  # active already, or given up at once
            return begun

        def ended() -> bool:
            return slot.to_view().phase != "Staging" or self.updates.slot is not slot

        await until(ended, what="the end of staging")
        return slot.to_view()

    async def commit(self, version: int, **fields: Any) -> CommitResponse:
        """Commit (1, version)."""
        body = {"epoch": 1, "version": version, **fields}
        return await self.commits.commit_weights("me", CommitRequest.model_validate(body))

    async def update(self, version: int, number: int, **fields: Any) -> CommitResponse:
        staged = await self.stage(version, number)
        assert staged.phase == "Staged", staged.error
        return await self.commit(version, **fields)

    @property
    def active(self) -> WeightsId | None:
        return self.updates.active_identity

    # Requests.

    async def begin(self, name: str, tokens: int = LONG, **fields: Any) -> InFlightRequest:
        """Submit a request and wait until the engine has it."""
        body = {
            "request_id": name,
            "token_ids": [1, 2, 3],
            "sampling": {"max_tokens": tokens, **fields.pop("sampling", {})},
            **fields,
        }
        flight = self.worker.submit_request(GenerateRequest.model_validate(body))
        known = {output.request.request_id for output in flight.outputs}
        await until(lambda: known <= self.engine.known or flight.done.is_set(), what=name)
        return flight

    async def runs(
        self, name: str, made: int = 2, tokens: int = LONG, **fields: Any
    ) -> InFlightRequest:
        """Submit a request and wait until it has made so many tokens."""
        flight = await self.begin(name, tokens, **fields)
        self.engine.step(made)
        await until(lambda: len(flight.outputs[0].token_ids) >= made, what=f"tokens of {name}")
        return flight

    async def ends(self, flight: InFlightRequest) -> RunningOutput:
        """Let the engine run until a request has ended; returns its first output."""
        self.engine.free = True
        await asyncio.wait_for(flight.done.wait(), 10)
        return flight.outputs[0]

    # Holds.

    async def pause(self, holder: str = "me", **fields: Any) -> None:
        await self.verbs.pause_worker(holder, PauseRequest(**fields))

    async def resume(self, holder: str = "me") -> None:
        await self.verbs.resume_worker(holder, ReleaseRequest())

    async def sleep(self, holder: str = "me", **fields: Any) -> None:
        await self.verbs.put_to_sleep(holder, SleepRequest(**fields))

    async def wake(self, holder: str = "me", **fields: Any) -> None:
        await self.verbs.wake_worker(holder, WakeRequest(**fields))


@contextlib.asynccontextmanager
async def tiny_worker(
    home: Path, *flags: str, rows: int = 8, loads: bool = True, able: Capabilities = ABLE
) -> AsyncIterator[TinyWorker]:
    """Run a worker until the block ends; no engine of it may have been treated badly.

    Args:
        home: where its files go.
        flags: of its command line.
        rows: what its engine runs at once.
        loads: whether to wait until it has loaded one.
        able: capabilities of its engines.
    """
    worker = TinyWorker(home, flags)
    worker.able = able
    worker.rows = rows
    running = asyncio.create_task(worker.worker.run_until_cancelled())
    try:
        if loads:
            await until(lambda: worker.runtime.lifecycle.has_engine, what="the engine")
        yield worker
        assert not running.done(), "its own loops go on"
    finally:
        running.cancel()
        await asyncio.wait({running})
        await worker.worker.supervisor.end_engine()
    broken = [rule for engine in worker.engines for rule in engine.broken]
    assert not broken, f"the worker treated its engine badly: {broken}"


def made_by(output: RunningOutput) -> list[tuple[int, int, bool]]:
    """(number, version, stale_kv) of each stretch of an output: what made it, and its label."""
    found: list[tuple[int, int, bool]] = []
    for span in output.spans:
        for token in output.token_ids[span.start : span.end]:
            kind = (token, span.version, span.stale_kv)
            if not found or found[-1] != kind:
                found.append(kind)
    assert not output.spans or output.spans[-1].end == len(output.token_ids)
    return found


@contextlib.contextmanager
def refused(slug: str) -> Any:
    """The block is refused with this kind of problem; yields it."""
    with pytest.raises(ProblemError) as caught:
        yield caught
    assert caught.value.slug == slug, str(caught.value)
