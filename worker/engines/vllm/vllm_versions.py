"""The weights of one running vLLM, whose workers map what this process has staged.

`SchedulerControl` keeps vLLM from stepping while weights or memory change.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from rollout_common.wire import MemoryTag, WeightsId
from rollout_worker.engine import (
    EngineCrashed,
    KvPolicy,
    TensorEntry,
    WeightsRefill,
    WeightsRejected,
)
from rollout_worker.engines.file_adapters import FileAdapters, LoadedAdapters
from rollout_worker.engines.options import EngineOptions
from rollout_worker.engines.shared_memory.sinks import MappedSink
from rollout_worker.engines.shared_memory.staging_budget import check_memory_left
from rollout_worker.engines.weight_versions import RankVersions

from .launch import LaunchedVllm
from .steering import SchedulerControl
from .vllm_drafts import check_whole
from .vllm_streams import WeightLabels


class VllmVersions(RankVersions):
    """The weights of one running vLLM; at sleep level 1 a CPU keeps its copy in a file."""

    def __init__(
        self,
        launched: LaunchedVllm,
        steering: SchedulerControl,
        labels: WeightLabels,
        options: EngineOptions,
        adapters: FileAdapters[Any],
    ) -> None:
        super().__init__(options, adapters, steering.asleep)
        self._launched = launched
        self._steering = steering
        self._labels = labels
        self._spill: MappedSink | None = None
        self._cache_follows = False  # the KV cache sleeps only because the weights do

    @override
    def _unneeded_tensors(self, entries: Sequence[TensorEntry]) -> Collection[str]:
        check_whole(entries, self._launched.layout)
        return ()

    @override
    async def _switch_weights(self, identity: WeightsId, sink: MappedSink, kv: KvPolicy) -> None:
        steering = self._steering
        async with steering.hold_steps():
            await steering.requeue_unstarted()
            kept = kv == "keep" and not steering.is_kv_lost
            if not kept:
                await steering.drop_kv()
            await self._load_weights(sink.make_ticket())
            self.adapters.switch_adapters(None)
            await steering.forget_features()
            self._mark_loaded()
            await self._label_steps(identity, kept=kept)

    async def _label_steps(self, identity: WeightsId, *, kept: bool) -> None:
        label = self._labels.make_label(identity, kept=kept)
        await self._launched.llm.engine_core.set_weight_version_async(label)
        self._labels.adopt_label(label)

    @override
    async def _switch_adapters(
        self, identity: WeightsId, loaded: LoadedAdapters[Any], kv: KvPolicy
    ) -> None:
        steering = self._steering
        async with steering.hold_steps():
            await steering.requeue_unstarted()
            await steering.drop_kv()
            self.adapters.switch_adapters(loaded)
            await self._label_steps(identity, kept=False)

    async def reload_checkpoint(self) -> None:
        """Load the checkpoint once more as a commit loads a version, while nothing runs."""
        async with self._lock, self._steering.hold_steps():
            await self._steering.drop_kv()
            await self._load_weights(None)
            await self._steering.forget_features()

    @override
    async def _load_weights(self, ticket: str | None) -> None:
        """Load a sink, or the checkpoint; a failure leaves the workers with halves of two versions."""
        self._steering.broken = True
        try:
            await self._call_workers("rollout_load", ticket)
        except Exception as error:
            raise EngineCrashed(f"vLLM failed to load verified weights: {error}") from error
        self._steering.broken = False

    async def _call_workers(self, method: str, *args: object) -> list[Any]:
        found: list[Any] = await self._launched.llm.collective_rpc(method, args=args)
        return found

    @override
    async def _call_ranks(self, method: str, args: Mapping[str, Any]) -> None:
        await self._launched.llm.collective_rpc(method, kwargs=dict(args))

    @override
    def _count_ranks(self) -> int:
        parallel = self._launched.config.parallel_config
        return int(parallel.world_size) * int(parallel.data_parallel_size)

    @override
    def _without_steps(self, what: str) -> AbstractAsyncContextManager[None]:
        return self._steering.hold_steps()

    @override
    def _linked_to_sleep(self, tags: set[MemoryTag]) -> set[MemoryTag]:
        if "kv_cache" in tags:
            self._cache_follows = False
        elif "weights" in tags - self._asleep and not self._launched.cpu:
            self._cache_follows = "kv_cache" not in self._asleep
            return tags | {"kv_cache"}  # vLLM's sleep on a GPU gives both back
        return tags

    @override
    def _linked_to_wake(self, tags: set[MemoryTag]) -> set[MemoryTag]:
        return tags | {"kv_cache"} if self._cache_follows and "weights" in tags else tags

    @override
    async def _prepare_sleep(
        self, level: Literal[1, 2], tags: set[MemoryTag], refill: WeightsRefill
    ) -> None:
        if "weights" not in tags:
            return
        if not self._launched.cpu:
            # vLLM keeps its copies in locked main memory, and does not check whether that is free.
            check_memory_left(await self._pinned_bytes(level))
        elif level == 1:
            # A copy in a file brings them back whatever happens to their source.
            self._spill = self._require_sealed(await refill(on_disk=True))

    async def _pinned_bytes(self, level: int) -> int:
        """Return how much main memory the ranks of this node need together to sleep at this level."""
        parallel = self._launched.config.parallel_config  # vLLM answers for one data-parallel rank
        once = sum(await self._call_workers("rollout_pinned_bytes", level))
        return int(once) * int(parallel.data_parallel_size) // self._nodes

    @override
    async def _release_memory(self, level: Literal[1, 2], tags: set[MemoryTag]) -> None:
        self._asleep |= tags  # before anything can fail: no step may follow
        await self._steering.requeue_unstarted()
        await self._steering.drop_kv()
        await self._call_workers("rollout_release", level, sorted(tags))

    @override
    async def _drop_copy(self) -> None:
        if not self._launched.cpu:
            await self._call_workers("rollout_forget")
        await self.close_spill()

    @override
    async def _retake_memory(self, tags: set[MemoryTag], sink: MappedSink | None) -> None:
        await self._call_workers("rollout_wake", sorted(tags))
        source = sink or (self._spill if "weights" in tags else None)
        if source is not None:
            await self._load_weights(source.make_ticket())
            await self.close_spill()
        if "weights" in tags:
            await self.adapters.forget_memory()
        self._cache_follows = self._cache_follows and "kv_cache" not in tags

    async def close_spill(self) -> None:
        """Delete the file with a copy of sleeping weights, if there is one."""
        spill, self._spill = self._spill, None
        if spill is not None:
            await asyncio.to_thread(spill.close)


class VllmAdapters(FileAdapters[Any]):
    """The LoRA adapters of one running vLLM, which knows each by a `LoRARequest`: a name, an id and a path."""

    def __init__(self, llm: Any, parent: Path | None) -> None:
        super().__init__("vLLM", parent)
        self._llm = llm

    @override
    def _make_handle(self, name: str, number: int, path: Path) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(lora_name=f"{name}@{number}", lora_int_id=number, lora_path=str(path))

    @override
    async def _load_adapter(self, name: str, handle: Any, path: Path) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self._llm.add_lora(handle)
        except EngineDeadError as error:
            raise EngineCrashed(f"vLLM died while it loaded adapter {name!r}") from error
        except Exception as error:
            raise WeightsRejected(f"vLLM can't serve adapter {name!r}: {error}") from error

    @override
    async def _remove_adapter(self, handle: Any) -> None:
        with contextlib.suppress(Exception):  # vLLM is dead
            await self._llm.remove_lora(handle.lora_int_id)
