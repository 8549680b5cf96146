"""What the three adapters share: the engine's parts, once it runs, and the calls about weights."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

from typing_extensions import override

from rollout_common.garbage_collection import freeze_heap
from rollout_common.wire import MemoryTag, Resident, WeightsId
from rollout_worker.engine import (
    Engine,
    EngineCrashed,
    EngineError,
    EngineInfo,
    EngineStats,
    GivenWeights,
    KvPolicy,
    Sink,
    TensorEntry,
    WeightsLayout,
    WeightsRefill,
    WeightsRejected,
)
from rollout_worker.engines.options import EngineOptions
from rollout_worker.engines.request_checks import ServedModel
from rollout_worker.engines.weight_versions import WeightVersions
from rollout_worker.lora.lora_checks import holds_adapters
from rollout_worker.lora.lora_sink import LoraSink
from rollout_worker.pictures.picture import Picture
from rollout_worker.threads import open_in_thread


class EngineParts(Protocol):
    """What exists once an engine runs."""

    @property
    def versions(self) -> WeightVersions[Any]:
        """Its weights."""

    @property
    def running(self) -> frozenset[str]:
        """Ids of the requests that it has started."""

    @property
    def pinned(self) -> frozenset[str]:
        """Ids of those that run on the former weights."""


EnginePartsT = TypeVar("EnginePartsT", bound=EngineParts)


class EngineAdapter(Engine, Generic[EnginePartsT]):
    """An `Engine` that refuses calls before `start` has set its parts, and after it has ended."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._give_up = threading.Event()
        self._parts: EnginePartsT | None = None
        self._ended: str | None = None
        self._root_hash = ""
        self.on_end: Callable[[str], None] = lambda why: None

    def _require_parts(self) -> EnginePartsT:
        if self._ended is not None:
            raise EngineCrashed(self._ended)
        if self._parts is None:
            raise EngineError("the engine is not started")
        return self._parts

    async def _freeze_heap(self) -> None:
        """Keep the collector off all that is there now; a guest would keep garbage of the process's owner, too."""
        if not self._options.guest:
            await asyncio.to_thread(freeze_heap)

    def _engine_info(
        self,
        engine: str,
        version: str,
        model: ServedModel,
        root_hash: str,
        layout: WeightsLayout,
        *,
        by_path: bool = True,
    ) -> EngineInfo:
        self._root_hash = root_hash
        return EngineInfo(
            engine=engine,
            engine_version=version,
            model=str(self._options.model),
            max_length=model.max_length,
            eos_token_ids=model.eos_token_ids,
            root_hash=root_hash,
            layout=layout,
            by_path=by_path,
        )

    @override
    async def prepare_pictures(self, pictures: Sequence[Picture]) -> None:
        """Do nothing, as an engine whose own process prepares them."""

    @override
    async def open_slot(
        self,
        entries: Sequence[TensorEntry],
        *,
        on_disk: bool = False,
        given: GivenWeights | None = None,
    ) -> Sink:
        versions = self._require_parts().versions
        if holds_adapters(entries):
            self._check_adapters_served()
            store, claim = versions.adapters, self._options.staging.claim_memory
            load, unload = store.load_adapters, store.unload_adapters
            return await open_in_thread(
                lambda: LoraSink(entries, self._root_hash, load, unload, claim)
            )
        return await versions.open_slot(entries, on_disk=on_disk, given=given)

    def _check_adapters_served(self) -> None:
        """Raise `WeightsRejected` if this engine serves no adapters, or not as it was started."""
        if self._options.gang is not None:
            raise WeightsRejected("replicas of several nodes serve no adapters: merge them")
        if not self.capabilities.adapters:
            raise WeightsRejected(
                "this engine serves no adapters as it was started: give it --enable-lora, or merge them into the"
                " weights"
            )

    @override
    async def commit(self, identity: WeightsId, sink: Sink, kv: KvPolicy) -> None:
        await self._require_parts().versions.commit(identity, sink, kv)

    @override
    async def sleep(
        self, level: Literal[1, 2], tags: Collection[MemoryTag], refill: WeightsRefill
    ) -> None:
        await self._require_parts().versions.sleep(level, tags, refill)

    @override
    async def wake(self, tags: Collection[MemoryTag], refill: WeightsRefill | None) -> None:
        await self._require_parts().versions.wake(tags, refill)

    @override
    def stats(self) -> EngineStats:
        parts = self._parts
        if parts is None:
            return EngineStats(0, Resident(weights=False, kv_cache=False))
        running = parts.running
        return EngineStats(len(running), parts.versions.resident_memory(), running, parts.pinned)
