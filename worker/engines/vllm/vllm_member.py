"""The ranks of one more node of a gang: launched here, commanded by the head's vLLM."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

from typing_extensions import override

from rollout_common.wire import Progress
from rollout_worker.engine import EngineError, EngineMember, MemberInfo, Sink, TensorEntry
from rollout_worker.engines.model_folder import start_while_hashing
from rollout_worker.engines.options import EngineOptions
from rollout_worker.engines.shared_memory import ranks
from rollout_worker.engines.weight_versions import open_mapped_sink
from rollout_worker.observe.processes import ProcessHandle, StandstillDetector, find_descendants

from . import launch, settings, shutdown


class VllmMember(EngineMember):
    """Starts and watches the ranks of a node; the head's vLLM commands them."""

    def __init__(self, options: EngineOptions) -> None:
        assert options.gang is not None, "a member has a gang"
        launch.prepare_environment()
        shutdown.prepare_folder()
        self._options = options
        self._gang = options.gang
        self._settings = settings.parse_flags(options.args, options.gang)
        self._give_up = threading.Event()
        self._before = find_descendants(os.getpid())
        self._standing = StandstillDetector()
        self._executor: Any = None  # owns the ranks
        self._ranks: set[ProcessHandle] = set()

    @override
    async def start(self, report: Callable[[Progress], None]) -> MemberInfo:
        return await shutdown.start_in_thread(
            self._launch_ranks, report, self._give_up, self._before
        )

    def _launch_ranks(
        self, report: Callable[[Progress], None], cancelled: Callable[[], bool]
    ) -> MemberInfo:
        options = self._options
        config, layout, _ = launch.prepare_launch(options, self._settings, report, cancelled)
        os.environ[settings.MEMBER_VARIABLE] = str(os.getpid())
        if self._gang.in_part:
            os.environ[settings.WATCH_VARIABLE] = "1"
        self._executor, root_hash = start_while_hashing(
            options.model,
            report,
            cancelled,
            lambda: _start_executor(config),
            lambda it: it.shutdown(),
        )
        pids = {worker.proc.pid for worker in self._executor.workers}
        self._ranks = {each for each in find_descendants(os.getpid()) if each.pid in pids}
        return MemberInfo(str(options.model), root_hash, layout)

    @override
    def unread(self, entries: Sequence[TensorEntry]) -> frozenset[str]:
        return ranks.unread_by_all(self._gang.slots, {rank.pid for rank in self._ranks}, entries)

    @override
    async def open_slot(
        self,
        slot: str,
        entries: Sequence[TensorEntry],
        *,
        on_disk: bool = False,
        unread: Collection[str] = (),
    ) -> Sink:
        return await open_mapped_sink(
            entries, self._options, on_disk=on_disk, skip=unread, slot=slot
        )

    @override
    def alive(self) -> str | None:
        if not all(rank.is_alive() for rank in self._ranks):
            return "one of vLLM's ranks died"
        if self._standing.find_stopped(self._ranks):
            return "one of vLLM's ranks was stopped"
        return None

    @override
    async def stop(self) -> None:
        self._give_up.set()
        await asyncio.to_thread(shutdown.end_started_processes, self._before)


def _start_executor(config: Any) -> Any:
    """Start what `vllm serve --headless` starts; its ranks then obey the head's."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    try:
        with shutdown.use_process_folder():
            return MultiprocExecutor(config, monitor_workers=False)
    except Exception as error:  # a rank's failure arrives as a plain Exception
        raise EngineError(f"vLLM's ranks did not start: {error}; its own log says why") from error
