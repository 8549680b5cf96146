"""The ranks of one more node of a gang: launched here, commanded by the head's vLLM."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_worker.engine import EngineError, Entry, MemberInfo, Sink
from rollout_worker.engines import EngineOptions, reads
from rollout_worker.engines.checkpoint import layout_of
from rollout_worker.engines.folder import read_config
from rollout_worker.engines.mapped import open_mapped
from rollout_worker.observe import processes
from rollout_worker.schemas import Progress
from rollout_worker.sources.files import ReadCancelled, open_source

from . import ending, environment, launch, leftovers, settings
from .hashing import Report, beside_hash


@dataclass(frozen=True, slots=True)
class Ranks:
    """A member's running ranks, and the executor that owns them."""

    executor: Any
    info: MemberInfo
    processes: set[processes.Process]
    ids: set[int]
    """Process ids of all."""


class VllmMember:
    """The `Member` of vLLM."""

    def __init__(self, options: EngineOptions) -> None:
        assert options.gang is not None, "a member has a gang"
        environment.prepare_environment()
        leftovers.prepare()
        self._options = options
        self._gang = options.gang
        self._settings = settings.parse(options.args, options.gang)
        self._give_up = threading.Event()
        self._before = processes.descendants(os.getpid())
        self._standing = processes.Standing()
        self._ranks: Ranks | None = None

    async def start(self, report: Callable[[Progress], None]) -> MemberInfo:
        """See `Member.start`."""
        loop = asyncio.get_running_loop()

        def relay(progress: Progress) -> None:
            loop.call_soon_threadsafe(report, progress)

        def work(cancelled: Callable[[], bool]) -> Ranks:
            return launch_ranks(self._options, self._settings, relay, cancelled)

        starting = loop.run_in_executor(None, work, self._give_up.is_set)
        try:
            self._ranks = await asyncio.shield(starting)
        except ReadCancelled:
            raise EngineError("the ranks were stopped while they loaded") from None
        except asyncio.CancelledError:
            await self.stop()
            done, _ = await asyncio.wait([starting], timeout=ending.STOP_SECONDS)
            for future in done:
                future.exception()  # looked at: a start that was given up is no unheard error
            raise
        return self._ranks.info

    def unread(self, entries: Sequence[Entry]) -> frozenset[str]:
        """See `Member.unread`."""
        ranks = set() if self._ranks is None else self._ranks.ids
        return reads.unread(self._gang.slots, ranks, entries)

    async def open_slot(
        self,
        slot: str,
        entries: Sequence[Entry],
        *,
        on_disk: bool = False,
        unread: Collection[str] = (),
    ) -> Sink:
        """See `Member.open_slot`."""
        spill_dir = self._options.spill_dir or Path(tempfile.gettempdir())
        return await open_mapped(
            entries,
            spill_dir if on_disk else None,
            skip=unread,
            slots=self._gang.slots,
            slot=slot,
            staging=self._options.staging,
        )

    def alive(self) -> str | None:
        """See `Member.alive`."""
        ranks = set() if self._ranks is None else self._ranks.processes
        if not all(rank.alive() for rank in ranks):
            return "one of vLLM's ranks died"
        if self._standing.still(ranks):
            return "one of vLLM's ranks was stopped"
        return None

    async def stop(self) -> None:
        """See `Member.stop`."""
        self._give_up.set()
        await asyncio.to_thread(ending.end_start, self._before)


def launch_ranks(
    options: EngineOptions,
    flags: settings.Settings,
    report: Report,
    cancelled: Callable[[], bool],
) -> Ranks:
    """Start the ranks of a member's node.

    Raises:
        EngineError: as `launch`.
        ReadCancelled: `cancelled` said so.
    """
    report(Progress(message="reading the model's configuration"))
    read_config(options.model)
    assert options.gang is not None, "a member has a gang"
    leader = environment.join_gang(options.gang, flags, cancelled)
    config, _ = launch.configure(options, flags, leader)
    tied = bool(getattr(config.model_config.hf_text_config, "tie_word_embeddings", False))
    layout = layout_of(open_source(options.model).entries, tied=tied)
    os.environ[settings.MEMBER_VARIABLE] = str(os.getpid())
    if options.gang.in_part:
        os.environ[settings.WATCH_VARIABLE] = "1"

    before = processes.descendants(os.getpid())
    executor, root_hash = beside_hash(
        options.model, report, cancelled, lambda: _executor(config), lambda it: it.shutdown()
    )
    ranks = {worker.proc.pid for worker in executor.workers}
    running = {each for each in processes.descendants(os.getpid()) - before if each.pid in ranks}
    return Ranks(executor, MemberInfo(str(options.model), root_hash, layout), running, ranks)


def _executor(config: Any) -> Any:
    """Start what `vllm serve --headless` starts; its ranks then obey the head's."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    try:
        with leftovers.temporary_files():
            return MultiprocExecutor(config, monitor_workers=False)
    except Exception as error:  # what a rank could not do is an exception of just that kind
        raise EngineError(f"vLLM's ranks did not start: {error}; its own log says why") from error
