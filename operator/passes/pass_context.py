"""What a reconcile pass is given."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from rollout_operator.api.objects import PoolKey
from rollout_operator.cache.neighbour_informer import NeighbourInformer
from rollout_operator.cache.object_store import ObjectStore
from rollout_operator.config import OperatorConfig
from rollout_operator.core.pods.pod_reader import PodRecord
from rollout_operator.kube.event_recorder import EventRecorder
from rollout_operator.kube.gang_watch import GangWatch
from rollout_operator.kube.kube_client import KubeClient
from rollout_operator.operator_telemetry import OperatorTelemetry
from rollout_operator.workers.worker_clients import WorkerClients

from .status_pace import StatusPace


@dataclass(frozen=True, slots=True)
class PassContext:
    """Everything around a pass.

    Attributes:
        clock: Wall-clock seconds, to compare with the API server's times.
        monotonic: Monotonic seconds, for every interval that begins in this process.
    """

    config: OperatorConfig
    store: ObjectStore[PodRecord]
    neighbours: NeighbourInformer
    kube: KubeClient
    gangs: GangWatch
    workers: WorkerClients
    recorder: EventRecorder
    telemetry: OperatorTelemetry
    clock: Callable[[], float]
    monotonic: Callable[[], float]
    pace: StatusPace = field(default_factory=StatusPace)


ReconcileFunction = Callable[[PoolKey], Awaitable[float | None]]
"""One pass over a pool; returns in how many seconds to look again, or None."""
