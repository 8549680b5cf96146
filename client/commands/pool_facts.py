"""All that `why` and `collect` read of a pool; what can't be read is said, and stops nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import httpx

from rollout_client.errors import ClusterError
from rollout_client.http_clients import HttpClients, trusted_authorities
from rollout_client.steering.control_ports import MOUNTED_TOKEN
from rollout_client.worker_control import (
    ControlError,
    ControlUnreachable,
    Send,
    WorkerControl,
    send_over_httpx,
)
from rollout_common.kube.access import Obj

from .pool_access import PoolAccess
from .pool_summary import has_condition
from .settings import PROBE_SECONDS

T = TypeVar("T")

LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"
OPERATOR_NAME = "rollout-operator"


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """What is known of a pool at one moment.

    Attributes:
        pool: The RolloutReplica.
        now: When this was read.
        pods: Its pods.
        events: Those about the pool and its pods.
        nodes: Those of the pods that could be read, by name.
        leases: Of the operator.
        states: Answer of each worker by pod: `/v1/state`, or what its data port says of its readiness.
        logs: End of the log of each pod.
        unread: What could not be read, and why.
    """

    pool: Obj
    now: datetime
    pods: list[Obj] = field(default_factory=list)
    events: list[Obj] = field(default_factory=list)
    nodes: Mapping[str, Obj] = field(default_factory=dict)
    leases: list[Obj] = field(default_factory=list)
    states: Mapping[str, Obj] = field(default_factory=dict)
    logs: Mapping[str, str] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)


@dataclass(eq=False, repr=False)
class FactReader:
    """Reads the facts of one pool."""

    pool: PoolAccess
    operator_namespace: str
    """Where the operator and its Lease are."""
    log_lines: int
    """How many lines of each log are read."""
    pod_limit: int = 20
    """Of how many pods logs, states and nodes are read, those that are not ready first."""
    token_file: Path | None = None
    """With a token for the control ports; None: the mounted one."""

    def __post_init__(self) -> None:
        self._token = _read_token(self.token_file)
        # Of a large pool the API server is not asked for all at once.
        self._slots = asyncio.Semaphore(16)
        self.unread: list[str] = []

    async def read_facts(self) -> PoolFacts:
        """Return the facts; only the pool itself has to be readable."""
        pool = await self.pool.read_pool()
        leases = self.pool.kube.get(LEASES.format(self.operator_namespace))
        pods, events, found = await asyncio.gather(
            self.attempt_read("pods", self.pool.read_pods(), []),
            self.attempt_read("events", self.pool.list_objects("events"), []),
            self.attempt_read(
                f"the operator's Lease in {self.operator_namespace} (--operator-namespace)",
                leases,
                {},
            ),
        )
        looked_at = sorted(pods, key=lambda pod: has_condition(pod, "Ready"))[: self.pod_limit]
        if len(looked_at) < len(pods):
            self.unread.append(f"logs and states of {len(pods) - len(looked_at)} more pods")
        names = [str(pod["metadata"]["name"]) for pod in looked_at]
        every = {self.pool.name, *(str(pod["metadata"]["name"]) for pod in pods)}
        nodes, states, logs = await asyncio.gather(
            self._read_nodes(looked_at),
            self._read_states(looked_at),
            asyncio.gather(*map(self._read_log, names)),
        )
        return PoolFacts(
            pool=pool,
            now=datetime.now(UTC),
            pods=pods,
            events=[
                each for each in events if (each.get("involvedObject") or {}).get("name") in every
            ],
            nodes=nodes,
            leases=[
                each
                for each in found.get("items") or ()
                if OPERATOR_NAME in each["metadata"]["name"]
            ],
            states={name: state for name, state in zip(names, states, strict=True) if state},
            logs={name: log for name, log in zip(names, logs, strict=True) if log},
            unread=self.unread,
        )

    async def attempt_read(self, what: str, reading: Awaitable[T], otherwise: T) -> T:
        """Return what is read, or `otherwise` if that fails, which is noted."""
        try:
            async with self._slots:
                return await reading
        except ClusterError as error:
            self.unread.append(f"{what}: {error}")
            return otherwise

    async def _read_nodes(self, pods: list[Obj]) -> dict[str, Obj]:
        names = sorted({str(node) for pod in pods if (node := pod["spec"].get("nodeName"))})
        found = await asyncio.gather(
            *(
                self.attempt_read(f"node {name}", self.pool.kube.get(f"/api/v1/nodes/{name}"), {})
                for name in names
            )
        )
        return {name: node for name, node in zip(names, found, strict=True) if node}

    async def _read_log(self, name: str) -> str:
        path = f"/api/v1/namespaces/{self.pool.namespace}/pods/{name}/log"
        params = {"tailLines": str(self.log_lines), "container": "worker"}
        return await self.attempt_read(f"log of {name}", self.pool.kube.get_text(path, params), "")

    async def _read_states(self, pods: list[Obj]) -> list[Obj]:
        # All at once: those that are silent take no time from the others.
        trusted = trusted_authorities(environment=False)
        clients = HttpClients(lambda _: httpx.AsyncClient(verify=trusted, trust_env=False))
        try:
            send = send_over_httpx(clients.client_for)
            return await asyncio.gather(*(self._read_state(send, pod) for pod in pods))
        finally:
            await clients.close()

    async def _read_state(self, send: Send, pod: Obj) -> Obj:
        name, status = str(pod["metadata"]["name"]), pod.get("status") or {}
        address = status.get("podIP")
        if not address or status.get("phase") != "Running":
            return {}
        token = self._token
        if token is None:
            return await self._ask_data_port(name)
        host = f"[{address}]" if ":" in address else address

        async def give_token() -> str:
            return token

        try:
            control = WorkerControl(f"http://{host}:8001", give_token, send)
            state = await control.state(timeout=PROBE_SECONDS)
            return state.model_dump(mode="json", exclude_none=True)
        except (ControlError, ControlUnreachable) as error:
            self.unread.append(f"control port of {name}: {error}")
            return await self._ask_data_port(name)

    async def _ask_data_port(self, name: str) -> Obj:
        """Ask through the API server, which passes no token on: the state is not to be had, readiness is."""
        path = f"/api/v1/namespaces/{self.pool.namespace}/pods/{name}:8000/proxy/ready"
        try:
            async with self._slots, asyncio.timeout(PROBE_SECONDS):
                return await self.pool.kube.get(path)
        except TimeoutError:
            return {"status": "silent", "detail": f"no answer within {PROBE_SECONDS:g} s"}
        except ClusterError as error:
            if "urn:rollout:problem:" in str(error):
                return {"status": "not ready", "detail": str(error)}
            self.unread.append(f"data port of {name}: {error}")
            return {}


def _read_token(given: Path | None) -> str | None:
    """Return the token for control ports; None: none is given, and none is mounted."""
    if given is not None and (token := given.read_text().strip()):
        return token
    try:
        return MOUNTED_TOKEN.read_text().strip()
    except OSError:
        return None
