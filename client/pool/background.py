"""The background tasks of a pool: discovery and health checks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from .settings import PART_RESTART_SECONDS

logger = logging.getLogger(__name__)


class PoolBackground:
    """Runs the parts of the pool `name` from `start` to `stop`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: list[asyncio.Task[None]] = []
        self._failed: dict[str, str] = {}

    def start(self, parts: Mapping[str, Callable[[], Awaitable[None]]]) -> None:
        """Run all parts, unless they run already.

        Raises:
            RuntimeError: They belong to another event loop than the caller's.
        """
        if self._tasks and self._tasks[0].get_loop() is not asyncio.get_running_loop():
            raise RuntimeError(
                f"the pool {self._name!r} belongs to another event loop, as that of an earlier asyncio.run: make"
                " a pool in each, or use RolloutPool"
            )
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._run_part(part, run), name=f"{self._name}: {part}")
                for part, run in parts.items()
            ]

    async def _run_part(self, part: str, run: Callable[[], Awaitable[None]]) -> None:
        """Run a part; if it fails, log that and start it again, as requests need it."""
        while True:
            try:
                return await run()
            except Exception as error:
                logger.exception("the %s of %s failed and starts again", part, self._name)
                self._failed[part] = f"its {part} failed: {error!r}"
            await asyncio.sleep(PART_RESTART_SECONDS)

    def note_working(self, part: str) -> None:
        """Note that a part works again."""
        self._failed.pop(part, None)

    @property
    def trouble(self) -> str:
        """Which parts failed, and how, until they work again; empty: none."""
        return "; ".join(self._failed.values())

    async def stop(self) -> None:
        """End all parts."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
