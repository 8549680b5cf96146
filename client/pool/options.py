"""What all ways to make a pool take."""

from __future__ import annotations

from typing import TypedDict

from rollout_client.hooks import Hook
from rollout_client.routing.member_clients import DataToken


class PoolOptions(TypedDict, total=False):
    """Arguments of `AsyncRolloutPool`, all by name, beside what says where its members come from.

    Attributes:
        max_imbalance: How many requests more than the least loaded replica a conversation's own
            replica may have before the conversation moves.
        deterministic: Choose replicas by a stable hash instead of by load.
        max_failures: Broken attempts that one output survives.
        silent_seconds: How long a worker may send nothing before it is asked whether it is alive.
        deadline_seconds: Of requests that name none.
        hook: Gets measurements.
        max_staleness: Requests without bounds of their own are served by weights at most so many
            versions older than the last one published with this pool; None: by any.
        data_token: Bearer token of the workers' data ports (`--data-token-file`), or a function that returns
            it at each request; None: they want none.
    """

    max_imbalance: int
    deterministic: bool
    max_failures: int
    silent_seconds: float
    deadline_seconds: float
    hook: Hook | None
    max_staleness: int | None
    data_token: DataToken


POOL_OPTIONS = ("name", *PoolOptions.__annotations__)
"""Names that every way to make a pool takes."""
