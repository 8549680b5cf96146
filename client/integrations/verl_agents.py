"""verl's agent loops over a pool: `rollout.agent.agent_loop_manager_class` of verl's configuration."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopManager

from .verl import VerlClient


class PoolAgentLoopManager(AgentLoopManager):  # type: ignore[misc]
    """verl's own manager and workers; only who answers their prompts is another."""

    def __init__(self, config: Any, llm_client: Any = None, *more: Any, **named: Any) -> None:
        """Take verl's arguments; `llm_client`, that of its own servers, gives way to the pool's."""
        client = VerlClient.of(config.actor_rollout_ref.rollout)
        super().__init__(config, client, *more, **named)
