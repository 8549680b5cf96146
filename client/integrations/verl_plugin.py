"""Makes pools known to verl as the rollout `pool`; imported by verl itself, in each of its processes.

verl finds this module by the entry point `verl.plugins` of our package, or by the environment
variable `VERL_USE_EXTERNAL_MODULES`.
"""

from __future__ import annotations

from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from .verl import PoolSettings

ROLLOUT_NAME = "pool"
"""`actor_rollout_ref.rollout.name`."""


class PoolReplica(RolloutReplica):  # type: ignore[misc]
    """Stands for a whole pool where verl would launch servers: the operator has launched them.

    It has no servers. Of what verl asks of them, sleeping and waking concern the pool (with
    `free_cache_engine`, as for verl's own); caches and running requests it sees to by itself.
    """

    async def launch_servers(self) -> None:
        """Launch nothing."""
        self._server_address = ROLLOUT_NAME

    async def init_standalone(self) -> None:
        """Take no accelerators from Ray."""
        await self.launch_servers()

    async def sleep(self) -> None:
        """Put the pool to sleep; of all replicas that verl counts, the first one does."""
        if self.replica_rank == 0 and self.config.free_cache_engine:
            async with PoolSettings.of(self.config).open() as pool:
                await pool.sleep()

    async def wake_up(self) -> None:
        """Wake the pool."""
        if self.replica_rank == 0 and self.config.free_cache_engine:
            async with PoolSettings.of(self.config).open() as pool:
                await pool.wake()


def register() -> None:
    """Enter the pool into verl's registries."""
    _ROLLOUT_REGISTRY[(ROLLOUT_NAME, "async")] = (
        "rollout_client.integrations.verl_rollout.VerlRollout"
    )
    RolloutReplicaRegistry.register(ROLLOUT_NAME, lambda: PoolReplica)


register()
