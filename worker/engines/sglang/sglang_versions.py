"""The weights of one running child of SGLang, which runs the worker's commands one after another.

A command that fails half-way leaves the child in an unknown state: then the child is ended, and the worker
starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from rollout_common.wire import MemoryTag, WeightsId
from rollout_worker.engine import (
    EngineCrashed,
    EngineError,
    KvPolicy,
    TensorEntry,
    WeightsRejected,
)
from rollout_worker.engines.file_adapters import FileAdapters, LoadedAdapters
from rollout_worker.engines.options import EngineOptions
from rollout_worker.engines.shared_memory.sinks import MappedSink
from rollout_worker.engines.weight_versions import RankVersions

from .child_connection import CallFailed, ChildConnection
from .model import SglangModel, update_refusal
from .scheduling import RequestScheduler


class SglangVersions(RankVersions):
    """The weights of one running child; at sleep level 1 each rank keeps its own in a file.

    `facts`: what the child reported of itself. `give_up`: ends a child in an unknown state, with the reason.
    """

    def __init__(
        self,
        options: EngineOptions,
        model: SglangModel,
        connection: ChildConnection,
        scheduler: RequestScheduler,
        facts: dict[str, Any],
        give_up: Callable[[str], None],
        adapters: FileAdapters[str],
    ) -> None:
        super().__init__(options, adapters)
        self._model = model
        self._connection = connection
        self._scheduler = scheduler
        self._facts = facts
        self._give_up = give_up
        device = facts.get("device")
        self._no_updates: str | None = facts.get("no_updates") or update_refusal(
            model.quantisation, None if device is None else tuple(device)
        )

    @override
    def _unneeded_tensors(self, entries: Sequence[TensorEntry]) -> Collection[str]:
        self._check_updatable()
        return self._model.layout.tied  # SGLang makes tied heads itself

    def _check_updatable(self) -> None:
        if self._no_updates is not None:
            raise WeightsRejected(self._no_updates)

    async def reload_checkpoint(self) -> None:
        """Load the checkpoint once more as a commit loads a version, while nothing runs.

        Raises:
            WeightsRejected: SGLang doesn't update this model.
            EngineCrashed: the load failed, and the child has ended.
        """
        self._check_updatable()
        folder = json.dumps({"folder": str(self._options.model)})
        async with self._lock, self._without_steps("the update"):
            await self._scheduler.pause()
            # Requests that ended here may still run there, and keep the child's cache from being flushed.
            await self._scheduler.stop_steps("retract")
            await self._load_weights(folder, flush=True)
            await self._scheduler.resume()

    @override
    def _count_ranks(self) -> int:
        return int(self._facts["ranks"])

    @override
    async def _call_ranks(self, method: str, args: Mapping[str, Any] | None = None) -> None:
        await self._connection.call_child("call_ranks", method=method, **(args or {}))

    @override
    async def _switch_weights(self, identity: WeightsId, sink: MappedSink, kv: KvPolicy) -> None:
        keep = kv == "keep" and "kv_cache" not in self._asleep
        async with self._without_steps("the commit"):
            await self._scheduler.stop_steps("in_place" if keep else "retract")
            await self._load_weights(sink.make_ticket(), str(identity), flush=not keep)
        self.adapters.switch_adapters(None)
        self._mark_loaded()
        self._scheduler.switch_weights(identity, keep=keep)

    @override
    async def _switch_adapters(
        self, identity: WeightsId, loaded: LoadedAdapters[str], kv: KvPolicy
    ) -> None:
        async with self._without_steps("the commit"):
            await self._scheduler.stop_steps("retract")
        self.adapters.switch_adapters(loaded)
        self._scheduler.switch_weights(identity, keep=False)

    @override
    async def _load_weights(
        self, ticket: str, version: str | None = None, *, flush: bool = False
    ) -> None:
        await self._connection.call_child("load", ticket=ticket, version=version, flush=flush)

    @override
    def _check_sleep(self, level: Literal[1, 2], tags: Collection[MemoryTag]) -> None:
        if not self._facts["enable_memory_saver"]:
            raise EngineError(
                "this engine cannot give memory back: enable SGLang's memory saver (on by default on a GPU)"
            )

    @override
    async def _release_memory(self, level: Literal[1, 2], tags: set[MemoryTag]) -> None:
        # Memory in use must not be given back: running requests wait in the queue, without KV.
        await self._scheduler.stop_steps("retract")
        if "weights" in tags and level == 1:
            try:
                await self._call_ranks("rollout_keep")
            except CallFailed as error:
                raise EngineError(
                    f"cannot spill the weights: {error}; free space there, set another spill_dir, "
                    "or sleep at level 2"
                ) from error
        await self._connection.call_child("release", tags=sorted(tags))
        if "kv_cache" in tags:
            self._scheduler.note_recomputed()

    @override
    async def _drop_copy(self) -> None:
        async with self._without_steps("giving up the spilled weights"):
            await self._call_ranks("rollout_forget")

    @override
    async def _retake_memory(self, tags: set[MemoryTag], sink: MappedSink | None) -> None:
        await self._connection.call_child("retake", tags=sorted(tags))
        if sink is not None:
            await self._load_weights(sink.make_ticket())
        elif "weights" in tags and self._has_copy:
            await self._call_ranks("rollout_bring_back")

    @override
    @asynccontextmanager
    async def _without_steps(self, what: str) -> AsyncIterator[None]:
        """End the child if what is inside the block fails or is cancelled half-way."""
        try:
            yield
        except CallFailed as error:
            self._give_up(f"{what} failed: {error}")
            raise EngineCrashed(f"{what} failed: {error}") from error
        except asyncio.CancelledError:
            self._give_up(f"{what} was cancelled half-way")
            raise

    @property
    def is_awake(self) -> bool:
        """Whether nothing is asleep."""
        return not self._asleep


class SglangAdapters(FileAdapters[str]):
    """The LoRA adapters of one child, which knows each by a name."""

    def __init__(self, connection: ChildConnection, parent: Path | None) -> None:
        super().__init__("SGLang", parent)
        self._connection = connection

    @override
    def _make_handle(self, name: str, number: int, path: Path) -> str:
        return f"{name}@{number}"

    @override
    async def _load_adapter(self, name: str, handle: str, path: Path) -> None:
        try:
            await self._connection.call_child("load_adapter", name=handle, path=str(path))
        except CallFailed as error:
            raise WeightsRejected(f"SGLang can't serve adapter {name!r}: {error}") from error

    @override
    async def _remove_adapter(self, handle: str) -> None:
        # The child waits for requests that use it.
        with contextlib.suppress(CallFailed, EngineCrashed):
            await self._connection.call_child("unload_adapter", name=handle)
