"""Which weights serve, which are staged, and where they are: stage, commit, sleep, wake.

Runs in the asyncio loop. Reading and spilling happen in threads; whatever touches the model runs
as a command of the step thread, or while `core.unfit` keeps it from stepping. One lock orders
commit, sleep and wake among themselves.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal, TypeVar

from rollout_worker import weights
from rollout_worker.engine import EngineError, KvPolicy, StagedInfo, StageProgress, WeightsRejected
from rollout_worker.engines.slot import StagingSlot, in_thread
from rollout_worker.schemas import MemoryTag, Resident, WeightsId, WeightsSource

from .core import Core
from .kv import KvRows
from .memory import NOT_UPDATABLE, Memory, Staged, release_freed
from .thread import StepThread

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Versions:
    """The weights of one running engine."""

    def __init__(
        self,
        memory: Memory,
        kv: KvRows,
        core: Core,
        thread: StepThread,
        *,
        checkpoint: Path,
        roots: tuple[Path, ...],
    ) -> None:
        self._memory = memory
        self._kv = kv
        self._core = core
        self._thread = thread
        self._checkpoint = checkpoint
        self._roots = roots
        self._slot: StagingSlot[Staged] = StagingSlot()
        self._lock = asyncio.Lock()
        self._away: set[MemoryTag] = set()

    async def stage(
        self, identity: WeightsId, source: WeightsSource, progress: StageProgress
    ) -> StagedInfo:
        """See `Engine.stage`."""
        return await self._slot.fill(identity, lambda cancel: self._read(source, progress, cancel))

    async def _read(
        self, source: WeightsSource, progress: StageProgress, cancel: threading.Event
    ) -> Staged:
        def work(cancelled: Callable[[], bool]) -> Staged:
            path = weights.locate(source, checkpoint=self._checkpoint, roots=self._roots)
            roots = () if source.path is None else self._roots
            return self._memory.stage(path, roots, progress, cancelled)

        return await in_thread(work, cancel)

    async def discard(self) -> None:
        """See `Engine.discard`."""
        await self._slot.discard()

    async def commit(self, identity: WeightsId, kv: KvPolicy) -> None:
        """See `Engine.commit`."""
        async with self._lock:
            if "weights" in self._away:
                raise EngineError("the weights are asleep: wake them before the commit")
            staged = self._slot.holds(identity)

            def flip() -> None:
                self._memory.swap(staged, pin=kv == "pin")
                self._core.commit(identity, kv)

            await self._command(flip)
            self._slot.empty(staged)

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
            await in_thread(lambda _: release_freed(), threading.Event())

    async def _sleep_weights(self, level: Literal[1, 2]) -> None:
        if "weights" in self._away:
            if level == 2:
                self._memory.forget_spill()
            return
        await self._command(lambda: self._leave("weights"))
        await self._command(self._core.unpin)
        try:
            if level == 1:
                await in_thread(lambda _: self._memory.spill(), threading.Event())
        except BaseException:
            self._memory.forget_spill()
            await self._command(lambda: self._come_back("weights"))
            raise
        await self._command(self._memory.drop)

    async def wake(self, tags: Collection[MemoryTag], source: WeightsSource) -> None:
        """See `Engine.wake`."""
        async with self._lock:
            if "weights" in tags and "weights" in self._away:
                await self._refill(source)
                await self._command(lambda: self._come_back("weights"))
            if "kv_cache" in tags and "kv_cache" in self._away:
                await self._command(lambda: self._come_back("kv_cache"))

    async def _refill(self, source: WeightsSource) -> None:
        """Bring the weights back, from the spilled copy if there is a sound one."""
        if self._memory.resident:  # a former wake was cancelled at the last moment
            return
        if self._memory.spilled:
            try:
                return await in_thread(lambda _: self._memory.restore(), threading.Event())
            except EngineError as error:
                logger.warning("%s; reading the active weights from their source", error)
                self._memory.forget_spill()
        await self._reload(source)

    async def _reload(self, source: WeightsSource) -> None:
        staged = await self._read(source, lambda *_: None, threading.Event())
        want = self._memory.root_hash
        if staged.root_hash != want:
            raise WeightsRejected(
                f"the source of the active weights has root_hash {staged.root_hash}, they had "
                f"{want}: its bytes were changed; commit a later version from an intact source"
            )
        await self._command(lambda: self._memory.swap(staged))

    def _leave(self, tag: MemoryTag) -> None:
        self._away.add(tag)
        self._core.unfit = True

    def _come_back(self, tag: MemoryTag) -> None:
        self._away.discard(tag)
        self._core.unfit = bool(self._away)

    async def _command(self, command: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._thread.call(command))

    def resident(self) -> Resident:
        """Return which memory is there."""
        return Resident(weights=self._memory.resident, kv_cache="kv_cache" not in self._away)

    def resident_bytes(self) -> dict[MemoryTag, int]:
        """Return what is held, staged weights included."""
        staged = self._slot.content
        held = self._memory.nbytes + (staged.nbytes if staged else 0)
        return {"weights": held, "kv_cache": self._kv.nbytes}

    async def close(self) -> None:
        """Give up everything."""
        await self.discard()
        self._memory.forget_spill()
