"""What an operator process is made of, and which part knows which.

Nothing runs yet: `runtime.py` starts the parts, watches them and ends them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

from rollout_client.control import ControlError, WorkerControl
from rollout_operator.api.objects import Key
from rollout_worker.schemas import WorkerState

from .api.names import audience
from .cache.feed import Feed
from .cache.neighbours import Neighbourhood
from .cache.resync import Resync
from .cache.store import Store
from .cache.streams import Streams
from .cache.workqueue import WorkQueue
from .config import Config
from .core.hybrid import parse_candidate
from .core.trainers import parse_claim, parse_slice, parse_trainer
from .kube.client import Kube
from .kube.events import Recorder
from .kube.installed import InstalledSchema
from .kube.lease import Leadership, SoleLeader
from .passes.context import Context, Reconcile
from .passes.loop import Passes
from .telemetry import Telemetry
from .workers.calls import Calls
from .workers.connections import Connections
from .workers.poller import Poller
from .workers.talk import Workers


class Parts:
    """The parts of one operator process.

    Args:
        config: The settings.
        make_reconcile: Makes the pass from the context.
        spawned: Called when kopf has set its signal handlers, see `Streams`.
    """

    def __init__(
        self,
        config: Config,
        make_reconcile: Callable[[Context], Reconcile],
        spawned: Callable[[], None],
    ) -> None:
        self._config = config
        self.telemetry = telemetry = Telemetry()
        self.kube = Kube(on_request=telemetry.request, service_account=config.account())
        self.leadership = _leadership(config, self.kube)
        self.kube.fence_with(self.leadership.write_seconds)
        self.installed = InstalledSchema(self.kube)
        self.recorder = Recorder(self.kube, instance=config.pod_name)
        self._add_cache(spawned)
        self._add_workers()
        self.passes = Passes(
            make_reconcile(self._context()),
            self.queue,
            telemetry,
            workers=config.workers,
            may_run=self.leadership.may_write,
        )

    def _add_cache(self, spawned: Callable[[], None]) -> None:
        config, telemetry = self._config, self.telemetry
        self.store = Store(config.operator_class)
        self.queue: WorkQueue[Key] = WorkQueue(on_wait=telemetry.queue_wait.observe)
        self.resync = Resync(
            self.kube,
            self.store,
            self.queue,
            telemetry,
            namespaces=config.watch_namespaces,
            interval=config.resync_seconds,
        )
        self.feed = Feed(self.store, self.queue, telemetry, self.resync)
        self.neighbours = Neighbourhood(
            self.kube,
            {
                "pods": parse_trainer,
                "resourceclaims": parse_claim,
                "resourceslices": parse_slice,
                "members": parse_candidate,
            },
            self.feed.part_changed,
        )
        self.streams = Streams(
            self.feed,
            namespaces=config.watch_namespaces,
            spawned=spawned,
            listed=self.resync.first,
        )

    def _add_workers(self) -> None:
        self.connections = Connections(self._config.control_ca_file)
        self.poller = Poller(self._ask, self.feed.part_changed)
        self.calls = Calls(
            self.queue.add,
            after=lambda lane, answer: self.workers.ended(lane, answer),
            may_start=self.leadership.may_write,
            failed=self.telemetry.call_failed,
        )
        self.workers = Workers(self.poller, self.calls, self.control)

    def _context(self) -> Context:
        return Context(
            config=self._config,
            store=self.store,
            neighbours=self.neighbours,
            kube=self.kube,
            workers=self.workers,
            recorder=self.recorder,
            telemetry=self.telemetry,
            clock=time.time,
            monotonic=time.monotonic,
        )

    def control(self, key: Key, address: str) -> WorkerControl:
        """Return the client of a worker's control port at `host:port`."""

        async def token() -> str | None:
            if self._config.service_account is None:
                return None  # a worker that wants one says so
            return await self.kube.token(audience(key.namespace, key.name))

        scheme = "http" if self._config.control_ca_file is None else "https"
        return WorkerControl(f"{scheme}://{address}", token, self.connections.send)

    async def _ask(self, key: Key, address: str) -> WorkerState:
        try:
            return await self.control(key, address).state()
        except ControlError as error:
            if error.status == 401:
                self.kube.forget_token(audience(key.namespace, key.name))
            raise


def _leadership(config: Config, kube: Kube) -> Leadership | SoleLeader:
    if not config.leader_elect:
        return SoleLeader()
    return Leadership(
        kube,
        namespace=config.lease_namespace,
        name=config.lease_name,
        identity=f"{config.pod_name}_{uuid.uuid4()}",
    )
