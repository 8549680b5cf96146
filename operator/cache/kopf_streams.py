"""The stream of RolloutReplicas, which kopf runs: inside our process, or around it under `kopf run`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, cast

import kopf

from rollout_common.kube.reflector import retry_pause
from rollout_operator.api.names import GROUP, MANAGER_NAME, PLURAL, VERSION
from rollout_operator.kube.credentials import load_kopf_login

from .settings import STREAM_CALM_SECONDS

logger = logging.getLogger(__name__)

EventSink = Callable[[str | None, Mapping[str, Any]], None]
"""Takes type of event (None: from a list) and raw RolloutReplica."""


class KopfStreams:
    """Runs kopf with our handlers.

    Args:
        sink: Takes the events.
        namespaces: Returns what to watch, asked at each start; empty: all.
        spawned: Called after each start: kopf has set its signal handlers, and we want ours.
        listed: Awaited before the streams restart. It must list everything, because events were
            missed, and it proves that the resource exists, because kopf looks for it only once.
    """

    def __init__(
        self,
        sink: EventSink,
        *,
        namespaces: Callable[[], tuple[str, ...]],
        spawned: Callable[[], None],
        listed: Callable[[], Awaitable[None]],
    ) -> None:
        self._sink = sink
        self._namespaces = namespaces
        self._spawned = spawned
        self._listed = listed
        self._stop = asyncio.Event()
        self._lost = asyncio.Event()

    async def run(self) -> None:
        """Stream until `stop`."""
        attempt = 0
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                await self._run_kopf()
                reason = "without an error"
            except Exception as error:  # noqa: BLE001 - whatever ends kopf, the remedy is the same
                reason = f"{type(error).__name__}: {error}"
            if self._stop.is_set():
                return
            reason = "its place is lost" if self._lost.is_set() else reason
            attempt = 0 if time.monotonic() - began > STREAM_CALM_SECONDS else attempt + 1
            logger.warning("the stream of pools ended (%s): restarting it", reason)
            await asyncio.sleep(retry_pause(attempt))
            await self._listed()

    def restart(self) -> None:
        """Begin again: the API server may have come back from a backup, and kopf goes on from where it was.

        A watch from a version that is yet to come shows nothing until then.
        """
        self._lost.set()

    def stop(self) -> None:
        """Ask `run` to end."""
        self._stop.set()

    async def _run_kopf(self) -> None:
        registry = kopf.OperatorRegistry()
        register_handlers(self._sink, registry)
        settings = kopf.OperatorSettings()
        configure_kopf(settings, embedded=True)
        namespaces = self._namespaces()
        tasks = await kopf.spawn_tasks(
            registry=registry,
            settings=settings,
            standalone=True,
            # Kopf would ask for the user's name, which a container's bare uid has not got.
            identity=cast("Any", MANAGER_NAME),
            clusterwide=not namespaces,
            namespaces=namespaces,
            stop_flag=self._stop,
        )
        self._lost.clear()
        self._spawned()
        await _run_until_one_ends([*tasks, asyncio.create_task(self._lost.wait())])


async def _run_until_one_ends(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Wait until one of these tasks ends, end the others, and raise what one of them raised.

    `kopf.run_tasks` would cancel all tasks of the loop that are not kopf's as well.
    """
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error


def register_handlers(sink: EventSink, registry: kopf.OperatorRegistry | None = None) -> None:
    """Register the handlers of the streams, and our login, in a registry of kopf."""

    @kopf.on.login(registry=registry, id="rollout")
    async def _login(**_: Any) -> kopf.ConnectionInfo:
        return await load_kopf_login()

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry, id="pools")
    async def _feed(*, event: kopf.RawEvent, **_: Any) -> None:
        sink(event["type"], event["object"])


def configure_kopf(settings: kopf.OperatorSettings, *, embedded: bool) -> None:
    """Set what measurements showed to matter; `embedded`: kopf runs inside this process."""
    settings.watching.chunk_size = 500
    settings.watching.server_timeout = 300
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.queueing.idle_timeout = 1.0
    settings.queueing.exit_timeout = 1.0
    settings.queueing.error_delays = [1, 2, 5, 10, 30]
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.networking.error_backoffs = [0.5, 1, 2, 4]
    settings.persistence.finalizer = f"{GROUP}/{MANAGER_NAME}"
    settings.persistence.diffbase_storage = _NoDiffStorage()
    # Embedded, the process does not end with kopf, and our own exit is bounded.
    settings.process.ultimate_exiting_timeout = None if embedded else 25


class _NoDiffStorage(kopf.DiffBaseStorage):
    """Remembers nothing: our handlers take raw events, and kopf would copy every object twice."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence({})

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        return None

    def store(self, **_: Any) -> None:
        return None
