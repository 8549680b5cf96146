"""`RolloutPool`: `AsyncRolloutPool` for programs without an event loop; whole, as it mirrors that class.

The asynchronous pool runs in a thread with its own loop; every method here hands its call to that
loop and waits. Threads may share a pool. It does not survive a fork: make it afterwards. Hooks and
`progress` run in the pool's thread: there you may look at the pool (`load`, `members`, `serving`),
while a method that waits raises a RuntimeError instead of waiting for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePath
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from rollout_client.discovery.dns import RESOLVE_INTERVAL_SECONDS
from rollout_client.discovery.members import DATA_PORT, Member
from rollout_client.errors import PoolClosed, RolloutError
from rollout_client.generating.prompts import GenerateOptions, Prompt
from rollout_client.generating.verbs import DEFAULT_CONCURRENCY, Progress
from rollout_client.results import GenerateResult
from rollout_client.steering.control_ports import Token
from rollout_client.steering.options import DirectOptions
from rollout_client.steering.protocol import (
    DEFAULT_ACQUIRE_SECONDS,
    DEFAULT_PUBLISH_SECONDS,
    DEFAULT_STATE_SECONDS,
    HandedOver,
    OnProgress,
    Published,
)
from rollout_client.steering.pushing.options import PushOptions, PushPlan
from rollout_client.steering.pushing.pusher import Begin
from rollout_client.steering.pushing.together import Work
from rollout_client.steering.spool import SHARD_BYTES, drain_blocking, spool_blocking
from rollout_client.steering.versions import DEFAULT_KEPT_VERSIONS, VersionFolder
from rollout_client.turn import HeldTurn, TurnOptions
from rollout_client.turn.plan import Plan
from rollout_client.turn.session import Session
from rollout_worker.schemas import WeightsId, WorkerInfo

from .asynchronous import AsyncRolloutPool
from .loop_thread import LoopThread
from .options import PoolOptions
from .sync_stream import SyncStream, following
from .sync_turn import acquire_blocking

if TYPE_CHECKING:
    from rollout_client.steering.spool import Tensors


class RolloutPool:
    """`AsyncRolloutPool` with the same methods and arguments, each of which waits for its end.

    Use it as a context manager, or `close` it. `asynchronous` is the pool behind it; it may be used
    in its own loop only.
    """

    def __init__(self, make: Callable[[], AsyncRolloutPool]) -> None:
        self._thread = LoopThread("rollout-pool")
        try:
            self.asynchronous = self._thread.call(self._made(make))
        except BaseException:
            self._thread.close()
            raise

    @staticmethod
    async def _made(make: Callable[[], AsyncRolloutPool]) -> AsyncRolloutPool:
        return await make().__aenter__()

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
        """Return a pool of workers at fixed data URLs, without an operator."""
        return cls(
            lambda: AsyncRolloutPool.from_urls(
                urls, control_urls=control_urls, direct=direct, name=name, **options
            )
        )

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
        """Return a pool of all addresses behind a name, such as `math-heads.train.svc`."""
        return cls(
            lambda: AsyncRolloutPool.from_dns(
                host, port=port, ttl_seconds=ttl_seconds, name=name, **options
            )
        )

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
        """Return the pool of a RolloutReplica."""
        return cls(
            lambda: AsyncRolloutPool.from_cluster(
                name,
                namespace,
                kubeconfig=kubeconfig,
                context=context,
                control_token=control_token,
                control_ca=control_ca,
                **options,
            )
        )

    # Life.

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything; requests under way raise `PoolClosed`."""
        try:
            self._thread.call(self.asynchronous.close())
        except PoolClosed:
            return
        self._thread.close()

    # Who is there.

    @property
    def floor(self) -> WeightsId | None:
        """Requests without bounds of their own are served by these weights or newer ones."""
        return self.asynchronous.floor

    @floor.setter
    def floor(self, floor: WeightsId | None) -> None:
        self.asynchronous.floor = floor

    @property
    def members(self) -> list[Member]:
        """Members that discovery has found; `serving` says which of them get requests."""
        return self._thread.read(lambda: self.asynchronous.members)

    def serving(self) -> list[Member]:
        """Members that may get requests now."""
        return self._thread.read(self.asynchronous.serving)

    def load(self) -> dict[str, int]:
        """Requests of this pool in flight, by member name."""
        return self._thread.read(self.asynchronous.load)

    def wait_serving(self, count: int = 1, *, seconds: float = 600) -> list[Member]:
        """Wait until so many members serve."""
        return self._thread.call(self.asynchronous.wait_serving(count, seconds=seconds))

    def info(self, *, seconds: float = 30) -> WorkerInfo:
        """Return what a replica says about its model, lengths and capabilities."""
        return self._thread.call(self.asynchronous.info(seconds=seconds))

    # Generate.

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerateResult:
        """Sample from one prompt until every output has ended."""
        return self._thread.call(self.asynchronous.generate(prompt, **options))

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        progress: Progress | None = None,
        on_error: Literal["raise", "return"] = "raise",
        **options: Unpack[GenerateOptions],
    ) -> list[Any]:
        """Sample from many prompts; `progress` is called in the pool's thread."""
        return self._thread.call(
            self.asynchronous.generate_many(
                prompts,
                concurrency=concurrency,
                progress=progress,
                on_error=on_error,
                **options,
            )
        )

    def as_completed(
        self,
        prompts: Iterable[Prompt],
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[tuple[int, GenerateResult | RolloutError]]:
        """Yield (index, result or error) as requests end."""
        found = self.asynchronous.as_completed(prompts, concurrency=concurrency, **options)
        try:
            while (each := self._thread.call(following(found))) is not None:
                yield each
        finally:
            self._thread.call(found.aclose())

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> SyncStream:
        """Return a stream of deltas, joined over all attempts; use it with `with`."""
        stream = self._thread.read(lambda: self.asynchronous.stream(prompt, **options))
        return SyncStream(self._thread, stream)

    # Steer.

    @property
    def epoch(self) -> int | None:
        """The epoch that this trainer holds; None until it has one."""
        return self.asynchronous.epoch

    def acquire(self, *, seconds: float = DEFAULT_ACQUIRE_SECONDS) -> int:
        """Take the pool: the next epoch, which shuts out earlier trainers."""
        return self._thread.call(self.asynchronous.acquire(seconds=seconds))

    def publish_weights(
        self,
        version: int,
        path: str | PurePath | EllipsisType | None = ...,
        *,
        tensors: Tensors | None = None,
        seconds: float = DEFAULT_PUBLISH_SECONDS,
        progress: OnProgress = lambda progress: None,
        **options: Unpack[PushOptions],
    ) -> Published:
        """Publish a version to all replicas and return once it serves.

        Tensors are copied in the caller's thread, which alone may have the right device.
        """
        pool = self.asynchronous
        if tensors is None:
            return self._thread.call(
                pool.publish_weights(version, path, seconds=seconds, progress=progress, **options)
            )
        plan = PushPlan.of(path, options)

        def push(begin: Begin) -> Published:
            return self._push(begin, version, tensors, plan, seconds, progress)

        if plan.ranks is None:
            return push(
                partial(pool._pusher.begin, tensors, plan.transport, plan.rate, delta=plan.delta)
            )
        work = Work(
            plan.ranks, version, tensors, seconds, plan.transport, plan.rate, plan.delta, plan.reach
        )
        return pool._together.publish_here(work, push)

    def _push(
        self,
        begin: Begin,
        version: int,
        tensors: Tensors,
        plan: PushPlan,
        seconds: float,
        progress: OnProgress,
    ) -> Published:
        """Publish what this process has, or rank 0 with the others; in the caller's thread."""
        pool = self.asynchronous
        try:
            push = begin(
                dtypes=self._thread.call(pool._cast_dtypes(plan, seconds)) if plan.cast else None
            )
        except BaseException:
            if plan.ranks is None:  # several ranks gather nothing before they have met
                drain_blocking(tensors)
            raise
        try:
            work = pool._send_push(version, push, plan, seconds, progress)
            sending = self._thread.begin(work, ended=push.filling.fail)
            with sending:
                push.fill_here()
            return sending.result()
        finally:
            push.close()

    def publish_handed_over(
        self,
        handed: HandedOver,
        *,
        seconds: float = DEFAULT_PUBLISH_SECONDS,
        progress: OnProgress = lambda progress: None,
    ) -> Published:
        """Let all replicas serve what `Worker.hand_over` staged in them, and return once they do."""
        pool = self.asynchronous
        return self._thread.call(
            pool.publish_handed_over(handed, seconds=seconds, progress=progress)
        )

    def save_and_publish(
        self,
        weights: Tensors,
        version: int,
        folder: str | PurePath,
        *,
        mounted_at: str | PurePath | None = None,
        keep: int = DEFAULT_KEPT_VERSIONS,
        shard_bytes: int = SHARD_BYTES,
        seconds: float = DEFAULT_PUBLISH_SECONDS,
        progress: OnProgress = lambda progress: None,
    ) -> Published:
        """Write a version to a shared volume, publish it, and delete versions that nobody needs.

        Tensors are made in the caller's thread, which alone may have the right device.
        """
        pool = self.asynchronous
        try:
            versions = VersionFolder.in_folder(folder, mounted_at, keep)
            identity = self._thread.call(pool._next_identity(version))
            versions.check_folder(identity)
        except BaseException:
            drain_blocking(weights)
            raise
        root_hash = spool_blocking(weights, versions.local_path(identity), shard_bytes)
        saved = pool._publish_saved(versions, identity, root_hash, seconds, progress)
        return self._thread.call(saved)

    def sleep(self, *, seconds: float = DEFAULT_STATE_SECONDS) -> None:
        """Free the engines' memory."""
        self._thread.call(self.asynchronous.sleep(seconds=seconds))

    def wake(self, *, seconds: float = DEFAULT_STATE_SECONDS) -> None:
        """Undo `sleep` and `pause`; returns once the replicas serve."""
        self._thread.call(self.asynchronous.wake(seconds=seconds))

    def pause(self, *, seconds: float = DEFAULT_STATE_SECONDS) -> None:
        """Stop generating and keep the memory."""
        self._thread.call(self.asynchronous.pause(seconds=seconds))

    @contextmanager
    def generating(self, *, seconds: float = DEFAULT_STATE_SECONDS) -> Iterator[Self]:
        """Wake the pool for a block and put it to sleep at the end."""
        block = self.asynchronous.generating(seconds=seconds)
        self._thread.call(block.__aenter__())
        try:
            yield self
        finally:
            self._thread.call(block.__aexit__(None, None, None))

    @contextmanager
    def turn(self, **options: Unpack[TurnOptions]) -> Iterator[HeldTurn]:
        """Have the devices that this process shares with the pool for a block."""
        pool = self.asynchronous
        plan = Plan.of(options)
        session = Session(pool, plan, pool._find_devices)
        acquire_blocking(session, plan, self._thread)
        try:
            yield session.held
        except BaseException as error:
            # Here: nothing in the pool's thread may come between, and a forked child has no such thread.
            if session.end_block(error):
                self._thread.call(session.leave(error))
            raise
        if session.end_block(None):
            self._thread.call(session.leave(None))
