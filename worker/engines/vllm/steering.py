"""vLLM's scheduler under control (admit, pause, resume, requeue, drop KV), and requests through it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Collection
from contextlib import asynccontextmanager
from typing import Any

from rollout_common.wire import AbortReason, MemoryTag, SamplingParams
from rollout_worker.engine import EngineCrashed, EngineDelta, EngineRequest, InvalidRequest
from rollout_worker.engines.admission_queue import AdmissionQueue
from rollout_worker.engines.file_adapters import FileAdapters
from rollout_worker.engines.picture_model import banned_tokens
from rollout_worker.engines.request_checks import (
    check_id_unused,
    make_stop_checker,
    with_known_tokens,
)

from .intake import VllmPictures, to_sampling_params
from .launch import LaunchedVllm
from .settings import FIRST_TOKEN_TIMEOUT_SECONDS
from .vllm_streams import VllmStream, WeightLabels


class SchedulerControl:
    """Controls vLLM's scheduler: it steps unless it is paused or frozen, or memory is asleep.

    vLLM gets at most `limit` outputs at once.
    """

    def __init__(self, launched: LaunchedVllm, limit: int, labels: WeightLabels) -> None:
        self._llm = launched.llm
        self._steps = launched.steps
        self._takes_pictures = launched.model.pictures is not None
        self._queue = AdmissionQueue[VllmStream](
            lambda _: len(self._admitted) < limit, self._admit_stream
        )
        self._admitted: set[str] = set()
        self._labels = labels
        self._lock = asyncio.Lock()
        self._stopped = False
        self._resumed_at = 0.0
        self._ordered_at: float | None = (
            None  # time of an order to stop or go on, until it is answered
        )
        self._frozen = 0
        self._lost_at = -1
        self._cache = 0
        self.paused = False
        self.admission_held = False
        self.broken = False  # half of other weights is loaded: it must never step again
        self.asleep: set[MemoryTag] = set()
        self.streams: dict[str, VllmStream] = {}
        self._begun: set[str] = set()  # names of outputs that have a token
        self._all_begun = asyncio.Event()  # every output in vLLM has a token

    @property
    def running(self) -> frozenset[str]:
        """Ids of the outputs that vLLM may have."""
        return frozenset(self._admitted)

    async def wait_for_admission(self, stream: VllmStream) -> None:
        """Wait until vLLM may have an output; a cancelled one leaves the queue."""
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
        """Pause or resume vLLM as `may_step` asks; if it may not, return once no step runs."""
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
                self._steps.last = self._resumed_at = time.monotonic()

    async def _await_order(self, order: Awaitable[object]) -> None:
        self._ordered_at = time.monotonic()
        try:
            await order
        finally:
            self._ordered_at = None

    def idle_since(self) -> float | None:
        """Return the monotonic time since which vLLM makes no step although it owes one.

        It owes a step while it has outputs and is not stopped, and also until it answers an order to stop
        or to go on, which takes at most one step. Of data-parallel ranks the one counts that has owed one for longest.
        """
        if self._ordered_at is not None:
            return max(self._ordered_at, self._steps.last)
        if self._stopped or not self._admitted:
            return None
        return min(self._ranks_idle_since(), default=self._steps.last)

    def _ranks_idle_since(self) -> list[float]:
        """Return since when each data-parallel rank that has outputs makes no step; none if there is one core."""
        core, first = self._llm.engine_core, dict[bytes, float]()
        # Only a client of several ranks has it, and it may still have outputs that have ended here.
        ranks: dict[str | None, bytes] = getattr(core, "reqs_in_flight", {})
        for stream in self.streams.values():
            if not stream.returned and (rank := ranks.get(stream.inside)) is not None:
                first[rank] = min(stream.placed, first.get(rank, stream.placed))
        return [
            max(since, self._resumed_at, self._steps.last_of.get(core.core_engines.index(rank), 0))
            for rank, since in first.items()
        ]

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
        """Admit nothing more, and give running outputs a moment to get their first token.

        An output without a token goes back to the queue when weights change, and is prefilled again.
        """
        self._queue.is_open = False
        self._all_begun.clear()
        if not (self._stopped or self._admitted <= self._begun):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRST_TOKEN_TIMEOUT_SECONDS):
                    await self._all_begun.wait()

    def note_begun(self, name: str) -> None:
        """Note that an output has a token: it is not requeued any more."""
        self._begun.add(name)
        self._check_all_begun()

    def note_ended(self, name: str) -> None:
        """Remove an output that has ended, however it did."""
        del self.streams[name]
        self._begun.discard(name)
        self._release_admitted([name])
        self._check_all_begun()

    def _check_all_begun(self) -> None:
        if self._admitted <= self._begun:
            self._all_begun.set()

    async def requeue_unstarted(self) -> None:
        """Take outputs without a token back into the queue: the new weights will make them."""
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
        """End outputs with what they have; None: all. Return the names that were known."""
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
        """Whether no step was made since all KV was dropped."""
        return self._lost_at == self._steps.count

    async def drop_kv(self) -> None:
        """Drop all KV; running outputs are prefilled again."""
        await self._llm.engine_core.reset_prefix_cache_async(True, False)
        self._lost_at = self._steps.count

    async def forget_features(self) -> None:
        """Drop what other weights made of pictures: a prefix that is computed again needs them again."""
        if self._takes_pictures:
            await self._llm.engine_core.reset_encoder_cache_async()

    async def reset_cache(self) -> None:
        """Drop reusable prefixes; running outputs keep theirs."""
        self._cache += 1
        await self._llm.engine_core.reset_prefix_cache_async(False, False)

    def cache_salt(self, given: str | None) -> str:
        """Return the salt under which an output may share prefixes: never another commit's."""
        return f"{self._labels.current}.{self._cache}:{given or ''}"


class VllmRequests:
    """All requests of one vLLM."""

    def __init__(
        self,
        launched: LaunchedVllm,
        steering: SchedulerControl,
        labels: WeightLabels,
        adapters: FileAdapters[Any],
    ) -> None:
        self._launched = launched
        self._steering = steering
        self._labels = labels
        self._adapters = adapters
        taken = launched.model.pictures
        self.pictures = None if taken is None else VllmPictures(taken)
        self._arrivals = 0
        self._over = False
        self._cleaning: set[asyncio.Task[None]] = set()

    def stop_waiting(self) -> None:
        """End the wait of every queued output: vLLM is about to be stopped."""
        self._over = True
        for stream in self._steering.streams.values():
            stream.stop_waiting()

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineDelta]:
        """Yield the deltas of one output as `Engine.generate` does."""
        name, streams = request.request_id, self._steering.streams
        check_id_unused(name, streams)
        self._arrivals += 1
        stops = None
        if request.sampling.stop:
            stops = make_stop_checker(request.sampling, self._launched.model)
        request = with_known_tokens(request, self._launched.model)
        hidden = banned_tokens(self._launched.model.pictures)
        stream = streams[name] = VllmStream(request, self._arrivals, stops, hidden)
        try:
            async for delta in self._run_stream(stream):
                yield delta
        finally:
            self._steering.note_ended(name)
            if stream.inside is not None:
                self._abort_in_background(stream.inside)

    async def _run_stream(self, stream: VllmStream) -> AsyncIterator[EngineDelta]:
        """Admit and run an output, again whenever it was requeued, until it ends."""
        while not stream.ended:
            stream.returned = False
            if stream.aborting is None and not self._over:
                await self._steering.wait_for_admission(stream)
            if stream.aborting is not None or self._over:
                yield stream.make_aborted_delta(stream.aborting or AbortReason.ENGINE)
                return
            collector = await self._submit_request(stream)
            while not (stream.ended or stream.returned):
                try:
                    output = collector.get_nowait() or await collector.get()
                except Exception as error:
                    stream.inside = None
                    raise _crash_error(error) from error
                if output.finished:
                    stream.inside = None
                # A requeued output starts again: a token that still arrives does not count.
                if not stream.returned:
                    fresh = not stream.produced
                    delta = stream.take_output(output, self._labels)
                    if fresh and stream.produced:
                        self._steering.note_begun(stream.name)
                    yield delta

    async def _submit_request(self, stream: VllmStream) -> Any:
        """Hand an output over to vLLM; return the collector of what vLLM makes."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input

        launched, request = self._launched, stream.request
        llm, config = launched.llm, launched.config
        if len(self._steering.running) == 1:  # vLLM was idle, and owed no step
            launched.steps.last = time.monotonic()
        stream.started = stream.started or time.monotonic()
        salt = self._steering.cache_salt(request.cache_salt)
        ranks, rank = config.parallel_config.data_parallel_size, None
        if ranks > 1 and request.session_id is not None:
            rank = hash(request.session_id) % ranks
        ordered = config.scheduler_config.policy == "priority"
        prompt = tokens_input(list(request.token_ids), cache_salt=salt)
        if request.pictures and self.pictures is not None:
            prompt = await asyncio.to_thread(self.pictures.make_input, request, salt)
        try:
            collector = await llm.add_request(
                stream.name,
                prompt,
                to_sampling_params(request, launched.model),
                priority=request.priority if ordered else 0,
                data_parallel_rank=rank,
                lora_request=self._adapters.find_handle(request.adapter),
            )
            stream.inside, stream.placed = collector.request_id, time.monotonic()
            stream.state = llm.output_processor.request_states.get(collector.request_id)
            if stream.aborting is not None or stream.returned:
                await llm.abort(stream.inside, internal=True)
        except InvalidRequest:
            raise
        except (VLLMClientError, ValueError) as error:  # about this request alone
            field = getattr(error, "parameter", None)
            known = field in SamplingParams.model_fields
            raise InvalidRequest(
                f"sampling.{field}" if known else "sampling", f"vLLM refuses it: {error}"
            ) from error
        except Exception as error:
            raise _crash_error(error) from error
        return collector

    def _abort_in_background(self, inside: str) -> None:
        """Make vLLM end an output that nobody reads any more."""

        async def abort() -> None:
            with contextlib.suppress(Exception):  # a dead vLLM has ended it
                await self._launched.llm.abort(inside, internal=True)

        task = asyncio.get_running_loop().create_task(abort())
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)


def _crash_error(error: Exception) -> EngineCrashed:
    return EngineCrashed(f"vLLM failed: {type(error).__name__}: {error}")
