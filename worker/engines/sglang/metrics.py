"""SGLang's own figures: the latest page of metrics that the child has sent."""

from __future__ import annotations

import asyncio
import contextlib

from rollout_worker.engine import EngineError

from .bridge import Bridge, CallFailed


class Page:
    """Asks for the next page whenever the latest is taken, since asking takes a while."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._text = ""
        self._turning: asyncio.Task[None] | None = None

    def latest(self) -> str:
        """Return the page; empty before the first one has come."""
        if self._turning is None or self._turning.done():
            with contextlib.suppress(RuntimeError):  # called outside the loop: no news
                self._turning = asyncio.get_running_loop().create_task(self._turn())
        return self._text

    async def _turn(self) -> None:
        with contextlib.suppress(EngineError, CallFailed):
            self._text = await self._bridge.call("metrics")
