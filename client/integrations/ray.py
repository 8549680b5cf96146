"""One pool for all processes of a Ray job: an actor holds it, and with it the only balancer.

With a pool in each process, every balancer would see only its own requests. The processes share
the counts of requests in flight, and which replica has which conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from rollout_client.discovery.pool_members import Member
from rollout_client.pool import AsyncRolloutPool

P = ParamSpec("P")
T = TypeVar("T")

ACTOR_CONCURRENCY = 10_000
"""Calls that the actor has open at once: nearly all of them wait for a worker."""


def call_in_actor(
    method: Callable[Concatenate[AsyncRolloutPool, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[PoolActor, P], Coroutine[Any, Any, T]]:
    """Return an actor's method that calls the pool's, with its arguments and docstring."""

    @wraps(method)
    async def call(actor: PoolActor, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = await getattr(actor._open_pool(), method.__name__)(*args, **kwargs)
        return result

    return call


class PoolActor:
    """The actor: the methods of `AsyncRolloutPool`, with the same arguments.

    It has no `stream`: a call to an actor has only one answer. `progress` is called in the actor.
    Ray copies tensors to the actor: if you can, publish them from the process that has them.
    """

    def __init__(self, make: Callable[[], AsyncRolloutPool]) -> None:
        self._make = make
        self._pool: AsyncRolloutPool | None = None

    def _open_pool(self) -> AsyncRolloutPool:
        # Made at the first call: a pool belongs to the loop of its maker.
        if self._pool is None:
            self._pool = self._make()
        return self._pool

    generate = call_in_actor(AsyncRolloutPool.generate)
    generate_many = call_in_actor(AsyncRolloutPool.generate_many)
    score = call_in_actor(AsyncRolloutPool.score)
    wait_serving = call_in_actor(AsyncRolloutPool.wait_serving)
    info = call_in_actor(AsyncRolloutPool.info)
    acquire = call_in_actor(AsyncRolloutPool.acquire)
    publish_weights = call_in_actor(AsyncRolloutPool.publish_weights)
    sleep = call_in_actor(AsyncRolloutPool.sleep)
    wake = call_in_actor(AsyncRolloutPool.wake)
    pause = call_in_actor(AsyncRolloutPool.pause)

    async def serving(self) -> list[Member]:
        """Return the members that may get requests now."""
        return self._open_pool().serving()

    async def load(self) -> dict[str, int]:
        """Return the requests in flight, by replica."""
        return self._open_pool().load()

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
        name: The actor's name, for `ray.get_actor`; an actor with this name is returned.
        **options: Options of the actor, such as `num_cpus`.

    Raises:
        ImportError: Ray is not installed.
    """
    import ray

    chosen: dict[str, Any] = {"num_cpus": 0, "max_concurrency": ACTOR_CONCURRENCY, **options}
    if name is not None:
        chosen |= {"name": name, "get_if_exists": True}
    return ray.remote(PoolActor).options(**chosen).remote(make)
