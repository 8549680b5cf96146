"""The adapter: `Engine` of the worker's contract on top of a supervised child."""

from __future__ import annotations

import itertools
import logging
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
    Given,
    InvalidRequest,
    KvPolicy,
    Refill,
    Sink,
)
from rollout_worker.engines import EngineOptions, selfcheck
from rollout_worker.schemas import (
    CHECKPOINT,
    AbortReason,
    Capabilities,
    MemoryTag,
    Progress,
    Resident,
    WeightsId,
)

from . import settings
from .bridge import Bridge, CallFailed
from .checks import capabilities, check
from .desk import Desk
from .metrics import Page
from .model import Model
from .node import Loaded, Node
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
        self._node = Node(options, self._settings, self._take, self._end_streams)
        self._bridge: Bridge | None = None
        self._model: Model | None = None
        self._desk: Desk | None = None
        self._versions: Versions | None = None
        self._page: Page | None = None
        self.capabilities: Capabilities = capabilities(tokenizer=True, facts={})
        self.on_end: Callable[[str], None] = lambda why: None

    async def start(self, report: Callable[[Progress], None]) -> EngineInfo:
        """See `Engine.start`."""
        loaded = await self._node.start(report)
        self._assemble(loaded)
        await self._prove(loaded, report)
        logger.info("serving %s, weights %s", self._options.model, loaded.root_hash)
        return EngineInfo(
            engine="sglang",
            engine_version=loaded.facts["version"],
            model=str(self._options.model),
            max_length=loaded.model.max_length,
            eos_token_ids=loaded.model.eos_token_ids,
            root_hash=loaded.root_hash,
            layout=loaded.model.layout,
        )

    def _assemble(self, loaded: Loaded) -> None:
        model, bridge, facts = loaded.model, loaded.bridge, loaded.facts
        room = facts["max_tokens"] - settings.SLACK_TOKENS
        if room < model.max_length:
            raise EngineError(
                f"the KV cache holds {room} tokens, below the maximum length {model.max_length}: "
                "raise max_batch_tokens or lower max_length"
            )
        self._model, self._bridge = model, bridge
        self._desk = Desk(bridge, int(facts["max_running"]), CHECKPOINT)
        self._page = Page(bridge)
        self._versions = Versions(self._options, model, bridge, self._desk, facts, self._node.die)
        self.capabilities = capabilities(tokenizer=model.tokenizer is not None, facts=facts)

    async def _prove(self, loaded: Loaded, report: Callable[[Progress], None]) -> None:
        """Warm up, and see that updates of this model work."""
        model, options, bridge, versions = loaded.model, self._options, self._bridge, self._versions
        assert bridge is not None
        assert versions is not None

        async def reload() -> None:
            try:
                await versions.reload()
            except EngineCrashed as error:
                raise EngineError(self._node.last_words() or str(error)) from error

        probe = selfcheck.Probe(self.generate, model.vocab_size, model.max_length, "sampling")
        cpu = settings.on_cpu(options)
        report(Progress(message="warming up"))
        try:
            await probe.warm_up(selfcheck.PROMPT_TOKENS if cpu else selfcheck.LONG_TOKENS)
            if self._settings.self_update_check:
                key = ("sglang", loaded.root_hash, options.args, options.dtype)
                await selfcheck.check_update(probe, reload, report, key)
            await bridge.call("flush")
        except (EngineCrashed, CallFailed) as error:
            words = self._node.last_words()
            raise EngineError(f"SGLang started, but can't generate: {words or error}") from error

    async def stop(self) -> None:
        """See `Engine.stop`."""
        self._end_streams()
        if self._versions is not None:
            self._versions.end()
        await self._node.stop()

    def _end_streams(self) -> None:
        for stream in self._streams.values():
            stream.end(AbortReason.ENGINE)
        if self._node.ended is not None:
            self.on_end(self._node.ended)

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
            if not stream.done and self._node.ended is None:
                desk.abort([stream], AbortReason.CLIENT)

    def _take(self, frames: list[Any]) -> None:
        if self._desk is not None and self._node.ended is None:
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

    async def open_slot(
        self, entries: Sequence[Entry], *, on_disk: bool = False, given: Given | None = None
    ) -> Sink:
        """See `Engine.open_slot`; the engine itself never asks for one on disk."""
        return await self._weights().open_slot(entries, given)

    async def commit(self, identity: WeightsId, sink: Sink, kv: KvPolicy) -> None:
        """See `Engine.commit`."""
        await self._weights().commit(identity, sink, kv)

    async def sleep(
        self, level: Literal[1, 2], tags: Collection[MemoryTag], refill: Refill
    ) -> None:
        """See `Engine.sleep`."""
        await self._weights().sleep(level, tags)

    async def wake(self, tags: Collection[MemoryTag], refill: Refill | None) -> None:
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
        wrong = self._node.alive()
        if wrong is not None or self._desk is None:
            return wrong
        return self._desk.stuck(self._settings.step_deadline_seconds)

    def metrics(self) -> str:
        """Return the child's latest page."""
        return "" if self._page is None else self._page.latest()

    def _live(self) -> Desk:
        if self._node.ended is not None:
            raise EngineCrashed(self._node.ended)
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
            self._node.die(f"SGLang failed at a command: {error}")
            raise EngineCrashed(str(error)) from error
