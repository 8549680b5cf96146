"""Which weights serve, which are staged, and where they are: stage, commit, sleep, wake.

Reading happens in threads of this process, into a blob; vLLM's workers map it at the commit. One
lock orders commit, sleep and wake among themselves. `Steering` (the engine) keeps vLLM from
stepping meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from rollout_worker import weights
from rollout_worker.engine import (
    EngineCrashed,
    EngineError,
    KvPolicy,
    StagedInfo,
    StageProgress,
    WeightsRejected,
)
from rollout_worker.engines.slot import StagingSlot, in_thread
from rollout_worker.schemas import Checkpoint, MemoryTag, Resident, WeightsId, WeightsSource
from rollout_worker.sources.files import open_source

from .blobs import Blob
from .labels import Labels
from .launch import Launched
from .steering import Steering

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class Staged:
    """A verified version in a blob."""

    blob: Blob
    source: WeightsSource
    root_hash: str
    bytes_total: int


class Versions:
    """The weights of one running vLLM."""

    def __init__(
        self,
        launched: Launched,
        steering: Steering,
        labels: Labels,
        *,
        checkpoint: Path,
        roots: tuple[Path, ...],
        spill_dir: Path | None,
        kv_bytes: int,
    ) -> None:
        self._launched = launched
        self._steering = steering
        self._labels = labels
        self._checkpoint = checkpoint
        self._roots = roots
        self._spill_dir = spill_dir or Path(tempfile.gettempdir())
        self._kv_bytes = kv_bytes
        self._bytes = open_source(checkpoint).bytes_total
        self._root_hash = launched.root_hash
        self._source = WeightsSource(checkpoint=Checkpoint())
        self._slot: StagingSlot[Staged] = StagingSlot(lambda staged: staged.blob.close())
        self._spill: Staged | None = None
        self._dropped = False  # the sleeping weights have no copy (level 2)
        self._lock = asyncio.Lock()

    async def stage(
        self, identity: WeightsId, source: WeightsSource, progress: StageProgress
    ) -> StagedInfo:
        """See `Engine.stage`."""
        return await self._slot.fill(identity, lambda cancel: self._read(source, progress, cancel))

    async def _read(
        self,
        source: WeightsSource,
        progress: StageProgress,
        cancel: threading.Event,
        folder: Path | None = None,
    ) -> Staged:
        """Read and verify a source into a blob: in memory, or in a file of `folder`."""
        layout = self._launched.layout

        def work(cancelled: Callable[[], bool]) -> Staged:
            path = weights.locate(source, checkpoint=self._checkpoint, roots=self._roots)
            opened = open_source(path, roots=() if source.path is None else self._roots)
            layout.check(opened)
            try:
                blob = Blob(opened.entries, folder)
            except OSError as error:
                raise EngineError(
                    f"there is no room for {opened.bytes_total} bytes of weights in "
                    f"{folder or 'memory'}: {error}"
                ) from error
            try:
                root = weights.read(opened, layout, blob.buffer, progress, cancelled)
                blob.seal()
            except BaseException:
                blob.close()
                raise
            return Staged(blob, source, root, opened.bytes_total)

        return await in_thread(work, cancel)

    async def discard(self) -> None:
        """See `Engine.discard`."""
        await self._slot.discard()

    async def commit(self, identity: WeightsId, kv: KvPolicy) -> None:
        """See `Engine.commit`."""
        async with self._lock:
            if "weights" in self._steering.away:
                raise EngineError("the weights are asleep: wake them before the commit")
            staged = self._slot.holds(identity)
            async with self._steering.frozen():
                await self._flip(identity, staged, kv)
            self._slot.empty(staged)
            staged.blob.close()

    async def _flip(self, identity: WeightsId, staged: Staged, kv: KvPolicy) -> None:
        """Load, then label; nothing steps meanwhile."""
        steering = self._steering
        await steering.take_back()
        kept = kv == "keep" and not steering.kv_lost
        if not kept:
            await steering.lose_kv()
        await self._load(staged)
        label = self._labels.next(identity, kept=kept)
        await self._launched.llm.engine_core.set_weight_version_async(label)
        self._labels.adopt(label)
        self._root_hash, self._source = staged.root_hash, staged.source

    async def _load(self, staged: Staged) -> None:
        """Let the workers take a blob; a failure leaves them with halves of two versions."""
        self._steering.broken = True
        try:
            await self._call("rollout_load", staged.blob.ticket())
        except Exception as error:
            raise EngineCrashed(f"vLLM failed to load verified weights: {error}") from error
        self._steering.broken = False

    async def _call(self, method: str, *args: object) -> list[Any]:
        found: list[Any] = await self._launched.llm.collective_rpc(method, args=args)
        return found

    async def sleep(self, level: Literal[1, 2], tags: Collection[MemoryTag]) -> None:
        """See `Engine.sleep`."""
        async with self._lock:
            away = self._steering.away
            wanted: set[MemoryTag] = set(tags)
            if "weights" in wanted and not self._launched.cpu:
                wanted.add("kv_cache")  # vLLM's sleep on a GPU gives both back
            if "weights" in wanted & away and level == 2:
                self._forget_spill()
            fresh = wanted - away
            if "weights" in fresh and level == 1 and self._launched.cpu:
                self._spill = await self._copy()
            if not fresh:
                return
            async with self._steering.frozen():
                away |= fresh
                await self._steering.take_back()
                await self._steering.lose_kv()
                await self._call("rollout_release", level, sorted(fresh))
            if "weights" in fresh:
                self._dropped = level == 2

    async def _copy(self) -> Staged:
        """Keep the active weights in a file, so that they come back whatever happens to theirs."""
        return await self._read_active(self._source, self._spill_dir)

    async def _read_active(self, source: WeightsSource, folder: Path | None) -> Staged:
        staged = await self._read(source, lambda *_: None, threading.Event(), folder)
        if staged.root_hash != self._root_hash:
            staged.blob.close()
            raise WeightsRejected(
                f"the source of the active weights has root_hash {staged.root_hash}, they had "
                f"{self._root_hash}: its bytes were changed; commit a later version from an "
                "intact source"
            )
        return staged

    async def wake(self, tags: Collection[MemoryTag], source: WeightsSource) -> None:
        """See `Engine.wake`."""
        async with self._lock:
            away = self._steering.away
            back: set[MemoryTag] = set(tags) & away
            if not self._launched.cpu and "weights" in tags:
                back |= away
            if not back:
                return
            loads = "weights" in back and (self._launched.cpu or self._dropped)
            staged = None
            if loads:
                staged = self._spill or await self._read_active(source, None)
            async with self._steering.frozen():
                await self._call("rollout_wake", sorted(back))
                if staged is not None:
                    await self._load(staged)
                away -= back
            if staged is not None:
                staged.blob.close()
                self._spill, self._dropped = None, False

    def _forget_spill(self) -> None:
        self._dropped = True
        if self._spill is not None:
            self._spill.blob.close()
            self._spill = None

    def resident(self) -> Resident:
        """Return which memory is there."""
        away = self._steering.away
        return Resident(weights="weights" not in away, kv_cache="kv_cache" not in away)

    def resident_bytes(self) -> dict[MemoryTag, int]:
        """Return what is held, staged weights included; the model's as its checkpoint has them."""
        staged = self._slot.content
        away = self._steering.away
        held = 0 if "weights" in away else self._bytes
        return {
            "weights": held + (staged.blob.nbytes if staged else 0),
            "kv_cache": 0 if "kv_cache" in away else self._kv_bytes,
        }

    async def close(self) -> None:
        """Give up everything."""
        await self.discard()
        if self._spill is not None:
            self._spill.blob.close()
