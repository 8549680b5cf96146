"""The ranks of one more node of a gang: launched here, commanded by the head's vLLM."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from rollout_worker.engine import EngineError, Entry, MemberInfo, Sink
from rollout_worker.engines import EngineOptions
from rollout_worker.engines.mapped import open_mapped
from rollout_worker.observe import processes
from rollout_worker.schemas import Progress
from rollout_worker.sources.files import ReadCancelled

from . import launch, leftovers, settings

STOP_SECONDS = 5.0


class VllmMember:
    """The `Member` of vLLM."""

    def __init__(self, options: EngineOptions) -> None:
        assert options.gang is not None, "a member has a gang"
        launch.prepare_environment()
        leftovers.prepare()
        self._options = options
        self._gang = options.gang
        self._settings = settings.parse(options.args, options.gang)
        self._give_up = threading.Event()
        self._before = processes.descendants(os.getpid())
        self._ranks: set[processes.Process] = set()

    async def start(self, report: Callable[[Progress], None]) -> MemberInfo:
        """See `Member.start`."""
        loop = asyncio.get_running_loop()

        def relay(progress: Progress) -> None:
            loop.call_soon_threadsafe(report, progress)

        def work(cancelled: Callable[[], bool]) -> tuple[MemberInfo, set[processes.Process]]:
            return launch.launch_ranks(self._options, self._settings, relay, cancelled)

        starting = loop.run_in_executor(None, work, self._give_up.is_set)
        try:
            info, started = await asyncio.shield(starting)
        except ReadCancelled:
            raise EngineError("the ranks were stopped while they loaded") from None
        except asyncio.CancelledError:
            await self.stop()
            done, _ = await asyncio.wait([starting], timeout=STOP_SECONDS)
            for future in done:
                future.exception()  # looked at: a start that was given up is no unheard error
            raise
        self._ranks = {each for each in started if each.title().startswith(launch.TITLE)}
        return info

    async def open_slot(
        self, slot: str, entries: Sequence[Entry], *, on_disk: bool = False
    ) -> Sink:
        """See `Member.open_slot`."""
        spill_dir = self._options.spill_dir or Path(tempfile.gettempdir())
        folder = spill_dir if on_disk else None
        return await open_mapped(
            entries, folder, slots=self._gang.slots, slot=slot, staging=self._options.staging
        )

    def alive(self) -> str | None:
        """See `Member.alive`."""
        if not all(rank.alive() for rank in self._ranks):
            return "one of vLLM's ranks died"
        if any(rank.stopped() for rank in self._ranks):
            return "one of vLLM's ranks was stopped"
        return None

    async def stop(self) -> None:
        """See `Member.stop`."""
        self._give_up.set()
        began = processes.descendants(os.getpid()) - self._before
        shared = leftovers.segments(began)
        await asyncio.to_thread(processes.end, began, STOP_SECONDS)
        await asyncio.to_thread(leftovers.remove, shared)
