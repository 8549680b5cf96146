"""Memory for new weights, the flip, and where the weights are: commit, sleep, wake.

Runs in the asyncio loop. Spilling happens in threads; whatever touches the model runs as a command
of the step thread, or while `core.unfit` keeps it from stepping. One lock orders commit, sleep and
wake among themselves.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Literal, TypeVar

from rollout_worker.engine import (
    EngineError,
    Entry,
    Given,
    KvPolicy,
    Refill,
    Sink,
    WeightsRejected,
)
from rollout_worker.schemas import MemoryTag, Resident, WeightsId
from rollout_worker.threads import in_thread, opened_in_thread

from .buffers import Buffers
from .core import Core
from .memory import NOT_UPDATABLE, Memory
from .thread import StepThread

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Versions:
    """The weights of one running engine."""

    def __init__(self, memory: Memory, core: Core, thread: StepThread) -> None:
        self._memory = memory
        self._core = core
        self._thread = thread
        self._lock = asyncio.Lock()
        self._away: set[MemoryTag] = set()
        self._empty = False  # the weights are away still, but awaited: the next slot brings them

    async def open_slot(self, entries: Sequence[Entry], given: Given | None = None) -> Sink:
        """See `Engine.open_slot`; a cancelled caller gets no memory, and none stays."""
        return await opened_in_thread(lambda: self._memory.buffers(entries, given))

    async def commit(self, identity: WeightsId, sink: Sink, kv: KvPolicy) -> None:
        """See `Engine.commit`."""
        try:
            async with self._lock:
                if "weights" in self._away and not self._empty:
                    raise EngineError("the weights are asleep: wake them before the commit")
                staged = _sealed(sink)

                def flip() -> None:
                    self._memory.swap(staged, pin=kv == "pin")
                    self._core.commit(identity, kv)
                    self._come_back("weights")

                await self._command(flip)
        except BaseException:  # also if it is cancelled while another verb has the lock
            await asyncio.to_thread(sink.close)
            raise
        self._memory.free(sink.close)  # the engine stands still here, and need not for that

    async def sleep(self, level: Literal[1, 2], tags: Collection[MemoryTag]) -> None:
        """See `Engine.sleep`."""
        if level == 2 and "weights" in tags and not self._memory.updatable:
            raise EngineError(NOT_UPDATABLE)
        async with self._lock:
            if "kv_cache" in tags and "kv_cache" not in self._away:
                await self._command(lambda: self._leave("kv_cache"))
                await self._command(self._core.lose_kv)
            if "weights" in tags:
                await self._sleep_weights(level)
            await in_thread(lambda _: self._memory.give_back(), threading.Event())

    async def _sleep_weights(self, level: Literal[1, 2]) -> None:
        self._empty = False
        if "weights" in self._away:
            if level == 2:
                self._memory.forget_spill()
            return
        await self._command(lambda: self._leave("weights"))
        await self._command(self._core.unpin)
        try:
            if level == 1 and self._memory.intact:  # else there is nothing worth keeping
                await in_thread(lambda _: self._memory.spill(), threading.Event())
        except BaseException:
            self._memory.forget_spill()
            await self._command(lambda: self._come_back("weights"))
            raise
        await self._command(self._memory.drop)

    async def wake(self, tags: Collection[MemoryTag], refill: Refill | None) -> None:
        """See `Engine.wake`."""
        async with self._lock:
            if "weights" in tags and "weights" in self._away:
                if refill is None:
                    self._memory.forget_spill()
                    self._empty = True
                else:
                    await self._bring_back(refill)
                    await self._command(lambda: self._come_back("weights"))
            if "kv_cache" in tags and "kv_cache" in self._away:
                await self._command(lambda: self._come_back("kv_cache"))

    async def _bring_back(self, refill: Refill) -> None:
        """Take the weights back, from the spilled copy if there is a sound one."""
        if self._memory.resident:  # a former wake was cancelled at the last moment
            return
        if self._memory.spilled:
            try:
                return await in_thread(lambda _: self._memory.restore(), threading.Event())
            except EngineError as error:
                logger.warning("%s; reading the active weights from their source", error)
                self._memory.forget_spill()
        sink = await refill()
        try:
            staged = _sealed(sink)
            await self._command(lambda: self._memory.swap(staged))
        finally:
            await asyncio.to_thread(sink.close)

    def _leave(self, tag: MemoryTag) -> None:
        self._away.add(tag)
        self._core.unfit = True

    def _come_back(self, tag: MemoryTag) -> None:
        self._away.discard(tag)
        self._core.unfit = bool(self._away)
        if tag == "weights":
            self._empty = False

    async def _command(self, command: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._thread.call(command))

    def resident(self) -> Resident:
        """Return which memory is there."""
        there = self._memory.resident or self._empty
        return Resident(weights=there, kv_cache="kv_cache" not in self._away)


def _sealed(sink: Sink) -> Buffers:
    """Return the sink as what it is; only verified weights may ever serve."""
    if not isinstance(sink, Buffers) or not sink.sealed:
        raise WeightsRejected("this sink is not a sealed one of this engine: fill it first")
    return sink
