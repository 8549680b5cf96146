"""Memory for new weights, the flip, and where the weights are: commit, sleep, wake.

The worker fills memory that vLLM's workers map at the commit. One lock orders commit, sleep and
wake among themselves. `Steering` keeps vLLM from stepping meanwhile.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rollout_worker.engine import EngineCrashed, EngineError, Entry, Given, KvPolicy, Refill, Sink
from rollout_worker.engines import EngineOptions
from rollout_worker.engines.mapped import MappedSink, open_mapped, sealed
from rollout_worker.engines.ranks import Ranks
from rollout_worker.engines.room import check_room
from rollout_worker.schemas import MemoryTag, Resident, WeightsId

from .labels import Labels
from .launch import Launched
from .steering import Steering


class Versions:
    """The weights of one running vLLM."""

    def __init__(
        self, launched: Launched, steering: Steering, labels: Labels, options: EngineOptions
    ) -> None:
        self._launched = launched
        self._steering = steering
        self._labels = labels
        self._staging = options.staging
        self._nodes = 1 if options.gang is None else options.gang.nodes
        self._spill_dir = options.spill_dir or Path(tempfile.gettempdir())
        self._slots = None if options.gang is None else options.gang.slots
        self._ranks: Ranks | None = None
        self._spill: MappedSink | None = None
        self._dropped = False  # the sleeping weights have no copy (level 2)
        self._empty = False  # their memory is back, without values: no step before a commit
        self._along = False  # the KV cache went with the weights, though nobody asked for that
        self._lock = asyncio.Lock()

    async def open_slot(
        self, entries: Sequence[Entry], *, on_disk: bool, given: Given | None = None
    ) -> Sink:
        """See `Engine.open_slot`."""
        folder = self._spill_dir if on_disk else None
        return await open_mapped(
            entries,
            folder,
            slots=self._slots,
            staging=self._staging,
            given=given,
            ranks=self._known(),
        )

    async def commit(self, identity: WeightsId, sink: Sink, kv: KvPolicy) -> None:
        """See `Engine.commit`."""
        try:
            async with self._lock:
                if "weights" in self._steering.away and not self._empty:
                    raise EngineError("the weights are asleep: wake them before the commit")
                mapped = sealed(sink)
                async with self._steering.frozen():
                    await self._flip(identity, mapped, kv)
        finally:  # also if it is cancelled while another verb has the lock
            await asyncio.to_thread(sink.close)

    async def _flip(self, identity: WeightsId, sink: MappedSink, kv: KvPolicy) -> None:
        """Load, then label; nothing steps meanwhile."""
        steering = self._steering
        await steering.take_back()
        kept = kv == "keep" and not steering.kv_lost
        if not kept:
            await steering.lose_kv()
        await self._load("rollout_load", sink.ticket())
        if self._empty:
            self._dropped = self._empty = False
            steering.away.discard("weights")
        label = self._labels.next(identity, kept=kept)
        await self._launched.llm.engine_core.set_weight_version_async(label)
        self._labels.adopt(label)

    async def reload(self) -> None:
        """Load the checkpoint once more as a commit loads a version; nothing runs.

        Raises:
            EngineCrashed: vLLM failed at it.
        """
        async with self._lock, self._steering.frozen():
            await self._steering.lose_kv()
            await self._load("rollout_reload")

    async def _load(self, method: str, *args: object) -> None:
        """Let the workers load; a failure leaves them with halves of two versions."""
        self._steering.broken = True
        try:
            await self._call(method, *args)
        except Exception as error:
            raise EngineCrashed(f"vLLM failed to load verified weights: {error}") from error
        self._steering.broken = False

    async def _call(self, method: str, *args: object) -> list[Any]:
        found: list[Any] = await self._launched.llm.collective_rpc(method, args=args)
        return found

    async def _tell(self, method: str, args: Mapping[str, Any]) -> None:
        await self._launched.llm.collective_rpc(method, kwargs=dict(args))

    def _known(self) -> Ranks:
        """Return those that hold weights."""
        if self._ranks is None:
            parallel = self._launched.config.parallel_config
            count = int(parallel.world_size) * int(parallel.data_parallel_size) // self._nodes
            self._ranks = Ranks(self._tell, count)
        return self._ranks

    def end(self) -> None:
        """Tell the ranks nothing any more."""
        if self._ranks is not None:
            self._ranks.end()

    async def sleep(
        self, level: Literal[1, 2], tags: Collection[MemoryTag], refill: Refill
    ) -> None:
        """See `Engine.sleep`."""
        async with self._lock:
            away = self._steering.away
            wanted: set[MemoryTag] = set(tags)
            if self._empty and "weights" in wanted:
                self._empty = False
                away.discard("weights")
            if "kv_cache" in wanted:
                self._along = False
            elif "weights" in wanted - away and not self._launched.cpu:
                self._along = "kv_cache" not in away
                wanted.add("kv_cache")  # vLLM's sleep on a GPU gives both back
            if "weights" in wanted & away and level == 2:
                await self._forget_copy()
            fresh = wanted - away
            if "weights" in fresh and level == 1 and self._launched.cpu:
                # A copy in a file, so that they come back whatever happens to their source.
                self._spill = sealed(await refill(on_disk=True))
            if "weights" in fresh and not self._launched.cpu:
                # vLLM's own copies are in main memory, locked, and asked for without a look.
                check_room(await self._pinned_bytes(level))
            if not fresh:
                return
            async with self._steering.frozen():
                away |= fresh
                await self._steering.take_back()
                await self._steering.lose_kv()
                await self._call("rollout_release", level, sorted(fresh))
            if "weights" in fresh:
                self._dropped = level == 2

    async def _pinned_bytes(self, level: int) -> int:
        """Return how much main memory the ranks of this node take together to sleep at this level."""
        parallel = self._launched.config.parallel_config  # vLLM answers for one data-parallel rank
        once = sum(await self._call("rollout_pinned_bytes", level))
        return int(once) * int(parallel.data_parallel_size) // self._nodes

    async def _forget_copy(self) -> None:
        """Give up what level 1 keeps of sleeping weights."""
        if not self._launched.cpu and not self._dropped:
            await self._call("rollout_forget")
        self._dropped = True
        await self.forget_spill()

    async def wake(self, tags: Collection[MemoryTag], refill: Refill | None) -> None:
        """See `Engine.wake`."""
        async with self._lock:
            away = self._steering.away
            back: set[MemoryTag] = set(tags) & away
            if self._empty:
                back.discard("weights")  # its memory is there, only a commit is missing
            if self._along and "weights" in back:
                back.add("kv_cache")
            if not back:
                return
            there = back if refill is not None else back - {"weights"}
            sink = None
            if refill is not None and "weights" in back and (self._launched.cpu or self._dropped):
                # Read and checked first: a refusal leaves everything asleep as it was.
                sink = self._spill or sealed(await refill())
            try:
                async with self._steering.frozen():
                    if refill is None and "weights" in back:
                        await self._forget_copy()  # nobody wants it brought back
                    await self._call("rollout_wake", sorted(back))
                    if sink is not None:
                        await self._load("rollout_load", sink.ticket())
                        self._dropped = False
                    away -= there
                    self._empty = self._empty or there != back
                    self._along = self._along and "kv_cache" in away
            finally:
                if sink is not None and sink is not self._spill:
                    await asyncio.to_thread(sink.close)
            if sink is not None or self._empty:
                await self.forget_spill()

    async def forget_spill(self) -> None:
        """Give up the copy of sleeping weights, if there is one."""
        spill, self._spill = self._spill, None
        if spill is not None:
            await asyncio.to_thread(spill.close)

    def resident(self) -> Resident:
        """Return which memory is there."""
        away = self._steering.away
        there = "weights" not in away or self._empty
        return Resident(weights=there, kv_cache="kv_cache" not in away)
