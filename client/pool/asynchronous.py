"""`AsyncRolloutPool`: makes a pool of its parts, starts it and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn, Self, TypedDict, Unpack

from typing_extensions import override

from rollout_client.cluster_client import ClusterClient, load_access
from rollout_client.discovery.dns import DnsDiscovery
from rollout_client.discovery.endpoint_discovery import EndpointDiscovery
from rollout_client.discovery.pool_members import (
    DATA_PORT,
    Discovery,
    Member,
    StaticDiscovery,
    static_members,
)
from rollout_client.discovery.settings import RESOLVE_INTERVAL_SECONDS
from rollout_client.errors import NoReplica, PoolClosed, SteeringFailed
from rollout_client.generating.attempt_verdicts import MAX_FAILURES
from rollout_client.generating.attempts import PoolContext
from rollout_client.generating.settings import DEFAULT_DEADLINE_SECONDS, MAX_DEADLINE_SECONDS
from rollout_client.hooks import Hook
from rollout_client.http_clients import DataToken, MemberClients
from rollout_client.option_names import check_option_names
from rollout_client.routing.balancer import MAX_IMBALANCE, LoadBalancer
from rollout_client.routing.health_checker import HealthChecker
from rollout_client.routing.member_records import ANY_WEIGHTS
from rollout_client.routing.router import RequestRouter
from rollout_client.routing.settings import SILENCE_LIMIT_SECONDS
from rollout_client.steering.cluster_steering import ClusterSteering
from rollout_client.steering.control_ports import (
    ControlPorts,
    DirectOptions,
    Token,
    read_mounted_token,
)
from rollout_client.steering.direct_steering import DirectSteering
from rollout_client.steering.steering_protocol import Steering
from rollout_client.turn.session import TurnVerbs
from rollout_client.turn.turn_devices import query_pod_devices
from rollout_common.transfer.connections.tls_session import TLS_NAME
from rollout_common.wire import WeightsId

from .background import PoolBackground
from .presence import MemberVerbs
from .settings import DISCOVERY_WAIT_SECONDS, SERVING_LOOK_SECONDS

logger = logging.getLogger(__name__)


class PoolOptions(TypedDict, total=False):
    """Options of every pool, however it finds its members.

    Attributes:
        max_imbalance: How many requests more than the least loaded replica a conversation's own
            replica may have before the conversation moves.
        deterministic: Choose replicas by a stable hash instead of by load.
        max_failures: Broken attempts that one output survives.
        silent_seconds: How long a worker may send nothing before it is asked whether it is alive.
        deadline_seconds: For requests without one.
        hook: Receives measurements.
        max_staleness: Requests without bounds of their own are served by weights at most this many
            versions older than the last one published with this pool; None: by any.
        data_token: Bearer token of the workers' data ports (`--data-token-file`), or a function that
            returns it at each request; None: they need none.
    """

    max_imbalance: int
    deterministic: bool
    max_failures: int
    silent_seconds: float
    deadline_seconds: float
    hook: Hook | None
    max_staleness: int | None
    data_token: DataToken


_COMMON_OPTIONS = ("name", *PoolOptions.__annotations__)


class AsyncRolloutPool(MemberVerbs, TurnVerbs):
    """Generates on all replicas of a pool; members come and go by themselves.

    Make it with `from_urls`, `from_dns` or `from_cluster`, use it as an async context manager (or
    `close` it), in one event loop.

    Args:
        discovery: Finds the members.
        name: For logs and metrics.
        steering: Handles epochs, weights and sleep; None: the pool can only generate.

    The other arguments are those of `PoolOptions`.
    """

    def __init__(
        self,
        discovery: Discovery,
        *,
        name: str = "pool",
        max_imbalance: int = MAX_IMBALANCE,
        deterministic: bool = False,
        max_failures: int = MAX_FAILURES,
        silent_seconds: float = SILENCE_LIMIT_SECONDS,
        deadline_seconds: float = DEFAULT_DEADLINE_SECONDS,
        hook: Hook | None = None,
        steering: Steering | None = None,
        max_staleness: int | None = None,
        data_token: DataToken = None,
    ) -> None:
        if max_failures < 0 or (max_staleness or 0) < 0:
            raise ValueError("max_failures and max_staleness must be 0 or more")
        if silent_seconds <= 0 or not 0 < deadline_seconds <= MAX_DEADLINE_SECONDS:
            raise ValueError(
                "silent_seconds and deadline_seconds must be above 0, and deadline_seconds at most "
                f"{MAX_DEADLINE_SECONDS:g}"
            )
        self.name = name
        self._hook = hook or Hook()
        self._discovery = discovery
        self._background = PoolBackground(name)
        connections = MemberClients(data_token)
        router = RequestRouter(
            LoadBalancer(max_imbalance=max_imbalance, deterministic=deterministic),
            self._discovery_trouble,
            connections.drop_origin,
            refused=lambda: self._discovery.refused,
        )
        self._health = HealthChecker(router, connections, silent_seconds=silent_seconds)
        self._discovered = asyncio.Event()
        MemberVerbs.__init__(
            self,
            PoolContext(router, connections, self._hook),
            max_failures=max_failures,
            deterministic=deterministic,
            deadline_seconds=deadline_seconds,
        )
        TurnVerbs.__init__(self, steering, self._hook, max_staleness)

    @classmethod
    def from_urls(
        cls,
        urls: Sequence[str],
        *,
        control_urls: Sequence[str | None] | None = None,
        direct: DirectOptions | None = None,
        name: str = "pool",
        **options: Unpack[PoolOptions],
    ) -> Self:
        """Return a pool of workers at fixed data URLs, without an operator.

        Args:
            urls: Such as `http://10.0.0.7:8000`.
            control_urls: Of the control ports; default: port 8001 for data port 8000.
            direct: How the workers are steered: token, in-flight policy, sleep level.
            name: For logs and metrics.
            **options: See `PoolOptions`.
        """
        check_option_names("from_urls", options, (*_COMMON_OPTIONS, "control_urls", "direct"))
        members = StaticDiscovery(static_members(urls, control_urls))
        pool = cls(members, name=name, **options)
        pool._steering = DirectSteering(
            lambda: pool.members, direct or DirectOptions(), pool._note_weights
        )
        return pool

    @classmethod
    def from_dns(
        cls,
        host: str,
        *,
        port: int = DATA_PORT,
        ttl_seconds: float = RESOLVE_INTERVAL_SECONDS,
        name: str | None = None,
        **options: Unpack[PoolOptions],
    ) -> Self:
        """Return a pool of all addresses of a DNS name, such as `math-heads.train.svc`.

        It can generate but not steer. Use it where the API server may not be asked.

        Args:
            host: Name of a headless Service.
            port: The data port.
            ttl_seconds: Time between two look-ups.
            name: For logs and metrics; default: the host.
            **options: See `PoolOptions`.
        """
        check_option_names("from_dns", options, (*_COMMON_OPTIONS, "port", "ttl_seconds"))
        return cls(DnsDiscovery(host, port, ttl_seconds), name=name or host, **options)

    @classmethod
    def from_cluster(
        cls,
        name: str,
        namespace: str | None = None,
        *,
        kubeconfig: str | Path | None = None,
        context: str | None = None,
        control_token: Token = None,
        control_ca: str | Path | None = None,
        **options: Unpack[PoolOptions],
    ) -> Self:
        """Return the pool of a RolloutReplica.

        It needs the role `rollout-trainer`; a pool that only generates needs the right to list and
        watch EndpointSlices.

        Args:
            name: Of the RolloutReplica.
            namespace: Default: the pod's, or the kubeconfig's.
            kubeconfig: Default: the pod's service account, else `$KUBECONFIG`.
            context: Of the kubeconfig; default: its current one.
            control_token: Only for pushing weights: bearer token of the control ports, issued for the
                audience `rollout.dev/NAMESPACE/NAME`, or a function that returns it; default: the token
                mounted at `/var/run/secrets/rollout.dev/token`.
            control_ca: File with the CA of control ports over TLS, and of the ports for weights;
                default: they speak plain HTTP.
            **options: See `PoolOptions`.

        Raises:
            ClusterError: No usable credentials were found.
        """
        own = ("namespace", "kubeconfig", "context", "control_token", "control_ca")
        check_option_names("from_cluster", options, (*_COMMON_OPTIONS, *own))
        found = load_access(kubeconfig, context)
        namespace, kube = namespace or found.namespace, ClusterClient(found)
        tls = control_ca is not None
        discovery = EndpointDiscovery(kube, name, namespace, control_tls=tls)
        pool = cls(discovery, name=f"{namespace}/{name}", **options)
        token = control_token or read_mounted_token(f"rollout.dev/{namespace}/{name}")
        heads = ControlPorts(lambda: pool.members, token, control_ca, TLS_NAME)
        pool._steering = ClusterSteering(kube, name, namespace, heads)
        # The trainer's pod is in the pool's namespace: claims are shared within one alone.
        pool._find_devices = partial(query_pod_devices, kube, namespace)
        return pool

    # Life.

    @override
    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a pool can't be pickled or copied, as it has connections: make one in each process, or share one"
            " by rollout_client.integrations.ray"
        )

    async def __aenter__(self) -> Self:
        self._start_discovery()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _start_discovery(self) -> None:
        if self._router.closed:
            raise PoolClosed("the pool was closed")
        run_discovery = partial(self._discovery.run_discovery, self._set_members)
        self._background.start({"discovery": run_discovery, "health": self._health.run_checks})

    def _discovery_trouble(self) -> str:
        """Return why the members may be out of date; empty: they are not."""
        return "; ".join(filter(None, (self._discovery.trouble, self._background.trouble)))

    def _set_members(self, members: Sequence[Member]) -> None:
        balancer = self._router.balancer
        before = {member.url for member in balancer.present_members()}
        balancer.set_members(members, time.monotonic())
        self._background.note_working("discovery")
        after = {member.url for member in balancer.present_members()}
        if before != after:
            gone = {"gone": len(before - after)}
            logger.info("%s has %d members", self.name, len(after), extra=gone)
        for url in before - after:
            if url not in balancer.records:
                self._connections.drop_origin(url)
        self._hook.members(len(after), len([m for m in balancer.present_members() if m.ready]))
        self._discovered.set()
        self._router.notify_waiting()

    async def close(self) -> None:
        """End everything; requests under way raise `PoolClosed`."""
        self._router.closed = True
        self._router.notify_waiting()
        for lease in list(self._router.leases):
            lease.cut_off("the pool was closed")
        await self._background.stop()
        self._together.close()
        self._pusher.close()
        if self._steering is not None:
            await self._steering.close()
        await self._connections.close()

    @override
    async def _get_steering(self, seconds: float = math.inf) -> Steering:
        self._start_discovery()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, DISCOVERY_WAIT_SECONDS)):
                while not (self._discovered.is_set() or self._router.is_hopeless):
                    changed = self._router.next_change
                    await self._router.wait_for_change(changed, SERVING_LOOK_SECONDS, ANY_WEIGHTS)
        return await super()._get_steering(seconds)

    async def _expect_serving(self, count: int, seconds: float) -> None:
        """Probe excluded members at once, and wait until this many serve.

        Raises:
            SteeringFailed: Fewer serve within these seconds; says why each does not.
        """
        if self._router.is_hopeless:
            return  # this trainer may steer, but not list the members
        for record in self._router.balancer.records.values():
            record.probe_at = 0.0
            if record.excluded_until is not None:
                record.excluded_until = 0.0
        try:
            await self.wait_serving(count, seconds=seconds)
        except NoReplica as error:
            raise SteeringFailed(f"they woke, but {error.cause}") from None

    def _lowest_weights(self) -> WeightsId | None:
        floors = (self.floor, None if self._steering is None else self._steering.lowest_identity)
        return max((floor for floor in floors if floor is not None), default=None)

    def _note_weights(self, url: str, identity: WeightsId) -> None:
        if (record := self._router.balancer.records.get(url)) is not None:
            record.active = identity
        self._router.notify_waiting()
