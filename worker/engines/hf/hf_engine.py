"""The adapter: the worker's contract `Engine` on top of the step thread.

Everything here runs in the worker's asyncio loop. The core and the model belong to the step thread
(`thread.py`), which runs commands at step boundaries; loading and spilling weights run in threads
of their own, so that neither the loop nor an abort ever waits for a disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from functools import partial
from typing import TypeVar

import torch
import transformers
from typing_extensions import override

from rollout_common.wire import (
    MAX_TOP_LOGPROBS,
    AbortReason,
    Capabilities,
    InFlightPolicy,
    Progress,
)
from rollout_worker.engine import (
    EngineCrashed,
    EngineDelta,
    EngineError,
    EngineInfo,
    EngineRequest,
    Grammar,
    InvalidRequest,
    ProcessSpent,
)
from rollout_worker.engines.adapter import EngineAdapter
from rollout_worker.engines.grammars.grammar_state import GrammarState
from rollout_worker.engines.options import EngineOptions
from rollout_worker.engines.picture_model import check_pictures
from rollout_worker.engines.request_checks import (
    check_id_unused,
    check_model_limits,
    check_route_size,
)
from rollout_worker.pictures.picture import Picture
from rollout_worker.sources.source_reading import ReadCancelled
from rollout_worker.threads import run_in_thread

from .core import BatchCore, DeltaDelivery
from .parts import HfParts, assemble_parts
from .sequence import make_sequence
from .settings import THREAD_STOP_SECONDS, parse_settings
from .thread import describe_spent, find_lasting_fault
from .weights.loading import load_model
from .weights.weights_memory import release_freed

logger = logging.getLogger(__name__)

T = TypeVar("T")

IN_FLIGHT: tuple[InFlightPolicy, ...] = ("Drain", "Abort", "Keep", "Recompute", "Pin")

OutputStream = tuple[EngineRequest, asyncio.Queue[EngineDelta]]
"""A request and the deltas of its output that its reader has not had."""


class HfEngine(EngineAdapter[HfParts]):
    """Serves one transformers model."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._settings = parse_settings(options.args)
        self._streams: dict[str, OutputStream] = {}
        self._arrivals = 0
        self._compiling: set[str] = set()
        """Requests whose grammar is being compiled."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self.capabilities = Capabilities(
            logprobs=("sampling", "raw"),
            prompt_logprobs=True,
            top_logprobs=MAX_TOP_LOGPROBS,
            structured=True,
            return_routed_experts=True,
            return_sampling_mask=True,
            adapters=True,
            adapters_in_flight=IN_FLIGHT,
            seed=True,
            priority=True,
            stop_strings=True,
            in_flight=IN_FLIGHT,
            sleep_levels=(1, 2),
            memory_release=True,
            prefix_cache=False,
            cache_salt=False,
        )

    @override
    async def start(self, report: Callable[[Progress], None]) -> EngineInfo:
        self._loop = asyncio.get_running_loop()
        if self._settings.threads:
            torch.set_num_threads(self._settings.threads)
        work = partial(load_model, self._options, self._settings, report)
        try:
            loaded = await run_in_thread(work, self._give_up)
        except ReadCancelled:
            raise EngineError("the engine was stopped while it loaded") from None
        except RuntimeError as error:
            if (why := find_lasting_fault(error)) is not None:
                raise ProcessSpent(describe_spent(why)) from error
            raise
        await self._freeze_heap()
        self._parts = assemble_parts(
            loaded, self._options, self._settings, self._deliver_deltas, self._on_crash
        )
        self._parts.thread.start()
        known = {
            "stop_strings": loaded.tokenizer is not None,
            "structured": self._parts.grammars is not None,
            "return_routed_experts": self._parts.routers is not None,
            "sleep_levels": (1, 2) if loaded.targets else (1,),  # 2 reads the weights again
            "multimodal": loaded.pictures is not None,
        }
        self.capabilities = self.capabilities.model_copy(update=known)
        logger.info("serving %s, weights %s", self._options.model, loaded.root_hash)
        version, root_hash = transformers.__version__, loaded.root_hash
        return self._engine_info("hf", version, loaded, root_hash, loaded.layout, by_path=False)

    @override
    async def stop(self) -> None:
        self._give_up.set()
        parts, self._parts = self._parts, None
        if parts is not None:
            large = (weakref.ref(parts.loaded.model), weakref.ref(parts.core))
            ended = await self._stop_thread(parts)
            del parts
            await asyncio.to_thread(release_freed)
            if any(each() is not None for each in large) and not self._options.guest:
                gc.unfreeze()  # a cycle keeps them alive, such as an error and its frames
                await asyncio.to_thread(release_freed)
            if not ended:
                raise EngineError(
                    "the step thread did not end, so memory of its model is still here"
                )

    async def _stop_thread(self, parts: HfParts) -> bool:
        with contextlib.suppress(EngineCrashed, TimeoutError):
            end = parts.thread.run_command(
                lambda: parts.core.abort_requests(None, AbortReason.ENGINE)
            )
            await asyncio.wait_for(asyncio.wrap_future(end), THREAD_STOP_SECONDS)
        parts.memory.forget_spill()
        ended = await asyncio.to_thread(parts.thread.stop, THREAD_STOP_SECONDS)
        if not ended:
            logger.error("the step thread did not end within %.0f s", THREAD_STOP_SECONDS)
        self._end_streams("the engine was stopped")
        return ended

    @override
    def validate(self, request: EngineRequest) -> None:
        parts = self._require_parts()
        loaded = parts.loaded
        check_model_limits(request, loaded)
        check_pictures(request, loaded.pictures)
        if parts.routers is not None:
            check_route_size(request, parts.routers.row_bytes)
        if request.cache_salt is not None:
            raise InvalidRequest(
                "cache_salt", "the hf engine has no prefix cache to salt: leave cache_salt out"
            )

    @override
    async def prepare_pictures(self, pictures: Sequence[Picture]) -> None:
        encoder = self._require_parts().encoder
        if encoder is not None:
            await asyncio.to_thread(encoder.prepare_pictures, pictures)

    @override
    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineDelta]:
        parts = self._require_parts()
        name = request.request_id
        check_id_unused(name, self._streams)
        deltas: asyncio.Queue[EngineDelta] = asyncio.Queue()
        stream = self._streams[name] = request, deltas
        finished = False
        try:
            self._arrivals += 1
            arrival, grammar = self._arrivals, None
            if request.grammar is not None:
                grammar = await self._compile_grammar(name, request.grammar)
            if deltas.empty():  # else it was aborted while it was compiled
                await self._run_command(
                    lambda core: core.add_request(
                        make_sequence(
                            request,
                            parts.loaded,
                            arrival,
                            deltas.put_nowait,
                            encoder=parts.encoder,
                            grammar=grammar,
                            routers=parts.routers,
                        )
                    )
                )
            while not finished:
                delta = await deltas.get()
                finished = delta.stop_reason is not None
                yield delta
        finally:
            if self._streams.get(name) is stream:
                del self._streams[name]
            if not finished:
                parts.thread.run_command(
                    lambda: parts.core.abort_requests([name], AbortReason.CLIENT)
                )

    async def _compile_grammar(self, name: str, grammar: Grammar) -> GrammarState:
        compiler = self._require_parts().grammars
        assert compiler is not None, "the capabilities say so"
        self._compiling.add(name)
        try:
            return await asyncio.to_thread(compiler.compile_grammar, grammar.compiled)
        except ValueError as error:
            raise InvalidRequest("structured", f"can't be compiled: {error}") from error
        finally:
            self._compiling.discard(name)

    @override
    async def abort(self, request_ids: Collection[str] | None, reason: AbortReason) -> set[str]:
        early = {name for name in self._compiling if request_ids is None or name in request_ids}
        for request, deltas in map(self._streams.__getitem__, early):
            deltas.put_nowait(EngineDelta.of_abort(request, reason))
        known = await self._run_command(lambda core: core.abort_requests(request_ids, reason))
        return known | early

    @override
    async def hold_admission(self) -> None:
        def hold(core: BatchCore) -> None:
            core.queue.is_open = False

        await self._run_command(hold)

    @override
    async def pause(self) -> None:
        def pause(core: BatchCore) -> None:
            core.paused = True

        await self._run_command(pause)

    @override
    async def resume(self) -> None:
        def resume(core: BatchCore) -> None:
            core.check_weights()
            core.paused, core.queue.is_open = False, True

        await self._run_command(resume)

    @override
    async def reset_cache(self) -> None:
        """Do nothing: no prefix outlives its request here."""

    @override
    def alive(self) -> str | None:
        if self._parts is None:
            return self._ended
        return self._parts.thread.find_problem(self._settings.step_deadline_seconds) or self._ended

    @override
    def metrics(self) -> str:
        return "" if self._parts is None else self._parts.render_metrics()

    async def _run_command(self, command: Callable[[BatchCore], T]) -> T:
        parts = self._require_parts()
        return await asyncio.wrap_future(parts.thread.run_command(lambda: command(parts.core)))

    def _deliver_deltas(self, deliveries: list[DeltaDelivery]) -> None:
        """Hand new tokens to their readers, in order; called in the step thread."""

        def hand_over() -> None:
            for sequence, delta in deliveries:
                sequence.sink(delta)

        if deliveries:
            self._call_in_loop(hand_over)

    def _on_crash(self, why: str) -> None:
        """End all streams; called in the step thread just before it ends."""
        self._call_in_loop(lambda: self._end_streams(why))

    def _call_in_loop(self, callback: Callable[[], object]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    def _end_streams(self, why: str) -> None:
        self._ended = why
        self.on_end(why)
        for request, deltas in self._streams.values():
            deltas.put_nowait(EngineDelta.of_abort(request, AbortReason.ENGINE))
