"""How often pools may write a status that only reports progress: seldom while many pools move.

Such a write costs the API server four times as much as the creation of a Service, and nobody reads hundreds of sentences a
second. What others rely on is written at once, whatever the pace.
"""

from __future__ import annotations

from rollout_operator.api.objects import PoolKey

from .settings import MAX_STATUS_PROGRESS_SECONDS, STATUS_PROGRESS_SECONDS

PROGRESS_WRITES_PER_SECOND = 2
"""Of all pools: people read no faster, and the API server takes some 6 ms for each. Metrics are always current."""


class StatusPace:
    """Shares the writes out among the pools that move."""

    def __init__(self) -> None:
        self._moving: set[PoolKey] = set()

    def note_pool(self, key: PoolKey, *, moving: bool) -> None:
        """Note whether a pool is on its way to what its spec asks for."""
        (self._moving.add if moving else self._moving.discard)(key)

    def moving_count(self) -> int:
        """Return how many pools are on their way."""
        return len(self._moving)

    def progress_seconds(self) -> float:
        """Return the least time between two such writes of one pool."""
        share = len(self._moving) / PROGRESS_WRITES_PER_SECOND
        return min(MAX_STATUS_PROGRESS_SECONDS, max(STATUS_PROGRESS_SECONDS, share))
