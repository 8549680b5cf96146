"""The order in which every engine commits weights, sleeps and wakes; each engine adds its own steps.

One lock serialises commit, sleep and wake.
"""

from __future__ import annotations

import asyncio
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

from typing_extensions import override

from rollout_common.wire import MemoryTag, Resident, WeightsId, WeightsSpan
from rollout_worker.engine import (
    EngineError,
    GivenWeights,
    KvPolicy,
    LentTensors,
    MappedWeights,
    Sink,
    TensorEntry,
    WeightsRefill,
    WeightsRejected,
)
from rollout_worker.engines.file_adapters import FileAdapters
from rollout_worker.engines.options import EngineOptions
from rollout_worker.engines.shared_memory.ranks import EngineRanks
from rollout_worker.engines.shared_memory.sinks import (
    BorrowedSink,
    LentSink,
    MappedSink,
    make_lent_ticket,
)
from rollout_worker.lora.lora_sink import LoraAdapter, LoraSink
from rollout_worker.threads import open_in_thread

WeightsChange = tuple[int, WeightsId, bool]
"""From this token of an output on: the weights that made the tokens, and whether they used KV of older weights."""


def spans_within(changes: Sequence[WeightsChange], begin: int, end: int) -> tuple[WeightsSpan, ...]:
    """Return the spans of tokens [begin, end) of an output; `changes` are in order."""
    spans = []
    stops = [*(start for start, _, _ in changes[1:]), end][: len(changes)]
    for (start, weights, stale), stop in zip(changes, stops, strict=True):
        first, last = max(start, begin), min(stop, end)
        if first < last:
            identity = {"epoch": weights.epoch, "version": weights.version}
            spans.append(WeightsSpan(**identity, start=first, end=last, stale_kv=stale))
    return tuple(spans)


class SealableSink(Sink, Protocol):
    """A sink that says whether `seal` was called."""

    sealed: bool


SinkT = TypeVar("SinkT", bound=SealableSink)


def require_sealed(sink: Sink, kind: type[SinkT]) -> SinkT:
    """Return the sink as one of this engine's; raise `WeightsRejected` if it is not, or is not verified and sealed."""
    if not isinstance(sink, kind) or not sink.sealed:
        raise WeightsRejected("this sink is not a sealed one of this engine: fill it first")
    return sink


class _AdapterStore(Protocol):
    """The LoRA adapters that an engine has loaded, next to those that serve."""

    def load_adapters(self, adapters: Sequence[LoraAdapter]) -> Any:
        """Load adapters as `LoraSink` asks; runs in a thread.

        Raises:
            WeightsRejected: The engine can't serve them.
        """

    def unload_adapters(self, loaded: Any) -> None:
        """Give up what `load_adapters` returned; never blocks."""


class WeightVersions(ABC, Generic[SinkT]):
    """The weights of one running engine: memory for new ones, the switch to them, and whether they are resident.

    `kind`: the class of the engine's sinks. `asleep`: the set of memory that is given back; other parts of the adapter
    may read it.
    """

    def __init__(
        self, kind: type[SinkT], adapters: _AdapterStore, asleep: set[MemoryTag] | None = None
    ) -> None:
        self._kind = kind
        self.adapters = adapters
        self._lock = asyncio.Lock()
        self._asleep: set[MemoryTag] = set() if asleep is None else asleep
        self._has_copy = False
        """Whether sleeping weights can be restored without their source (level 1)."""
        self._empty = False
        """Whether the weights count as resident, but have no values: no step is made before a commit."""

    @abstractmethod
    async def open_slot(
        self, entries: Sequence[TensorEntry], *, on_disk: bool, given: GivenWeights | None
    ) -> Sink:
        """Open a sink as `Engine.open_slot` does."""

    async def commit(self, identity: WeightsId, sink: Sink, kv: KvPolicy) -> None:
        """Switch to the weights of a sink as `Engine.commit` does."""
        try:
            async with self._lock:
                if "weights" in self._asleep and not self._empty:
                    raise EngineError("the weights are asleep: wake them before the commit")
                if not isinstance(sink, LoraSink):
                    await self._switch_weights(identity, self._require_sealed(sink), kv)
                elif self._empty:
                    raise EngineError("the weights that these adapters change have no values")
                else:
                    require_sealed(sink, LoraSink)
                    await self._switch_adapters(identity, sink.loaded, kv)
                    sink.loaded = None  # closing the sink leaves them
        except BaseException:  # also if it is cancelled while it waits for the lock
            await asyncio.to_thread(sink.close)
            raise
        await self._close_committed(sink)

    async def sleep(
        self, level: Literal[1, 2], tags: Collection[MemoryTag], refill: WeightsRefill
    ) -> None:
        """Give memory back as `Engine.sleep` does."""
        self._check_sleep(level, tags)
        async with self._lock:
            if self._empty and "weights" in tags:
                self._mark_loaded()  # memory without values is given back as any other
            elif level == 2 and "weights" in self._asleep & set(tags):
                await self._forget_copy()
            going = self._linked_to_sleep(set(tags)) - self._asleep
            if not going:
                return
            await self._prepare_sleep(level, going, refill)
            async with self._without_steps("falling asleep"):
                await self._release_memory(level, going)
                self._asleep |= going
            if "weights" in going:
                self._has_copy = level == 1

    async def wake(self, tags: Collection[MemoryTag], refill: WeightsRefill | None) -> None:
        """Take memory back as `Engine.wake` does."""
        async with self._lock:
            back = set(tags) & self._asleep
            if self._empty:
                back.discard("weights")  # its memory is there, only a commit is missing
            back = self._linked_to_wake(back)
            if not back:
                return
            weights = "weights" in back
            # The values are read and checked first: if that fails, everything stays asleep.
            sink = await self._read_back(refill) if weights and refill is not None else None
            try:
                async with self._without_steps("waking"):
                    if weights and refill is None:
                        await self._forget_copy()
                    await self._retake_memory(back, sink)
                    self._empty = self._empty or (weights and refill is None)
                    self._asleep -= back - {"weights"} if self._empty else back
            finally:
                if sink is not None:
                    await asyncio.to_thread(sink.close)
            if weights:
                self._has_copy = False

    def resident_memory(self) -> Resident:
        """Return which memory is resident."""
        there = "weights" not in self._asleep or self._empty
        return Resident(weights=there, kv_cache="kv_cache" not in self._asleep)

    def _require_sealed(self, sink: Sink) -> SinkT:
        return require_sealed(sink, self._kind)

    def _mark_loaded(self) -> None:
        """Note that weights that woke without values have some now."""
        if self._empty:
            self._empty = False
            self._asleep.discard("weights")

    async def _forget_copy(self) -> None:
        if self._has_copy:
            await self._drop_copy()
        self._has_copy = False

    async def _read_back(self, refill: WeightsRefill) -> SinkT | None:
        """Return a sink with the sleeping weights' values; None if the engine's own copy has them."""
        return None if self._has_copy else self._require_sealed(await refill())

    # The rest differs between engines.

    @abstractmethod
    async def _switch_weights(self, identity: WeightsId, sink: SinkT, kv: KvPolicy) -> None:
        """Make the weights of a sink serve, without adapters, and call `_mark_loaded` before the next step."""

    @abstractmethod
    async def _switch_adapters(self, identity: WeightsId, loaded: Any, kv: KvPolicy) -> None:
        """Make loaded adapters serve, and no others, with the weights that serve now."""

    @abstractmethod
    async def _release_memory(self, level: Literal[1, 2], tags: set[MemoryTag]) -> None:
        """Give this memory back; at level 1 with a copy of the weights."""

    @abstractmethod
    async def _retake_memory(self, tags: set[MemoryTag], sink: SinkT | None) -> None:
        """Take this memory back; weights get the values of the sink, else of the copy, if there is one."""

    @abstractmethod
    async def _drop_copy(self) -> None:
        """Give up the copy of sleeping weights."""

    def _without_steps(self, what: str) -> AbstractAsyncContextManager[None]:
        """Keep the engine from stepping inside the block; `what` names the work in errors."""
        return nullcontext()

    def _check_sleep(self, level: Literal[1, 2], tags: Collection[MemoryTag]) -> None:
        """Raise `EngineError` if this engine can't sleep like this."""

    async def _prepare_sleep(
        self, level: Literal[1, 2], tags: set[MemoryTag], refill: WeightsRefill
    ) -> None:
        """Do what takes long before steps stop; raise `EngineError` if there is not enough memory."""

    def _linked_to_sleep(self, tags: set[MemoryTag]) -> set[MemoryTag]:
        """Return these tags, and those that must sleep with them."""
        return tags

    def _linked_to_wake(self, tags: set[MemoryTag]) -> set[MemoryTag]:
        """Return these tags, and those that fell asleep only because of them."""
        return tags

    async def _close_committed(self, sink: Sink) -> None:
        await asyncio.to_thread(sink.close)


class RankVersions(WeightVersions[MappedSink]):
    """The weights of an engine whose ranks are other processes, which map the worker's sinks."""

    adapters: FileAdapters[Any]
    _lent: LentSink | None = None
    """What the weights hold that are awake without values that may serve."""

    def __init__(
        self,
        options: EngineOptions,
        adapters: FileAdapters[Any],
        asleep: set[MemoryTag] | None = None,
    ) -> None:
        super().__init__(MappedSink, adapters, asleep)
        self._options = options
        self._nodes = 1 if options.gang is None else options.gang.nodes
        self._ranks: EngineRanks | None = None

    @override
    async def open_slot(
        self, entries: Sequence[TensorEntry], *, on_disk: bool, given: GivenWeights | None
    ) -> Sink:
        skip = self._unneeded_tensors(entries)
        if isinstance(given, LentTensors):
            return await self._load_lent(given)
        if self._ranks is None:
            self._ranks = EngineRanks(self._call_ranks, self._count_ranks() // self._nodes)
        return await open_mapped_sink(
            entries, self._options, on_disk=on_disk, skip=skip, given=given, ranks=self._ranks
        )

    def stop_calling_ranks(self) -> None:
        """Stop calling the ranks: the engine is about to be stopped."""
        if self._ranks is not None:
            self._ranks.stop_calling()

    async def _load_lent(self, lent: LentTensors) -> LentSink:
        """Have the ranks read lent tensors into weights that woke without values.

        Raises:
            WeightsRejected: This engine has ranks on several nodes.
            EngineError: The weights have values.
            EngineCrashed: The ranks could not load them, and have halves of two versions.
        """
        if self._nodes > 1:
            raise WeightsRejected(
                "replicas of several nodes take no lent tensors: publish them by publish_weights(tensors=…)"
            )
        async with self._lock:
            if not self._empty:
                raise EngineError("the weights have values: only empty ones take lent tensors")
            self._lent = None
            async with self._without_steps("reading lent tensors"):
                await self._load_weights(make_lent_ticket(lent, self._count_ranks()))
            self._lent = LentSink()
            return self._lent

    @override
    def _require_sealed(self, sink: Sink) -> MappedSink:
        if isinstance(sink, LentSink) and sink is not self._lent:
            raise EngineError("the lent values were replaced in the meantime: hand them over again")
        return super()._require_sealed(sink)

    @override
    def _mark_loaded(self) -> None:
        super()._mark_loaded()
        self._lent = None

    @abstractmethod
    def _unneeded_tensors(self, entries: Sequence[TensorEntry]) -> Collection[str]:
        """Return the names of those that no rank needs, or raise `WeightsRejected`: no such version can serve."""

    @abstractmethod
    async def _load_weights(self, ticket: str) -> None:
        """Have the ranks load what a ticket names, while they make no steps; the engine is lost if one can't."""

    @abstractmethod
    def _count_ranks(self) -> int:
        """Return how many ranks there are on all nodes."""

    @abstractmethod
    async def _call_ranks(self, method: str, args: Mapping[str, Any]) -> None:
        """Call a method in all ranks."""


async def open_mapped_sink(
    entries: Sequence[TensorEntry],
    options: EngineOptions,
    *,
    on_disk: bool = False,
    skip: Collection[str] = (),
    slot: str | None = None,
    given: GivenWeights | None = None,
    ranks: EngineRanks | None = None,
) -> MappedSink:
    """Open a `MappedSink` in a thread, for `ranks` to map; it is closed if the caller is cancelled.

    In a gang it is a slot, `on_disk` it is in the `spill_dir`. Else it is a `BorrowedSink` over `given` memory that
    other processes can read.

    Raises:
        EngineError: there is not enough memory.
    """
    folder = (options.spill_dir or Path(tempfile.gettempdir())) if on_disk else None
    slots = None if options.gang is None else options.gang.slots
    in_memory = folder is None and slots is None
    if in_memory and isinstance(given, MappedWeights) and given.handle is not None:
        sink: MappedSink = BorrowedSink(entries, given, skip=skip)
    else:
        sink = await open_in_thread(
            lambda: MappedSink(
                entries, folder, skip=skip, slots=slots, slot=slot, staging=options.staging
            )
        )
    sink.ranks = ranks
    return sink
