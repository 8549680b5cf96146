"""An operator's process over a `MemoryServer`: its real parts, all but its Lease, and whoever stands between its acts and the world.

An act is a write to the API server, or a call that changes a worker. What stands in for kopf resumes a stream as
kopf does: from the last version that it saw, without another list.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from rollout_client.worker_control import WorkerControl
from rollout_common.kube.access import ClusterAccess
from rollout_common.kube.errors import Gone, KubeError
from rollout_common.kube.reflector import list_pages, watch_events
from rollout_operator.api.names import PLURAL
from rollout_operator.api.objects import PoolKey
from rollout_operator.cache.neighbour_informer import NeighbourInformer
from rollout_operator.cache.object_store import ObjectStore
from rollout_operator.cache.pool_informer import PoolInformer
from rollout_operator.cache.store_feed import StoreFeed
from rollout_operator.cache.workqueue import WorkQueue
from rollout_operator.config import EngineDefaults, OperatorConfig
from rollout_operator.core.pods.pod_reader import read_pod
from rollout_operator.kube.event_recorder import EventRecorder
from rollout_operator.kube.gang_watch import GangWatch
from rollout_operator.kube.kube_client import KubeClient, resource_collection
from rollout_operator.operator_telemetry import OperatorTelemetry
from rollout_operator.passes.pass_context import PassContext
from rollout_operator.passes.pass_loop import PassLoop
from rollout_operator.passes.reconcile import Reconciler
from rollout_operator.wiring import NEIGHBOUR_PARSERS
from rollout_operator.workers.head_poller import HeadPoller
from rollout_operator.workers.worker_calls import WorkerCalls
from rollout_operator.workers.worker_clients import WorkerClients
from tests.support.faults.memory_nodes import Nodes
from tests.support.faults.memory_wire import Act, MemoryConnections, MemoryServer
from tests.support.unit.simanswers import answer_call

Send = Callable[["FaultyOperator", str, Act], Awaitable[tuple[int, bytes]]]
"""Takes what an act is and does."""


class FaultyOperator:
    """See the module.

    Args:
        server: The API server.
        nodes: Where workers are.
        wall: The wall clock of this process.
        send: Does an act, or lets something else happen; returns code and body.
        watched: Called with what each act is, as it takes effect.
    """

    def __init__(
        self,
        server: MemoryServer,
        nodes: Nodes,
        wall: Callable[[], float],
        send: Send,
        watched: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.server, self.nodes, self._send = server, nodes, send
        self.watched = watched
        self.gone = asyncio.Event()
        """It is dead, or frozen: nothing that it does reaches anybody."""
        self.late: list[tuple[str, Act]] = []
        """What it had begun when it froze."""
        loop = asyncio.get_running_loop()
        self.kube = KubeClient()
        self.kube._load = lambda: ClusterAccess("memory", None, lambda: None, "rl")  # type: ignore[arg-type]
        self.kube._connect = lambda access: MemoryConnections(server, self.send_act)
        telemetry, self.store = OperatorTelemetry(), ObjectStore(read_pod)
        self.queue: WorkQueue[PoolKey] = WorkQueue(clock=loop.time)
        self.feed = StoreFeed(self.store, self.queue, telemetry)
        self.informer = PoolInformer(self.kube, self.feed, lost=self._restart_stream)
        self._stream: asyncio.Task[None] | None = None
        self.neighbours = NeighbourInformer(
            self.kube,
            NEIGHBOUR_PARSERS,
            self.feed.note_change,
        )
        self.poller = HeadPoller(
            lambda key, address: self.control(key, address).state(),
            self.feed.note_change,
            clock=loop.time,
        )
        self.calls = WorkerCalls(
            self.queue.add,
            after=lambda lane, answer: self.workers.note_call_end(lane, answer),
            clock=loop.time,
        )
        self.workers = WorkerClients(self.poller, self.calls, self.control)
        self.context = PassContext(
            config=OperatorConfig(engines={"hf": EngineDefaults(image="localhost/none")}),
            store=self.store,
            neighbours=self.neighbours,
            kube=self.kube,
            gangs=GangWatch(self.kube, lambda key: None),
            workers=self.workers,
            recorder=EventRecorder(self.kube, instance="memory", clock=loop.time),
            telemetry=telemetry,
            clock=wall,
            monotonic=loop.time,
        )
        self.passes = PassLoop(
            Reconciler(self.context).reconcile,
            self.queue,
            telemetry,
            workers=2,
            may_run=lambda: not self.gone.is_set(),
        )
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.informer.run())
            await self.informer.wait_listed()
            self._restart_stream()
            tasks.create_task(self.poller.run())
            tasks.create_task(self.neighbours.run())
            tasks.create_task(self.passes.run())
            self.informer.schedule_pool_list(5.0)

    async def end(self) -> None:
        """Let the process be gone, with all that it had begun."""
        self.gone.set()
        for task in filter(None, (self._task, self._stream)):
            task.cancel()
        await self.calls.cancel_all()
        await asyncio.gather(*filter(None, (self._task, self._stream)), return_exceptions=True)

    def _restart_stream(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
        self._stream = asyncio.create_task(self._follow_pools())

    async def _follow_pools(self) -> None:
        of, version = resource_collection(PLURAL, None), ""
        while True:
            try:
                if not version:
                    async for page in list_pages(self.kube, of):
                        version = page.resource_version
                        for item in page.items:
                            self.informer.take_pool_event(None, item)
                async for kind, obj in watch_events(self.kube, of, version, 300):
                    version = obj["metadata"]["resourceVersion"]
                    self.informer.take_pool_event(kind, obj)
            except Gone:
                version = ""
            except KubeError:
                await asyncio.sleep(1)
            await asyncio.sleep(0.1)

    async def send_act(self, what: str, act: Act) -> tuple[int, bytes]:
        """Do one act, or let the accident happen instead."""
        if self.gone.is_set():
            self.late.append((what, act))
            await asyncio.Event().wait()
        return await self._send(self, what, act)

    def do(self, what: str, act: Act) -> tuple[int, bytes]:
        """Let an act take effect."""
        self.watched(what)
        return act()

    def control(self, key: PoolKey, address: str) -> WorkerControl:
        async def token() -> str | None:
            return None

        return WorkerControl(f"http://{address}", token, self._send_to_worker)

    async def _send_to_worker(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, seconds: float
    ) -> tuple[int, bytes]:
        address, _, verb = url.removeprefix("http://").partition("/v1/")
        await asyncio.sleep(0.001)

        def act() -> tuple[int, bytes]:
            worker = self.nodes.worker_at(address)
            if worker is None or worker.silent:
                return 0, b""
            return answer_call(worker, verb.rpartition("/")[2], body or b"")

        async with asyncio.timeout(seconds):
            if verb == "state":
                if self.gone.is_set():
                    await asyncio.Event().wait()
                code, answer = act()
            else:
                text = (body or b"").decode()
                code, answer = await self.send_act(f"{verb} {address} {text}", act)
        if not code:
            raise ConnectionRefusedError(f"{address} does not answer")
        return code, answer
