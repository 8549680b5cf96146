"""`RolloutPool`: `AsyncRolloutPool` for programs without an event loop.

The asynchronous pool runs in a thread with a loop of its own; every method here hands its call to
it and waits. Threads may share a pool. It does not survive a fork: make it after.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, Literal, Self, TypeVar

from rollout_client.discovery.dns import TTL_SECONDS
from rollout_client.discovery.members import DATA_PORT, Member
from rollout_client.errors import PoolClosed, RolloutError
from rollout_client.generating.attempts import OnVersionChange
from rollout_client.generating.calls import Prompt
from rollout_client.generating.streams import GenerationStream
from rollout_client.results import GenerateResult
from rollout_client.steering.direct import DirectOptions
from rollout_client.steering.protocol import (
    ACQUIRE_SECONDS,
    PUBLISH_SECONDS,
    STATE_SECONDS,
    OnProgress,
    Published,
)
from rollout_worker.schemas import StreamDelta, WeightsId, WorkerInfo

from .asynchronous import CONCURRENCY, AsyncRolloutPool, Progress

T = TypeVar("T")

CLOSE_SECONDS = 30.0
LOOK_SECONDS = 1.0
"""How often a caller that waits looks whether the loop is still there."""


class LoopThread:
    """A thread with an event loop, for as long as `close` is not called."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        # Who still waits for a call gets an end of it, too.
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and return its result; interrupted, it is cancelled.

        Raises:
            PoolClosed: The loop has ended.
        """
        if self._loop.is_closed() or not self._thread.is_alive():
            work.close()
            raise PoolClosed("the pool was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while not concurrent.futures.wait([future], LOOK_SECONDS).done:
                if not self._thread.is_alive():  # handed over just after the loop's last turn
                    raise PoolClosed("the pool was closed")
            return future.result()
        except concurrent.futures.CancelledError:
            raise PoolClosed("the pool was closed while this ran") from None
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End the loop and the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_SECONDS)


class RolloutPool:
    """See `AsyncRolloutPool`: the same methods and arguments, each waits for its end.

    Use it as a context manager, or `close` it. `asynchronous` is the pool behind, to be used in its
    own loop only.
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
        **options: Any,
    ) -> Self:
        """Return a pool of workers at fixed data URLs, without an operator."""
        return cls(
            lambda: AsyncRolloutPool.from_urls(
                urls, control_urls=control_urls, direct=direct, **options
            )
        )

    @classmethod
    def from_dns(
        cls,
        host: str,
        *,
        port: int = DATA_PORT,
        ttl_seconds: float = TTL_SECONDS,
        **options: Any,
    ) -> Self:
        """Return a pool of all addresses behind a name, such as `math-heads.train.svc`."""
        return cls(
            lambda: AsyncRolloutPool.from_dns(host, port=port, ttl_seconds=ttl_seconds, **options)
        )

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
        """Return the pool of a RolloutReplica."""
        return cls(
            lambda: AsyncRolloutPool.from_cluster(
                name, namespace, kubeconfig=kubeconfig, context=context, **options
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
        """Members that discovery knows now."""
        return self._thread.call(_of(lambda: self.asynchronous.members))

    def serving(self) -> list[Member]:
        """Members that may get requests now."""
        return self._thread.call(_of(self.asynchronous.serving))

    def load(self) -> dict[str, int]:
        """Requests of this pool in flight, by the member's name."""
        return self._thread.call(_of(self.asynchronous.load))

    def wait_serving(self, count: int = 1, *, seconds: float = 600) -> list[Member]:
        """Wait until so many members answer that they serve."""
        return self._thread.call(self.asynchronous.wait_serving(count, seconds=seconds))

    def info(self, *, seconds: float = 30) -> WorkerInfo:
        """Return what a replica says of model, length and capabilities."""
        return self._thread.call(self.asynchronous.info(seconds=seconds))

    # Generate.

    def generate(
        self,
        prompt: Prompt,
        *,
        group_id: str | None = None,
        on_version_change: OnVersionChange = "continue",
        **fields: Any,
    ) -> GenerateResult:
        """Sample from one prompt until every output has ended."""
        return self._thread.call(
            self.asynchronous.generate(
                prompt, group_id=group_id, on_version_change=on_version_change, **fields
            )
        )

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        *,
        concurrency: int = CONCURRENCY,
        progress: Progress | None = None,
        on_error: Literal["raise", "return"] = "raise",
        **options: Any,
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
        self, prompts: Iterable[Prompt], *, concurrency: int = CONCURRENCY, **options: Any
    ) -> Iterator[tuple[int, GenerateResult | RolloutError]]:
        """Yield (index, result or error) as requests end."""
        found = self.asynchronous.as_completed(prompts, concurrency=concurrency, **options)
        try:
            while (following := self._thread.call(_next(found))) is not None:
                yield following
        finally:
            self._thread.call(found.aclose())

    def stream(
        self,
        prompt: Prompt,
        *,
        group_id: str | None = None,
        on_version_change: OnVersionChange = "continue",
        **fields: Any,
    ) -> SyncStream:
        """Return a stream of deltas, joined over all attempts; use it with `with`."""
        stream = self._thread.call(
            _of(
                lambda: self.asynchronous.stream(
                    prompt, group_id=group_id, on_version_change=on_version_change, **fields
                )
            )
        )
        return SyncStream(self._thread, stream)

    # Steer.

    @property
    def epoch(self) -> int | None:
        """The epoch that this trainer holds, once it has one."""
        return self.asynchronous.epoch

    def acquire(self, *, seconds: float = ACQUIRE_SECONDS) -> int:
        """Take the pool: the next epoch; former trainers are shut out."""
        return self._thread.call(self.asynchronous.acquire(seconds=seconds))

    def publish_weights(
        self,
        version: int,
        path: str | PurePath | None,
        *,
        seconds: float = PUBLISH_SECONDS,
        progress: OnProgress = lambda progress: None,
    ) -> Published:
        """Bring a version to all replicas and return once it serves."""
        return self._thread.call(
            self.asynchronous.publish_weights(version, path, seconds=seconds, progress=progress)
        )

    def sleep(self, *, seconds: float = STATE_SECONDS) -> None:
        """Give the engines' memory back."""
        self._thread.call(self.asynchronous.sleep(seconds=seconds))

    def wake(self, *, seconds: float = STATE_SECONDS) -> None:
        """Undo `sleep` and `pause`; returns once the replicas serve."""
        self._thread.call(self.asynchronous.wake(seconds=seconds))

    def pause(self, *, seconds: float = STATE_SECONDS) -> None:
        """Stop generating and keep the memory."""
        self._thread.call(self.asynchronous.pause(seconds=seconds))

    @contextmanager
    def generating(self, *, seconds: float = STATE_SECONDS) -> Iterator[Self]:
        """Wake the pool for a block and let it sleep at the end."""
        block = self.asynchronous.generating(seconds=seconds)
        self._thread.call(block.__aenter__())
        try:
            yield self
        finally:
            self._thread.call(block.__aexit__(None, None, None))


class SyncStream:
    """A `GenerationStream` for programs without an event loop."""

    def __init__(self, thread: LoopThread, stream: GenerationStream) -> None:
        self._thread = thread
        self._stream = stream

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.call(self._stream.close())

    def __iter__(self) -> Iterator[StreamDelta]:
        """Yield deltas; their spans count from the output's first token."""
        deltas = self._stream.__aiter__()
        try:
            while (delta := self._thread.call(_next(deltas))) is not None:
                yield delta
        finally:
            self._thread.call(deltas.aclose())

    @property
    def result(self) -> GenerateResult:
        """The result: final once the iteration has ended, else what there is so far."""
        return self._thread.call(_of(lambda: self._stream.result))


async def _of(function: Callable[[], T]) -> T:
    return function()


async def _next(iterator: Any) -> Any:
    return await anext(iterator, None)
