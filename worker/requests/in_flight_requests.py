"""Requests in flight: one pump per output, abort with partial output, deadlines.

A *flight* is an accepted request; an *output* is one of its `n` continuations, and one request to
the engine. Whatever happens, each output of a flight is finished by the model, or aborted with a
reason and what it has so far.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from functools import partial

from rollout_common import wire
from rollout_common.wire import AbortReason, WeightsId
from rollout_worker.core.worker_runtime import WorkerRuntime
from rollout_worker.engine import EngineCrashed, EngineRequest, InvalidRequest

from .admission_checks import invalid_problem
from .running_output import RunningOutput
from .score_frames import prompt_frames, response_pieces
from .settings import ABORT_TIMEOUT_SECONDS, ANSWER_TIMEOUT_SECONDS

logger = logging.getLogger(__name__)


class InFlightRequest:
    """An accepted request."""

    def __init__(
        self, request_id: str, requests: Sequence[EngineRequest], exact: WeightsId | None
    ) -> None:
        self.request_id = request_id
        self.exact = exact
        self.outputs = [RunningOutput(index, request) for index, request in enumerate(requests)]
        self.landing = len(self.outputs)
        """Outputs whose pump has not ended."""
        self.created = time.monotonic()
        self.first_token: float | None = None
        self.ended: float | None = None
        self.fresh = asyncio.Event()
        """Set when there is more to read; a queue would grow while its reader is slow or has stopped."""
        self.done = asyncio.Event()
        self.refusal: InvalidRequest | None = None
        """Why the engine refused it after it was accepted."""
        self.deadline: asyncio.TimerHandle | None = None

    @property
    def logprobs_kind(self) -> wire.LogprobsOf | None:
        """Kind of its logprobs; None if it has none."""
        return self.outputs[0].request.logprobs

    def check_answered(self) -> None:
        """Make sure that a finished flight has an answer.

        Raises:
            ProblemError: The engine refused it before it generated a token.
        """
        if self.refusal is not None and not any(output.token_ids for output in self.outputs):
            raise invalid_problem(self.refusal)

    async def wait_finished(self, deadline_seconds: float) -> None:
        """Wait until it ends, by its own deadline at the latest; raises as `check_answered` does."""
        async with asyncio.timeout(deadline_seconds + ANSWER_TIMEOUT_SECONDS):
            await self.done.wait()
        self.check_answered()

    def prompt_frames(self) -> Iterator[wire.PromptLogprobs]:
        """Yield the scores of the prompt, if there are any, in frames of a stream."""
        scores = self.outputs[0].prompt
        return iter(()) if scores is None else prompt_frames(scores)

    async def stream_deltas(self, deadline_seconds: float) -> AsyncIterator[wire.StreamDelta]:
        """Yield its tokens as they come, to one reader, until it ends; raises as `check_answered` does."""
        until = asyncio.get_running_loop().time() + deadline_seconds + ANSWER_TIMEOUT_SECONDS
        read, ended = [0] * len(self.outputs), False
        while not ended:
            async with asyncio.timeout_at(until):
                await self.fresh.wait()
            self.fresh.clear()
            ended = self.done.is_set()  # read first: tokens that come after it are read once more
            for place, output in enumerate(self.outputs):
                delta = output.delta_since(read[place])
                if delta is not None:
                    read[place] += len(delta.token_ids)
                    yield delta
                if read[place] < len(output.token_ids):  # more than a frame holds
                    self.fresh.set()
                    ended = False
                    await asyncio.sleep(0)
        self.check_answered()

    def to_response(self) -> wire.GenerateResponse:
        """The answer of a finished flight."""
        return wire.GenerateResponse(
            request_id=self.request_id,
            logprobs_of=self.logprobs_kind,
            outputs=tuple(output.to_result() for output in self.outputs),
            usage=self._token_usage(),
            timing=self._measured_timing(),
        )

    @property
    def has_scores(self) -> bool:
        """Whether its answer may be long: it has scores of the prompt, the most likely tokens, or replay records."""
        request = self.outputs[0].request
        scored = request.top_logprobs > 0 or request.scored is not None
        return scored or request.masks or request.routed_from is not None

    def response_pieces(self) -> AsyncIterator[bytes]:
        """Return the JSON of `to_response` with all scores, piece by piece."""
        arrays = [output.response_arrays() for output in self.outputs]
        return response_pieces(self.to_response(), arrays, self.outputs[0].prompt)

    def final_event(self) -> wire.StreamDone:
        """The closing event of a finished flight."""
        return wire.StreamDone(
            request_id=self.request_id,
            logprobs_of=self.logprobs_kind,
            outputs=tuple(output.to_done() for output in self.outputs),
            usage=self._token_usage(),
            timing=self._measured_timing(),
        )

    def _token_usage(self) -> wire.Usage:
        return wire.Usage(
            prompt_tokens=len(self.outputs[0].request.token_ids),
            completion_tokens=sum(len(output.token_ids) for output in self.outputs),
            cached_tokens=self.cached_tokens,
        )

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt, which counts once, that were in the prefix cache for at least one output."""
        return max(output.cached_tokens for output in self.outputs)

    def _measured_timing(self) -> wire.Timing:
        assert self.ended is not None, "only a finished flight is answered"
        first = None if self.first_token is None else self.first_token - self.created
        return wire.Timing(
            queued_seconds=min(output.queued_seconds for output in self.outputs),
            first_token_seconds=first,
            total_seconds=self.ended - self.created,
            preemptions=sum(output.preemptions for output in self.outputs),
        )


class InFlightRequests:
    """All requests in flight on one worker, by request id."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime
        self._flights: dict[str, InFlightRequest] = {}
        self._landing = 0
        """Outputs of all flights whose pump has not ended; counted here, as each new request asks for it."""
        self._aborts: set[asyncio.Task[None]] = set()
        runtime.telemetry.watch_load(
            lambda: runtime.engine_stats().running, lambda: self.waiting_count
        )

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._flights

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def unfinished_outputs(self) -> dict[str, RunningOutput]:
        """All unfinished outputs, by the engine's request id."""
        return {
            output.request.request_id: output
            for flight in self._flights.values()
            for output in flight.outputs
            if output.stop_reason is None
        }

    @property
    def waiting_count(self) -> int:
        """Accepted outputs that the engine has not started."""
        return max(0, self._landing - self._runtime.engine_stats().running)

    def outputs_pinned_elsewhere(self, active: WeightsId) -> list[RunningOutput]:
        """Unfinished outputs that asked for exactly one identity, other than this one."""
        return [
            output
            for flight in self._flights.values()
            if flight.exact not in (None, active)
            for output in flight.outputs
            if output.stop_reason is None
        ]

    def launch_request(self, flight: InFlightRequest, deadline_seconds: float) -> None:
        """Register a flight and start its pumps; call it right after the admission check."""
        self._flights[flight.request_id] = flight
        self._landing += flight.landing
        loop = asyncio.get_running_loop()
        flight.deadline = loop.call_later(deadline_seconds, self._expire_request, flight)
        self._runtime.telemetry.prompt_tokens.inc(len(flight.outputs[0].request.token_ids))
        for output in flight.outputs:
            output.pump = asyncio.create_task(self._pump_output(flight, output))
            # Not in the pump itself: one that is cancelled before its first step runs nothing.
            output.pump.add_done_callback(partial(self._finish_output, flight, output))

    def _expire_request(self, flight: InFlightRequest) -> None:
        abort = asyncio.create_task(self.abort_requests([flight], AbortReason.DEADLINE))
        self._aborts.add(abort)
        abort.add_done_callback(self._aborts.discard)

    async def _pump_output(self, flight: InFlightRequest, output: RunningOutput) -> None:
        engine = self._runtime.engine
        # It may have been aborted since admission: the engine doesn't know about it yet.
        if output.aborting is not None or engine is None:
            return
        try:
            async for delta in engine.generate(output.request):
                output.append_delta(delta)
                if delta.token_ids:
                    self._count_tokens(flight, output, len(delta.token_ids))
                    flight.fresh.set()
        except EngineCrashed as error:
            self._runtime.report_crash(str(error))
        except InvalidRequest as error:
            flight.refusal = error
        except asyncio.CancelledError:
            # Only `abort_outputs` and `fail_all` cancel a pump, after they have recorded why.
            pass
        except Exception:
            logger.exception(
                "the engine failed during a request", extra={"request": flight.request_id}
            )

    def _count_tokens(self, flight: InFlightRequest, output: RunningOutput, tokens: int) -> None:
        now, telemetry = time.monotonic(), self._runtime.telemetry
        if flight.first_token is None:
            flight.first_token = now
            # Now, not at its end: a request may go on for half an hour.
            telemetry.first_token_seconds.observe(now - flight.created)
        if output.latest is not None:
            telemetry.inter_token_seconds.observe((now - output.latest) / tokens)
        output.latest = now
        telemetry.generated_tokens.inc(tokens)

    def _finish_output(
        self, flight: InFlightRequest, output: RunningOutput, _: asyncio.Task[None]
    ) -> None:
        telemetry = self._runtime.telemetry
        output.mark_aborted(output.aborting or AbortReason.ENGINE)
        assert output.stop_reason is not None
        telemetry.requests.labels(output.stop_reason.value).inc()
        flight.landing -= 1
        self._landing -= 1
        if flight.landing:
            return
        flight.ended = time.monotonic()
        if flight.deadline is not None:
            flight.deadline.cancel()
        telemetry.request_seconds.observe(flight.ended - flight.created)
        del self._flights[flight.request_id]
        flight.done.set()
        flight.fresh.set()
        self._runtime.changed.notify_all()

    async def abort_requests(self, flights: Iterable[InFlightRequest], reason: AbortReason) -> None:
        """End these flights with their partial output; returns once they have ended."""
        outputs = [o for flight in flights for o in flight.outputs if o.stop_reason is None]
        await self.abort_outputs(outputs, reason)

    async def abort_outputs(self, outputs: Collection[RunningOutput], reason: AbortReason) -> None:
        """End single outputs with what they have so far; returns once they have ended."""
        if not outputs:
            return
        for output in outputs:
            output.aborting = output.aborting or reason
        runtime = self._runtime
        if runtime.engine is not None:
            ids = {output.request.request_id for output in outputs}
            try:
                await runtime.call_engine(
                    runtime.engine.abort(ids, reason), ABORT_TIMEOUT_SECONDS, "abort"
                )
            except EngineCrashed:
                logger.warning("the engine died while requests were being aborted")
        pumps = {output.pump for output in outputs if output.pump is not None}
        _, late = await asyncio.wait(pumps, timeout=ABORT_TIMEOUT_SECONDS)
        for pump in late:
            pump.cancel()

    async def abort_all(self, reason: AbortReason) -> None:
        """End everything in flight, with partial output."""
        await self.abort_requests(list(self._flights.values()), reason)

    async def abort_ids(self, ids: Collection[str], reason: AbortReason) -> set[str]:
        """End the named requests; return those that were in flight."""
        known = {request_id for request_id in ids if request_id in self._flights}
        await self.abort_requests([self._flights[request_id] for request_id in known], reason)
        return known

    def request_ids(self) -> list[str]:
        """Ids of all requests in flight."""
        return list(self._flights)

    def fail_all(self) -> None:
        """End everything as aborted (`engine`); the engine is dead and is not asked."""
        for output in self.unfinished_outputs.values():
            output.aborting = output.aborting or AbortReason.ENGINE
            if output.pump is not None:
                output.pump.cancel()
