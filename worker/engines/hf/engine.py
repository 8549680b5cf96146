"""The adapter: `Engine` of the worker's contract on top of the step thread; whole.

Everything here runs in the worker's asyncio loop. The core and the model belong to the step thread
(`thread.py`), which answers commands at step boundaries; loading and spilling weights run in threads
of their own, so that neither the loop nor an abort ever waits for a disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
import transformers

from rollout_worker.engine import (
    EngineCrashed,
    EngineDelta,
    EngineError,
    EngineInfo,
    EngineRequest,
    EngineStats,
    Entry,
    Given,
    InvalidRequest,
    KvPolicy,
    ProcessSpent,
    Refill,
    Sink,
)
from rollout_worker.engines import EngineOptions
from rollout_worker.schemas import AbortReason, MemoryTag, Progress, Resident, StopReason, WeightsId
from rollout_worker.sources.files import ReadCancelled
from rollout_worker.threads import in_thread

from . import metrics, settings
from .core import Core, Delivery
from .faults import lasting, spent
from .intake import check, sequence_of
from .loading import Loaded, load
from .memory import release_freed, settle_heap
from .parts import Parts, assemble, capabilities

logger = logging.getLogger(__name__)

T = TypeVar("T")

STOP_SECONDS = 30.0
"""How long `stop` waits for the step that runs."""


@dataclass(slots=True)
class _Stream:
    """The reader's end of one output."""

    request: EngineRequest
    deltas: asyncio.Queue[EngineDelta]


class HfEngine:
    """Serves one transformers model."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._settings = settings.parse(options.args)
        self._parts: Parts | None = None
        self._streams: dict[str, _Stream] = {}
        self._arrivals = 0
        self._give_up = threading.Event()
        self._ended: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.capabilities = capabilities(stop_strings=True, reloads=True)
        self.on_end: Callable[[str], None] = lambda why: None

    async def start(self, report: Callable[[Progress], None]) -> EngineInfo:
        """See `Engine.start`."""
        loop = self._loop = asyncio.get_running_loop()

        def relay(progress: Progress) -> None:
            loop.call_soon_threadsafe(report, progress)

        if self._settings.threads:
            torch.set_num_threads(self._settings.threads)

        def work(cancelled: Callable[[], bool]) -> Loaded:
            loaded = load(self._options, self._settings, relay, cancelled)
            if not self._options.guest:  # garbage of the process's owner would stay for ever, too
                settle_heap()
            return loaded

        try:
            loaded = await in_thread(work, self._give_up)
        except ReadCancelled:
            raise EngineError("the engine was stopped while it loaded") from None
        except RuntimeError as error:
            if (why := lasting(error)) is not None:
                raise ProcessSpent(spent(why)) from error
            raise
        self._parts = assemble(loaded, self._options, self._settings, self._deliver, self._on_crash)
        self._parts.thread.start()
        self.capabilities = capabilities(
            stop_strings=loaded.tokenizer is not None, reloads=bool(loaded.targets)
        )
        logger.info("serving %s, weights %s", self._options.model, loaded.root_hash)
        return EngineInfo(
            engine="hf",
            engine_version=transformers.__version__,
            model=str(self._options.model),
            max_length=loaded.max_length,
            eos_token_ids=loaded.eos_token_ids,
            root_hash=loaded.root_hash,
            layout=loaded.layout,
            by_path=False,
        )

    async def stop(self) -> None:
        """See `Engine.stop`."""
        self._give_up.set()
        parts, self._parts = self._parts, None
        if parts is not None:
            large = (weakref.ref(parts.loaded.model), weakref.ref(parts.core))
            ended = await self._halt(parts)
            del parts
            await asyncio.to_thread(release_freed)
            if any(each() is not None for each in large) and not self._options.guest:
                gc.unfreeze()  # a cycle holds them, such as an error and its frames
                await asyncio.to_thread(release_freed)
            if not ended:
                raise EngineError(
                    "the step thread did not end, so memory of its model is still here"
                )

    async def _halt(self, parts: Parts) -> bool:
        with contextlib.suppress(EngineCrashed, TimeoutError):
            end = parts.thread.call(lambda: parts.core.abort(None, AbortReason.ENGINE))
            await asyncio.wait_for(asyncio.wrap_future(end), STOP_SECONDS)
        parts.memory.forget_spill()
        ended = await asyncio.to_thread(parts.thread.stop, STOP_SECONDS)
        if not ended:
            logger.error("the step thread did not end within %.0f s", STOP_SECONDS)
        self._end_streams("the engine was stopped")
        return ended

    def validate(self, request: EngineRequest) -> None:
        """See `Engine.validate`."""
        check(request, self._live().loaded)

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineDelta]:
        """See `Engine.generate`."""
        parts = self._live()
        self.validate(request)
        name = request.request_id
        if name in self._streams:
            raise InvalidRequest("request_id", f"request {name!r} runs already: use another id")
        stream = self._streams[name] = _Stream(request, asyncio.Queue())
        finished = False
        try:
            await self._enter(parts, stream)
            while not finished:
                delta = await stream.deltas.get()
                finished = delta.stop_reason is not None
                yield delta
        finally:
            if self._streams.get(name) is stream:
                del self._streams[name]
            if not finished:
                parts.thread.call(lambda: parts.core.abort([name], AbortReason.CLIENT))

    async def _enter(self, parts: Parts, stream: _Stream) -> None:
        self._arrivals += 1
        arrival = self._arrivals

        def enter() -> None:
            sink = stream.deltas.put_nowait
            parts.core.add(sequence_of(stream.request, parts.loaded, arrival, sink))

        await asyncio.wrap_future(parts.thread.call(enter))

    async def abort(self, request_ids: Collection[str] | None, reason: AbortReason) -> set[str]:
        """See `Engine.abort`."""
        return await self._command(lambda core: core.abort(request_ids, reason))

    async def hold_admission(self) -> None:
        """See `Engine.hold_admission`."""

        def hold(core: Core) -> None:
            core.held = True

        await self._command(hold)

    async def pause(self) -> None:
        """See `Engine.pause`."""

        def pause(core: Core) -> None:
            core.paused = True

        await self._command(pause)

    async def resume(self) -> None:
        """See `Engine.resume`."""

        def resume(core: Core) -> None:
            core.check_weights()
            core.paused = core.held = False

        await self._command(resume)

    async def open_slot(
        self, entries: Sequence[Entry], *, on_disk: bool = False, given: Given | None = None
    ) -> Sink:
        """See `Engine.open_slot`; the engine itself never asks for one on disk."""
        return await self._live().versions.open_slot(entries, given)

    async def commit(self, identity: WeightsId, sink: Sink, kv: KvPolicy) -> None:
        """See `Engine.commit`."""
        await self._live().versions.commit(identity, sink, kv)

    async def sleep(
        self, level: Literal[1, 2], tags: Collection[MemoryTag], refill: Refill
    ) -> None:
        """See `Engine.sleep`."""
        await self._live().versions.sleep(level, tags)

    async def wake(self, tags: Collection[MemoryTag], refill: Refill | None) -> None:
        """See `Engine.wake`."""
        await self._live().versions.wake(tags, refill)

    async def reset_cache(self) -> None:
        """Do nothing: no prefix outlives its request here."""

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        parts = self._parts
        if parts is None:
            return EngineStats(0, Resident(weights=False, kv_cache=False))
        census = parts.core.census
        return EngineStats(
            running=len(census.running),
            resident=parts.versions.resident(),
            running_ids=census.running,
            pinned_ids=census.pinned,
        )

    def alive(self) -> str | None:
        """See `Engine.alive`."""
        if self._parts is None:
            return self._ended
        return self._parts.thread.wrong(self._settings.step_deadline_seconds) or self._ended

    def metrics(self) -> str:
        """See `Engine.metrics`."""
        parts = self._parts
        if parts is None:
            return ""
        return metrics.render(parts.core.totals, parts.core.census, parts.kv, parts.memory)

    def _live(self) -> Parts:
        if self._ended is not None:
            raise EngineCrashed(self._ended)
        if self._parts is None:
            raise EngineError("the engine is not started")
        return self._parts

    async def _command(self, command: Callable[[Core], T]) -> T:
        parts = self._live()
        return await asyncio.wrap_future(parts.thread.call(lambda: command(parts.core)))

    def _deliver(self, deliveries: list[Delivery]) -> None:
        """Called in the step thread: hand new tokens to their readers, in order."""
        if deliveries:
            self._soon(lambda: _hand_over(deliveries))

    def _on_crash(self, why: str) -> None:
        """Called in the step thread as its last act."""
        self._soon(lambda: self._end_streams(why))

    def _soon(self, callback: Callable[[], object]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    def _end_streams(self, why: str) -> None:
        self._ended = why
        self.on_end(why)
        for stream in self._streams.values():
            stream.deltas.put_nowait(
                EngineDelta(
                    token_ids=(),
                    logprobs=None if stream.request.logprobs is None else (),
                    spans=(),
                    stop_reason=StopReason.ABORTED,
                    abort_reason=AbortReason.ENGINE,
                )
            )


def _hand_over(deliveries: list[Delivery]) -> None:
    for sequence, delta in deliveries:
        sequence.sink(delta)
