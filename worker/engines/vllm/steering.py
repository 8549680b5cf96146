"""Whether vLLM steps, and who is in it: pause, resume, take outputs back, forget KV."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Collection
from contextlib import asynccontextmanager

from rollout_worker.schemas import AbortReason, MemoryTag

from .gate import Gate
from .labels import Labels
from .launch import Launched
from .streams import Stream

RIPEN_SECONDS = 1.0


class Steering:
    """Holds vLLM's scheduler; it steps only if nobody paused, froze or put memory away."""

    def __init__(self, launched: Launched, gate: Gate, labels: Labels) -> None:
        self._llm = launched.llm
        self._steps = launched.steps
        self._gate = gate
        self._labels = labels
        self._lock = asyncio.Lock()
        self._stopped = False
        self._ordered_at: float | None = None  # an order to stop or go on that is not answered yet
        self._frozen = 0
        self._lost_at = -1
        self._cache = 0
        self.paused = False
        self.held = False
        self.broken = False  # half of other weights is loaded: no step may be made any more
        self.away: set[MemoryTag] = set()
        self.streams: dict[str, Stream] = {}
        self._begun: set[str] = set()
        self._ripe = asyncio.Event()  # all that are in vLLM have begun

    @property
    def may_step(self) -> bool:
        """Whether steps are wanted now."""
        return not (self.paused or self._frozen or self.away or self.broken)

    async def settle(self) -> None:
        """Bring vLLM to what is wanted; returns once no step runs, if none may."""
        async with self._lock:
            if self.may_step and not self.held:
                self._gate.open()
            else:
                self._gate.shut()
            core = self._llm.engine_core
            if not self.may_step and not self._stopped:
                await self._order(core.pause_scheduler_async(mode="keep", clear_cache=False))
                self._stopped = True
            elif self.may_step and self._stopped:
                await self._order(core.resume_scheduler_async())
                self._stopped = False
                self._steps.last = time.monotonic()

    async def _order(self, order: Awaitable[object]) -> None:
        self._ordered_at = time.monotonic()
        try:
            await order
        finally:
            self._ordered_at = None

    def idle_since(self) -> float | None:
        """Return since when no step was made although one is owed, as a monotonic time.

        Owed is a step while outputs are inside of what rests not yet, and the answer to an order
        to stop or to go on, which comes after at most one step.
        """
        if self._ordered_at is not None:
            return max(self._ordered_at, self._steps.last)
        return self._steps.last if self._gate.inside and not self._stopped else None

    @asynccontextmanager
    async def frozen(self) -> AsyncIterator[None]:
        """Keep vLLM from stepping inside the block."""
        self._frozen += 1
        try:
            await self.settle()
            yield
        finally:
            self._frozen -= 1
            if not self.broken:
                await self.settle()

    async def ripen(self) -> None:
        """Let nobody in, and give those that are in a moment to get their first token.

        Who has none when weights change goes back to the queue, and its prefill was in vain.
        """
        self._gate.shut()
        self._ripe.clear()
        if not (self._stopped or self._gate.inside <= self._begun):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RIPEN_SECONDS):
                    await self._ripe.wait()

    def began(self, name: str) -> None:
        """Note that an output has a token: no other weights can begin it any more."""
        self._begun.add(name)
        if self._gate.inside <= self._begun:
            self._ripe.set()

    def left(self, name: str) -> None:
        """Note that an output has ended, however it did."""
        del self.streams[name]
        self._begun.discard(name)
        self._gate.leave([name])
        if self._gate.inside <= self._begun:
            self._ripe.set()

    async def take_back(self) -> None:
        """Take outputs without a token back into the queue: they are to run on other weights."""
        early = [
            stream
            for stream in self.streams.values()
            if stream.name in self._gate.inside
            and not (stream.produced or stream.ended or stream.aborting)
        ]
        for stream in early:
            stream.returned = True
        self._gate.leave([stream.name for stream in early])
        await self._remove(early)

    async def _remove(self, streams: Collection[Stream]) -> None:
        inside = [stream.inside for stream in streams if stream.inside is not None]
        if inside:
            await self._llm.abort(inside, internal=True)

    async def abort(self, names: Collection[str] | None, reason: AbortReason) -> set[str]:
        """End outputs with what they have; None: all. Returns the names that were known."""
        wanted = list(self.streams) if names is None else names
        known = [self.streams[name] for name in wanted if name in self.streams]
        known = [stream for stream in known if not stream.ended]
        for stream in known:
            stream.aborting = stream.aborting or reason
            self._gate.dismiss(stream.name)
        await self._remove(known)
        return {stream.name for stream in known}

    @property
    def kv_lost(self) -> bool:
        """Whether no step was made since all KV was forgotten."""
        return self._lost_at == self._steps.count

    async def lose_kv(self) -> None:
        """Forget all KV; what runs is prefilled again."""
        await self._llm.engine_core.reset_prefix_cache_async(True, False)
        self._lost_at = self._steps.count

    async def reset_cache(self) -> None:
        """Forget reusable prefixes; those of running outputs are left to them."""
        self._cache += 1
        await self._llm.engine_core.reset_prefix_cache_async(False, False)

    def salt(self, given: str | None) -> str:
        """Return the salt under which an output may share prefixes: never another commit's."""
        return f"{self._labels.current}.{self._cache}:{given or ''}"
