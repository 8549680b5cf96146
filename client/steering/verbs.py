"""The trainer's verbs of a pool: epochs, weights, sleep. `AsyncRolloutPool` has them all."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import PurePath
from typing import Self

from rollout_client.errors import RolloutError, SteeringFailed
from rollout_client.hooks import Hook
from rollout_worker.schemas import WeightsId

from .protocol import (
    ACQUIRE_SECONDS,
    PUBLISH_SECONDS,
    STATE_SECONDS,
    OnProgress,
    PoolState,
    Published,
    Steering,
    source_of,
)

logger = logging.getLogger(__name__)


class SteeringVerbs:
    """What needs the right to steer the pool; RBAC and the workers decide who has it.

    Args:
        steering: Carries the verbs out; None: this pool is only generated on.
        max_staleness: Requests without bounds of their own are served by weights at most so many
            versions older than the last one published here; None: by any.
    """

    def __init__(
        self, steering: Steering | None, hook: Hook, max_staleness: int | None = None
    ) -> None:
        self.floor: WeightsId | None = None
        """Requests without bounds of their own are served by these weights or newer ones."""
        self.epoch: int | None = None
        """The epoch that this trainer holds, once it has one."""
        self._steering = steering
        self._steering_hook = hook
        self._max_staleness = max_staleness

    async def _steer(self) -> Steering:
        if self._steering is None:
            raise SteeringFailed(
                "this pool can't be steered: make it with from_cluster or from_urls"
            )
        return self._steering

    async def acquire(self, *, seconds: float = ACQUIRE_SECONDS) -> int:
        """Take the pool: the next epoch, by compare-and-swap; former trainers are shut out.

        Raises:
            EpochLost: Another trainer was faster.
        """
        self.epoch = await (await self._steer()).acquire(seconds)
        logger.info("this trainer holds epoch %d", self.epoch)
        return self.epoch

    async def publish_weights(
        self,
        version: int,
        path: str | PurePath | None,
        *,
        seconds: float = PUBLISH_SECONDS,
        progress: OnProgress = lambda progress: None,
    ) -> Published:
        """Bring a version to all replicas and return once it serves.

        A trainer that dies meanwhile leaves a pool that ends right: all old, or all new.

        Args:
            version: Above the last one of this epoch. Without an epoch the next one is taken.
            path: Folder of safetensors as the workers see it, immutable from now on; None: the
                model's own checkpoint.
            seconds: Deadline for all of it.
            progress: Told how far it is.

        Raises:
            PublishFailed: With the reason of the operator or of the worker that can't use them.
            Superseded: Newer weights took their place.
            EpochLost: Another trainer has the pool now.
        """
        began, outcome = time.monotonic(), "cancelled"
        steering = await self._steer()
        try:
            if self.epoch is None:
                await self.acquire()
            assert self.epoch is not None
            identity = WeightsId(epoch=self.epoch, version=version)
            done = await steering.publish(identity, source_of(path), seconds, progress)
            outcome = "ok"
        except RolloutError as error:
            outcome = type(error).__name__
            raise
        finally:
            self._steering_hook.published(outcome, time.monotonic() - began)
        logger.info("%s", done.message, extra={"weights_version": version})
        if self._max_staleness is not None:
            oldest = max(0, version - self._max_staleness)
            self.floor = WeightsId(epoch=self.epoch, version=oldest)
        return done

    async def sleep(self, *, seconds: float = STATE_SECONDS) -> None:
        """Give the engines' memory back; running generations end and continue after waking.

        Raises:
            SteeringFailed: A replica refused, somebody changed the state meanwhile, or it took
                too long.
        """
        await self._bring("Asleep", seconds)

    async def wake(self, *, seconds: float = STATE_SECONDS) -> None:
        """Undo `sleep` and `pause`; returns once the replicas serve. Errors as of `sleep`."""
        await self._bring("Active", seconds)

    async def pause(self, *, seconds: float = STATE_SECONDS) -> None:
        """Stop generating and keep the memory. Errors as of `sleep`."""
        await self._bring("Paused", seconds)

    async def _bring(self, state: PoolState, seconds: float) -> None:
        await (await self._steer()).bring(state, seconds)
        logger.info("the pool is %s", state)

    @asynccontextmanager
    async def generating(self, *, seconds: float = STATE_SECONDS) -> AsyncIterator[Self]:
        """Wake the pool for a block and let it sleep at the end: for a shared accelerator.

        If somebody else moved the state meanwhile, it is left as they want it.
        """
        await self.wake(seconds=seconds)
        try:
            yield self
        finally:
            if await (await self._steer()).state() in ("Active", None):
                await self.sleep(seconds=seconds)
