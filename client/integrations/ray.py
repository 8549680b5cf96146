"""One pool for all processes of a Ray job: an actor holds it, and with it the only balancer.

With a pool in each process, every balancer would see only its own requests. Here the processes share
the counts of requests in flight, and which replica has which conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rollout_client.discovery.members import Member
from rollout_client.generating.calls import Prompt
from rollout_client.pool import AsyncRolloutPool
from rollout_client.results import GenerateResult
from rollout_client.steering.protocol import Published

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

    async def generate(self, prompt: Prompt, **options: Any) -> GenerateResult:
        """See `AsyncRolloutPool.generate`."""
        return await (await self._opened()).generate(prompt, **options)

    async def generate_many(self, prompts: Sequence[Prompt], **options: Any) -> list[Any]:
        """See `AsyncRolloutPool.generate_many`; `progress` is called in the actor."""
        return await (await self._opened()).generate_many(prompts, **options)

    async def wait_serving(self, count: int = 1, **options: Any) -> list[Member]:
        """See `AsyncRolloutPool.wait_serving`."""
        return await (await self._opened()).wait_serving(count, **options)

    async def acquire(self, **options: Any) -> int:
        """See `AsyncRolloutPool.acquire`."""
        return await (await self._opened()).acquire(**options)

    async def publish_weights(self, version: int, path: str | None, **options: Any) -> Published:
        """See `AsyncRolloutPool.publish_weights`."""
        return await (await self._opened()).publish_weights(version, path, **options)

    async def sleep(self, **options: Any) -> None:
        """See `AsyncRolloutPool.sleep`."""
        await (await self._opened()).sleep(**options)

    async def wake(self, **options: Any) -> None:
        """See `AsyncRolloutPool.wake`."""
        await (await self._opened()).wake(**options)

    async def pause(self, **options: Any) -> None:
        """See `AsyncRolloutPool.pause`."""
        await (await self._opened()).pause(**options)

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
