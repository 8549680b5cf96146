"""A whole engine in plain Python, to test the worker around it: no torch, no process; whole.

Its weights are one number, and every token that it makes is that number: a token tells which
weights made it, whatever its label says. It keeps the contract of `rollout_worker.engine` and holds
the worker to its side of it (`broken`). It makes tokens only when a test lets it (`step`, `free`),
and fails on command (`before`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from safetensors.numpy import save_file

from rollout_worker.engine import (
    EngineCrashed,
    EngineDelta,
    EngineError,
    EngineInfo,
    EngineRequest,
    EngineStats,
    GivenWeights,
    InvalidRequest,
    KvPolicy,
    MappedWeights,
    ProcessSpent,
    Sink,
    TensorEntry,
    TensorSpec,
    WeightsLayout,
    WeightsRefill,
)
from rollout_worker.pictures.picture import Picture
from rollout_worker.schemas import (
    CHECKPOINT,
    AbortReason,
    Capabilities,
    MemoryTag,
    Progress,
    Resident,
    StopReason,
    WeightsId,
    WeightsSpan,
)
from rollout_worker.sources.checkpoint_files import open_source
from rollout_worker.sources.source_reading import read_source

MAX_LENGTH = 64
SPEC = TensorSpec("U8", (1,))
LAYOUT = WeightsLayout({"number": SPEC, "rest": SPEC}, {"copy": SPEC}, {"copy": "number"})
ABLE = Capabilities(
    logprobs=("sampling", "raw"),
    seed=True,
    priority=True,
    stop_strings=True,
    in_flight=("Drain", "Abort", "Keep", "Recompute", "Pin"),
    sleep_levels=(1, 2),
    memory_release=True,
    prefix_cache=False,
    cache_salt=False,
)
UNKNOWN = 999
"""A token id that the engine refuses once the request is queued: no check of ours knows it."""


def write_weights(folder: Path, number: int, **more: int) -> Path:
    """A folder of weights whose tokens are `number`."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"number": number, "rest": 0, **more}
    tensors = {name: np.array([value], np.uint8) for name, value in values.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@dataclass(frozen=True, slots=True)
class Version:
    """Weights and their label, which flip together."""

    number: int
    identity: WeightsId


@dataclass(eq=False)
class Row:
    """A request to the engine: queued, running or done."""

    request: EngineRequest
    deltas: asyncio.Queue[EngineDelta | EngineCrashed] = field(default_factory=asyncio.Queue)
    made: int = 0
    stale: bool = False
    pinned: Version | None = None


class TinySink:
    """Memory of one version."""

    slot = ""

    def __init__(
        self,
        engine: TinyEngine,
        entries: Sequence[TensorEntry],
        *,
        on_disk: bool = False,
        given: MappedWeights | None = None,
    ) -> None:
        self.given = given
        self.memory: Literal["host", "device"] = engine.memory
        self.on_disk = on_disk
        self._engine = engine
        self._left = list(entries)
        self._buffers: dict[str, bytearray] = {}
        self.sealed = False

    @property
    def nbytes(self) -> int:
        return sum(map(len, self._buffers.values()))

    @property
    def number(self) -> int:
        """What its weights are."""
        if self.given is not None:
            start = self.given.starts["number"]
            if self.given.handle is None:
                return self.given.view[start]
            return os.pread(self.given.handle, 1, start)[0]
        return self._buffers["number"][0]

    @property
    def took(self) -> bool:
        return self.given is not None

    def allocate(self, entry: TensorEntry) -> memoryview | None:
        """As `Sink.allocate`: in the order that was promised."""
        self._engine.expect(self._left[:1] == [entry], f"{entry.name} is not next")
        self._engine.expect(self in self._engine.sinks, "a closed sink is filled")
        del self._left[:1]
        if self.given is not None:
            return None
        self._buffers[entry.name] = bytearray(entry.spec.nbytes)
        return memoryview(self._buffers[entry.name])

    def seal(self) -> None:
        self._engine.expect(not self._left, "sealed half full")
        self.sealed = True

    def close(self) -> None:
        if self in self._engine.sinks:
            self._engine.sinks.remove(self)
            if self.given is not None:
                self.given.release()


class TinyEngine:
    """See the module; `rows` requests run at once."""

    by_path = True
    """As `EngineInfo.by_path`."""

    def __init__(self, model: Path, rows: int = 8) -> None:
        self.capabilities = ABLE
        self.before: dict[str, Callable[[], Awaitable[None]]] = {}
        """Awaited at the beginning of the call of that name: may wait, raise, never return."""
        self.broken: list[str] = []
        """What the worker did against the contract."""
        self.sinks: list[TinySink] = []
        """Memory given that was neither committed nor closed."""
        self.memory: Literal["host", "device"] = "host"
        """Of the sinks that it gives."""
        self.takes = True
        """Whether its sinks serve from memory that is given."""
        self.free = False
        """Whether it steps without being told to."""
        self.paused = False
        self.stopped = False
        self.wrong: str | None = None
        self.spent: str | None = None
        """What `alive` says."""
        self.on_end: Callable[[str], None] = lambda why: None
        self.resident: dict[MemoryTag, bool] = {"weights": True, "kv_cache": True}
        self.asked = 0
        """Requests that it was given."""
        self.prepared: list[Picture] = []
        """Pictures that it was asked to prepare."""
        self.resets = 0
        self._model, self._rows = model, rows
        self._holding = False
        self._queue: list[Row] = []
        self._running: list[Row] = []
        self._stepping: asyncio.Task[None] | None = None
        self._kept: Version | None = None
        self.empty = False
        """Whether its weights have no values."""
        self.refills = 0
        """How often it read weights from their source to wake."""
        self._refilling = False

    def expect(self, kept: bool, rule: str) -> None:
        """Note a rule that the worker broke."""
        if not kept:
            self.broken.append(rule)

    async def _begin(self, call: str) -> None:
        self.expect(not self.stopped or call == "stop", f"{call} after stop")
        if self.wrong is not None and call != "stop":
            raise EngineCrashed(self.wrong)
        hook = self.before.get(call)
        if hook is not None:
            await hook()

    # Life.

    async def start(self, report: Callable[[Progress], None]) -> EngineInfo:
        """Read the checkpoint as an adapter does, by its own means."""
        await self._begin("start")
        report(Progress(message="loading"))
        source = open_source(self._model)
        sink = TinySink(self, source.entries)
        self.sinks.append(sink)
        root = read_source(source, LAYOUT.tied, sink.allocate)
        sink.close()
        self.active = Version(sink.number, CHECKPOINT)
        self._stepping = asyncio.create_task(self._step_freely())
        model = str(self._model)
        return EngineInfo("tiny", "1.0", model, MAX_LENGTH, frozenset(), root, LAYOUT, self.by_path)

    async def stop(self) -> None:
        await self._begin("stop")
        self.stopped = True
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.wait({self._stepping})
        self._end(None, AbortReason.ENGINE)

    def die(self, reason: str = "the test ended it") -> None:
        """End all requests as a dead process does."""
        self.wrong = reason
        for sequence in [*self._running, *self._queue]:
            sequence.deltas.put_nowait(EngineCrashed(reason))
        self._running, self._queue = [], []

    # Requests.

    def validate(self, request: EngineRequest) -> None:
        if request.token_ids[0] == UNKNOWN - 1:
            raise InvalidRequest("token_ids", "no such token: ids end at 255")

    async def prepare_pictures(self, pictures: Sequence[Picture]) -> None:
        await self._begin("prepare_pictures")
        if any(each.width > MAX_LENGTH for each in pictures):
            raise InvalidRequest("multimodal.images", f"at most {MAX_LENGTH} pixels wide")
        self.prepared += pictures

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        self.asked += 1
        if request.token_ids[0] == UNKNOWN:
            raise InvalidRequest("token_ids", "found out late")
        await self._begin("generate")
        sequence = Row(request)
        self._queue.append(sequence)
        self._admit()
        try:
            while True:
                delta = await sequence.deltas.get()
                if isinstance(delta, EngineCrashed):
                    raise delta
                yield delta
                if delta.stop_reason is not None:
                    return
        finally:
            self._forget(sequence)

    def _forget(self, sequence: Row) -> None:
        for place in (self._queue, self._running):
            with contextlib.suppress(ValueError):
                place.remove(sequence)

    def _admit(self) -> None:
        awake = all(self.resident.values())
        while not (self.paused or self._holding) and awake and self._queue:
            if len(self._running) >= self._rows:
                return
            self._queue.sort(key=lambda each: each.request.priority)
            self._running.append(self._queue.pop(0))

    @property
    def is_generating(self) -> bool:
        return bool(self._running)

    def step(self, count: int = 1) -> None:
        """Make so many tokens for every running request."""
        for _ in range(count):
            if self.paused:
                return
            self.expect(all(self.resident.values()), "it steps without its memory")
            self.expect(not self.empty, "it steps without weights")
            for sequence in list(self._running):
                self._token(sequence)
            self._admit()

    def _token(self, sequence: Row) -> None:
        version, at = sequence.pinned or self.active, sequence.made
        sequence.made += 1
        span = WeightsSpan(
            epoch=version.identity.epoch,
            version=version.identity.version,
            start=at,
            end=at + 1,
            stale_kv=sequence.stale,
        )
        done = sequence.made == sequence.request.sampling.max_tokens
        logprobs = None if sequence.request.logprobs is None else (-0.5,)
        stop = StopReason.LENGTH if done else None
        delta = EngineDelta((version.number,), logprobs, (span,), stop, queued_seconds=0.25)
        sequence.deltas.put_nowait(delta)
        if done:
            self._forget(sequence)

    async def _step_freely(self) -> None:
        while True:
            await asyncio.sleep(0.001)
            if self.free:
                self.step()

    async def abort(self, request_ids: Collection[str] | None, reason: AbortReason) -> set[str]:
        await self._begin("abort")
        return self._end(request_ids, reason)

    def _end(self, request_ids: Collection[str] | None, reason: AbortReason) -> set[str]:
        known = set()
        for sequence in [*self._running, *self._queue]:
            name = sequence.request.request_id
            if request_ids is None or name in request_ids:
                known.add(name)
                self._forget(sequence)
                end = EngineDelta((), None, (), stop_reason=StopReason.ABORTED, abort_reason=reason)
                sequence.deltas.put_nowait(end)
        self._admit()
        return known

    # Pauses.

    async def hold_admission(self) -> None:
        await self._begin("hold_admission")
        self._holding = True

    async def pause(self) -> None:
        await self._begin("pause")
        self.paused = True

    async def resume(self) -> None:
        await self._begin("resume")
        self.expect(all(self.resident.values()), "resumed asleep")
        self.expect(not self.empty, "resumed without weights")
        self.paused = self._holding = False
        self._admit()

    # Weights.

    async def open_slot(
        self,
        entries: Sequence[TensorEntry],
        *,
        on_disk: bool = False,
        given: GivenWeights | None = None,
    ) -> TinySink:
        await self._begin("open_slot")
        # A refill comes on top, while it rests.
        most = 1 if self._refilling or self.paused else 0
        self.expect(len(self.sinks) <= most, "a second slot beside the first")
        lent = given if isinstance(given, MappedWeights) and self.takes else None
        sink = TinySink(self, entries, on_disk=on_disk, given=lent)
        self.sinks.append(sink)
        return sink

    async def commit(self, identity: WeightsId, sink: Sink, kv: KvPolicy) -> None:
        self.expect(self.paused, "committed while it steps")
        self.expect(self.resident["weights"], "committed asleep")
        assert isinstance(sink, TinySink), "of another engine"
        self.expect(sink in self.sinks, "a sink that is closed, or another engine's")
        self.expect(sink.sealed, "a sink that is not sealed")
        try:
            await self._begin("commit")
            number = sink.number
        finally:
            sink.close()
        self.expect(kv != "pin" or not self.empty, "pinned to weights that are gone")
        former, self.active = self.active, Version(number, identity)
        self.empty = False
        for sequence in self._running:
            if sequence.made == 0:
                continue
            if kv == "pin" and sequence.pinned is None and not sequence.stale:
                sequence.pinned = former
            else:
                sequence.pinned = None
                sequence.stale = kv != "recompute"

    async def sleep(
        self, level: Literal[1, 2], tags: Collection[MemoryTag], refill: WeightsRefill
    ) -> None:
        await self._begin("sleep")
        self.expect(self.paused, "put to sleep while it steps")
        if "weights" in tags and self.resident["weights"]:
            self.expect(not self.sinks, "staged weights stay where the active ones are given back")
            self.expect(level == 2 or not self.empty, "weights without values are kept")
            self._kept = self.active
            for sequence in self._running:
                sequence.pinned = None  # they go on with the active ones, prefilled anew
        if "weights" in tags and level == 2:
            self._kept = None
        if "weights" in tags:
            self.empty = False
        for tag in tags:
            self.resident[tag] = False

    async def wake(self, tags: Collection[MemoryTag], refill: WeightsRefill | None) -> None:
        await self._begin("wake")
        if "weights" in tags and not self.resident["weights"]:
            if refill is None:
                self.empty = True
            elif self._kept is None:
                self.refills += 1
                self._refilling = True
                try:
                    sink = await refill()
                finally:
                    self._refilling = False
                assert isinstance(sink, TinySink)
                self.expect(sink.sealed, "a refill that is not sealed")
                self.active = Version(sink.number, self.active.identity)
                await asyncio.to_thread(sink.close)
            self._kept = None
        for tag in tags:
            self.resident[tag] = True

    async def reset_cache(self) -> None:
        await self._begin("reset_cache")
        self.resets += 1

    # Looks.

    def stats(self) -> EngineStats:
        pinned = {s.request.request_id for s in self._running if s.pinned is not None}
        return EngineStats(
            running=len(self._running),
            resident=Resident(**self.resident),
            running_ids=frozenset(s.request.request_id for s in self._running),
            pinned_ids=frozenset(pinned),
        )

    @property
    def known(self) -> frozenset[str]:
        """Ids of requests that run or wait."""
        return frozenset(row.request.request_id for row in (*self._running, *self._queue))

    def alive(self) -> str | None:
        if self.spent is not None:
            raise ProcessSpent(self.spent)
        return self.wrong

    def metrics(self) -> str:
        return "tiny_engine_steps 1\n"


class Gate:
    """Holds a call of the engine until it is opened."""

    def __init__(self, then: EngineError | None = None) -> None:
        self.reached = asyncio.Event()
        self._opened = asyncio.Event()
        self._then = then

    async def __call__(self) -> None:
        self.reached.set()
        await self._opened.wait()
        if self._then is not None:
            raise self._then

    def open(self) -> None:
        """Let it go on, and whoever comes later."""
        self._opened.set()


def raising(error: BaseException) -> Callable[[], Awaitable[None]]:
    """For `TinyEngine.before`: the call fails."""

    async def fail() -> None:
        raise error

    return fail
