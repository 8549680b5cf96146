"""A pool of replicas, asynchronously: `AsyncRolloutPool`. `RolloutPool` is the same for others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ValidationError

from rollout_client.discovery.dns import TTL_SECONDS, DnsDiscovery
from rollout_client.discovery.endpoints import EndpointDiscovery
from rollout_client.discovery.members import (
    DATA_PORT,
    Discovery,
    Member,
    StaticDiscovery,
    static_members,
)
from rollout_client.errors import (
    ManyFailed,
    NoReplica,
    PoolClosed,
    RequestRefused,
    RolloutError,
)
from rollout_client.generating.attempts import MAX_FAILURES, OnVersionChange, Shared
from rollout_client.generating.calls import Call, Options, Prompt, request_of
from rollout_client.generating.streams import GenerationStream
from rollout_client.hooks import Hook
from rollout_client.kube.access import access
from rollout_client.kube.client import Kube
from rollout_client.results import GenerateResult
from rollout_client.routing.balancer import MAX_IMBALANCE, Balancer
from rollout_client.routing.connections import Connections
from rollout_client.routing.health import SILENT_SECONDS, Health
from rollout_client.routing.router import Router
from rollout_client.steering.cluster import ClusterSteering
from rollout_client.steering.direct import DirectOptions, DirectSteering
from rollout_client.steering.protocol import Steering
from rollout_client.steering.verbs import Steered
from rollout_worker.schemas import GenerateRequest, WeightsId, WorkerInfo

logger = logging.getLogger(__name__)

CONCURRENCY = 512
"""Requests in flight of one `generate_many` unless said otherwise."""

FOUND_SECONDS = 10.0
"""What discovery gets to find its first members before the pool is steered."""

Progress = Callable[[int, int], None]


class AsyncRolloutPool(Steered):
    """Generates on all replicas of a pool; members come and go without anybody's help.

    Make it with `from_urls`, `from_dns` or `from_cluster`, use it as an async context manager (or
    `close` it), in one event loop.

    Args:
        discovery: Finds the members.
        name: For logs and metrics.
        max_imbalance: Requests that a conversation's own replica may have above the least loaded
            one before the conversation moves.
        deterministic: Choose replicas by a stable hash instead of by load.
        max_failures: Broken attempts that one output survives.
        silent_seconds: How long a worker may say nothing before it is asked whether it lives.
        hook: Gets measurements.
        steering: Carries out what `Steered` offers.
        max_staleness: See `Steered`.
    """

    def __init__(
        self,
        discovery: Discovery,
        *,
        name: str = "pool",
        max_imbalance: int = MAX_IMBALANCE,
        deterministic: bool = False,
        max_failures: int = MAX_FAILURES,
        silent_seconds: float = SILENT_SECONDS,
        hook: Hook | None = None,
        steering: Steering | None = None,
        max_staleness: int | None = None,
    ) -> None:
        if max_failures < 0 or silent_seconds <= 0 or (max_staleness or 0) < 0:
            raise ValueError(
                "max_failures and max_staleness must be 0 or more, silent_seconds above 0"
            )
        self._hook = hook or Hook()
        super().__init__(steering, self._hook, max_staleness)
        self.name = name
        self._discovery = discovery
        self._deterministic = deterministic
        self._max_failures = max_failures
        self._connections = Connections()
        self._router = Router(
            Balancer(max_imbalance=max_imbalance, deterministic=deterministic),
            lambda: self._discovery.trouble,
            self._connections.drop,
        )
        self._health = Health(self._router, self._connections, silent_seconds=silent_seconds)
        self._shared = Shared(self._router, self._connections, self._hook)
        self._tasks: list[asyncio.Task[None]] = []
        self._found = asyncio.Event()

    @classmethod
    def from_urls(
        cls,
        urls: Sequence[str],
        *,
        control_urls: Sequence[str | None] | None = None,
        direct: DirectOptions | None = None,
        **options: Any,
    ) -> Self:
        """Return a pool of workers at fixed data URLs, without an operator.

        Args:
            urls: Such as `http://10.0.0.7:8000`.
            control_urls: Of the control ports; default: port 8001 beside data port 8000.
            direct: How its workers are steered: token, in-flight policy, sleep level.
            **options: See the class.
        """
        pool = cls(StaticDiscovery(static_members(urls, control_urls)), **options)
        pool._steering = DirectSteering(
            lambda: pool.members, direct or DirectOptions(), pool._saw_weights
        )
        return pool

    @classmethod
    def from_dns(
        cls,
        host: str,
        *,
        port: int = DATA_PORT,
        ttl_seconds: float = TTL_SECONDS,
        **options: Any,
    ) -> Self:
        """Return a pool of all addresses behind a name, such as `math-heads.train.svc`.

        For those who may not ask the API server: it can generate but not steer.

        Args:
            host: Name of a headless Service.
            port: Of the data port.
            ttl_seconds: Between two looks.
            **options: See the class.
        """
        return cls(DnsDiscovery(host, port, ttl_seconds), **{"name": host, **options})

    @classmethod
    def from_cluster(
        cls,
        name: str,
        namespace: str | None = None,
        *,
        kubeconfig: str | Path | None = None,
        context: str | None = None,
        **options: Any,
    ) -> Self:
        """Return the pool of a RolloutReplica.

        Needs the role `rollout-trainer`, or for generating alone the right to list and watch
        EndpointSlices.

        Args:
            name: Of the RolloutReplica.
            namespace: Default: the pod's, or the kubeconfig's.
            kubeconfig: Default: the pod's account, else `$KUBECONFIG`.
            context: Of the kubeconfig.
            **options: See the class.

        Raises:
            ClusterError: There are no usable credentials.
        """
        where = access(kubeconfig, context)
        home, kube = namespace or where.namespace, Kube(where)
        return cls(
            EndpointDiscovery(kube, name, home),
            steering=ClusterSteering(kube, name, home),
            **{"name": f"{home}/{name}", **options},
        )

    # Life.

    async def __aenter__(self) -> Self:
        self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _start(self) -> None:
        if self._router.closed:
            raise PoolClosed("the pool was closed")
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._discover(), name=f"{self.name}: discovery"),
                asyncio.create_task(self._health.run(), name=f"{self.name}: health"),
            ]

    async def _discover(self) -> None:
        await self._discovery.run(self._take_members)

    def _take_members(self, members: Sequence[Member]) -> None:
        balancer = self._router.balancer
        before = {member.url for member in balancer.members()}
        balancer.set_members(members, time.monotonic())
        after = {member.url for member in balancer.members()}
        if before != after:
            logger.info(
                "%s has %d members", self.name, len(after), extra={"gone": len(before - after)}
            )
        for url in before - after:
            if url not in balancer.seats:
                self._connections.drop(url)
        self._hook.members(len(after), len([m for m in balancer.members() if m.ready]))
        self._found.set()
        self._router.changed()

    async def close(self) -> None:
        """End everything; requests under way raise `PoolClosed`."""
        self._router.closed = True
        self._router.changed()
        for lease in list(self._router.leases):
            lease.cut_off("the pool was closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._steering is not None:
            await self._steering.close()
        await self._connections.close()

    async def _steer(self) -> Steering:
        self._start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FOUND_SECONDS):
                await self._found.wait()
        return await super()._steer()

    def _saw_weights(self, url: str, identity: WeightsId) -> None:
        self._router.balancer.saw_weights(url, identity)
        self._router.changed()

    # Who is there.

    @property
    def members(self) -> list[Member]:
        """Members that discovery knows now."""
        return self._router.balancer.members()

    def serving(self) -> list[Member]:
        """Members that may get requests now."""
        now = time.monotonic()
        seats = self._router.balancer.seats.values()
        return [seat.member for seat in seats if seat.usable(now)]

    def load(self) -> dict[str, int]:
        """Requests of this pool in flight, by the member's name."""
        seats = self._router.balancer.seats.values()
        return {seat.member.name: seat.in_flight for seat in seats}

    async def wait_serving(self, count: int = 1, *, seconds: float = 600) -> list[Member]:
        """Wait until so many members answer that they serve.

        Raises:
            NoReplica: They did not within these seconds.
        """
        self._start()
        began = time.monotonic()
        until = began + seconds
        while len(found := self.serving()) < count:
            now = time.monotonic()
            if now >= until:
                why = self._router.reasons()
                raise NoReplica(f"{len(found)} of {count} replicas serve ({why})")
            self._router.warn_since(began)
            await asyncio.sleep(min(0.05, until - now))
        return found

    async def info(self, *, seconds: float = 30) -> WorkerInfo:
        """Return what a replica says of model, length and capabilities.

        Raises:
            NoReplica: None serves within these seconds.
        """
        member = (await self.wait_serving(seconds=seconds))[0]
        with self._connections.to(member.url) as client:
            answer = await client.get("/v1/info", timeout=seconds)
        answer.raise_for_status()
        return WorkerInfo.model_validate_json(answer.content, extra="ignore")

    # Generate.

    async def generate(
        self,
        prompt: Prompt,
        *,
        group_id: str | None = None,
        on_version_change: OnVersionChange = "continue",
        **fields: Any,
    ) -> GenerateResult:
        """Sample from one prompt until every output has ended, whatever happens to replicas.

        Args:
            prompt: token_ids: [P] (a list, an array, a tensor), or a whole `GenerateRequest`.
            group_id: Requests of one group go to one replica as conversations do (`session_id`);
                without it the samples of a group spread.
            on_version_change: What to do when other weights serve the rest of an output: continue
                (spans tell which token came from which), restart from the prompt, or fail.
            **fields: Of `GenerateRequest` (API.md §3): `sampling`, `session_id`, `min_version`,
                `deadline_seconds`, …

        Raises:
            RequestError: With `kept`: what had been received.
        """
        return await self._call(prompt, fields, group_id, on_version_change).run()

    def stream(
        self,
        prompt: Prompt,
        *,
        group_id: str | None = None,
        on_version_change: OnVersionChange = "continue",
        **fields: Any,
    ) -> GenerationStream:
        """Return a stream of deltas, joined over all attempts; arguments as of `generate`.

        `async with pool.stream(…) as stream: async for delta in stream: …`, then `stream.result`.
        Tokens that might have to be taken back come late: the last few with `stop` strings, all of
        them with `on_version_change="restart"`, or with presence or frequency penalties.
        """
        return GenerationStream(
            lambda on_tokens: self._call(prompt, fields, group_id, on_version_change, on_tokens)
        )

    async def as_completed(
        self,
        prompts: Iterable[Prompt],
        *,
        concurrency: int = CONCURRENCY,
        **options: Any,
    ) -> AsyncGenerator[tuple[int, GenerateResult | RolloutError]]:
        """Yield (index, result or error) as requests end; at most `concurrency` run at once.

        Prompts are taken from the iterable only when there is room for them. Leaving the loop
        early ends what runs.
        """
        if concurrency < 1:
            raise ValueError("concurrency must be 1 or more")
        waiting = enumerate(prompts)
        running: dict[asyncio.Task[GenerateResult], int] = {}
        try:
            while True:
                while len(running) < concurrency and (following := next(waiting, None)):
                    index, prompt = following
                    running[asyncio.create_task(self._one_of_many(prompt, options))] = index
                if not running:
                    return
                ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    index = running.pop(task)
                    error = task.exception()
                    if error is not None and not isinstance(error, RolloutError):
                        raise error
                    yield index, error if error is not None else task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _one_of_many(self, prompt: Prompt, options: Mapping[str, Any]) -> GenerateResult:
        """Generate; a prompt that can't be sent fails like one that was refused."""
        try:
            return await self.generate(prompt, **options)
        except ValidationError as error:
            wrong = [(".".join(map(str, each["loc"])), each["msg"]) for each in error.errors()]
            why = "; ".join(f"{where}: {what}" for where, what in wrong[:4])
            raise RequestRefused(why, status=422, slug="invalid-request") from error

    async def generate_many(
        self,
        prompts: Sequence[Prompt],
        *,
        concurrency: int = CONCURRENCY,
        progress: Progress | None = None,
        on_error: Literal["raise", "return"] = "raise",
        **options: Any,
    ) -> list[Any]:
        """Sample from many prompts; the results are in the order of the prompts.

        Args:
            prompts: As `generate` takes them.
            concurrency: How many run at once.
            progress: Called with (ended, all) after each.
            on_error: A failed request never stops the others. Afterwards `raise` raises
                `ManyFailed` with all results, `return` leaves the errors in their places.
            **options: Further arguments of `generate`, the same for all.

        Raises:
            ManyFailed: See `on_error`.
        """
        if on_error not in ("raise", "return"):
            raise ValueError(f"on_error is raise or return, not {on_error!r}")
        results: list[Any] = [None] * len(prompts)
        ended = 0
        async for index, result in self.as_completed(prompts, concurrency=concurrency, **options):
            results[index] = result
            ended += 1
            if progress is not None:
                progress(ended, len(prompts))
        if on_error == "raise" and any(isinstance(each, RolloutError) for each in results):
            raise ManyFailed(results)
        return results

    def _call(
        self,
        prompt: Prompt,
        fields: Mapping[str, Any],
        group_id: str | None,
        on_version_change: OnVersionChange,
        on_tokens: Callable[[int], None] = lambda index: None,
    ) -> Call:
        self._start()
        request = request_of(prompt, fields)
        options = Options(on_version_change, self._max_failures, group_id, self._deterministic)
        return Call(self._shared, self._bounded(request), options, on_tokens)

    def _bounded(self, request: GenerateRequest) -> GenerateRequest:
        """The request with the pool's own floor, unless it has bounds of its own."""
        bounded = (request.epoch, request.min_version, request.exact_version) != (None, None, None)
        floors = [self.floor, None if self._steering is None else self._steering.floor]
        floor = max((each for each in floors if each is not None), default=None)
        if bounded or floor is None:
            return request
        changes = {"epoch": floor.epoch, "min_version": floor.version}
        return request.model_copy(update=changes)
