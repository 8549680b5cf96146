"""What an operator process is made of, and which part knows which.

Nothing runs yet: `operator_process.py` starts the parts, watches them and ends them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping

from rollout_client.worker_control import ControlError, WorkerControl
from rollout_common.wire import WorkerState
from rollout_operator.api.objects import PoolKey
from rollout_operator.core.replicas.hybrid import parse_candidate

from .api.names import token_audience
from .cache.kopf_streams import KopfStreams
from .cache.neighbour_informer import NeighbourInformer, NeighbourResource, ReadObject
from .cache.object_store import ObjectStore
from .cache.pool_informer import PoolInformer
from .cache.store_feed import StoreFeed
from .cache.workqueue import WorkQueue
from .config import OperatorConfig
from .core.pods.pod_reader import read_pod
from .core.trainer_pods import parse_resource_claim, parse_resource_slice, parse_trainer
from .kube.event_recorder import EventRecorder
from .kube.gang_watch import GangWatch
from .kube.installed_schema import InstalledSchema
from .kube.kube_client import KubeClient
from .kube.lease import Leadership, SoleLeader
from .operator_telemetry import OperatorTelemetry
from .passes.pass_context import PassContext, ReconcileFunction
from .passes.pass_loop import PassLoop
from .passes.status_pace import StatusPace
from .pool_page import FAILED_CALLS
from .workers.head_poller import HeadPoller
from .workers.worker_calls import WorkerCalls
from .workers.worker_clients import WorkerClients
from .workers.worker_connections import WorkerConnections

NEIGHBOUR_PARSERS: Mapping[NeighbourResource, ReadObject] = {
    "pods": parse_trainer,
    "resourceclaims": parse_resource_claim,
    "resourceslices": parse_resource_slice,
    "members": parse_candidate,
    "nodes": lambda node: str(node["metadata"]["name"]),
}
"""How objects next to pools are read, by what they are."""


class OperatorParts:
    """The parts of one operator process; `spawned` is called when kopf has set its signal handlers, see `KopfStreams`."""

    def __init__(
        self,
        config: OperatorConfig,
        make_reconcile: Callable[[PassContext], ReconcileFunction],
        spawned: Callable[[], None],
    ) -> None:
        self._config = config
        self.telemetry = telemetry = OperatorTelemetry()
        self.kube = KubeClient(
            on_request=telemetry.count_request, service_account=config.own_service_account()
        )
        self.leadership = _make_leadership(config, self.kube)
        self.kube.fence_with(self.leadership.write_seconds)
        self.installed = InstalledSchema(self.kube)
        self.recorder = EventRecorder(self.kube, instance=config.pod_name)
        self._add_cache(spawned)
        self._add_workers()
        self.passes = PassLoop(
            make_reconcile(self._make_context()),
            self.queue,
            telemetry,
            workers=config.workers,
            may_run=self.leadership.may_write,
            is_listed=self.informer.is_listed,
        )

    def _add_cache(self, spawned: Callable[[], None]) -> None:
        config, telemetry = self._config, self.telemetry
        self.store = ObjectStore(read_pod, config.operator_class, self.leadership.covers_pool)
        self.queue: WorkQueue[PoolKey] = WorkQueue(on_wait=telemetry.queue_wait.observe)
        self.pace = StatusPace()
        self.feed = StoreFeed(self.store, self.queue, telemetry, self.pace.moving_count)
        self.informer = PoolInformer(
            self.kube,
            self.feed,
            namespaces=config.watch_namespaces,
            interval=config.resync_seconds,
            lost=lambda: self.streams.restart(),
        )
        self.neighbours = NeighbourInformer(self.kube, NEIGHBOUR_PARSERS, self.feed.note_change)
        self.gangs = GangWatch(
            self.kube, self._wake_pool, config.watch_namespaces, config.gang_scheduler
        )
        self.streams = KopfStreams(
            self.informer.take_pool_event,
            namespaces=self.informer.streamed_namespaces,
            spawned=spawned,
            listed=self.informer.list_pools,
        )

    def _wake_pool(self, key: PoolKey) -> None:
        """Have a pool looked at again; PodGroups are listed of all pools, also of another operator's."""
        if self.store.find_pool(key) is not None:
            self.queue.add(key)

    def _add_workers(self) -> None:
        self.connections = WorkerConnections(self._config.control_ca_file)
        self.poller = HeadPoller(self._ask_state, self.feed.note_change)
        self.calls = WorkerCalls(
            self.feed.note_change,
            after=lambda call_key, answer: self.workers.note_call_end(call_key, answer),
            may_start=self.leadership.may_write,
            failed=lambda key, verb: self.telemetry.pools.count_event(key, FAILED_CALLS, verb=verb),
        )
        self.workers = WorkerClients(self.poller, self.calls, self.worker_control)

    def _make_context(self) -> PassContext:
        return PassContext(
            config=self._config,
            store=self.store,
            neighbours=self.neighbours,
            kube=self.kube,
            gangs=self.gangs,
            workers=self.workers,
            recorder=self.recorder,
            telemetry=self.telemetry,
            pace=self.pace,
            clock=time.time,
            monotonic=time.monotonic,
        )

    def worker_control(self, key: PoolKey, address: str) -> WorkerControl:
        """Return the client of a worker's control port at `host:port`."""

        async def token() -> str | None:
            if self._config.service_account is None:
                return None  # a worker that wants one says so
            return await self.kube.get_token(token_audience(key.namespace, key.name))

        scheme = "http" if self._config.control_ca_file is None else "https"
        return WorkerControl(f"{scheme}://{address}", token, self.connections.send_request)

    async def _ask_state(self, key: PoolKey, address: str) -> WorkerState:
        try:
            return await self.worker_control(key, address).state()
        except ControlError as error:
            if error.status == 401:
                self.kube.forget_token(token_audience(key.namespace, key.name))
            raise


def _make_leadership(config: OperatorConfig, kube: KubeClient) -> Leadership:
    kind = Leadership if config.leader_elect else SoleLeader
    return kind(
        kube,
        namespace=config.lease_namespace,
        name=config.lease_name,
        identity=f"{config.pod_name}_{uuid.uuid4()}",
        shards=config.shards if config.leader_elect else 1,
    )
