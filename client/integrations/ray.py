"""One pool for all processes of a Ray job: an actor holds it, and with it the only balancer.

With a pool in each process, every balancer would see only its own requests. Here the processes share
the counts of requests in flight, and which replica has which conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import PurePath
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, Unpack

from rollout_client.discovery.members import Member
from rollout_client.generating.prompts import GenerateOptions, Prompt
from rollout_client.generating.verbs import DEFAULT_CONCURRENCY as CONCURRENT_PROMPTS
from rollout_client.generating.verbs import Progress
from rollout_client.pool import AsyncRolloutPool
from rollout_client.results import GenerateResult
from rollout_client.steering.protocol import (
    DEFAULT_ACQUIRE_SECONDS,
    DEFAULT_PUBLISH_SECONDS,
    DEFAULT_STATE_SECONDS,
    OnProgress,
    Published,
)
from rollout_client.steering.pushing.options import PushOptions
from rollout_worker.schemas import WorkerInfo

if TYPE_CHECKING:
    from rollout_client.steering.spool import Tensors

CONCURRENCY = 10_000
"""How many calls the actor has open at once: nearly all of them wait for a worker."""


class PoolActor:
    """What runs in the actor: the methods of `AsyncRolloutPool`, with the same arguments.

    All but `stream`: a call to an actor has only one answer.
    """

    def __init__(self, make: Callable[[], AsyncRolloutPool]) -> None:
        self._make = make
        self._pool: AsyncRolloutPool | None = None

    async def _opened(self) -> AsyncRolloutPool:
        if self._pool is None:
            self._pool = self._make()
        return self._pool

    async def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerateResult:
        """See `AsyncRolloutPool.generate`."""
        return await (await self._opened()).generate(prompt, **options)

    async def generate_many(
        self,
        prompts: Sequence[Prompt],
        *,
        concurrency: int = CONCURRENT_PROMPTS,
        progress: Progress | None = None,
        on_error: Literal["raise", "return"] = "raise",
        **options: Unpack[GenerateOptions],
    ) -> list[Any]:
        """See `AsyncRolloutPool.generate_many`; `progress` is called in the actor."""
        return await (await self._opened()).generate_many(
            prompts, concurrency=concurrency, progress=progress, on_error=on_error, **options
        )

    async def wait_serving(self, count: int = 1, *, seconds: float = 600) -> list[Member]:
        """See `AsyncRolloutPool.wait_serving`."""
        return await (await self._opened()).wait_serving(count, seconds=seconds)

    async def info(self, *, seconds: float = 30) -> WorkerInfo:
        """See `AsyncRolloutPool.info`."""
        return await (await self._opened()).info(seconds=seconds)

    async def acquire(self, *, seconds: float = DEFAULT_ACQUIRE_SECONDS) -> int:
        """See `AsyncRolloutPool.acquire`."""
        return await (await self._opened()).acquire(seconds=seconds)

    async def publish_weights(
        self,
        version: int,
        path: str | PurePath | EllipsisType | None = ...,
        *,
        tensors: Tensors | None = None,
        seconds: float = DEFAULT_PUBLISH_SECONDS,
        progress: OnProgress = lambda progress: None,
        **options: Unpack[PushOptions],
    ) -> Published:
        """See `AsyncRolloutPool.publish_weights`; `progress` is called in the actor.

        Ray copies tensors to the actor: publish them from the process that has them if you can.
        """
        pool = await self._opened()
        return await pool.publish_weights(
            version, path, tensors=tensors, seconds=seconds, progress=progress, **options
        )

    async def sleep(self, *, seconds: float = DEFAULT_STATE_SECONDS) -> None:
        """See `AsyncRolloutPool.sleep`."""
        await (await self._opened()).sleep(seconds=seconds)

    async def wake(self, *, seconds: float = DEFAULT_STATE_SECONDS) -> None:
        """See `AsyncRolloutPool.wake`."""
        await (await self._opened()).wake(seconds=seconds)

    async def pause(self, *, seconds: float = DEFAULT_STATE_SECONDS) -> None:
        """See `AsyncRolloutPool.pause`."""
        await (await self._opened()).pause(seconds=seconds)

    async def serving(self) -> list[Member]:
        """Return the members that may get requests now."""
        return (await self._opened()).serving()

    async def load(self) -> dict[str, int]:
        """Return the requests in flight, by replica."""
        return (await self._opened()).load()

    async def close(self) -> None:
        """Close the pool."""
        if self._pool is not None:
            await self._pool.close()


def pool_actor(
    make: Callable[[], AsyncRolloutPool], name: str | None = None, **options: Any
) -> Any:
    """Start the actor and return its handle: `ray.get(handle.generate.remote(prompt, …))`.

    Args:
        make: Makes the pool, in the actor: `partial(AsyncRolloutPool.from_cluster, "math")`.
        name: Of the actor, for `ray.get_actor`; if there is such an actor already, it is returned.
        **options: Of the actor, such as `num_cpus`.

    Raises:
        ImportError: Ray is not installed.
    """
    import ray

    chosen: dict[str, Any] = {"num_cpus": 0, "max_concurrency": CONCURRENCY, **options}
    if name is not None:
        chosen |= {"name": name, "get_if_exists": True}
    return ray.remote(PoolActor).options(**chosen).remote(make)
