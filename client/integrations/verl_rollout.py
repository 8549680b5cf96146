"""verl's rollout interface over a pool, for each rank of a trainer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rollout_client.steering.spool import drain_tensors

from .verl import LoopPools, PoolSettings

if TYPE_CHECKING:
    from rollout_client.steering.spool import Tensors

MEMORY_TAGS = ("weights", "kv_cache")


class VerlRollout:
    """One rank of a trainer, as verl makes and calls its rollouts. The first rank steers the pool.

    Args:
        config: verl's rollout configuration; its section `custom.pool` has `PoolSettings`.
        model_config: Not used: the RolloutReplica names the model.
        device_mesh: Not used: a pool knows its own devices.
        rank: This process's rank in the trainer; default: `$RANK`, as torch and verl set it.
    """

    def __init__(
        self,
        config: Any,
        model_config: Any = None,
        device_mesh: Any = None,
        *,
        rank: int | None = None,
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.device_mesh = device_mesh
        self.is_leader_rank = int(os.environ.get("RANK", "0") if rank is None else rank) == 0
        self.replica_rank = 0
        self._settings = PoolSettings.of(config)
        self._pools = LoopPools(self._settings.open)
        self._epoch: int | None = None
        self._step: int | None = None

    async def close(self) -> None:
        """Close the pool of the running loop."""
        await self._pools.close()

    async def resume(self, tags: Sequence[str]) -> None:
        """Wake the pool for `kv_cache`, after the trainer has freed its own memory.

        `weights` needs no wake: what is pushed to a pool that sleeps waits in its main memory.
        """
        unknown = sorted(set(tags) - set(MEMORY_TAGS))
        if unknown:
            raise ValueError(f"unknown tags {unknown}: use {', '.join(MEMORY_TAGS)}")
        if self.is_leader_rank and "kv_cache" in tags:
            await self._pools.current_pool().wake()

    async def release(self) -> None:
        """Put the pool to sleep."""
        if self.is_leader_rank:
            await self._pools.current_pool().sleep()

    async def update_weights(
        self,
        weights: Tensors,
        wire_format: str = "named_tensors",
        *,
        global_steps: int | None = None,
        peft_config: object | None = None,
        base_sync_done: bool = True,
    ) -> None:
        """Take all tensors on every rank; the first one publishes them from its memory.

        The version is the step, so that verl's staleness filters see the steps of its own trainer.
        Without a step verl sends the last weights again (after a colocated reward model used the
        devices): the same version, which the pool refuses if its content differs.

        Args:
            weights: Plain or asynchronous generator of (name, tensor), each a whole parameter. Tensors
                are cast to the checkpoint's dtype: verl's FSDP keeps its own in float32.
            wire_format: Only `named_tensors`.
            global_steps: The trainer's step, which becomes the version.
            peft_config: Not supported: merge adapters first (`model.lora.merge`).
            base_sync_done: Not used: it concerns adapters.

        Raises:
            NotImplementedError: Another wire format, or an adapter; all tensors were taken.
            OSError, PublishError: See `AsyncRolloutPool.publish_weights`.
        """
        unsupported = wire_format != "named_tensors" or peft_config is not None
        if unsupported or not self.is_leader_rank:
            await drain_tensors(weights)
        if unsupported:
            what = "adapters" if peft_config is not None else f"wire_format {wire_format!r}"
            raise NotImplementedError(f"{what} can't be sent: send whole named tensors")
        if not self.is_leader_rank:
            return
        pool = self._pools.current_pool()
        # verl may call from another loop, which has another pool: the trainer's epoch stays.
        pool.epoch = self._epoch
        step = (self._step or 0) if global_steps is None else global_steps
        try:
            await pool.publish_weights(step, tensors=weights, **self._settings.push_options())
        finally:
            self._epoch = pool.epoch
        self._step = step
