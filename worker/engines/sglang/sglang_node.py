"""SGLang's processes of one node: started, spoken to, watched, ended; the head's and a member's alike."""

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
from rollout_worker.engines import EngineOptions, selfcheck, tested
from rollout_worker.engines.model_folder import hash_checkpoint
from rollout_worker.engines.network import resolve_address
from rollout_worker.sources.checkpoint_files import ReadCancelled
from rollout_worker.threads import run_in_thread

from . import settings
from .child_connection import ChildConnection
from .model import SglangModel, read_model, update_refusal
from .process import SglangProcess, startup_milestone
from .sglang_versions import open_node_slot

logger = logging.getLogger(__name__)

ReportProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class StartedNode:
    """What came of a start: the model, what the child said of itself, the checkpoint's hash."""

    model: SglangModel
    connection: ChildConnection
    facts: dict[str, Any]
    root_hash: str


class SglangNode:
    """This node's child of SGLang with its ranks.

    Args:
        options: What the worker says.
        given: What the engine's own flags say.
        take: Called with what each step made.
        on_end: Called once, when the processes have ended by themselves or were given up.
    """

    def __init__(
        self,
        options: EngineOptions,
        given: settings.SglangSettings,
        take: Callable[[list[Any]], None],
        on_end: Callable[[], None],
    ) -> None:
        self._options = options
        self._given = given
        self._take = take
        self._on_end = on_end
        self._give_up = threading.Event()
        self._process: SglangProcess | None = None
        self._connection: ChildConnection | None = None
        self._reading: asyncio.Task[None] | None = None
        self.ended: str | None = None

    async def start(self, report: ReportProgress) -> StartedNode:
        """Start SGLang; returns once this node's ranks run.

        Raises:
            EngineError: it can't; the text says why and what to change.
        """
        report(Progress(message="reading the model's configuration"))
        try:
            model = await run_in_thread(lambda _: read_model(self._options), self._give_up)
            if self._given.self_update_check:
                _check_updatable_kind(model)
            options = await run_in_thread(self._with_leader_address, self._give_up)
            connection, process = self._launch_child(options, model, report)
            hashing = asyncio.create_task(self._hash_checkpoint())
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
            raise EngineError(f"SGLang did not start: {self.last_words() or error}") from error
        process.watch_schedulers()
        return StartedNode(model, connection, facts, digest)

    def _with_leader_address(self, cancelled: Callable[[], bool]) -> EngineOptions:
        """Return the options with the head's address for its name, which a new pod has not at once."""
        gang = self._options.gang
        if gang is None:
            return self._options
        return replace(
            self._options, gang=replace(gang, leader=resolve_address(gang.leader, cancelled))
        )

    def _launch_child(
        self, options: EngineOptions, model: SglangModel, report: ReportProgress
    ) -> tuple[ChildConnection, SglangProcess]:
        connection = self._connection = ChildConnection(self._take)
        connection.on_progress = lambda text: report(Progress(message=text))

        def line(text: str) -> None:
            progress = startup_milestone(text)
            if progress is not None and not connection.ready.done():
                report(Progress(message=progress))

        process = self._process = SglangProcess(self.mark_dead, line)
        cpu = settings.runs_on_cpu(options)
        flags = settings.child_flags(options, self._given, model, cpu)
        if self._given.any_version:
            flags.append(tested.ALLOW_UNTESTED_FLAG)
        report(Progress(message="starting SGLang"))
        sock = process.start(self._given.python, flags, settings.child_environment(options, cpu))
        self._reading = asyncio.create_task(self._read_frames(connection, sock))
        return connection, process

    def last_words(self) -> str:
        """Return what the child said last of what went wrong; empty if it said nothing."""
        return "" if self._process is None else self._process.last_words()

    async def _read_frames(self, connection: ChildConnection, sock: socket.socket) -> None:
        await connection.run(sock)
        self.mark_dead("SGLang's process closed its end of the connection")

    async def _hash_checkpoint(self) -> str:
        def work(cancelled: Callable[[], bool]) -> str:
            return hash_checkpoint(self._options.model, lambda *_: None, cancelled)

        return await run_in_thread(work, self._give_up)

    def mark_dead(self, why: str) -> None:
        """Take note that the child is dead or in an unknown state."""
        if self.ended is not None:
            return
        logger.error("%s", why)
        self.ended = why
        self._on_end()
        if self._connection is not None:
            self._connection.fail_calls(why)

    def find_problem(self) -> str | None:
        """Return None while its processes run, else what is wrong; from memory."""
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
    """Refuse a kind of weights that can't be updated before it is loaded."""
    if (why := update_refusal(model.quantisation, None)) is not None:
        raise EngineError(
            f"{why}; {selfcheck.SELF_CHECK_FLAG}=off in engine.args serves it without updates"
        )


class SglangMember(EngineMember):
    """The ranks of a node next to the head's.

    The head commands them through SGLang's own channels. What is to do here is to start and watch
    them, and to give memory where their loader looks for it.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._model: SglangModel | None = None
        self._node = SglangNode(
            options, settings.parse_flags(options.args), lambda _: None, lambda: None
        )

    @override
    async def start(self, report: Callable[[Progress], None]) -> MemberInfo:
        loaded = await self._node.start(report)
        self._model = loaded.model
        return MemberInfo(str(self._options.model), loaded.root_hash, loaded.model.layout)

    @override
    def unread(self, entries: Sequence[TensorEntry]) -> frozenset[str]:
        return frozenset()  # each rank has a slice of every tensor, for there are no pipelines

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
        return await open_node_slot(self._options, self._model, entries, slot)

    @override
    def alive(self) -> str | None:
        return self._node.find_problem()

    @override
    async def stop(self) -> None:
        await self._node.stop()
