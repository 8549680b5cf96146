"""`RolloutPool`: `AsyncRolloutPool` for programs without an event loop.

The asynchronous pool runs in the loop of a `BlockingPortal`. The functions here make a blocking
method of an asynchronous one, with its arguments, types and docstring.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack

from typing_extensions import override

from rollout_client.blocking_portal import BlockingPortal
from rollout_client.discovery.pool_members import Member
from rollout_client.errors import PoolClosed
from rollout_client.generating.generate_call import GenerationStream
from rollout_client.generating.generate_options import GenerateOptions, Prompt
from rollout_client.results import GenerateResult
from rollout_client.steering.settings import DEFAULT_STATE_SECONDS
from rollout_client.steering.spool import drain_blocking
from rollout_client.turn import HeldTurn, TurnOptions
from rollout_client.turn.plan import TurnPlan
from rollout_client.turn.session import StepRunner, TurnSession, TurnStep
from rollout_common.wire import StreamDelta, WeightsId

from .asynchronous import AsyncRolloutPool

P = ParamSpec("P")
T = TypeVar("T")
PoolT = TypeVar("PoolT", bound="RolloutPool")


class MakePool(Generic[P]):
    """A class method that makes an `AsyncRolloutPool` in a new portal, and the pool around it."""

    def __init__(self, make: Callable[P, AsyncRolloutPool]) -> None:
        self._make = make

    def __get__(self, pool: object, kind: type[PoolT]) -> Callable[P, PoolT]:
        @wraps(self._make)
        def make_pool(*args: P.args, **kwargs: P.kwargs) -> PoolT:
            return kind(partial(self._make, *args, **kwargs))

        return make_pool


def call_blocking(
    method: Callable[Concatenate[AsyncRolloutPool, P], Coroutine[Any, Any, T]],
    tensors: str | None = None,
) -> Callable[Concatenate[RolloutPool, P], T]:
    """Return a method that waits until the asynchronous one has ended.

    Args:
        method: The asynchronous method.
        tensors: The argument with tensors to publish, if any. A closed pool takes all of them, too:
            other ranks make them together with this one, and would wait. With `ranks` it takes
            none, as the ranks have not met yet.
    """
    signature = inspect.signature(method)

    @wraps(method)
    def call(pool: RolloutPool, /, *args: P.args, **kwargs: P.kwargs) -> T:
        def drain_refused() -> None:
            given = signature.bind(pool, *args, **kwargs).arguments.get(tensors or "")
            if given is not None and kwargs.get("ranks") is None:
                drain_blocking(given)

        work: Coroutine[Any, Any, T]
        work = getattr(pool.asynchronous, method.__name__)(*args, **kwargs)
        return pool._portal.call(work, drain_refused)

    return call


def read_blocking(
    method: Callable[Concatenate[AsyncRolloutPool, P], T],
) -> Callable[Concatenate[RolloutPool, P], T]:
    """Return a method that runs a plain one in the loop; callbacks may call it as well."""

    @wraps(method)
    def read(pool: RolloutPool, /, *args: P.args, **kwargs: P.kwargs) -> T:
        bound: Callable[P, T] = getattr(pool.asynchronous, method.__name__)
        return pool._portal.read(lambda: bound(*args, **kwargs))

    return read


def iterate_blocking(
    method: Callable[Concatenate[AsyncRolloutPool, P], AsyncGenerator[T]],
) -> Callable[Concatenate[RolloutPool, P], Iterator[T]]:
    """Return a method that iterates over what the asynchronous one yields."""

    @wraps(method)
    def iterate(pool: RolloutPool, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        found = getattr(pool.asynchronous, method.__name__)(*args, **kwargs)
        return _iterate(pool._portal, found)

    shown = inspect.signature(method)
    yields = str(shown.return_annotation).replace("AsyncGenerator", "Iterator")
    shown = shown.replace(return_annotation=yields)
    setattr(iterate, "__signature__", shown)  # noqa: B010  # unknown to mypy
    return iterate


def _iterate(portal: BlockingPortal, found: AsyncGenerator[T]) -> Iterator[T]:
    async def next_item() -> T | None:
        return await anext(found, None)

    try:
        while (item := portal.call(next_item())) is not None:
            yield item
    finally:
        portal.finish(found.aclose())


class _BlockingStepRunner(StepRunner):
    """Runs the steps of a turn in the pool's thread, and votes in the caller's, which has the device."""

    def __init__(self, plan: TurnPlan, portal: BlockingPortal) -> None:
        super().__init__(plan)
        self._portal = portal

    @override
    async def run_step(self, step: TurnStep) -> None:
        self._portal.call(step())

    @override
    async def collect_votes(self, yes: bool) -> bool:
        return self._plan.all_agree(yes)


def _acquire_blocking(session: TurnSession, plan: TurnPlan, portal: BlockingPortal) -> None:
    """Acquire a turn as `TurnSession.acquire_turn` does, in the caller's thread."""
    acquiring = session.acquire_turn(_BlockingStepRunner(plan, portal))
    # No step of this runner waits for an event loop, so the coroutine never suspends.
    try:
        acquiring.send(None)
    except StopIteration:
        return
    acquiring.close()
    raise AssertionError("a step of the turn waited for an event loop")


class SyncStream:
    """A `GenerationStream` for programs without an event loop."""

    def __init__(self, portal: BlockingPortal, stream: GenerationStream) -> None:
        self._portal = portal
        self._stream = stream

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._portal.finish(self._stream.close())

    def __iter__(self) -> Iterator[StreamDelta]:
        """Yield deltas; their spans count from the output's first token."""
        return _iterate(self._portal, self._stream.__aiter__())

    @property
    def result(self) -> GenerateResult:
        """The result: final once the iteration has ended, until then what there is so far."""
        return self._portal.read(lambda: self._stream.result)


class RolloutPool:
    """`AsyncRolloutPool` with the same methods and arguments, each of which blocks until its end.

    Use it as a context manager, or `close` it. `asynchronous` is the pool inside; use that only in
    its own loop. Threads may share a pool. It does not survive a fork: make it afterwards.

    Hooks and `progress` run in the pool's thread: they may read the pool (`load`, `members`,
    `serving`), while a method that blocks raises a RuntimeError. Tensors are made and copied in the
    calling thread, which may be the only one with the right device; a stream of them is a plain
    generator.
    """

    def __init__(self, make: Callable[[], AsyncRolloutPool]) -> None:
        async def make_pool() -> AsyncRolloutPool:
            return await make().__aenter__()

        self._portal = BlockingPortal("rollout-pool")
        try:
            self.asynchronous = self._portal.call(make_pool())
        except BaseException:
            self._portal.close()
            raise

    from_urls = MakePool(AsyncRolloutPool.from_urls)
    from_dns = MakePool(AsyncRolloutPool.from_dns)
    from_cluster = MakePool(AsyncRolloutPool.from_cluster)

    # Life.

    __reduce__ = AsyncRolloutPool.__reduce__

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything; requests under way raise `PoolClosed`."""
        try:
            self._portal.call(self.asynchronous.close())
        except PoolClosed:
            return
        self._portal.close()

    # Members.

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
        return self._portal.read(lambda: self.asynchronous.members)

    serving = read_blocking(AsyncRolloutPool.serving)
    load = read_blocking(AsyncRolloutPool.load)
    wait_serving = call_blocking(AsyncRolloutPool.wait_serving)
    info = call_blocking(AsyncRolloutPool.info)

    # Generate.

    generate = call_blocking(AsyncRolloutPool.generate)
    score = call_blocking(AsyncRolloutPool.score)
    generate_many = call_blocking(AsyncRolloutPool.generate_many)
    as_completed = iterate_blocking(AsyncRolloutPool.as_completed)

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> SyncStream:
        """Return a stream of deltas, joined over all attempts; arguments as of `generate`.

        `with pool.stream(…) as stream: for delta in stream: …`, then `stream.result`. Some tokens are
        held back: see `AsyncRolloutPool.stream`.
        """
        stream = self._portal.read(lambda: self.asynchronous.stream(prompt, **options))
        return SyncStream(self._portal, stream)

    # Steer.

    @property
    def epoch(self) -> int | None:
        """The epoch that this trainer holds; None before it has one."""
        return self.asynchronous.epoch

    acquire = call_blocking(AsyncRolloutPool.acquire)
    publish_weights = call_blocking(AsyncRolloutPool.publish_weights, "tensors")
    publish_handed_over = call_blocking(AsyncRolloutPool.publish_handed_over)
    save_and_publish = call_blocking(AsyncRolloutPool.save_and_publish, "weights")
    sleep = call_blocking(AsyncRolloutPool.sleep)
    wake = call_blocking(AsyncRolloutPool.wake)
    pause = call_blocking(AsyncRolloutPool.pause)

    @contextmanager
    def generating(self, *, seconds: float = DEFAULT_STATE_SECONDS) -> Iterator[Self]:
        """Wake the pool for a block and put it to sleep at the end: for a shared accelerator.

        If another client changes the state within the block, the pool keeps that state.
        """
        block = self.asynchronous.generating(seconds=seconds)
        self._portal.call(block.__aenter__())
        try:
            yield self
        finally:
            self._portal.call(block.__aexit__(None, None, None))

    @contextmanager
    def turn(self, **options: Unpack[TurnOptions]) -> Iterator[HeldTurn]:
        """Hold the devices that this process shares with the pool; see `AsyncRolloutPool.turn`."""
        pool = self.asynchronous
        plan = TurnPlan.from_options(options)
        session = TurnSession(pool, plan, pool._find_devices)
        _acquire_blocking(session, plan, self._portal)
        try:
            yield session.held_turn
        except BaseException as error:
            # In this thread: no step of the pool's may come between, and a forked child has only this one.
            if session.end_block(error):
                self._portal.call(session.leave_turn(error))
            raise
        if session.end_block(None):
            self._portal.call(session.leave_turn(None))
