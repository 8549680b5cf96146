"""Pools against a real API server, the operator in this process, pods without processes; whole.

`tests.support.cluster.processless` answers the control ports, on loopback addresses that are the pods'. A
thread plays the kubelet: it lets pods run and says whether they are ready. The operator has a
service account of its own, so that the audit log shows what it wrote, in order.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import pytest
from aiohttp import web

from localkube import Cluster
from rollout_client.worker_control import WorkerControl
from rollout_operator.api.gangs import GangScheduler
from rollout_operator.api.objects import PoolKey
from rollout_operator.config import EngineDefaults, OperatorConfig
from rollout_operator.operator_process import Operator
from rollout_operator.passes.pass_context import PassContext, ReconcileFunction
from rollout_operator.passes.reconcile import Reconciler
from rollout_operator.wiring import OperatorParts
from tests.support.api.apiclient import PODS, POOLS, Api, ApiError, Obj
from tests.support.cluster import processless
from tests.support.cluster.scalelab import AuditLog, Call, holds
from tests.support.manifests import pool as manifest

ACCOUNT, WORKERS = "operator", "rollout-worker"
GATE = "rollout.dev/serving"
NO_NODE = "example.com/no-node"
"""A label of pods that the lab's kubelet leaves alone."""
STRATEGIC = "application/strategic-merge-patch+json"


@dataclass(frozen=True, slots=True)
class Asked:
    """A call to a worker; `update` is the pool's `lastUpdate` as it stood in the API server then."""

    ip: str
    verb: str
    body: Obj
    update: Obj


@dataclass(slots=True)
class Fault:
    """What is wrong with the worker of one pod."""

    refuses: bool = False
    """It can't check who calls: each call is a 503."""
    missing: bool = False
    """It finds nothing at any path of weights."""
    failed: str = ""
    """Why its engine is dead; empty: it is not."""

    def before(self, request: web.Request, body: Obj) -> web.Response | None:
        """Return the answer instead of the worker's own; None: it has one."""
        if self.refuses:
            why = "tokenreviews.authentication.k8s.io is forbidden"
            return processless.problem(503, "auth-unavailable", why)
        if self.missing and request.path.endswith("/weights/stage"):
            why = f"{body['source']['path']!r} does not exist: check path and mounts"
            return processless.problem(409, "stage-failed", why)
        return None

    def after(self, request: web.Request, answer: web.StreamResponse) -> web.StreamResponse:
        """Return its own answer, or that of a dead engine."""
        if not (self.failed and request.path == "/v1/state" and isinstance(answer, web.Response)):
            return answer
        state = json.loads(answer.body)  # type: ignore[arg-type]
        state |= {"lifecycle": "Failed", "serving": False, "last_error": self.failed}
        return web.json_response(state)


class Serving(Protocol):
    """What the kubelet has to know of a pod."""

    @property
    def serving(self) -> bool:
        """Whether its worker serves."""


@dataclass(frozen=True, slots=True)
class Workers:
    """Who is behind the pods' addresses (127.77.0.1 and so on), and the port of their control."""

    pods: Mapping[str, Serving]
    port: int


class LabParts(OperatorParts):
    """The operator's parts; a pod's control port is the lab's one port at the pod's address."""

    def __init__(
        self, port: int, config: OperatorConfig, make: Any, spawned: Callable[[], None]
    ) -> None:
        self._port = port
        super().__init__(config, make, spawned)

    def worker_control(self, key: PoolKey, address: str) -> WorkerControl:
        """Call 127.x.y.z for any address: EndpointSlices take none of loopback."""
        host = address.rpartition(":")[0].partition(".")[2]
        return super().worker_control(key, f"127.{host}:{self._port}")


class LabOperator(Operator):
    """The operator, in a process of somebody else's."""

    def handle_signals(self) -> None:
        """Signals are pytest's."""


class PoolLab:
    """See the module; made by `pool_lab`."""

    context: PassContext
    operator: Operator
    running: asyncio.Task[int]
    """The operator's, until it is stopped."""

    def __init__(self, cluster: Cluster, namespace: str, api: Api) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.api = api
        self.asked: list[Asked] = []
        self.faults: dict[str, Fault] = {}
        """By address."""
        self._log = AuditLog(cluster, f"system:serviceaccount:{namespace}:{ACCOUNT}")

    def path(self, kind: str, name: str = "") -> str:
        """Path of a collection (`pools`, `pods`, `services`) or of an object in it."""
        known = {"pools": POOLS, "pods": PODS}
        base = known.get(kind, "/api/v1/namespaces/{}/" + kind).format(self.namespace)
        return f"{base}/{name}" if name else base

    def create(self, name: str, **spec: Any) -> Obj:
        return self.api.create(self.path("pools"), manifest(name, {"drainSeconds": 0, **spec}))

    def patch(self, name: str, **spec: Any) -> None:
        self.api.patch(self.path("pools", name), {"spec": spec})

    def annotate(self, name: str, note: str, value: str | None) -> None:
        """Set an annotation of a pool; None removes it."""
        self.api.patch(self.path("pools", name), {"metadata": {"annotations": {note: value}}})

    def get(self, name: str) -> Obj:
        return self.api.get(self.path("pools", name))

    def condition(self, name: str, kind: str) -> tuple[str, str, str]:
        """Status, reason and message of a pool's condition; empty: nobody has told it yet."""
        told = (self.get(name).get("status") or {}).get("conditions", ())
        found: Obj = next((each for each in told if each["type"] == kind), {})
        return found.get("status", ""), found.get("reason", ""), found.get("message", "")

    def events(self, name: str) -> dict[str, tuple[str, str]]:
        """Type and message of a pool's events, by reason."""
        path = f"/apis/events.k8s.io/v1/namespaces/{self.namespace}/events"
        return {
            e["reason"]: (e["type"], e.get("note", ""))
            for e in self.api.get(path)["items"]
            if e["regarding"].get("name") == name
        }

    def pods(self, name: str) -> dict[str, Obj]:
        found = self.api.get(self.path("pods"), labelSelector=f"rollout.dev/pool={name}")
        return {p["metadata"]["name"]: p for p in found["items"]}

    async def until_refused(self, pool: str, what: str) -> None:
        """Wait until the API server admits no pods of a pool."""
        container = {"name": "c", "image": "none"}
        labels = {"rollout.dev/pool": pool}
        probe: Obj = {
            "metadata": {"name": "probe", "labels": labels},
            "spec": {"containers": [container]},
        }

        def refuses() -> bool:
            try:
                self.api.create(self.path("pods") + "?dryRun=All", probe)
            except ApiError:
                return True
            return False

        await self.until(what, refuses)

    async def until(self, what: str, condition: Callable[[], object], seconds: float = 30) -> None:
        """Wait for something of the API server, which is asked in a thread."""
        end = time.monotonic() + seconds
        while not await asyncio.to_thread(condition):
            if time.monotonic() > end:
                pools = self.api.get(self.path("pools"))["items"]
                told = {p["metadata"]["name"]: p.get("status", {}).get("message") for p in pools}
                raise AssertionError(f"waited {seconds:g} s in vain: {what}; pools say {told}")
            await asyncio.sleep(0.05)

    async def reaches(self, name: str, condition: str = "Ready") -> None:
        """Wait until a condition of the pool is True for its newest generation."""
        await self.until(f"{name} is {condition}", lambda: holds(self.get(name), condition))

    async def committed(self, name: str, epoch: int, version: int) -> Obj:
        """Wait until these weights are committed and their bytes known; return what status says."""

        def found() -> Obj:
            weights: Obj = self.get(name).get("status", {}).get("weights", {})
            now: Obj = weights.get("committed") or {}
            is_it = (now.get("epoch"), now.get("version")) == (epoch, version)
            return now if is_it and now.get("rootHash") else {}

        await self.until(f"{name} serves ({epoch}, {version})", found)
        return found()

    def writes(self) -> list[Call]:
        """The operator's writes since this was last asked; events and tokens left out."""
        return [each for each in self._log.calls() if each.is_write and each.resource != "events"]

    @web.middleware
    async def record(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Note a call before it is answered."""
        assert request.transport is not None
        ip: str = request.transport.get_extra_info("sockname")[0]
        body = json.loads(await request.read() or b"{}")
        fault = self.faults.get(ip, Fault())
        if (refusal := fault.before(request, body)) is not None:
            return refusal
        if request.method == "POST":
            update = await asyncio.to_thread(self._update_of, ip)
            self.asked.append(Asked(ip, request.path.rpartition("/")[2], body, update))
        return fault.after(request, await handler(request))

    def worker_of(self, pod: str) -> Fault:
        """What is wrong with the worker of a pod that runs; change it to let it fail."""
        ip: str = self.api.get(self.path("pods", pod))["status"]["podIP"]
        return self.faults.setdefault(ip, Fault())

    def _update_of(self, ip: str) -> Obj:
        """What stands in the status of the pool that the pod at this address belongs to."""
        for pod in self.api.get(self.path("pods"))["items"]:
            if pod["status"].get("podIP") == ip:
                name = pod["metadata"]["labels"].get("rollout.dev/pool")
                if name is None:
                    return {}  # its label is gone, and comes back
                pool = self.get(name)
                found: Obj = pool.get("status", {}).get("weights", {}).get("lastUpdate") or {}
                return found
        return {}


class Kubelet:
    """Lets pods run, each at an address of its own, until `stop`."""

    def __init__(self, cluster: Cluster, namespace: str, workers: Mapping[str, Serving]) -> None:
        self._api = Api(cluster)
        self._path = PODS.format(namespace)
        self._workers = workers
        self._ended = threading.Event()
        self._numbers: dict[str, int] = {}
        self._thread = threading.Thread(target=self._run, daemon=True, name="kubelet")
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        with self._api:
            while not self._ended.wait(0.05):
                for pod in self._api.get(self._path)["items"]:
                    self._look(pod)

    def _look(self, pod: Obj) -> None:
        meta, status = pod["metadata"], pod["status"]
        labels = meta.get("labels", {})
        left_alone = "rollout.dev/pool" not in labels or NO_NODE in labels
        if left_alone or status["phase"] == "Failed":
            return
        ip = status.get("podIP")
        if ip is None:
            # By uid: a write that was lost must not cost an address.
            number = self._numbers.setdefault(meta["uid"], len(self._numbers))
            ip = f"127.77.{number // 250}.{number % 250 + 1}"
        gate = next((c["status"] for c in status.get("conditions", ()) if c["type"] == GATE), "")
        known = self._workers.get(ip)
        ready = gate == "True" and known is not None and known.serving
        if status["phase"] == "Running" and ready == _is_ready(pod):
            return
        change = {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]} | _running(ready)
        # Nor is what a test has said of the pod in between taken back.
        seen = {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}
        body = {"metadata": seen, "status": change}
        # Gone in between is nobody's fault.
        self._api.patch(f"{self._path}/{meta['name']}/status", body, kind=STRATEGIC, missing=True)


def _running(ready: bool) -> Obj:
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {
        "conditions": [{"type": "Ready", "status": str(ready), "lastTransitionTime": moment}],
        "containerStatuses": [
            {
                "name": "worker", "image": "none", "imageID": "", "ready": ready,
                "restartCount": 0, "state": {"running": {"startedAt": moment}},
            }
        ],
    }  # fmt: skip


def _is_ready(pod: Obj) -> bool:
    conditions = pod["status"].get("conditions", ())
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


@asynccontextmanager
async def _answering(server: processless.Server, lab: PoolLab) -> AsyncIterator[int]:
    """Answer at one port of every loopback address; yields it."""
    app = server.app()
    app.middlewares.append(lab.record)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    sock = socket.create_server(("0.0.0.0", 0), backlog=64)
    await web.SockSite(runner, sock).start()
    try:
        yield sock.getsockname()[1]
    finally:
        await runner.cleanup()


@asynccontextmanager
async def pool_lab(
    cluster: Cluster,
    namespace: str,
    workers: Workers | None = None,
    gang_scheduler: GangScheduler | None = None,
) -> AsyncIterator[PoolLab]:
    """Start everything in a namespace of its own, and remove it at the end.

    Args:
        cluster: With the CRD.
        namespace: Its name.
        workers: Real ones at the pods' addresses; None: one server answers for all pods.
        gang_scheduler: The one to use of several; None: the one that the cluster has.
    """
    async with AsyncExitStack() as stack:
        stack.enter_context(_namespace(cluster, namespace))
        api = stack.enter_context(Api(cluster))
        stack.enter_context(_account(cluster, namespace))
        lab = PoolLab(cluster, namespace, api)
        if workers is None:
            server = processless.Server()
            workers = Workers(server.pods, await stack.enter_async_context(_answering(server, lab)))

        def make(context: PassContext) -> ReconcileFunction:
            lab.context = context
            return Reconciler(context).reconcile

        operator = lab.operator = LabOperator(
            _config(namespace, gang_scheduler), make, make_parts=partial(LabParts, workers.port)
        )
        kubelet = Kubelet(cluster, namespace, workers.pods)
        running = lab.running = asyncio.create_task(operator.run())
        try:
            yield lab
        finally:
            operator.stop()
            assert await running == 0
            kubelet.stop()


def _config(namespace: str, gang_scheduler: GangScheduler | None) -> OperatorConfig:
    return OperatorConfig(
        watch_namespaces=(namespace,),
        leader_elect=False,
        lease_namespace=namespace,
        http_host="127.0.0.1",
        http_port=0,
        gang_scheduler=gang_scheduler,
        engines={"hf": EngineDefaults(image="localhost/none")},
    )


@contextmanager
def _namespace(cluster: Cluster, name: str) -> Iterator[None]:
    cluster.kubectl("create", "namespace", name)
    yield
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@contextmanager
def _account(cluster: Cluster, namespace: str) -> Iterator[None]:
    """Let the operator log in as an account that may do all."""
    for account in (ACCOUNT, WORKERS):
        cluster.kubectl("-n", namespace, "create", "serviceaccount", account)
    binding = f"{namespace}-{ACCOUNT}"
    cluster.kubectl(
        "create", "clusterrolebinding", binding, "--clusterrole=cluster-admin",
        f"--serviceaccount={namespace}:{ACCOUNT}",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        path = cluster.service_account_kubeconfig(namespace, ACCOUNT)
        patch.setenv("KUBECONFIG", str(path))
        yield
    cluster.kubectl("delete", "clusterrolebinding", binding)
