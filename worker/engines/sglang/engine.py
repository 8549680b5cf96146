"""The adapter: `Engine` of the worker's contract on top of a supervised child."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Literal

from rollout_worker.engine import (
    EngineCrashed,
    EngineDelta,
    EngineError,
    EngineInfo,
    EngineRequest,
    EngineStats,
    Entry,
    InvalidRequest,
    KvPolicy,
    Refill,
    Sink,
)
from rollout_worker.engines import EngineOptions, tested
from rollout_worker.engines.checkpoint import hash_of
from rollout_worker.schemas import (
    CHECKPOINT,
    AbortReason,
    Capabilities,
    MemoryTag,
    Progress,
    Resident,
    WeightsId,
)
from rollout_worker.sources.files import ReadCancelled
from rollout_worker.threads import in_thread

from . import settings
from .bridge import Bridge, CallFailed
from .checks import capabilities, check
from .desk import Desk
from .metrics import Page
from .model import Model, read_model
from .process import Process, milestone
from .streams import Stream
from .versions import Versions

logger = logging.getLogger(__name__)


class SglangEngine:
    """Serves one model by one child of SGLang."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._settings = settings.parse(options.args)
        self._streams: dict[str, Stream] = {}
        self._arrivals = itertools.count()
        self._give_up = threading.Event()
        self._ended: str | None = None
        self._process: Process | None = None
        self._bridge: Bridge | None = None
        self._reading: asyncio.Task[None] | None = None
        self._model: Model | None = None
        self._desk: Desk | None = None
        self._versions: Versions | None = None
        self._page: Page | None = None
        self.capabilities: Capabilities = capabilities(tokenizer=True, facts={})

    async def start(self, report: Callable[[Progress], None]) -> EngineInfo:
        """See `Engine.start`."""
        report(Progress(message="reading the model's configuration"))
        try:
            model = await in_thread(lambda _: read_model(self._options), self._give_up)
            self._model = model
            bridge = self._launch(model, report)
            hashing = asyncio.create_task(self._hash())
            try:
                facts = await bridge.ready
            finally:
                if not bridge.ready.done() or bridge.ready.exception():
                    self._give_up.set()
                    await asyncio.wait([hashing])
            digest = await hashing
        except ReadCancelled:
            raise EngineError("the engine was stopped while it loaded") from None
        except EngineCrashed as error:
            words = self._process.last_words() if self._process else ""
            raise EngineError(f"SGLang did not start: {words or error}") from error
        self._assemble(model, bridge, facts)
        logger.info("serving %s, weights %s", self._options.model, digest)
        return EngineInfo(
            engine="sglang",
            engine_version=facts["version"],
            model=str(self._options.model),
            max_length=model.max_length,
            eos_token_ids=model.eos_token_ids,
            root_hash=digest,
            layout=model.layout,
        )

    def _launch(self, model: Model, report: Callable[[Progress], None]) -> Bridge:
        bridge = self._bridge = Bridge(self._take)
        bridge.on_progress = lambda text: report(Progress(message=text))

        def line(text: str) -> None:
            progress = milestone(text)
            if progress is not None and not bridge.ready.done():
                report(Progress(message=progress))

        process = self._process = Process(self._die, line)
        cpu = settings.on_cpu(self._options)
        flags = settings.child_flags(self._options, self._settings, model, cpu)
        if self._settings.any_version:
            flags.append(tested.FLAG)
        report(Progress(message="starting SGLang"))
        sock = process.start(self._settings.python, flags, settings.environ(cpu))
        self._reading = asyncio.create_task(self._read(bridge, sock))
        return bridge

    async def _read(self, bridge: Bridge, sock: Any) -> None:
        await bridge.run(sock)
        self._die("SGLang's process closed its end of the bridge")

    async def _hash(self) -> str:
        def work(cancelled: Callable[[], bool]) -> str:
            return hash_of(self._options.model, lambda *_: None, cancelled)

        return await in_thread(work, self._give_up)

    def _assemble(self, model: Model, bridge: Bridge, facts: dict[str, Any]) -> None:
        assert self._process is not None
        self._process.watch_schedulers()
        room = facts["max_tokens"] - settings.SLACK_TOKENS
        if room < model.max_length:
            raise EngineError(
                f"the KV cache holds {room} tokens, below the maximum length {model.max_length}: "
                "raise max_batch_tokens or lower max_length"
            )
        self._desk = Desk(bridge, int(facts["max_running"]), CHECKPOINT)
        self._page = Page(bridge)
        self._versions = Versions(self._options, model, bridge, self._desk, facts, self._die)
        self.capabilities = capabilities(tokenizer=model.tokenizer is not None, facts=facts)

    async def stop(self) -> None:
        """See `Engine.stop`."""
        self._give_up.set()
        self._ended = self._ended or "the engine was stopped"
        for stream in self._streams.values():
            stream.end(AbortReason.ENGINE)
        process, self._process = self._process, None
        if process is not None:
            await process.stop()
        if self._bridge is not None:
            self._bridge.end(self._ended)
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading
            self._reading = None
        if self._versions is not None:
            self._versions.forget_spill()

    def _die(self, why: str) -> None:
        """The child is dead or in an unknown state; what ran on it ends."""
        if self._ended is not None:
            return
        logger.error("%s", why)
        self._ended = why
        for stream in self._streams.values():
            stream.end(AbortReason.ENGINE)
        if self._bridge is not None:
            self._bridge.end(why)

    def validate(self, request: EngineRequest) -> None:
        """See `Engine.validate`."""
        self._live()
        assert self._model is not None
        check(request, self._model)

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineDelta]:
        """See `Engine.generate`."""
        self.validate(request)
        desk, model, name = self._live(), self._model, request.request_id
        assert model is not None
        if name in self._streams:
            raise InvalidRequest("request_id", f"request {name!r} runs already: use another id")
        decode = None if model.tokenizer is None else model.text
        if request.sampling.max_tokens is None:
            room = model.max_length - len(request.token_ids)
            sampling = request.sampling.model_copy(update={"max_tokens": room})
            request = replace(request, sampling=sampling)
        stream = Stream(request, next(self._arrivals), model.eos_token_ids, decode)
        self._streams[name] = stream
        try:
            desk.add(stream)
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
                desk.abort([stream], AbortReason.CLIENT)

    def _take(self, frames: list[Any]) -> None:
        if self._desk is not None and self._ended is None:
            self._desk.take(frames)

    async def abort(self, request_ids: Collection[str] | None, reason: AbortReason) -> set[str]:
        """See `Engine.abort`."""
        desk = self._live()
        names = set(self._streams) if request_ids is None else set(request_ids)
        known = {name for name in names & set(self._streams) if not self._streams[name].done}
        desk.abort([self._streams[name] for name in known], reason)
        return known

    async def hold_admission(self) -> None:
        """See `Engine.hold_admission`."""
        self._live().hold()

    async def pause(self) -> None:
        """See `Engine.pause`."""
        await self._calling(self._live().pause())

    async def resume(self) -> None:
        """See `Engine.resume`."""
        desk = self._live()
        if not self._weights().awake:
            raise EngineError("the engine is asleep: wake it before it is resumed")
        await self._calling(desk.resume())

    async def open_slot(self, entries: Sequence[Entry], *, on_disk: bool = False) -> Sink:
        """See `Engine.open_slot`; the engine itself never asks for one on disk."""
        return await self._weights().open_slot(entries)

    async def commit(self, identity: WeightsId, sink: Sink, kv: KvPolicy) -> None:
        """See `Engine.commit`."""
        await self._weights().commit(identity, sink, kv)

    async def sleep(
        self, level: Literal[1, 2], tags: Collection[MemoryTag], refill: Refill
    ) -> None:
        """See `Engine.sleep`."""
        await self._weights().sleep(level, tags)

    async def wake(self, tags: Collection[MemoryTag], refill: Refill) -> None:
        """See `Engine.wake`."""
        await self._weights().wake(tags, refill)

    async def reset_cache(self) -> None:
        """Forget reusable prefixes; SGLang does so only while nothing runs, else they age."""
        self._live()
        assert self._bridge is not None
        await self._calling(self._bridge.call("flush"))

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        if self._desk is None or self._versions is None:
            return EngineStats(0, Resident(weights=False, kv_cache=False))
        running = self._desk.running
        return EngineStats(
            running=len(running),
            resident=self._versions.resident(),
            running_ids=running,
        )

    def alive(self) -> str | None:
        """See `Engine.alive`."""
        if self._ended is not None or self._desk is None:
            return self._ended
        return self._desk.stuck(self._settings.step_deadline_seconds)

    def metrics(self) -> str:
        """Return the child's latest page."""
        return "" if self._page is None else self._page.latest()

    def _live(self) -> Desk:
        if self._ended is not None:
            raise EngineCrashed(self._ended)
        if self._desk is None:
            raise EngineError("the engine is not started")
        return self._desk

    def _weights(self) -> Versions:
        self._live()
        assert self._versions is not None
        return self._versions

    async def _calling(self, call: Any) -> None:
        try:
            await call
        except CallFailed as error:
            self._die(f"SGLang failed at a command: {error}")
            raise EngineCrashed(str(error)) from error
