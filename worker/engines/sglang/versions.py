"""Memory for new weights, the flip, and where the weights are: commit, sleep, wake.

Everything that touches the model is a command to the child, which works on them one after another.
One lock orders commit, sleep and wake among themselves. A command that fails half-way leaves the
child in an unknown state: then it is ended, and the worker starts another.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

from rollout_worker.engine import (
    EngineCrashed,
    EngineError,
    Entry,
    Given,
    KvPolicy,
    Refill,
    Sink,
    WeightsRejected,
)
from rollout_worker.engines import EngineOptions
from rollout_worker.engines.mapped import LentSink, MappedSink, open_mapped, sealed
from rollout_worker.engines.ranks import Ranks
from rollout_worker.schemas import MemoryTag, Resident, WeightsId

from .bridge import Bridge, CallFailed
from .desk import Desk
from .model import Model, refuse_updates

TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache")
FIX = "enable SGLang's memory saver (on by default on a GPU)"


async def open_slot(
    options: EngineOptions,
    model: Model,
    entries: Sequence[Entry],
    slot: str | None = None,
    given: Given | None = None,
    ranks: Ranks | None = None,
) -> Sink:
    """Give memory on this node; SGLang reads a file of safetensors, a tied head it makes itself."""
    slots = None if options.gang is None else options.gang.slots
    return await open_mapped(
        entries,
        header=True,
        skip=model.layout.tied,
        slots=slots,
        slot=slot,
        staging=options.staging,
        given=given,
        ranks=ranks,
    )


class Versions:
    """The weights of one running child."""

    def __init__(
        self,
        options: EngineOptions,
        model: Model,
        bridge: Bridge,
        desk: Desk,
        facts: dict[str, Any],
        give_up: Callable[[str], None],
    ) -> None:
        self._options = options
        self._model = model
        self._bridge = bridge
        self._desk = desk
        self._facts = facts
        self._give_up = give_up
        device = facts.get("device")
        self._no_updates: str | None = facts.get("no_updates") or refuse_updates(
            model.quantisation, None if device is None else tuple(device)
        )
        self._ranks: Ranks | None = None
        self._lock = asyncio.Lock()
        self._away: set[MemoryTag] = set()
        self._empty = False  # the weights' memory is back, without values: a commit brings them
        self._spilled = False

    async def open_slot(self, entries: Sequence[Entry], given: Given | None = None) -> Sink:
        """See `Engine.open_slot`."""
        self._check_updatable()
        return await open_slot(
            self._options, self._model, entries, given=given, ranks=self._known()
        )

    def _check_updatable(self) -> None:
        """Refuse weights that SGLang would refuse, before anything is touched for them."""
        if self._no_updates is not None:
            raise WeightsRejected(self._no_updates)

    async def reload(self) -> None:
        """Load the checkpoint once more as a commit loads a version; nothing runs.

        Raises:
            WeightsRejected: SGLang doesn't update this model.
            EngineCrashed: it failed at it, and has ended.
        """
        self._check_updatable()
        folder = {"folder": str(self._options.model)}
        async with self._lock, self._whole("the update"):
            await self._desk.pause()
            # What has ended here may still be there: with it the child's cache can't be flushed.
            await self._desk.rest("retract")
            await self._bridge.call("load", where=folder, version=None, flush=True)
            await self._desk.resume()

    def _known(self) -> Ranks:
        """Return those that hold weights."""
        if self._ranks is None:
            gang = self._options.gang
            nodes = 1 if gang is None else gang.nodes
            self._ranks = Ranks(self._tell, int(self._facts["ranks"]) // nodes)
        return self._ranks

    async def _tell(self, method: str, args: Mapping[str, Any]) -> None:
        await self._bridge.call("tell", method=method, **args)

    def end(self) -> None:
        """Tell the ranks nothing any more."""
        if self._ranks is not None:
            self._ranks.end()

    async def commit(self, identity: WeightsId, sink: Sink, kv: KvPolicy) -> None:
        """See `Engine.commit`."""
        try:
            async with self._lock:
                if "weights" in self._away and not self._empty:
                    raise EngineError("the weights are asleep: wake them before the commit")
                mapped = sealed(sink)
                keep = kv == "keep" and "kv_cache" not in self._away
                async with self._whole("the commit"):
                    await self._desk.rest("in_place" if keep else "retract")
                    await self._load(mapped, str(identity), flush=not keep)
                if self._empty:
                    self._empty = False
                    self._away.discard("weights")
                self._desk.switched(identity, keep=keep)
        finally:  # also if it is cancelled while another verb has the lock
            await asyncio.to_thread(sink.close)

    async def _load(self, sink: MappedSink, version: str | None, *, flush: bool) -> None:
        where = sink.where
        if isinstance(sink, LentSink):
            where = {"told": sink.told()}
        await self._bridge.call("load", where=where, version=version, flush=flush)

    async def sleep(self, level: Literal[1, 2], tags: Collection[MemoryTag]) -> None:
        """See `Engine.sleep`."""
        if not self._facts["enable_memory_saver"]:
            raise EngineError(f"this engine cannot give memory back: {FIX}")
        async with self._lock:
            if level == 2 and self._spilled:
                await self._forget("falling asleep")
            if self._empty and "weights" in tags:
                self._empty = False
                self._away.discard("weights")
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

    async def _forget(self, what: str) -> None:
        async with self._whole(what):
            await self._bridge.call("spill", what="forget")
        self._spilled = False

    async def _spill_weights(self) -> None:
        try:
            await self._bridge.call("spill", what="keep")
        except CallFailed as error:
            raise EngineError(
                f"cannot spill the weights: {error}; free space there, set another spill_dir, or "
                "sleep at level 2"
            ) from error
        self._spilled = True

    async def wake(self, tags: Collection[MemoryTag], refill: Refill | None) -> None:
        """See `Engine.wake`."""
        async with self._lock:
            coming: list[MemoryTag] = [tag for tag in TAGS if tag in tags and tag in self._away]
            if refill is None or self._empty:
                await self._wake_empty(coming)
                return
            sink: MappedSink | None = None
            if "weights" in coming and not self._spilled:
                # Read and checked first: a refusal leaves everything asleep as it was.
                sink = sealed(await refill())
            try:
                async with self._whole("waking"):
                    if coming:
                        await self._bridge.call("retake", tags=coming)
                    if sink is not None:
                        await self._load(sink, None, flush=False)
                    elif "weights" in coming:
                        await self._bridge.call("spill", what="bring_back")
            finally:
                if sink is not None:
                    await asyncio.to_thread(sink.close)
            self._away.difference_update(coming)
            if "weights" in coming:
                self._spilled = False

    async def _wake_empty(self, coming: list[MemoryTag]) -> None:
        """Take memory back, that of weights without values unless it is there already."""
        if self._spilled and "weights" in coming:
            await self._forget("waking")
        missing = [tag for tag in coming if not (tag == "weights" and self._empty)]
        if missing:
            async with self._whole("waking"):
                await self._bridge.call("retake", tags=missing)
        self._empty = self._empty or "weights" in missing
        self._away.difference_update(tag for tag in missing if tag != "weights")

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
        there = "weights" not in self._away or self._empty
        return Resident(weights=there, kv_cache="kv_cache" not in self._away)

    @property
    def awake(self) -> bool:
        """Whether nothing was given back."""
        return not self._away
