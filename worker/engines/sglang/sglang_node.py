"""SGLang's processes of one node, the head's or a member's: started, called, watched, ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from rollout_common.wire import Progress
from rollout_worker.engine import (
    EngineCrashed,
    EngineError,
    EngineMember,
    MemberInfo,
    Sink,
    TensorEntry,
)
from rollout_worker.engines import tested
from rollout_worker.engines.model_folder import hash_checkpoint
from rollout_worker.engines.network import resolve_address
from rollout_worker.engines.options import EngineOptions
from rollout_worker.engines.weight_versions import open_mapped_sink
from rollout_worker.sources.source_reading import ReadCancelled
from rollout_worker.threads import run_in_thread

from . import settings
from .child_connection import ChildConnection
from .model import SglangModel, read_model, update_refusal
from .process import STARTUP_MILESTONES, SglangProcess

logger = logging.getLogger(__name__)

ReportProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class StartedNode:
    """The result of a start. `facts`: what the child reported of itself."""

    model: SglangModel
    connection: ChildConnection
    facts: dict[str, Any]
    root_hash: str


class SglangNode:
    """This node's child of SGLang with its ranks.

    `on_tokens` gets what each step made. `on_end` is called once, when the processes have ended by themselves
    or were given up.
    """

    def __init__(
        self,
        options: EngineOptions,
        on_tokens: Callable[[list[Any]], None] = lambda _: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._options = options
        self.settings = settings.parse_flags(options.args)
        self._on_tokens = on_tokens
        self._on_end = on_end
        self._give_up = threading.Event()
        self._process: SglangProcess | None = None
        self._connection: ChildConnection | None = None
        self._reading: asyncio.Task[None] | None = None
        self.ended: str | None = None

    async def start(self, report: ReportProgress) -> StartedNode:
        """Start SGLang; return once this node's ranks run.

        Raises:
            EngineError: it can't; the text says why and what to change.
        """
        report(Progress(message="reading the model's configuration"))
        try:
            model = await run_in_thread(lambda _: read_model(self._options), self._give_up)
            if self.settings.self_update_check:
                _check_updatable_kind(model)
            options = await run_in_thread(self._resolve_leader, self._give_up)
            connection, process = self._launch_child(options, model, report)
            hashing = asyncio.create_task(run_in_thread(self._hash_checkpoint, self._give_up))
            try:
                facts = await connection.ready
            finally:
                if not connection.ready.done() or connection.ready.exception():
                    self._give_up.set()
                    await asyncio.wait([hashing])
            digest = await hashing
        except ReadCancelled:
            raise EngineError("the engine was stopped while it loaded") from None
        except EngineCrashed as error:
            raise EngineError(f"SGLang did not start: {self.last_errors() or error}") from error
        process.watch_schedulers()
        return StartedNode(model, connection, facts, digest)

    def _resolve_leader(self, cancelled: Callable[[], bool]) -> EngineOptions:
        """Return the options with the address of the head, whose name a new pod gets only after a while."""
        gang = self._options.gang
        if gang is None:
            return self._options
        leader = resolve_address(gang.leader, cancelled)
        return replace(self._options, gang=replace(gang, leader=leader))

    def _launch_child(
        self, options: EngineOptions, model: SglangModel, report: ReportProgress
    ) -> tuple[ChildConnection, SglangProcess]:
        connection = self._connection = ChildConnection(self._on_tokens)

        def read_line(line: str) -> None:
            for words, progress in STARTUP_MILESTONES.items():
                if words in line and not connection.ready.done():
                    report(Progress(message=progress))

        process = self._process = SglangProcess(self.mark_dead, read_line)
        cpu = settings.runs_on_cpu(options)
        flags = settings.child_flags(options, self.settings, model, cpu)
        if self.settings.any_version:
            flags.append(tested.ALLOW_UNTESTED_FLAG)
        report(Progress(message="starting SGLang"))
        sock = process.start(self.settings.python, flags, settings.child_environment(options, cpu))
        self._reading = asyncio.create_task(self._read_frames(connection, sock))
        return connection, process

    def last_errors(self) -> str:
        """Return the child's last lines about errors; empty if it printed nothing."""
        return "" if self._process is None else self._process.last_errors()

    async def _read_frames(self, connection: ChildConnection, sock: socket.socket) -> None:
        await connection.run(sock)
        self.mark_dead("SGLang's process closed its end of the connection")

    def _hash_checkpoint(self, cancelled: Callable[[], bool]) -> str:
        return hash_checkpoint(self._options.model, lambda *_: None, cancelled)

    def mark_dead(self, why: str) -> None:
        """Note that the child is dead or in an unknown state: every call fails from now on."""
        if self.ended is not None:
            return
        logger.error("%s", why)
        self.ended = why
        self._on_end()
        if self._connection is not None:
            self._connection.fail_calls(why)

    def find_problem(self) -> str | None:
        """Return what is wrong with the processes, None while they run; from memory."""
        if self.ended is None and self._process is not None:
            return self._process.find_stopped()
        return self.ended

    async def stop(self) -> None:
        """End the child and all that it started."""
        self._give_up.set()
        self.ended = self.ended or "the engine was stopped"
        process, self._process = self._process, None
        if process is not None:
            await process.stop()
        if self._connection is not None:
            self._connection.fail_calls(self.ended)
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading
            self._reading = None


def _check_updatable_kind(model: SglangModel) -> None:
    """Refuse weights that can't be updated before they are loaded."""
    if (why := update_refusal(model.quantisation, None)) is not None:
        raise EngineError(
            f"{why}; {tested.SELF_CHECK_FLAG}=off in engine.args serves it without updates"
        )


class SglangMember(EngineMember):
    """Starts and watches the ranks of a member's node, and gives memory where their loader looks for it.

    The head commands them through SGLang's own channels.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._model: SglangModel | None = None
        self._node = SglangNode(options)

    @override
    async def start(self, report: Callable[[Progress], None]) -> MemberInfo:
        started = await self._node.start(report)
        self._model = started.model
        return MemberInfo(str(self._options.model), started.root_hash, started.model.layout)

    @override
    def unread(self, entries: Sequence[TensorEntry]) -> frozenset[str]:
        return frozenset()  # without pipelines, each rank has a slice of every tensor

    @override
    async def open_slot(
        self,
        slot: str,
        entries: Sequence[TensorEntry],
        *,
        on_disk: bool = False,
        unread: Collection[str] = (),
    ) -> Sink:
        if self._model is None:
            raise EngineError("the engine is not started")
        tied = self._model.layout.tied
        return await open_mapped_sink(entries, self._options, skip=tied, slot=slot)

    @override
    def alive(self) -> str | None:
        return self._node.find_problem()

    @override
    async def stop(self) -> None:
        await self._node.stop()
