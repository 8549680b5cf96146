"""Requests into vLLM, and their outputs back to who reads them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from rollout_common.wire import AbortReason, SamplingParams
from rollout_worker.engine import EngineCrashed, EngineDelta, EngineRequest, InvalidRequest
from rollout_worker.engines.request_checks import check_id_unused, make_stop_checker

from .intake import to_sampling_params
from .launch import LaunchedVllm
from .steering import SchedulerControl
from .vllm_streams import VllmStream, WeightLabels


class VllmRequests:
    """All requests of one vLLM."""

    def __init__(
        self, launched: LaunchedVllm, steering: SchedulerControl, labels: WeightLabels
    ) -> None:
        self._launched = launched
        self._steering = steering
        self._labels = labels
        self._arrivals = 0
        self._over = False
        self._cleaning: set[asyncio.Task[None]] = set()

    def stop_waiting(self) -> None:
        """Let no output wait for its admission any more: vLLM is about to be stopped."""
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
        stream = streams[name] = VllmStream(request, self._arrivals, stops)
        try:
            async for delta in self._run_stream(stream):
                yield delta
        finally:
            self._steering.note_ended(name)
            if stream.inside is not None:
                self._abort_in_background(stream.inside)

    async def _run_stream(self, stream: VllmStream) -> AsyncIterator[EngineDelta]:
        """Let an output take its turns until one of them ends it."""
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
                # A token that arrives after its output was taken back was never made.
                if not stream.returned:
                    fresh = not stream.produced
                    delta = stream.take_output(output, self._labels)
                    if fresh and stream.produced:
                        self._steering.note_begun(stream.name)
                    yield delta

    async def _submit_request(self, stream: VllmStream) -> Any:
        """Hand an output over to vLLM; returns where its own outputs arrive."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input

        launched, request = self._launched, stream.request
        llm, config = launched.llm, launched.config
        if len(self._steering.running) == 1:  # until now there was nothing to step for
            launched.steps.last = time.monotonic()
        stream.started = stream.started or time.monotonic()
        salt = self._steering.cache_salt(request.cache_salt)
        ranks, rank = config.parallel_config.data_parallel_size, None
        if ranks > 1 and request.session_id is not None:
            rank = hash(request.session_id) % ranks
        ordered = config.scheduler_config.policy == "priority"
        try:
            collector = await llm.add_request(
                stream.name,
                tokens_input(list(request.token_ids), cache_salt=salt),
                to_sampling_params(request, launched.model),
                priority=request.priority if ordered else 0,
                data_parallel_rank=rank,
            )
            stream.inside = collector.request_id
            stream.state = llm.output_processor.request_states.get(collector.request_id)
            if stream.aborting is not None or stream.returned:
                await llm.abort(stream.inside, internal=True)
        except (VLLMClientError, ValueError) as error:  # of this request, the others go on
            field = getattr(error, "parameter", None)
            known = field in SamplingParams.model_fields
            raise InvalidRequest(
                f"sampling.{field}" if known else "sampling", f"vLLM refuses it: {error}"
            ) from error
        except Exception as error:
            raise _crash_error(error) from error
        return collector

    def _abort_in_background(self, inside: str) -> None:
        """Make vLLM forget an output that nobody reads any more."""

        async def forget() -> None:
            with contextlib.suppress(Exception):  # a dead vLLM has forgotten it
                await self._launched.llm.abort(inside, internal=True)

        task = asyncio.get_running_loop().create_task(forget())
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)


def _crash_error(error: Exception) -> EngineCrashed:
    return EngineCrashed(f"vLLM failed: {type(error).__name__}: {error}")
