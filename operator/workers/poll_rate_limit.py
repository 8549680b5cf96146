"""How often heads may be asked: each pool has a share of the polls, so that large ones slow no other."""

from __future__ import annotations

from rollout_operator.api.objects import PoolKey

MAX_POLLS_PER_SECOND = 200.0
"""Polls of one pace in a second: of all pools that keep to their share, and of all others."""


class PollRateLimit:
    """Heads that are asked equally often, by pool; `seconds` is the interval while they are few.

    At most `MAX_POLLS_PER_SECOND` are asked in a second, or twice as many where small pools keep to their share.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._pools: dict[PoolKey, set[str]] = {}
        self._count = 0

    def put(self, key: PoolKey, uid: str, *, inside: bool) -> None:
        """Have a head be one of them, or not."""
        heads = self._pools.setdefault(key, set())
        self._count -= len(heads)
        (heads.add if inside else heads.discard)(uid)
        self._count += len(heads)
        if not heads:
            del self._pools[key]

    def poll_interval(self, key: PoolKey) -> float:
        """Return the seconds between two polls of each of a pool's heads."""
        mine = len(self._pools.get(key, ()))
        return max(self._seconds, min(mine * len(self._pools), self._count) / MAX_POLLS_PER_SECOND)
