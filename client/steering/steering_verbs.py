"""The verbs that a pool is steered with: epochs, weights, sleep; whole, as `AsyncRolloutPool` has them all."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import PurePath
from types import EllipsisType
from typing import TYPE_CHECKING, Self, Unpack

from rollout_client.blocking_portal import calling_thread
from rollout_client.errors import PublishFailed, RolloutError, SteeringFailed
from rollout_client.hooks import Hook, guard_progress
from rollout_common.wire import MAX_IDENTITY, Pushed, WeightsId, WeightsSource

from .pushing.options import PushOptions, PushPlan, check_path
from .pushing.push import Push
from .pushing.pusher import Begin, Pusher
from .pushing.together import Together, Work
from .settings import DEFAULT_ACQUIRE_SECONDS, DEFAULT_PUBLISH_SECONDS, DEFAULT_STATE_SECONDS
from .spool import SHARD_BYTES, drain_tensors, run_to_end, spool_tensors
from .steering_protocol import (
    HandedOverVersion,
    OnProgress,
    PoolState,
    Published,
    Steering,
    handed_over_identity,
    source_from_path,
)
from .version_folder import DEFAULT_KEPT_VERSIONS, VersionFolder

if TYPE_CHECKING:
    from .spool import Tensors

logger = logging.getLogger(__name__)


class SteeringVerbs:
    """What only those may do who have the right to steer the pool; RBAC and the workers decide.

    Args:
        steering: Carries the verbs out; None: this pool can only generate.
        hook: Is told how publishing ended.
        max_staleness: Requests without bounds of their own are served by weights at most so many
            versions older than the last one published here; None: by any.
    """

    def __init__(
        self, steering: Steering | None, hook: Hook, max_staleness: int | None = None
    ) -> None:
        self.floor: WeightsId | None = None
        """Requests without bounds of their own are served by these weights or newer ones."""
        self.epoch: int | None = None
        """The epoch that this trainer holds; None until it has one."""
        self._steering = steering
        self._steering_hook = hook
        self._max_staleness = max_staleness
        self._dtypes: Mapping[str, str] | None = None
        self._last: WeightsId | None = None
        """What was published here last."""
        self._pusher = Pusher()
        self._together = Together(self._pusher)

    async def _get_steering(self) -> Steering:
        if self._steering is None:
            raise SteeringFailed(
                "this pool can't be steered: make it with from_cluster or from_urls"
            )
        return self._steering

    async def acquire(self, *, seconds: float = DEFAULT_ACQUIRE_SECONDS) -> int:
        """Take the pool: the next epoch, by compare-and-swap, which shuts out earlier trainers.

        Raises:
            EpochLost: Another trainer was faster.
        """
        self.epoch = await (await self._get_steering()).acquire_epoch(seconds)
        logger.info("this trainer holds epoch %d", self.epoch)
        return self.epoch

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
        """Publish a version to all replicas and return once it serves.

        It is what lies at a path, or tensors of this process, which go straight to the replicas'
        memory. If this trainer dies meanwhile, the pool ends up consistent: all old, or all new.

        Args:
            version: Must be higher than the last one of this epoch; the last one again succeeds if it has
                the same content. A trainer without an epoch takes the next one first.
            path: Folder of safetensors as the workers see it, which must not change any more;
                None: the model's own checkpoint.
            tensors: Instead of a path: a model, its state dict, or a plain or asynchronous generator
                of (name, tensor), with the names and shapes of the model's checkpoint, and its dtypes
                unless `cast` is given. A generator is always taken to its end, also if this fails: other ranks wait in it.
            seconds: Deadline for all of it.
            progress: Called with how far it is.
            **options: Of tensors alone, see `PushOptions`.

        Raises:
            PublishFailed: The operator, or a worker that can't use the weights, says why; or this version
                has other content already (`content-mismatch`), or is below the last one.
            Superseded: Newer weights took their place.
            EpochLost: Another trainer has the pool now.
            ValueError: A tensor can't be published; names it. Or there is no memory for them.
            OSError: The folder of `spool` can't be written; nothing was committed.
        """
        if tensors is None:
            check_path(path, options)
            assert not isinstance(path, EllipsisType)
            return await self._publish_source(version, source_from_path(path), seconds, progress)
        plan = PushPlan.of(path, options)

        async def push(begin: Begin) -> Published:
            return await self._push_tensors(begin, version, tensors, plan, seconds, progress)

        if plan.ranks is None:
            return await push(
                partial(self._pusher.begin, tensors, plan.transport, plan.rate, delta=plan.delta)
            )
        work = Work(
            plan.ranks, version, tensors, seconds, plan.transport, plan.rate, plan.delta, plan.reach
        )
        return await self._together.publish(work, push)

    async def _push_tensors(
        self,
        begin: Begin,
        version: int,
        tensors: Tensors,
        plan: PushPlan,
        seconds: float,
        progress: OnProgress,
    ) -> Published:
        """Publish what this process has, or rank 0 with the others."""
        try:
            push = begin(dtypes=await self._cast_dtypes(plan, seconds))
        except BaseException:
            if plan.ranks is None:  # several ranks gather nothing before they have met
                await drain_tensors(tensors)
            raise
        sending = asyncio.ensure_future(self._send_push(version, push, plan, seconds, progress))
        sending.add_done_callback(lambda _: push.filling.fail())
        try:
            try:
                if calling_thread() is None:
                    await push.fill()
                else:
                    await run_to_end(push.fill_here)
            except BaseException:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
                raise
            return await sending
        finally:
            push.close()

    async def _cast_dtypes(self, plan: PushPlan, seconds: float) -> Mapping[str, str] | None:
        """Return what floating-point tensors are cast to; a pool is of one model, so it is asked for once.

        Raises:
            SteeringFailed: No worker tells.
        """
        if not plan.cast:
            return None
        if self._dtypes is None:
            steering = await self._get_steering()
            try:
                async with asyncio.timeout(seconds):
                    self._dtypes = await steering.tensor_dtypes()
            except TimeoutError:
                why = f"cast: no worker told the dtypes of its model within {seconds:g} s"
                raise SteeringFailed(why) from None
        return self._dtypes

    async def publish_handed_over(
        self,
        handed: HandedOverVersion,
        *,
        seconds: float = DEFAULT_PUBLISH_SECONDS,
        progress: OnProgress = lambda progress: None,
    ) -> Published:
        """Let all replicas serve what `Worker.hand_over` staged in them, and return once they do.

        Of several ranks each hands over to its own worker, and one of them calls this with what it got; who was
        handed nothing fetches it from the others. Raises what `publish_weights` raises.
        """
        version = handed_over_identity(handed, self.epoch).version
        source = WeightsSource(pushed=Pushed())
        return await self._publish_source(
            version, source, seconds, progress, root_hash=handed.root_hash
        )

    async def _send_push(
        self,
        version: int,
        push: Push,
        plan: PushPlan,
        seconds: float,
        progress: OnProgress,
    ) -> Published:
        """Publish what somebody fills meanwhile, and the folder beside it if one is wanted."""
        if plan.versions is None:
            source = WeightsSource(pushed=Pushed())
            return await self._publish_source(version, source, seconds, progress, push)
        identity = await self._next_identity(version)
        await asyncio.to_thread(plan.versions.check_folder, identity)
        push.spool = plan.versions.local_path(identity)
        source = source_from_path(plan.versions.mounted_path(identity))
        done = await self._publish_source(version, source, seconds, progress, push)
        await asyncio.to_thread(plan.versions.prune_versions, done.identity)
        return done

    async def _publish_source(
        self,
        version: int,
        source: WeightsSource,
        seconds: float,
        progress: OnProgress,
        push: Push | None = None,
        root_hash: str | None = None,
    ) -> Published:
        began, outcome = time.monotonic(), "cancelled"
        steering = await self._get_steering()
        tell = guard_progress(progress)
        try:
            identity = await self._next_identity(version)
            done = await steering.publish_identity(identity, source, seconds, tell, push, root_hash)
            outcome, self._last = "ok", identity
        except RolloutError as error:
            outcome = type(error).__name__
            raise
        finally:
            self._steering_hook.published(outcome, time.monotonic() - began)
        logger.info("%s", done.message, extra={"weights_version": version})
        if self._max_staleness is not None:
            oldest = max(0, version - self._max_staleness)
            self.floor = WeightsId(epoch=identity.epoch, version=oldest)
        return done

    async def save_and_publish(
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

        The version becomes a folder `epoch-E-version-V` with a manifest; it is there whole or not at
        all, also after a crash. Needs torch, safetensors and xxhash. A stream of tensors is always
        taken to its end, also if this fails: other ranks wait in it.

        Args:
            weights: A model, its state dict, or a plain or asynchronous generator of (name, tensor),
                with the names, shapes and dtypes of the model's checkpoint.
            version: As of `publish_weights`.
            folder: Where this process writes versions, of this pool alone.
            mounted_at: The same folder as the workers see it: absolute, or relative to the weights'
                claim; None: as here.
            keep: How many committed versions stay, at least the one that serves.
            shard_bytes: Size of the files, and of what is held in memory.
            seconds: Deadline for publishing; writing takes as long as it takes.
            progress: Called with how far publishing is.

        Raises:
            OSError: It can't be written; FileExistsError: it, or a later one, was written before.
            ValueError: A name came twice, or there was no tensor.
            PublishError, EpochLost: See `publish_weights`.
        """
        try:
            versions = VersionFolder.in_folder(folder, mounted_at, keep)
            identity = await self._next_identity(version)
            await asyncio.to_thread(versions.check_folder, identity)
        except BaseException:
            await drain_tensors(weights)
            raise
        root_hash = await spool_tensors(weights, versions.local_path(identity), shard_bytes)
        return await self._publish_saved(versions, identity, root_hash, seconds, progress)

    async def _next_identity(self, version: int) -> WeightsId:
        """Return the identity of a version of this trainer, which takes an epoch if it has none.

        Raises:
            PublishFailed: A higher one was published here.
            ValueError: It is no whole number, or out of range.
        """
        if isinstance(version, bool) or not hasattr(version, "__index__"):
            raise ValueError(f"version must be a whole number, not {version!r}")
        version = version.__index__()  # numpy's, too
        if not 0 <= version <= MAX_IDENTITY:
            raise ValueError(f"version must be 0 to {MAX_IDENTITY}, not {version}")
        if self.epoch is None:
            await self.acquire()
        assert self.epoch is not None
        identity = WeightsId(epoch=self.epoch, version=version)
        if self._last is not None and identity < self._last:
            raise PublishFailed(
                f"weights {identity} are below {self._last}, which this pool published last: give a"
                " higher version, or acquire() a higher epoch to go back"
            )
        return identity

    async def _publish_saved(
        self,
        versions: VersionFolder,
        identity: WeightsId,
        root_hash: str,
        seconds: float,
        progress: OnProgress,
    ) -> Published:
        """Publish what was written, then delete what nobody needs any more."""
        source = source_from_path(versions.mounted_path(identity))
        done = await self._publish_source(
            identity.version, source, seconds, progress, root_hash=root_hash
        )
        await asyncio.to_thread(versions.prune_versions, done.identity)
        return done

    async def sleep(self, *, seconds: float = DEFAULT_STATE_SECONDS) -> None:
        """Free the engines' memory; running generations are cut off and continue after waking.

        Raises:
            SteeringFailed: A replica refused, somebody else changed the state meanwhile, or it
                took too long.
        """
        await self._change_state("Asleep", seconds)

    async def wake(self, *, seconds: float = DEFAULT_STATE_SECONDS) -> None:
        """Undo `sleep` or `pause` and return once the replicas serve requests of this pool.

        A replica that comes back more than a minute after the first one is left to the operator.
        Raises what `sleep` raises.
        """
        began = time.monotonic()
        count = await self._change_state("Active", seconds)
        await self._expect_serving(count, max(0.0, seconds - (time.monotonic() - began)))

    async def pause(self, *, seconds: float = DEFAULT_STATE_SECONDS) -> None:
        """Stop generating but keep the memory. Raises what `sleep` raises."""
        await self._change_state("Paused", seconds)

    async def _change_state(self, state: PoolState, seconds: float) -> int:
        count = await (await self._get_steering()).change_state(state, seconds)
        logger.info("the pool is %s", state)
        return count

    async def _expect_serving(self, count: int, seconds: float) -> None:
        """Return once so many replicas, which woke, get requests of this pool."""
        raise NotImplementedError

    @asynccontextmanager
    async def generating(self, *, seconds: float = DEFAULT_STATE_SECONDS) -> AsyncIterator[Self]:
        """Wake the pool for a block and put it to sleep at the end: for a shared accelerator.

        If somebody else changed the state meanwhile, it stays as they want it.
        """
        await self.wake(seconds=seconds)
        try:
            yield self
        finally:
            if await (await self._get_steering()).wanted_state() in ("Active", None):
                await self.sleep(seconds=seconds)
