"""Registers pools with verl as the rollout `pool`; verl imports this in each of its processes.

It finds this module by our entry point `verl.plugins`, or by the environment variable
`VERL_USE_EXTERNAL_MODULES`.
"""

from __future__ import annotations

from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from .verl import PoolSettings

ROLLOUT_NAME = "pool"
"""`actor_rollout_ref.rollout.name`."""


class PoolReplica(RolloutReplica):  # type: ignore[misc]
    """Represents a whole pool where verl would launch servers: the operator has launched them.

    Sleep and wake go to the pool if `free_cache_engine` is set, as for verl's own servers. The pool
    handles caches and running requests by itself.
    """

    async def launch_servers(self) -> None:
        """Launch nothing."""
        self._server_address = ROLLOUT_NAME

    async def init_standalone(self) -> None:
        """Take no accelerators from Ray."""
        await self.launch_servers()

    async def sleep(self) -> None:
        """Put the pool to sleep; only the first of the replicas that verl counts does."""
        if self.replica_rank == 0 and self.config.free_cache_engine:
            async with PoolSettings.of(self.config).open() as pool:
                await pool.sleep()

    async def wake_up(self) -> None:
        """Wake the pool."""
        if self.replica_rank == 0 and self.config.free_cache_engine:
            async with PoolSettings.of(self.config).open() as pool:
                await pool.wake()


def register() -> None:
    """Add the pool to verl's registries."""
    rollout = "rollout_client.integrations.verl_rollout.VerlRollout"
    _ROLLOUT_REGISTRY[(ROLLOUT_NAME, "async")] = rollout
    RolloutReplicaRegistry.register(ROLLOUT_NAME, lambda: PoolReplica)


register()
