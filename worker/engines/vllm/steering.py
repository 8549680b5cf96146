"""Whether vLLM steps, and which requests it has: admit, pause, resume, take back, forget KV."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Collection
from contextlib import asynccontextmanager

from rollout_common.wire import AbortReason, MemoryTag
from rollout_worker.engines.admission_queue import AdmissionQueue

from .launch import LaunchedVllm
from .settings import FIRST_TOKEN_TIMEOUT_SECONDS
from .vllm_streams import VllmStream, WeightLabels


class SchedulerControl:
    """Controls vLLM's scheduler: it steps unless it is paused or frozen, or memory is asleep.

    Args:
        launched: The vLLM.
        limit: How many outputs it runs at once; it gets no more.
        labels: Which weights made which token.
    """

    def __init__(self, launched: LaunchedVllm, limit: int, labels: WeightLabels) -> None:
        self._llm = launched.llm
        self._steps = launched.steps
        self._queue = AdmissionQueue[VllmStream](
            lambda _: len(self._admitted) < limit, self._admit_stream
        )
        self._admitted: set[str] = set()
        self._labels = labels
        self._lock = asyncio.Lock()
        self._stopped = False
        self._ordered_at: float | None = None  # an order to stop or go on that is not answered yet
        self._frozen = 0
        self._lost_at = -1
        self._cache = 0
        self.paused = False
        self.admission_held = False
        self.broken = False  # half of other weights is loaded: no step may be made any more
        self.asleep: set[MemoryTag] = set()
        self.streams: dict[str, VllmStream] = {}
        self._begun: set[str] = set()
        self._all_begun = asyncio.Event()  # all that are in vLLM have begun

    @property
    def running(self) -> frozenset[str]:
        """Ids of the outputs that vLLM may have."""
        return frozenset(self._admitted)

    async def wait_for_admission(self, stream: VllmStream) -> None:
        """Wait until vLLM may have an output; a cancelled one gives its place up."""
        stream.admission = asyncio.get_running_loop().create_future()
        self._queue.add_request(stream)
        self._queue.admit_requests()
        try:
            await stream.admission
        except asyncio.CancelledError:
            self._release_admitted([stream.name])
            raise

    def _admit_stream(self, stream: VllmStream) -> None:
        self._admitted.add(stream.name)
        stream.stop_waiting()

    def _release_admitted(self, names: Collection[str]) -> None:
        self._admitted.difference_update(names)
        self._queue.admit_requests()

    @property
    def may_step(self) -> bool:
        """Whether steps are wanted now."""
        return not (self.paused or self._frozen or self.asleep or self.broken)

    async def sync_scheduler(self) -> None:
        """Bring vLLM to what is wanted; returns once no step runs, if none may."""
        async with self._lock:
            self._queue.is_open = self.may_step and not self.admission_held
            self._queue.admit_requests()
            core = self._llm.engine_core
            if not self.may_step and not self._stopped:
                await self._await_order(core.pause_scheduler_async(mode="keep", clear_cache=False))
                self._stopped = True
            elif self.may_step and self._stopped:
                await self._await_order(core.resume_scheduler_async())
                self._stopped = False
                self._steps.last = time.monotonic()

    async def _await_order(self, order: Awaitable[object]) -> None:
        self._ordered_at = time.monotonic()
        try:
            await order
        finally:
            self._ordered_at = None

    def idle_since(self) -> float | None:
        """Return since when no step was made although one is owed, as a monotonic time.

        Owed is a step while outputs are inside of what rests not yet, and the answer to an order
        to stop or to go on, which comes after at most one step.
        """
        if self._ordered_at is not None:
            return max(self._ordered_at, self._steps.last)
        return self._steps.last if self._admitted and not self._stopped else None

    @asynccontextmanager
    async def hold_steps(self) -> AsyncIterator[None]:
        """Keep vLLM from stepping inside the block."""
        self._frozen += 1
        try:
            await self.sync_scheduler()
            yield
        finally:
            self._frozen -= 1
            if not self.broken:
                await self.sync_scheduler()

    async def wait_for_first_tokens(self) -> None:
        """Admit nothing more, and give what runs a moment to get its first token.

        An output that has none when weights change goes back to the queue, and its prefill was in vain.
        """
        self._queue.is_open = False
        self._all_begun.clear()
        if not (self._stopped or self._admitted <= self._begun):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRST_TOKEN_TIMEOUT_SECONDS):
                    await self._all_begun.wait()

    def note_begun(self, name: str) -> None:
        """Note that an output has a token: no other weights can begin it any more."""
        self._begun.add(name)
        if self._admitted <= self._begun:
            self._all_begun.set()

    def note_ended(self, name: str) -> None:
        """Note that an output has ended, however it did."""
        del self.streams[name]
        self._begun.discard(name)
        self._release_admitted([name])
        if self._admitted <= self._begun:
            self._all_begun.set()

    async def requeue_unstarted(self) -> None:
        """Take outputs without a token back into the queue: they are to run on other weights."""
        early = [
            stream
            for stream in self.streams.values()
            if stream.name in self._admitted
            and not (stream.produced or stream.ended or stream.aborting)
        ]
        for stream in early:
            stream.returned = True
        self._release_admitted([stream.name for stream in early])
        await self._remove_from_vllm(early)

    async def _remove_from_vllm(self, streams: Collection[VllmStream]) -> None:
        inside = [stream.inside for stream in streams if stream.inside is not None]
        if inside:
            await self._llm.abort(inside, internal=True)

    async def abort_requests(self, names: Collection[str] | None, reason: AbortReason) -> set[str]:
        """End outputs with what they have; None: all. Returns the names that were known."""
        wanted = list(self.streams) if names is None else names
        known = [self.streams[name] for name in wanted if name in self.streams]
        known = [stream for stream in known if not stream.ended]
        for stream in known:
            stream.aborting = stream.aborting or reason
            stream.stop_waiting()
        await self._remove_from_vllm(known)
        return {stream.name for stream in known}

    @property
    def is_kv_lost(self) -> bool:
        """Whether no step was made since all KV was forgotten."""
        return self._lost_at == self._steps.count

    async def drop_kv(self) -> None:
        """Forget all KV; what runs is prefilled again."""
        await self._llm.engine_core.reset_prefix_cache_async(True, False)
        self._lost_at = self._steps.count

    async def reset_cache(self) -> None:
        """Forget reusable prefixes; those of running outputs are left to them."""
        self._cache += 1
        await self._llm.engine_core.reset_prefix_cache_async(False, False)

    def cache_salt(self, given: str | None) -> str:
        """Return the salt under which an output may share prefixes: never another commit's."""
        return f"{self._labels.current}.{self._cache}:{given or ''}"
