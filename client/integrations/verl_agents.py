"""verl's agent loops over a pool: `rollout.agent.agent_loop_manager_class` of verl's configuration."""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1 import AgentLoopManagerTQ

from .verl import VerlClient


class PoolAgentLoopManager(AgentLoopManagerTQ):  # type: ignore[misc]
    """The manager and workers of verl's default trainer, with a pool that answers their prompts."""

    def __init__(self, config: Any, llm_client: Any = None, *more: Any, **named: Any) -> None:
        """Take verl's arguments, and replace `llm_client`, the client of verl's own servers.

        Raises:
            ValueError: verl's older trainer is configured, or `custom.pool` is wrong.
        """
        if not config.trainer.get("use_v1", True):
            raise ValueError("trainer.use_v1 must be true: verl's older trainer is not supported")
        client = VerlClient.of(config.actor_rollout_ref.rollout)
        super().__init__(config, client, *more, **named)
