"""A worker inside the trainer's own process: mode Hybrid.

`Worker` and `AsyncWorker` run the engine and both ports in a thread of the trainer's process, and take the
trainer's own tensors as weights. Engine and trainer use the accelerators by turns::

    with Worker(model=MODEL, auth="token", auth_token_file=FILE) as worker:
        for version in range(1, STEPS):
            samples = rollout()
            with worker.turn():
                train(model, samples)
                worker.hand_over(version, model)

The worker leaves the process alone otherwise: its signals, its root logger, its limits. docs/hybrid.md has
the rules for handed-over tensors.
"""

from rollout_common.wire.problems import ProblemError
from rollout_worker.settings import InvalidSettings

from .embedded_worker import AsyncWorker, Worker
from .handing_over import HandedOver, HandOverFailed
from .worker_host import WorkerEnded

__all__ = [
    "AsyncWorker",
    "HandOverFailed",
    "HandedOver",
    "InvalidSettings",
    "ProblemError",
    "Worker",
    "WorkerEnded",
]
