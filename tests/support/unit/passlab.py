"""One pool and its passes by themselves: the API server is scripted, the workers answer from memory; whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollout_client.worker_control import WorkerControl
from rollout_operator.api import names
from rollout_operator.api.objects import Obj, PoolKey, ResourceName
from rollout_operator.api.revision import pod_revision
from rollout_operator.api.spec import parse_spec
from rollout_operator.cache.neighbour_informer import NeighbourInformer
from rollout_operator.cache.object_store import ObjectStore
from rollout_operator.config import EngineDefaults, OperatorConfig
from rollout_operator.core.pass_plan import DisruptionBudget
from rollout_operator.core.pods.pod_reader import PodRecord, read_pod
from rollout_operator.core.replicas.disruption import disruption_budget
from rollout_operator.core.services import pool_services
from rollout_operator.kube.event_recorder import EventRecorder
from rollout_operator.kube.gang_watch import GangWatch
from rollout_operator.kube.kube_client import KubeClient
from rollout_operator.operator_telemetry import OperatorTelemetry
from rollout_operator.passes.pass_context import PassContext
from rollout_operator.passes.reconcile import Reconciler
from rollout_operator.wiring import NEIGHBOUR_PARSERS
from rollout_operator.workers import head_poller
from rollout_operator.workers.head_poller import AskState, HeadPoller
from rollout_operator.workers.worker_calls import WorkerCalls
from rollout_operator.workers.worker_clients import WorkerClients
from rollout_worker.schemas import WeightsId
from tests.support.loopback import Loopback, kubeconfig, loopback
from tests.support.unit.poolspecs import NOW
from tests.support.unit.simanswers import answer_call
from tests.support.unit.simworker import SimWorker
from tests.support.waiting import until

KEY = PoolKey("rl", "math")
BUDGET = "/apis/policy/v1/namespaces/rl/poddisruptionbudgets/math"
PODS = "/api/v1/namespaces/rl/pods"
POOL = "/apis/rollout.dev/v1alpha1/namespaces/rl/rolloutreplicas/math"


@dataclass
class Clock:
    """What the process reads: a wall clock that people set, and one that only goes on."""

    wall: float = NOW
    steady: float = 1000.0


class Told(EventRecorder):
    """Keeps events instead of posting them: (type, reason, message)."""

    def __init__(self, kube: KubeClient) -> None:
        super().__init__(kube, instance="o")
        self.events: list[tuple[str, str, str]] = []

    def record_event(self, pool: Obj, type: str, reason: str, message: str) -> None:  # noqa: A002
        assert pool["metadata"]["name"] == KEY.name
        self.events.append((type, reason, message))


class Watched(HeadPoller):
    """Knows whom it polls, and whether often."""

    def __init__(self, ask: AskState) -> None:
        super().__init__(ask, lambda key: None)
        self.fast: dict[str, bool] = {}

    def watch_head(self, key: PoolKey, pod_uid: str, address: str, fast: bool) -> None:
        self.fast[pod_uid] = fast
        super().watch_head(key, pod_uid, address, fast)

    def unwatch_head(self, pod_uid: str) -> None:
        self.fast.pop(pod_uid, None)
        super().unwatch_head(pod_uid)


class PassLab:
    """See the module; made by `pass_lab`."""

    def __init__(self, api: Loopback, kube: KubeClient) -> None:
        self.api = api
        self.clock = Clock()
        self.workers: dict[str, SimWorker] = {}
        """By address of the control port; who is not there does not answer."""
        self.asked: list[tuple[str, str]] = []
        """(address, verb) of each call to a worker."""
        self.bodies: list[Obj] = []
        """Of those calls."""
        self.refusals: dict[str, Obj] = {}
        """What workers answer to a verb instead of doing it, as a problem."""
        self.written: list[Obj] = []
        """Statuses as they were written."""
        self.poller = Watched(lambda key, address: self.control(key, address).state())
        self.told = Told(kube)
        self._raw_pods: dict[str, Obj] = {}
        self.calls = WorkerCalls(lambda key: None, clock=lambda: self.clock.steady)
        self.ctx = PassContext(
            config=OperatorConfig(engines={"hf": EngineDefaults(image="localhost/none")}),
            store=ObjectStore(self._read_pod),
            neighbours=NeighbourInformer(
                kube,
                NEIGHBOUR_PARSERS,
                lambda key: None,
            ),
            kube=kube,
            gangs=GangWatch(kube, lambda key: None),
            workers=WorkerClients(self.poller, self.calls, self.control),
            recorder=self.told,
            telemetry=OperatorTelemetry(),
            clock=lambda: self.clock.wall,
            monotonic=lambda: self.clock.steady,
        )
        self.reconciler = Reconciler(self.ctx)
        api.answers["PATCH", f"{POOL}/status"] = self._take_status
        api.answers["PATCH", BUDGET] = self._take_budget

    # The cluster.

    def has_pool(self, **spec: Any) -> Obj:
        """Put the pool into the store, and its Services."""
        found = pool(**spec)
        self.ctx.store.upsert_written("pools", found)
        nodes = spec.get("parallelism", {}).get("nodes", 1)
        pods = 0 if spec.get("suspend") else spec.get("replicas", 1) * nodes
        settled_services(self.ctx, selecting=spec.get("mode") != "Hybrid", pods=pods)
        return found

    def change(self, notes: dict[str, str] | None = None, **spec: Any) -> None:
        """Let somebody change the pool's spec, or its annotations."""
        now = self.stored
        generation = now["metadata"]["generation"] + 1
        again = changed(now, generation=generation, annotations=notes or {})
        self.ctx.store.upsert_written("pools", {**again, "spec": now["spec"] | spec})

    def goes(self) -> None:
        """Let the watch show that the pool is deleted."""
        self.sees("pools", "DELETED", changed(self.stored))

    def sees(self, resource: ResourceName, event: str, obj: Obj) -> None:
        """Let the watch show an event."""
        store = self.ctx.store
        store.apply_event(resource, event, store.read_object(resource, obj))

    def _read_pod(self, obj: Obj) -> PodRecord:
        self._raw_pods[obj["metadata"]["name"]] = obj
        return read_pod(obj)

    @property
    def pods(self) -> list[Obj]:
        """The pods in the store, as the API server gave them."""
        return [self._raw_pods[each.name] for each in self.ctx.store.pool_pods(KEY)]

    def lists(self, path: str, *items: Obj) -> None:
        """Let a list hold these objects, and nothing happen after it."""

        async def answer(request: web.Request) -> web.StreamResponse:
            if "watch" not in request.query:
                return web.json_response({"metadata": {"resourceVersion": "9"}, "items": [*items]})
            stream = web.StreamResponse()
            await stream.prepare(request)
            await asyncio.sleep(60)
            return stream

        self.api.answers["GET", path] = answer

    def has_pod(self, found: Obj, worker: SimWorker | None = None) -> str:
        """Put a pod into the store, and its worker behind its address; returns the pod's uid."""
        self.ctx.store.upsert_written("pods", found)
        name = found["metadata"]["name"]
        self.api.answers["PATCH", f"{PODS}/{name}/status"] = self._take_conditions
        self.api.answers["DELETE", f"{PODS}/{name}"] = self._take_delete
        if worker is not None:
            self.workers[address_of(found)] = worker
        uid: str = found["metadata"]["uid"]
        return uid

    async def _take_status(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.text())
        self.written.append(body["status"])
        version = str(int(body["metadata"]["resourceVersion"]) + 1)
        again = changed(self.stored, resourceVersion=version)
        return web.json_response({**again, "status": body["status"]})

    async def _take_budget(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.text())
        [now] = self.ctx.store.pool_budgets(KEY)
        return web.json_response({**changed(now), "spec": body["spec"]})

    async def _take_conditions(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.text())
        now = self._pod_of(body["metadata"]["uid"])
        labels = {**now["metadata"]["labels"], **body["metadata"].get("labels", {})}
        given = body.get("status", {}).get("conditions", [])
        kinds = {c["type"] for c in given}
        kept = [c for c in now["status"].get("conditions", ()) if c["type"] not in kinds]
        status = {**now["status"], "conditions": [*kept, *given]}
        return web.json_response({**changed(now, labels=labels), "status": status})

    async def _take_delete(self, request: web.Request) -> web.StreamResponse:
        """Let the pod terminate; one that terminates already stays as it is."""
        now = self._pod_of(json.loads(await request.text())["preconditions"]["uid"])
        goes = "deletionTimestamp" in now["metadata"]
        again = now if goes else changed(now, deletionTimestamp="1970-01-12T13:46:40Z")
        return web.json_response(again)

    def _pod_of(self, uid: str) -> Obj:
        return next(p for p in self.pods if p["metadata"]["uid"] == uid)

    @property
    def status(self) -> Obj:
        """The last status that was written."""
        return self.written[-1]

    @property
    def stored(self) -> Obj:
        """The pool in the store, which must be there."""
        found = self.ctx.store.find_pool(KEY)
        assert found is not None
        return found

    @property
    def page(self) -> str:
        """What Prometheus reads."""
        return self.ctx.telemetry.render_page().decode()

    @property
    def pod_writes(self) -> list[tuple[str, str]]:
        """(method, name) of all writes of pods so far, in order."""
        return [
            (method, path.partition("?")[0].removeprefix(PODS).strip("/"))
            for method, path, _ in self.api.requests
            if path.startswith(PODS)
        ]

    # Passes.

    async def reconcile(self, times: int = 1) -> float | None:
        """Run passes; returns what the last one returned."""
        again = None
        for _ in range(times):
            again = await self.reconciler.reconcile(KEY)
        return again

    async def polled(self) -> None:
        """Let each head that is polled answer, or fail to."""
        running = asyncio.create_task(self.poller.run())
        await asyncio.gather(*(self.poller.refresh_state(uid) for uid in self.poller.fast))
        running.cancel()
        await asyncio.wait({running})

    async def settled(self, rounds: int = 6) -> None:
        """Run passes, and let the workers do what they are called for, until nothing is left."""
        for _ in range(rounds):
            await self.reconcile()
            await self.called()
            await self.polled()
        await self.reconcile()

    async def called(self) -> None:
        """Wait until all calls to workers have ended."""
        call_keys = [key for uid in self.poller.fast for key in (uid, f"{uid}/stage")]
        running = asyncio.create_task(self.poller.run())
        await until(
            lambda: not any(self.calls.running_call(key) for key in call_keys),
            what="the end of all calls",
        )
        running.cancel()
        await asyncio.wait({running})

    # The workers.

    def control(self, key: PoolKey, address: str) -> WorkerControl:
        """A client whose worker is in memory."""
        assert key == KEY
        return WorkerControl(f"http://{address}", _no_token, self._send)

    async def _send(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, seconds: float
    ) -> tuple[int, bytes]:
        address, _, verb = url.removeprefix("http://").partition("/v1/")
        worker = self.workers.get(address)
        if worker is None or worker.silent:
            raise TimeoutError(f"{address} does not answer")
        verb = verb.rpartition("/")[2]
        if verb != "state":
            self.asked.append((address, verb))
            self.bodies.append(json.loads(body or b"{}"))
            if verb in self.refusals:
                problem = self.refusals[verb]
                return 409, json.dumps(problem).encode()
        return answer_call(worker, verb, body or b"")


async def _no_token() -> str | None:
    return None


@asynccontextmanager
async def pass_lab(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PassLab]:
    """A pool whose API server answers 404 to whatever a test does not say."""
    monkeypatch.setattr(head_poller, "MAX_CONCURRENT_POLLS", 4)  # tasks for each time that it runs
    async with loopback() as server:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(folder, server.url)))
        async with KubeClient() as kube:
            lab = PassLab(server, kube)
            yield lab
            await lab.calls.cancel_all()


@asynccontextmanager
async def watching_pass_lab(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[PassLab]:
    """What `pass_lab` gives, with a running watch of the trainers' pods."""
    async with pass_lab(folder, monkeypatch) as lab:
        running = asyncio.create_task(lab.ctx.neighbours.run())
        yield lab
        running.cancel()
        await asyncio.wait({running})


# Objects.


def changed(obj: Obj, **meta: Any) -> Obj:
    """The next version of an object, with these fields of its metadata."""
    version = str(int(obj["metadata"]["resourceVersion"]) + 1)
    return {**obj, "metadata": {**obj["metadata"], "resourceVersion": version, **meta}}


def pool(**spec: Any) -> Obj:
    """The pool `rl/math`, of one `hf` replica, with these fields of its spec."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {
            "namespace": "rl", "name": "math", "uid": "ours", "generation": 1, "resourceVersion": "7",
        },
        "spec": {"replicas": 1, "engine": {"type": "hf"}, "model": {"source": {"path": "/m"}}} | spec,
    }  # fmt: skip


def pod(replica: int = 0, owner: str = "ours", **meta: Any) -> Obj:
    """A pod of rank 0 that runs, of the pool's present revision."""
    name = f"math-{replica}-0"
    return {
        "metadata": {
            "namespace": "rl",
            "name": name,
            "uid": f"uid of {name}",
            "resourceVersion": "5",
            "labels": {
                **names.worker_labels("math", replica, 0),
                names.LABEL_REVISION: pod_revision(parse_spec(pool())),
            },
            "ownerReferences": [names.controller_reference("math", owner)],
            **meta,
        },
        "spec": {"serviceAccountName": "rollout-worker"},
        "status": {"phase": "Running"},
    }


def head(replica: int = 0, *, serving: bool = False, boot: str = "b", **meta: Any) -> Obj:
    """A pod whose worker has started and has an address; `serving`: its gate is on."""
    made = pod(replica, **meta)
    ran = {"name": "worker", "state": {"running": {"startedAt": "1970-01-12T13:00:00Z"}}}
    conditions = [
        {
            "type": names.GATE_SERVING,
            "status": "True",
            "message": f"boot {boot}: Serving",
            "lastTransitionTime": "1970-01-12T13:00:00Z",
        },
        {"type": "Ready", "status": "True"},
    ]
    made["status"] = {
        "phase": "Running",
        "podIP": f"10.0.0.{replica}",
        "containerStatuses": [ran],
        "conditions": conditions if serving else [],
    }
    return made


def address_of(found: Obj) -> str:
    """Control port of a pod."""
    return f"{found['status']['podIP']}:{names.CONTROL_PORT}"


def worker_of(**fields: Any) -> SimWorker:
    """A worker that serves the checkpoint."""
    made = SimWorker(boot="b", loading=False, required=WeightsId(epoch=0, version=0))
    for name, value in fields.items():
        assert hasattr(made, name)
        setattr(made, name, value)
    return made


def settled_services(ctx: PassContext, *, selecting: bool = True, pods: int = 1) -> None:
    """Put the pool's Services into the store, and the PodDisruptionBudget that it has at rest."""
    for service in pool_services("math", "rl", "ours", selecting=selecting):
        service["metadata"]["uid"] = f"uid of {service['metadata']['name']}"
        ctx.store.upsert_written("services", service)
    budget = disruption_budget(
        "math", "rl", "ours", DisruptionBudget(max(pods - 1, 0), unready_go=True)
    )
    budget["metadata"] |= {"uid": "uid of the budget", "resourceVersion": "1"}
    if selecting:
        ctx.store.upsert_written("poddisruptionbudgets", budget)


def condition(status: Obj, kind: str) -> tuple[str, str]:
    """Status and reason of a condition."""
    return next((c["status"], c["reason"]) for c in status["conditions"] if c["type"] == kind)
