"""The calls of the trainer's code on its embedded worker; all of them run in the worker's loop."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from rollout_common import wire
from rollout_common.wire.problems import ProblemError, conflict_problem
from rollout_worker.core.holds import EVERYTHING, WantedState
from rollout_worker.engine import TrainerTensors
from rollout_worker.service import WorkerService

EMBEDDED_HOLDER = "embedded:trainer"
"""The name of the trainer's holds, and of the caller that stages its weights."""


class HandOverFailed(RuntimeError):
    """The weights could not be staged; the text names the tensor and the fix. The former weights serve on."""


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
class HandOverOptions:
    """Arguments of `Worker.hand_over`."""

    version: int
    epoch: int | None
    commit: bool | None
    in_flight: wire.InFlightPolicy
    drain_seconds: float
    deadline_seconds: float
    labels: Mapping[str, str]


async def hand_over_weights(
    worker: WorkerService, given: TrainerTensors, asked: HandOverOptions
) -> HandedOver:
    """Stage tensors of this process, and commit them unless an operator does; raises as `Worker.hand_over` does."""
    in_pool = worker.settings.pool is not None
    if in_pool and asked.commit:
        raise ValueError("commit: in a pool the operator commits; move spec.weights.target instead")
    epoch = _known_epoch(worker) if asked.epoch is None else asked.epoch
    identity = wire.WeightsId(epoch=epoch, version=asked.version)
    await _wake_without_values(worker)
    staged = await _stage_tensors(worker, given, identity, asked)
    root_hash = staged.root_hash or ""
    if in_pool or asked.commit is False:
        return HandedOver(epoch, asked.version, root_hash, False)
    commit = wire.CommitRequest(
        epoch=epoch,
        version=asked.version,
        root_hash=root_hash,
        in_flight=asked.in_flight,
        deadline_seconds=asked.drain_seconds,
    )
    await worker.commits.commit_weights(EMBEDDED_HOLDER, commit)
    return HandedOver(epoch, asked.version, root_hash, True)


def _known_epoch(worker: WorkerService) -> int:
    """The highest epoch that this worker knows."""
    active = worker.updates.active_identity
    return max(worker.updates.fence.epoch, 0 if active is None else active.epoch)


async def _wake_without_values(worker: WorkerService) -> None:
    """Allocate the memory of weights that sleep has dropped; the KV cache stays asleep."""
    runtime = worker.runtime
    asleep = runtime.lifecycle.current_state is wire.Lifecycle.ASLEEP
    if asleep and not runtime.engine_stats().resident.weights:
        await worker.verbs.wake_worker(
            EMBEDDED_HOLDER, wire.WakeRequest(tags=("weights",), load=False)
        )


async def _stage_tensors(
    worker: WorkerService, given: TrainerTensors, identity: wire.WeightsId, asked: HandOverOptions
) -> wire.StagedWeights:
    request = wire.StageRequest(
        epoch=identity.epoch,
        version=identity.version,
        source=wire.StageSource(pushed=wire.PushedBytes()),
        labels=asked.labels,
        deadline_seconds=asked.deadline_seconds,
    )
    view = await worker.updates.stage_weights(EMBEDDED_HOLDER, request, given)
    while view.phase == "Staging":
        await worker.runtime.changed.wait_for_change(asked.deadline_seconds)
        slot = worker.updates.slot
        if slot is None or slot.identity != identity:
            raise conflict_problem(
                "changed-meanwhile", f"weights {identity} were discarded while they were staged"
            )
        view = slot.to_view()
    if view.error is not None:
        raise HandOverFailed(view.error)
    return view


async def get_state(worker: WorkerService) -> wire.WorkerState:
    """Return the worker's state."""
    return worker.worker_state(EMBEDDED_HOLDER)


async def release_hold(worker: WorkerService) -> None:
    """Release the trainer's hold, Paused or Asleep; returns once the worker serves.

    Raises:
        ProblemError: The weights are gone or were changed, and the hold stays; or other callers hold it.
    """
    runtime = worker.runtime
    want = runtime.holds.want_of(EMBEDDED_HOLDER, time.monotonic())
    try:
        if want is WantedState.ASLEEP:
            # Staged weights are about to be committed: wake without the old ones.
            load = worker.updates.slot is None
            await worker.verbs.wake_worker(
                EMBEDDED_HOLDER, wire.WakeRequest(tags=tuple(sorted(EVERYTHING)), load=load)
            )
        else:
            await worker.verbs.resume_worker(EMBEDDED_HOLDER, wire.ReleaseRequest())
    except ProblemError as refusal:
        if refusal.slug in ("engine-refused", "weights-rejected"):
            _restore_hold(worker, want)
        raise


def _restore_hold(worker: WorkerService, want: WantedState) -> None:
    """Hold a worker that can't resume as it was held before."""
    if want is WantedState.ASLEEP:
        worker.runtime.holds.hold_asleep(EMBEDDED_HOLDER, 2, EVERYTHING)
    elif want is WantedState.PAUSED:
        worker.runtime.holds.hold_paused(EMBEDDED_HOLDER)
    worker.runtime.changed.notify_all()
