"""The pools that users hold: `AsyncRolloutPool` for asyncio, `RolloutPool` for all other programs.

This package only puts parts together: `generating`, `routing`, `steering` and `turn` decide.
"""

from .asynchronous import AsyncRolloutPool
from .synchronous import RolloutPool

__all__ = ["AsyncRolloutPool", "RolloutPool"]
