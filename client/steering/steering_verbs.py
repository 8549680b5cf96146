"""The verbs that steer a pool: epochs, weights, sleep. One class, since `AsyncRolloutPool` has them all."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from types import EllipsisType
from typing import TYPE_CHECKING, Self, Unpack

from rollout_client.blocking_portal import calling_thread
from rollout_client.errors import PublishFailed, RolloutError, SteeringFailed
from rollout_client.hooks import Hook, guard_progress
from rollout_client.steering.pushing.ranks.rank_publish import RankConnections
from rollout_common import tracing
from rollout_common.wire import Pushed, WeightsDtypes, WeightsId, WeightsSource

from .adapter_tensors import GivenAdapter, adapter_tensors
from .pushing.options import PushOptions, PushPlan, PushWork, check_path
from .pushing.push import Push
from .pushing.pusher import Begin, Pusher
from .settings import DEFAULT_ACQUIRE_SECONDS, DEFAULT_PUBLISH_SECONDS, DEFAULT_STATE_SECONDS
from .spool import SHARD_BYTES, drain_on_error, run_to_end, spool_tensors
from .steering_protocol import (
    HandedOverVersion,
    OnProgress,
    PoolState,
    Published,
    Steering,
    publish_seconds,
    seconds_left,
    source_from_path,
    whole_version,
)
from .version_folder import DEFAULT_KEPT_VERSIONS, VersionFolder

if TYPE_CHECKING:
    from .spool import Tensors

logger = logging.getLogger(__name__)
PUSHED = WeightsSource(pushed=Pushed())


class SteeringVerbs:
    """What needs the right to steer the pool, which RBAC and the workers check.

    Args:
        steering: Carries the verbs out; None: this pool can only generate.
        hook: Learns how each publish ended.
        max_staleness: See `PoolOptions`.
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
        self._checkpoint: WeightsDtypes | None = None
        self._last: WeightsId | None = None  # published here
        self._pusher = Pusher()
        self._together = RankConnections(self._pusher)
        self._pushing = asyncio.Lock()

    async def _get_steering(self, seconds: float = math.inf) -> Steering:
        """Return what carries the verbs out, once members were found or these seconds have passed."""
        if self._steering is None:
            raise SteeringFailed(
                "this pool can't be steered: make it with from_cluster or from_urls"
            )
        return self._steering

    async def acquire(self, *, seconds: float = DEFAULT_ACQUIRE_SECONDS) -> int:
        """Take the pool: the next epoch, by compare-and-swap, which shuts out earlier trainers.

        Raises:
            EpochLost: Another trainer took it first.
        """
        began = time.monotonic()
        steering = await self._get_steering(seconds)
        self.epoch = await steering.acquire_epoch(seconds_left(began, seconds))
        logger.info("this trainer holds epoch %d", self.epoch)
        return self.epoch

    async def publish_weights(
        self,
        version: int,
        path: str | PurePath | EllipsisType | None = ...,
        *,
        tensors: Tensors | None = None,
        adapters: Mapping[str, GivenAdapter] | None = None,
        seconds: float = DEFAULT_PUBLISH_SECONDS,
        progress: OnProgress = lambda progress: None,
        **options: Unpack[PushOptions],
    ) -> Published:
        """Publish a version to all replicas and return once it serves.

        The version is a folder that the workers can read, or tensors or adapters of this process, which go straight
        to the replicas' memory. If this trainer dies during the call, the pool ends up consistent: every
        replica serves the old weights, or every replica the new ones.

        Args:
            version: Must be higher than the last one of this epoch; publishing the last one again succeeds
                if it has the same content. A trainer without an epoch takes the next one first.
            path: Folder of safetensors as the workers see it, which must not change any more;
                None: the model's own checkpoint.
            tensors: Instead of a path: a model, its state dict, or a plain or asynchronous generator
                of (name, tensor), with the names and shapes of the model's checkpoint, and its dtypes
                unless `cast` is given. A generator is always read to its end, even if the call fails: other
                ranks wait in it.
            adapters: Instead of both: LoRA adapters by the name by which requests will ask for them, each a PEFT model,
                a folder that PEFT wrote, or (configuration, tensors by PEFT's names). They are all that serve with
                the model's own checkpoint from then on: those of earlier versions end.
            seconds: Deadline for the whole call, at most a day. Of tensors a pool publishes one version after the other.
            progress: Called with the progress.
            **options: Only for tensors and adapters, see `PushOptions`.

        Raises:
            PublishFailed: The operator, or a worker that can't use the weights, gives the reason; or this
                version already has other content (`content-mismatch`), or is below the last one.
            Superseded: Newer weights replaced these.
            EpochLost: Another trainer has the pool now.
            ValueError: A tensor, which the message names, or an argument can't be used. Or memory is short.
            OSError: The folder of `spool` can't be written; nothing was committed.
        """
        async with drain_on_error(tensors, options.get("ranks")):
            version, seconds = whole_version(version), publish_seconds(seconds)
            if adapters is not None and (tensors is not None or options.get("cast")):
                raise TypeError("give publish_weights adapters alone, without tensors or cast")
            if adapters is None and tensors is None:
                check_path(path, options)
                assert not isinstance(path, EllipsisType)
                source = source_from_path(path)
                return await self._publish_source(version, source, seconds, progress)
            plan = PushPlan.of(path, options)
        if adapters is not None:
            base = (await self._describe_checkpoint(seconds)).root_hash
            tensors = await asyncio.to_thread(adapter_tensors, adapters, base)
        assert tensors is not None
        return await self._push_in_turn(PushWork(version, tensors, plan, seconds, progress))

    async def _push_in_turn(self, work: PushWork) -> Published:
        """Push one version after the other, since each takes the memory and the connections; ranks do it together."""
        plan, until = work.plan, time.monotonic() + work.seconds
        async with drain_on_error(work.tensors, plan.ranks):
            try:
                async with asyncio.timeout(work.seconds):
                    await self._pushing.acquire()
            except TimeoutError:
                why = "another publish of tensors by this pool did not end"
                raise PublishFailed(f"{why} within {work.seconds:g} s") from None
        try:
            work = replace(work, seconds=max(0.001, round(until - time.monotonic(), 3)))
            push = partial(self._push_tensors, work)
            if plan.ranks is not None:
                return await self._together.publish(work, push)
            return await push(partial(self._pusher.begin, work.tensors, plan))
        finally:
            self._pushing.release()

    async def _push_tensors(self, work: PushWork, begin: Begin) -> Published:
        plan = work.plan
        async with drain_on_error(work.tensors, plan.ranks):
            # What floating-point tensors are cast to.
            dtypes = (await self._describe_checkpoint(work.seconds)).dtypes if plan.cast else None
            push = begin(dtypes)
        sending = asyncio.ensure_future(self._send_push(work, push))
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

    async def _send_push(self, work: PushWork, push: Push) -> Published:
        """Publish tensors that another task fills in, and write them to a folder too if one is wanted."""
        source, versions = PUSHED, work.plan.versions
        if versions is not None:
            identity = await self._next_identity(work.version, work.seconds)
            await asyncio.to_thread(versions.check_folder, identity)
            push.spool = versions.local_path(identity)
            source = source_from_path(versions.mounted_path(identity))
        return await self._publish_source(
            work.version, source, work.seconds, work.progress, push=push, versions=versions
        )

    async def _describe_checkpoint(self, seconds: float) -> WeightsDtypes:
        """Return what the workers say of their model's checkpoint. A pool has one, so they are asked only once."""
        if self._checkpoint is None:
            steering = await self._get_steering(seconds)
            try:
                async with asyncio.timeout(seconds):
                    self._checkpoint = await steering.describe_checkpoint()
            except TimeoutError:
                why = f"no worker described the checkpoint of its model within {seconds:g} s"
                raise SteeringFailed(why) from None
        return self._checkpoint

    async def publish_handed_over(
        self,
        handed: HandedOverVersion,
        *,
        seconds: float = DEFAULT_PUBLISH_SECONDS,
        progress: OnProgress = lambda progress: None,
    ) -> Published:
        """Let all replicas serve what `Worker.hand_over`, or that of a turn, staged in them, and return once they do.

        Each of several ranks hands over to its own worker, and one rank makes this call with what
        `hand_over` returned. Replicas that were handed nothing fetch the weights from the others, unless these were lent
        or the pool has no operator. Raises what `publish_weights` raises.
        """
        if handed.epoch != self.epoch:
            holds = "has none" if self.epoch is None else f"holds epoch {self.epoch}"
            raise ValueError(
                f"version {handed.version} was handed over under epoch {handed.epoch}, and this trainer"
                f" {holds}: call pool.acquire() once, and give each hand_over epoch=pool.epoch"
            )
        version, seconds = whole_version(handed.version), publish_seconds(seconds)
        root_hash = handed.root_hash
        return await self._publish_source(version, PUSHED, seconds, progress, root_hash=root_hash)

    async def _publish_source(
        self,
        version: int,
        source: WeightsSource,
        seconds: float,
        progress: OnProgress,
        *,
        push: Push | None = None,
        root_hash: str | None = None,
        versions: VersionFolder | None = None,
    ) -> Published:
        """Publish a source, then delete those of `versions` that nobody needs any more."""
        began, outcome = time.monotonic(), "cancelled"
        steering = await self._get_steering(seconds)
        try:
            identity = await self._next_identity(version, seconds_left(began, seconds))
            about = {"rollout.epoch": identity.epoch, "rollout.version": identity.version}
            with tracing.open_span("publish_weights", attributes=about):
                left = seconds_left(began, seconds)
                done = await steering.publish_identity(
                    identity, source, left, guard_progress(progress), push, root_hash
                )
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
        if versions is not None:
            await asyncio.to_thread(versions.prune_versions, identity)
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

        The version becomes a folder `epoch-E-version-V` with a manifest; the folder is complete or absent,
        even after a crash. Needs torch, safetensors and xxhash. A stream of tensors is always read to its
        end, even if the call fails: other ranks wait in it.

        Args:
            weights: A model, its state dict, or a plain or asynchronous generator of (name, tensor),
                with the names, shapes and dtypes of the model's checkpoint.
            version: As for `publish_weights`.
            folder: Where this process writes the versions of this pool, and of no other.
            mounted_at: The same folder as the workers see it: absolute, or relative to the weights'
                claim; None: under the path that it has here.
            keep: How many committed versions stay, at least the one that serves.
            shard_bytes: Size of the files, and of what is held in memory.
            seconds: Deadline for publishing; writing has none.
            progress: Called with the progress of publishing.

        Raises:
            OSError: It can't be written; FileExistsError: it, or a later one, was written before.
            ValueError: A name came twice, no tensor came, or one, which the message names, can't be published.
            PublishError, EpochLost: See `publish_weights`.
        """
        async with drain_on_error(weights):
            version, seconds = whole_version(version), publish_seconds(seconds)
            versions = VersionFolder(folder, mounted_at, keep)
            identity = await self._next_identity(version, seconds)
            await asyncio.to_thread(versions.check_folder, identity)
        root_hash = await spool_tensors(weights, versions.local_path(identity), shard_bytes)
        source = source_from_path(versions.mounted_path(identity))
        return await self._publish_source(
            version, source, seconds, progress, root_hash=root_hash, versions=versions
        )

    async def _next_identity(self, version: int, seconds: float) -> WeightsId:
        """Return the identity of a version of this trainer, which takes an epoch if it has none."""
        if self.epoch is None:
            await self.acquire(seconds=min(seconds, DEFAULT_ACQUIRE_SECONDS))
        assert self.epoch is not None
        identity = WeightsId(epoch=self.epoch, version=version)
        if self._last is not None and identity < self._last:
            raise PublishFailed(
                f"weights {identity} are below {self._last}, which this pool published last: give a"
                " higher version, or acquire() a higher epoch to go back"
            )
        return identity

    async def sleep(self, *, seconds: float = DEFAULT_STATE_SECONDS) -> None:
        """Free the engines' memory; running generations are cut off and continue after waking.

        Raises:
            SteeringFailed: A replica refused, somebody else changed the state during the call, or it
                took too long.
        """
        await self._change_state("Asleep", seconds)

    async def wake(self, *, seconds: float = DEFAULT_STATE_SECONDS) -> None:
        """Undo `sleep` or `pause` and return once the replicas serve requests of this pool.

        The call leaves a replica that wakes more than a minute after the first one to the operator. Raises
        what `sleep` raises.
        """
        began = time.monotonic()
        count = await self._change_state("Active", seconds)
        await self._expect_serving(count, max(0.0, seconds - (time.monotonic() - began)))

    async def pause(self, *, seconds: float = DEFAULT_STATE_SECONDS) -> None:
        """Stop generating but keep the memory. Raises what `sleep` raises."""
        await self._change_state("Paused", seconds)

    async def _change_state(self, state: PoolState, seconds: float) -> int:
        began = time.monotonic()
        steering = await self._get_steering(seconds)
        count = await steering.change_state(state, seconds_left(began, seconds))
        logger.info("the pool is %s", state)
        return count

    async def _expect_serving(self, count: int, seconds: float) -> None:
        """Return once this many replicas, which woke, get requests of this pool."""
        raise NotImplementedError

    @asynccontextmanager
    async def generating(self, *, seconds: float = DEFAULT_STATE_SECONDS) -> AsyncIterator[Self]:
        """Wake the pool for a block and put it to sleep at the end: for a shared accelerator.

        If somebody else changed the state in between, their state stays.
        """
        await self.wake(seconds=seconds)
        try:
            yield self
        finally:
            if await (await self._get_steering()).wanted_state() in ("Active", None):
                await self.sleep(seconds=seconds)
