"""verl's agent loops over a pool: `rollout.agent.agent_loop_manager_class` of verl's configuration.

verl has two managers. Its default trainer (`trainer.use_v1`) hands over a TensorDict and collects
trajectories from TransferQueue; the older one waits for a DataProto. Both make their manager with
`create`, so one name in the configuration serves both.
"""

from __future__ import annotations

from typing import Any

from .verl import VerlClient


class PoolAgentLoopManager:
    """Makes verl's own manager and agent loops; only who answers their prompts is another."""

    @classmethod
    def create(cls, config: Any, llm_client: Any = None, *more: Any, **named: Any) -> Any:
        """Return the manager of the trainer that is configured, or what verl awaits to get it.

        Args:
            config: verl's whole configuration.
            llm_client: The client of verl's own servers; the pool's takes its place.
            *more: Passed on to verl's manager.
            **named: Passed on to verl's manager.

        Raises:
            ValueError: The section `custom.pool` is missing or wrong; see `PoolSettings`.
            ImportError: TransferQueue, which verl's default trainer needs, is not installed.
        """
        client = VerlClient.of(config.actor_rollout_ref.rollout)
        return manager_class(config).create(config, client, *more, **named)


def manager_class(config: Any) -> Any:
    """Return verl's class of manager for the trainer that `trainer.use_v1` selects, its default being V1."""
    if config.trainer.get("use_v1", True):
        from verl.trainer.ppo.v1 import AgentLoopManagerTQ

        return AgentLoopManagerTQ
    from verl.experimental.agent_loop.agent_loop import AgentLoopManager

    return AgentLoopManager
