"""Which weights serve, which are staged, and where they are: stage, commit, sleep, wake.

Reading happens in threads of the worker, everything else by commands to the child, which works on
them one after another. One lock orders commit, sleep and wake among themselves. A command that
fails half-way leaves the child in an unknown state: then it is ended, and the worker starts another.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from rollout_worker import weights
from rollout_worker.engine import (
    EngineCrashed,
    EngineError,
    KvPolicy,
    StagedInfo,
    StageProgress,
    WeightsRejected,
)
from rollout_worker.engines import EngineOptions
from rollout_worker.engines.slot import StagingSlot, in_thread
from rollout_worker.schemas import CHECKPOINT, MemoryTag, Resident, WeightsId, WeightsSource

from .bridge import Bridge, CallFailed
from .desk import Desk
from .model import Model
from .staging import Staged, stage

TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache")
FIX = "enable SGLang's memory saver (on by default on a GPU)"


class Versions:
    """The weights of one running child."""

    def __init__(
        self,
        options: EngineOptions,
        model: Model,
        bridge: Bridge,
        desk: Desk,
        root_hash: str,
        facts: dict[str, Any],
        give_up: Callable[[str], None],
    ) -> None:
        self._options = options
        self._model = model
        self._bridge = bridge
        self._desk = desk
        self._facts = facts
        self._give_up = give_up
        self._slot: StagingSlot[Staged] = StagingSlot(Staged.close)
        self._lock = asyncio.Lock()
        self._away: set[MemoryTag] = set()
        self._spill: _Spill | None = None
        self._root_hash = root_hash
        self.identity = CHECKPOINT

    async def stage(
        self, identity: WeightsId, source: WeightsSource, progress: StageProgress
    ) -> StagedInfo:
        """See `Engine.stage`."""
        return await self._slot.fill(identity, lambda cancel: self._read(source, progress, cancel))

    async def _read(
        self, source: WeightsSource, progress: StageProgress, cancel: threading.Event
    ) -> Staged:
        roots = self._options.weights_roots

        def work(cancelled: Callable[[], bool]) -> Staged:
            path = weights.locate(source, checkpoint=self._options.model, roots=roots)
            below = () if source.path is None else roots
            return stage(path, below, self._model.layout, progress, cancelled)

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
            keep = kv == "keep" and "kv_cache" not in self._away
            async with self._whole("the commit"):
                await self._desk.rest("in_place" if keep else "retract")
                await self._load(staged, str(identity), flush=not keep)
            self.identity, self._root_hash = identity, staged.root_hash
            self._desk.switched(identity, keep=keep)
            self._slot.empty(staged)
            await asyncio.to_thread(staged.close)

    async def _load(self, staged: Staged, version: str | None, *, flush: bool) -> None:
        await self._bridge.call(
            "weights", op="load", paths=[staged.path], version=version, flush=flush
        )

    async def sleep(self, level: Literal[1, 2], tags: Collection[MemoryTag]) -> None:
        """See `Engine.sleep`."""
        if not self._facts["enable_memory_saver"]:
            raise EngineError(f"this engine cannot give memory back: {FIX}")
        async with self._lock:
            if level == 2 and "weights" in self._away:
                self._forget_spill()
            going: list[MemoryTag] = [tag for tag in TAGS if tag in tags and tag not in self._away]
            if not going:
                return
            async with self._whole("falling asleep"):
                # Memory in use must not go: what runs waits in the queue, without KV.
                await self._desk.rest("retract")
                if "weights" in going and level == 1:
                    await self._spill_weights()
                await self._bridge.call("release", tags=going)
            self._away.update(going)
            if "kv_cache" in going:
                self._desk.recomputed()

    async def _spill_weights(self) -> None:
        self._spill = await asyncio.to_thread(
            _Spill, self._options.spill_dir, self._facts["ranks"], self._model.bytes_total
        )
        await self._bridge.call("weights", op="spill", paths=self._spill.paths)

    def _forget_spill(self) -> None:
        if self._spill is not None:
            self._spill.close()
            self._spill = None

    async def wake(self, tags: Collection[MemoryTag], source: WeightsSource) -> None:
        """See `Engine.wake`."""
        async with self._lock:
            coming: list[MemoryTag] = [tag for tag in TAGS if tag in tags and tag in self._away]
            with ExitStack() as held:
                staged = None
                if "weights" in coming and self._spill is None:
                    # Read and checked first: a refusal leaves everything asleep as it was.
                    staged = held.enter_context(await self._reread(source))
                async with self._whole("waking"):
                    if coming:
                        await self._bridge.call("retake", tags=coming)
                    if staged is not None:
                        await self._load(staged, None, flush=False)
                    elif "weights" in coming and self._spill is not None:
                        await self._bridge.call("weights", op="restore", paths=self._spill.paths)
            self._away.difference_update(coming)
            if "weights" in coming:
                self._forget_spill()

    async def _reread(self, source: WeightsSource) -> Staged:
        staged = await self._read(source, lambda *_: None, threading.Event())
        if staged.root_hash != self._root_hash:
            staged.close()
            raise WeightsRejected(
                f"the source of the active weights has root_hash {staged.root_hash}, they had "
                f"{self._root_hash}: its bytes were changed; commit a later version from an "
                "intact source"
            )
        return staged

    @asynccontextmanager
    async def _whole(self, what: str) -> AsyncIterator[None]:
        """Let what is inside happen wholly, or end the child."""
        try:
            yield
        except CallFailed as error:
            self._give_up(f"{what} failed: {error}")
            raise EngineCrashed(f"{what} failed: {error}") from error
        except asyncio.CancelledError:
            self._give_up(f"{what} was given up half-way")
            raise

    def resident(self) -> Resident:
        """Return which memory is there."""
        return Resident(weights="weights" not in self._away, kv_cache="kv_cache" not in self._away)

    def resident_bytes(self) -> dict[MemoryTag, int]:
        """Return what is held, staged weights included; SGLang's own figure for the KV cache."""
        here = self.resident()
        staged = self._slot.content
        held = (self._model.bytes_total if here.weights else 0) + (staged.nbytes if staged else 0)
        gigabytes = self._facts["memory"].get("kvcache") or 0
        return {"weights": held, "kv_cache": int(gigabytes * (1 << 30)) if here.kv_cache else 0}

    @property
    def awake(self) -> bool:
        """Whether nothing was given back."""
        return not self._away

    async def close(self) -> None:
        """Give up everything."""
        await self.discard()
        self._forget_spill()


class _Spill:
    """Files without a name, one a rank, that the child reaches by this process's descriptors."""

    def __init__(self, folder: Path | None, ranks: int, bytes_needed: int) -> None:
        self._files: list[int] = []
        place = folder or Path(tempfile.gettempdir())
        free = os.statvfs(place)
        if free.f_bavail * free.f_frsize < bytes_needed:
            raise EngineError(
                f"cannot spill the weights: {str(place)!r} has less than {bytes_needed} bytes "
                "free; free space there, set another spill_dir, or sleep at level 2"
            )
        for _ in range(ranks):
            handle, name = tempfile.mkstemp(prefix="rollout-spill-", dir=place)
            os.unlink(name)
            self._files.append(handle)
        self.paths = [f"/proc/{os.getpid()}/fd/{handle}" for handle in self._files]

    def close(self) -> None:
        """Remove the files."""
        while self._files:
            os.close(self._files.pop())
