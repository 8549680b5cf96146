"""The weights of one running hf engine.

Runs in the asyncio loop. Threads spill weights; what touches the model runs as a command
of the step thread, or while memory that is asleep keeps that from stepping.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Literal, TypeVar

from typing_extensions import override

from rollout_common.wire import MemoryTag, WeightsId
from rollout_worker.engine import (
    EngineError,
    GivenWeights,
    KvPolicy,
    LentTensors,
    Sink,
    TensorEntry,
    WeightsRefill,
)
from rollout_worker.engines.shared_memory.sinks import make_lent_ticket
from rollout_worker.engines.weight_versions import WeightVersions
from rollout_worker.threads import open_in_thread, run_in_thread

from .core import BatchCore
from .lora_layers import HfAdapter, LoraLayers
from .thread import StepThread
from .weights.buffers import TensorSink
from .weights.weights_memory import NOT_UPDATABLE, WeightsMemory

logger = logging.getLogger(__name__)

T = TypeVar("T")


class HfVersions(WeightVersions[TensorSink]):
    """The weights of one running engine."""

    def __init__(
        self, memory: WeightsMemory, core: BatchCore, thread: StepThread, lora: LoraLayers
    ) -> None:
        super().__init__(TensorSink, lora, core.asleep)
        self._memory = memory
        self._core = core
        self._thread = thread

    @override
    async def open_slot(
        self, entries: Sequence[TensorEntry], *, on_disk: bool, given: GivenWeights | None
    ) -> Sink:
        if isinstance(given, LentTensors):
            if not self._empty:
                raise EngineError("the weights have values: only empty ones take lent tensors")
            ticket = json.loads(make_lent_ticket(given, 1))
            return await open_in_thread(lambda: self._memory.read_lent_tensors(ticket))
        # While the weights sleep, the device is somebody else's.
        awake = "weights" not in self._asleep
        return await open_in_thread(lambda: self._memory.open_sink(entries, given, on_device=awake))

    @override
    async def _switch_weights(self, identity: WeightsId, sink: TensorSink, kv: KvPolicy) -> None:
        def flip() -> None:
            self._memory.swap_weights(sink, pin=kv == "pin")
            self._core.commit_weights(identity, kv, {})
            self._mark_loaded()

        await self._run_command(flip)

    @override
    async def _switch_adapters(
        self, identity: WeightsId, loaded: dict[str, HfAdapter], kv: KvPolicy
    ) -> None:
        def flip() -> None:
            self._memory.release_pinned()  # what is pinned from now on has these very weights
            self._core.commit_weights(identity, kv, loaded)

        await self._run_command(flip)

    @override
    async def _close_committed(self, sink: Sink) -> None:
        self._memory.free_in_thread(sink.close)  # so that the engine steps again before it is done

    @override
    def _check_sleep(self, level: Literal[1, 2], tags: Collection[MemoryTag]) -> None:
        if level == 2 and "weights" in tags and not self._memory.is_updatable:
            raise EngineError(NOT_UPDATABLE)

    @override
    async def _release_memory(self, level: Literal[1, 2], tags: set[MemoryTag]) -> None:
        if "weights" in tags:
            await self._release_weights(level)  # first: it may refuse, and then all stays awake
        if "kv_cache" in tags:
            await self._run_command(partial(self._asleep.add, "kv_cache"))
            await self._run_command(self._core.drop_kv)
        await _run_in_thread(self._memory.release_memory)

    async def _release_weights(self, level: Literal[1, 2]) -> None:
        await self._run_command(partial(self._asleep.add, "weights"))
        await self._run_command(self._core.unpin_outputs)
        try:
            # Weights that are gone or changed are not worth keeping.
            if level == 1 and self._memory.resident and self._memory.is_intact:
                await _run_in_thread(self._memory.spill_weights)
        except BaseException:
            self._memory.forget_spill()
            await self._run_command(partial(self._asleep.discard, "weights"))
            raise
        await self._run_command(self._memory.drop_weights)

    @override
    async def _read_back(self, refill: WeightsRefill) -> TensorSink | None:
        """Return the weights' values; None if they are in memory, from a sound copy."""
        if self._memory.resident:  # a former wake was cancelled at the last moment
            return None
        if self._memory.has_spill:
            try:
                await _run_in_thread(self._memory.restore_weights)
            except EngineError as error:
                logger.warning("%s; reading the active weights from their source", error)
                self._memory.forget_spill()
            else:
                return None
        return self._require_sealed(await refill())

    @override
    async def _retake_memory(self, tags: set[MemoryTag], sink: TensorSink | None) -> None:
        if sink is not None:
            await self._run_command(lambda: self._memory.swap_weights(sink))
        there = tags if self._memory.resident else tags - {"weights"}
        await self._run_command(partial(self._asleep.difference_update, there))

    @override
    async def _drop_copy(self) -> None:
        self._memory.forget_spill()

    async def _run_command(self, command: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._thread.run_command(command))


async def _run_in_thread(work: Callable[[], None]) -> None:
    await run_in_thread(lambda _: work(), threading.Event())
