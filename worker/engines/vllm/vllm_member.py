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

from typing_extensions import override

from rollout_common.wire import Progress
from rollout_worker.engine import EngineError, EngineMember, MemberInfo, Sink, TensorEntry
from rollout_worker.engines import EngineOptions
from rollout_worker.engines.model_folder import checkpoint_layout, read_config, start_while_hashing
from rollout_worker.engines.shared_memory.ranks import unread_by_all
from rollout_worker.engines.shared_memory.sinks import open_mapped_sink
from rollout_worker.observe import processes
from rollout_worker.sources.checkpoint_files import open_source

from . import launch, settings, shutdown, vllm_environment
from .shutdown import ReportProgress


@dataclass(frozen=True, slots=True)
class MemberRanks:
    """A member's running ranks, and the executor that owns them."""

    executor: Any
    info: MemberInfo
    processes: set[processes.ProcessHandle]
    ids: set[int]
    """Process ids of all."""


class VllmMember(EngineMember):
    """The `Member` of vLLM."""

    def __init__(self, options: EngineOptions) -> None:
        assert options.gang is not None, "a member has a gang"
        vllm_environment.prepare_environment()
        shutdown.prepare_folder()
        self._options = options
        self._gang = options.gang
        self._settings = settings.parse_flags(options.args, options.gang)
        self._give_up = threading.Event()
        self._before = processes.find_descendants(os.getpid())
        self._standing = processes.StandstillDetector()
        self._ranks: MemberRanks | None = None

    @override
    async def start(self, report: Callable[[Progress], None]) -> MemberInfo:
        self._ranks = await shutdown.start_in_thread(
            lambda relay, cancelled: launch_ranks(self._options, self._settings, relay, cancelled),
            report,
            self._give_up,
            self._before,
        )
        return self._ranks.info

    @override
    def unread(self, entries: Sequence[TensorEntry]) -> frozenset[str]:
        ranks = set() if self._ranks is None else self._ranks.ids
        return unread_by_all(self._gang.slots, ranks, entries)

    @override
    async def open_slot(
        self,
        slot: str,
        entries: Sequence[TensorEntry],
        *,
        on_disk: bool = False,
        unread: Collection[str] = (),
    ) -> Sink:
        spill_dir = self._options.spill_dir or Path(tempfile.gettempdir())
        return await open_mapped_sink(
            entries,
            spill_dir if on_disk else None,
            skip=unread,
            slots=self._gang.slots,
            slot=slot,
            staging=self._options.staging,
        )

    @override
    def alive(self) -> str | None:
        ranks = set() if self._ranks is None else self._ranks.processes
        if not all(rank.is_alive() for rank in ranks):
            return "one of vLLM's ranks died"
        if self._standing.find_stopped(ranks):
            return "one of vLLM's ranks was stopped"
        return None

    @override
    async def stop(self) -> None:
        self._give_up.set()
        await asyncio.to_thread(shutdown.end_started_processes, self._before)


def launch_ranks(
    options: EngineOptions,
    flags: settings.VllmSettings,
    report: ReportProgress,
    cancelled: Callable[[], bool],
) -> MemberRanks:
    """Start the ranks of a member's node.

    Raises:
        EngineError: as `launch`.
        ReadCancelled: `cancelled` said so.
    """
    report(Progress(message="reading the model's configuration"))
    read_config(options.model)
    assert options.gang is not None, "a member has a gang"
    leader = vllm_environment.join_gang(options.gang, flags, cancelled)
    config, _ = launch.make_config(options, flags, leader)
    tied = bool(getattr(config.model_config.hf_text_config, "tie_word_embeddings", False))
    layout = checkpoint_layout(open_source(options.model).entries, tied=tied)
    os.environ[settings.MEMBER_VARIABLE] = str(os.getpid())
    if options.gang.in_part:
        os.environ[settings.WATCH_VARIABLE] = "1"

    before = processes.find_descendants(os.getpid())
    executor, root_hash = start_while_hashing(
        options.model, report, cancelled, lambda: _start_executor(config), lambda it: it.shutdown()
    )
    ranks = {worker.proc.pid for worker in executor.workers}
    running = {
        each for each in processes.find_descendants(os.getpid()) - before if each.pid in ranks
    }
    return MemberRanks(executor, MemberInfo(str(options.model), root_hash, layout), running, ranks)


def _start_executor(config: Any) -> Any:
    """Start what `vllm serve --headless` starts; its ranks then obey the head's."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    try:
        with shutdown.use_process_folder():
            return MultiprocExecutor(config, monitor_workers=False)
    except Exception as error:  # what a rank could not do is an exception of just that kind
        raise EngineError(f"vLLM's ranks did not start: {error}; its own log says why") from error
