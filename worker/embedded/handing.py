"""What the trainer's code asks of the worker beside it; all of it runs in the worker's loop."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rollout_worker.core.holds import EVERYTHING, Want
from rollout_worker.engine import Tensors
from rollout_worker.lifecycle.governor import Mode
from rollout_worker.schemas import (
    CommitRequest,
    Lifecycle,
    PauseRequest,
    PushedBytes,
    ReleaseRequest,
    SleepRequest,
    StagedWeights,
    StageRequest,
    StageSource,
    WakeRequest,
    WeightsId,
)
from rollout_worker.service import Worker
from rollout_worker.wire.problems import ProblemError, conflict

HOLDER = "embedded:trainer"
"""The name of the trainer's own holds, and of what it stages."""


class HandOverFailed(RuntimeError):
    """The weights could not be taken; the text names the tensor and the fix. What served, serves on."""


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Weights that were handed over: their identity and content.

    `committed`: they serve, or will once the worker wakes; False in a pool, where the operator commits.
    """

    epoch: int
    version: int
    root_hash: str
    committed: bool


@dataclass(frozen=True, slots=True)
class HandOver:
    """Arguments of `Worker.hand_over`."""

    version: int
    epoch: int | None
    commit: bool | None
    in_flight: str
    drain_seconds: float
    deadline_seconds: float
    labels: Mapping[str, str]


async def hand_over(worker: Worker, given: Tensors, asked: HandOver) -> HandedOver:
    """Stage tensors of this process, and commit them unless an operator does.

    Raises:
        ProblemError: the order of identities, or the worker's state, forbids it.
        HandOverFailed: they are not weights of this model, or there is no room.
    """
    in_pool = worker.settings.in_pool
    if in_pool and asked.commit:
        raise ValueError("commit: in a pool the operator commits; move spec.weights.target instead")
    epoch = _epoch(worker) if asked.epoch is None else asked.epoch
    identity = WeightsId(epoch=epoch, version=asked.version)
    await _wake_empty(worker)
    staged = await _stage(worker, given, identity, asked)
    root_hash = staged.root_hash or ""
    if in_pool or asked.commit is False:
        return HandedOver(epoch, asked.version, root_hash, False)
    commit = CommitRequest.model_validate(
        {
            "epoch": epoch,
            "version": asked.version,
            "root_hash": root_hash,
            "in_flight": asked.in_flight,
            "deadline_seconds": asked.drain_seconds,
        }
    )
    await worker.commits.commit(HOLDER, commit)
    return HandedOver(epoch, asked.version, root_hash, True)


def _epoch(worker: Worker) -> int:
    """The trainer's epoch, as far as this worker knows it."""
    active = worker.updates.identity
    return max(worker.updates.fence.epoch, 0 if active is None else active.epoch)


async def _wake_empty(worker: Worker) -> None:
    """Take the weights' memory back without what it held, which is no more; the rest stays asleep."""
    runtime = worker.runtime
    asleep = runtime.lifecycle.state is Lifecycle.ASLEEP
    if asleep and not runtime.stats().resident.weights:
        await worker.verbs.wake(HOLDER, WakeRequest(tags=("weights",), load=False))


async def _stage(
    worker: Worker, given: Tensors, identity: WeightsId, asked: HandOver
) -> StagedWeights:
    request = StageRequest(
        epoch=identity.epoch,
        version=identity.version,
        source=StageSource(pushed=PushedBytes()),
        labels=asked.labels,
        deadline_seconds=asked.deadline_seconds,
    )
    view = await worker.updates.stage(HOLDER, request, given)
    while view.phase == "Staging":
        await worker.runtime.changed.wait(asked.deadline_seconds)
        slot = worker.updates.slot
        if slot is None or slot.identity != identity:
            raise conflict("changed-meanwhile", f"weights {identity} were discarded meanwhile")
        view = slot.view()
    if view.error is not None:
        raise HandOverFailed(view.error)
    return view


async def pause(worker: Worker, mode: Mode, drain_seconds: float) -> None:
    """Hold the worker Paused."""
    await worker.verbs.pause(HOLDER, PauseRequest(mode=mode, deadline_seconds=drain_seconds))


async def sleep(worker: Worker, level: Literal[1, 2], mode: Mode, drain_seconds: float) -> None:
    """Hold the worker Asleep, without memory."""
    request: dict[str, Any] = {"level": level, "mode": mode, "deadline_seconds": drain_seconds}
    await worker.verbs.sleep(HOLDER, SleepRequest.model_validate(request))


async def go_on(worker: Worker) -> None:
    """Drop the trainer's hold, whichever it is; returns once nobody but others holds the worker.

    Raises:
        ProblemError: the weights are gone or were changed, and the hold stays; or others hold it.
    """
    runtime = worker.runtime
    want = runtime.holds.of(HOLDER, time.monotonic())
    try:
        if want is Want.ASLEEP:
            # What is staged is what it is to wake with.
            load = worker.updates.slot is None
            await worker.verbs.wake(HOLDER, WakeRequest(tags=tuple(sorted(EVERYTHING)), load=load))
        else:
            await worker.verbs.resume(HOLDER, ReleaseRequest())
    except ProblemError as refusal:
        if refusal.slug in ("engine-refused", "weights-rejected"):
            _hold_again(worker, want)
        raise


def _hold_again(worker: Worker, want: Want) -> None:
    """Let a worker that can't go on rest until it can."""
    if want is Want.ASLEEP:
        worker.runtime.holds.sleep(HOLDER, 2, EVERYTHING)
    elif want is Want.PAUSED:
        worker.runtime.holds.pause(HOLDER)
    worker.runtime.changed.fire()
