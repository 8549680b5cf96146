"""The adapter: `Engine` of the worker's contract on top of a supervised child of SGLang."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from rollout_common.wire import CHECKPOINT, AbortReason, Progress
from rollout_worker.engine import EngineCrashed, EngineDelta, EngineError, EngineInfo, EngineRequest
from rollout_worker.engines import selfcheck
from rollout_worker.engines.adapter import EngineAdapter
from rollout_worker.engines.options import EngineOptions
from rollout_worker.engines.request_checks import (
    check_id_unused,
    make_stop_checker,
    with_known_tokens,
)

from . import settings
from .child_connection import CallFailed, ChildConnection
from .model import SglangModel, check_request, make_capabilities
from .scheduling import RequestScheduler
from .sglang_node import SglangNode, StartedNode
from .sglang_streams import SglangStream
from .sglang_versions import SglangAdapters, SglangVersions

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _SglangParts:
    """What exists once the child runs."""

    model: SglangModel
    connection: ChildConnection
    scheduler: RequestScheduler
    versions: SglangVersions
    adapters: SglangAdapters
    pinned: frozenset[str] = frozenset()

    @property
    def running(self) -> frozenset[str]:
        """Ids of the requests that have made a token."""
        return self.scheduler.running


class SglangEngine(EngineAdapter[_SglangParts]):
    """Serves one model by one child of SGLang."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._streams: dict[str, SglangStream] = {}
        self._arrivals = itertools.count()
        self._node = SglangNode(options, self._take_frames, self._on_node_end)
        self.capabilities = make_capabilities(None, {})

    @override
    async def start(self, report: Callable[[Progress], None]) -> EngineInfo:
        started = await self._node.start(report)
        parts = self._parts = self._assemble_parts(started)
        await self._warm_up_and_check(parts, started.root_hash, report)
        await self._freeze_heap()
        logger.info("serving %s, weights %s", self._options.model, started.root_hash)
        version, layout = started.facts["version"], started.model.layout
        return self._engine_info("sglang", version, started.model, started.root_hash, layout)

    def _assemble_parts(self, started: StartedNode) -> _SglangParts:
        model, connection, facts = started.model, started.connection, started.facts
        tokens = facts["max_tokens"] - settings.SLACK_TOKENS
        if tokens < model.max_length:
            raise EngineError(
                f"the KV cache holds {tokens} tokens, below the maximum length {model.max_length}: "
                "raise max_batch_tokens or lower max_length"
            )
        adapters = SglangAdapters(connection, self._options.spill_dir)
        scheduler = RequestScheduler(connection, int(facts["max_running"]), CHECKPOINT, adapters)
        versions = SglangVersions(
            self._options, model, connection, scheduler, facts, self._node.mark_dead, adapters
        )
        self.capabilities = make_capabilities(model, facts)
        return _SglangParts(model, connection, scheduler, versions, adapters)

    async def _warm_up_and_check(
        self, parts: _SglangParts, root_hash: str, report: Callable[[Progress], None]
    ) -> None:
        """Warm up, and check that updates of this model work."""
        model, options = parts.model, self._options

        async def reload() -> None:
            try:
                await parts.versions.reload_checkpoint()
            except EngineCrashed as error:
                raise EngineError(self._node.last_errors() or str(error)) from error

        probe = selfcheck.UpdateProbe(
            self.generate, model.vocab_size, model.max_length, "sampling", model.pictures
        )
        cpu = settings.runs_on_cpu(options)
        report(Progress(message="warming up"))
        try:
            await probe.warm_up(selfcheck.PROMPT_TOKENS if cpu else selfcheck.WARM_UP_TOKENS)
            if self._node.settings.self_update_check:
                key = ("sglang", root_hash, options.args, options.dtype)
                await selfcheck.check_update(probe, reload, report, key)
            await parts.connection.call_child("flush")
            await parts.connection.call_child("freeze_heaps")
        except (EngineCrashed, CallFailed) as error:
            why = self._node.last_errors() or error
            raise EngineError(f"SGLang started, but can't generate: {why}") from error

    @override
    async def stop(self) -> None:
        self._end_streams()
        self._ended = self._ended or "the engine was stopped"
        if self._parts is not None:
            self._parts.versions.stop_calling_ranks()
        await self._node.stop()
        if self._parts is not None:
            await asyncio.to_thread(self._parts.adapters.delete_files)

    def _on_node_end(self) -> None:
        self._ended = self._node.ended
        self._end_streams()
        self.on_end(self._ended or "")

    def _end_streams(self) -> None:
        for stream in self._streams.values():
            stream.end_output(AbortReason.ENGINE)

    @override
    def validate(self, request: EngineRequest) -> None:
        check_request(request, self._require_parts().model)

    @override
    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineDelta]:
        parts, name = self._require_parts(), request.request_id
        check_id_unused(name, self._streams)
        request = with_known_tokens(request, parts.model)
        stops = make_stop_checker(request.sampling, parts.model)
        stream = SglangStream(request, next(self._arrivals), parts.model, stops)
        self._streams[name] = stream
        try:
            parts.scheduler.add_request(stream)
            finished = False
            while not finished:
                delta = await stream.deltas.get()
                if isinstance(delta, Exception):
                    raise delta
                finished = delta.stop_reason is not None
                yield delta
        finally:
            if self._streams.get(name) is stream:
                del self._streams[name]
            if not stream.done and self._ended is None:
                parts.scheduler.abort_requests([stream], AbortReason.CLIENT)

    def _take_frames(self, frames: list[Any]) -> None:
        if self._parts is not None and self._ended is None:
            self._parts.scheduler.take_frames(frames)

    @override
    async def abort(self, request_ids: Collection[str] | None, reason: AbortReason) -> set[str]:
        scheduler = self._require_parts().scheduler
        names = set(self._streams) if request_ids is None else set(request_ids)
        known = {name for name in names & set(self._streams) if not self._streams[name].done}
        scheduler.abort_requests([self._streams[name] for name in known], reason)
        return known

    @override
    async def hold_admission(self) -> None:
        self._require_parts().scheduler.hold_admission()

    @override
    async def pause(self) -> None:
        await self._run_command(self._require_parts().scheduler.pause())

    @override
    async def resume(self) -> None:
        parts = self._require_parts()
        if not parts.versions.is_awake:
            raise EngineError("the engine is asleep: wake it before it is resumed")
        await self._run_command(parts.scheduler.resume())

    @override
    async def reset_cache(self) -> None:
        await self._run_command(self._require_parts().scheduler.reset_cache())

    @override
    def alive(self) -> str | None:
        wrong = self._node.find_problem()
        if wrong is not None or self._parts is None:
            return wrong
        return self._parts.scheduler.find_hang(self._node.settings.step_deadline_seconds)

    @override
    def metrics(self) -> str:
        return "" if self._parts is None else self._parts.connection.latest_metrics()

    async def _run_command(self, call: Awaitable[object]) -> None:
        try:
            await call
        except CallFailed as error:
            self._node.mark_dead(f"SGLang failed at a command: {error}")
            raise EngineCrashed(str(error)) from error
