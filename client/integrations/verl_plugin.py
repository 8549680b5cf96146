"""Makes pools known to verl as the rollout `pool`; imported by verl itself, in each of its processes.

verl finds this module by the entry point `verl.plugins` of our package, or by the environment
variable `VERL_USE_EXTERNAL_MODULES`.
"""

from __future__ import annotations

from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

NAME = "pool"
"""`actor_rollout_ref.rollout.name`."""


class PoolReplica(RolloutReplica):  # type: ignore[misc]
    """Stands for a whole pool where verl would launch servers: the operator has launched them.

    It has no servers, so verl's calls to all of them do nothing; `VerlRollout` steers the pool.
    """

    async def launch_servers(self) -> None:
        """Launch nothing."""
        self._server_address = NAME

    async def init_standalone(self) -> None:
        """Take no accelerators from Ray."""
        await self.launch_servers()


def register() -> None:
    """Enter the pool into verl's registries."""
    _ROLLOUT_REGISTRY[(NAME, "async")] = "rollout_client.integrations.verl_rollout.VerlRollout"
    RolloutReplicaRegistry.register(NAME, lambda: PoolReplica)


register()
