"""kopf inside this process: its watch streams, started anew when they end by themselves."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from typing import Any

import kopf
from kopf._core.engines.peering import Identity

from .names import MANAGER
from .watching import Sink, configure, register

logger = logging.getLogger(__name__)

BACKOFF_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0)
CALM_SECONDS = 60.0
"""Streams that ran for so long start again with the shortest delay."""


class Streams:
    """Runs kopf with our three handlers.

    Args:
        sink: Takes the events.
        namespaces: What to watch; empty: all.
        spawned: Called after each start: kopf has set its signal handlers, and we want ours.
        listed: Awaited before the streams start anew. It must list everything, because events were
            missed, and it shows that the resource exists, because kopf looks for it only once.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        namespaces: tuple[str, ...],
        spawned: Callable[[], None],
        listed: Callable[[], Awaitable[None]],
    ) -> None:
        self._sink = sink
        self._namespaces = namespaces
        self._spawned = spawned
        self._listed = listed
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Stream until `stop`."""
        failures = 0
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                await self._stream()
                reason = "without an error"
            except Exception as error:  # noqa: BLE001 - whatever ends kopf, the remedy is the same
                reason = f"{type(error).__name__}: {error}"
            if self._stop.is_set():
                return
            failures = 0 if time.monotonic() - began > CALM_SECONDS else failures + 1
            delay = BACKOFF_SECONDS[min(failures, len(BACKOFF_SECONDS) - 1)]
            logger.warning("the watch streams ended (%s): starting them anew", reason)
            await asyncio.sleep(delay * random.uniform(0.8, 1.2))
            await self._listed()

    def stop(self) -> None:
        """Ask `run` to end."""
        self._stop.set()

    async def _stream(self) -> None:
        registry = kopf.OperatorRegistry()
        register(self._sink, registry)
        settings = kopf.OperatorSettings()
        configure(settings, embedded=True)
        tasks = await kopf.spawn_tasks(
            registry=registry,
            settings=settings,
            standalone=True,
            # Kopf would ask for the user's name, which a container's bare uid has not got.
            identity=Identity(MANAGER),
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
            stop_flag=self._stop,
        )
        self._spawned()
        await kopf.run_tasks(tasks, ignored=_AllTasks())


class _AllTasks(Collection[Any]):
    """Says that it holds every task: at its end kopf would cancel all of the loop's but these."""

    def __contains__(self, task: object) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0
