"""The pools that users hold: `AsyncRolloutPool` for asyncio, `RolloutPool` for all other programs.

Here the parts are put together. What a part does stays in its own package: no decision about
requests or weights is made here.
"""

from .asynchronous import AsyncRolloutPool
from .synchronous import RolloutPool

__all__ = ["AsyncRolloutPool", "RolloutPool"]
