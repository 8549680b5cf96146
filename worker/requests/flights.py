"""Requests in flight: one pump per output, abort with partial output, deadlines; whole.

A *flight* is an accepted request; an *output* is one of its `n` continuations, and one request to
the engine. Whatever happens, a flight ends with every output finished by the model, or aborted with
a reason and its partial output.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from functools import partial

from rollout_worker.core.runtime import Runtime
from rollout_worker.engine import EngineCrashed, EngineDelta, EngineRequest, InvalidRequest
from rollout_worker.schemas import (
    AbortReason,
    DoneOutput,
    GenerateResponse,
    LogprobsOf,
    StopReason,
    StreamDelta,
    StreamDone,
    Timing,
    Usage,
    WeightsId,
)

from .admission import invalid
from .outputs import Output

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 90.0
"""How long a request may outlive its own deadline before the worker gives up on it."""

ABORT_SECONDS = 30.0
"""How long the engine may take to end an aborted request; then the worker ends it itself."""


class Flight:
    """An accepted request."""

    def __init__(
        self, request_id: str, requests: Sequence[EngineRequest], exact: WeightsId | None
    ) -> None:
        self.request_id = request_id
        self.exact = exact
        self.outputs = [Output(index, request) for index, request in enumerate(requests)]
        self.landing = len(self.outputs)
        """Outputs whose pump has not ended."""
        self.created = time.monotonic()
        self.first_token: float | None = None
        self.ended: float | None = None
        self.fresh = asyncio.Event()
        """Set when there is more to read: no queue, as its reader may be slow, or read no more."""
        self.done = asyncio.Event()
        self.refusal: InvalidRequest | None = None
        """Why the engine refused it after it was accepted."""
        self.deadline: asyncio.TimerHandle | None = None

    @property
    def logprobs_of(self) -> LogprobsOf | None:
        """Kind of its logprobs; None if it has none."""
        return self.outputs[0].request.logprobs

    def check(self) -> None:
        """Make sure that a finished flight has an answer.

        Raises:
            ProblemError: the engine refused it before it generated a token.
        """
        if self.refusal is not None and not any(output.token_ids for output in self.outputs):
            raise invalid(self.refusal)

    async def finish(self, deadline_seconds: float) -> None:
        """Wait until it ends, by its own deadline at the latest.

        Raises:
            ProblemError: see `check`.
        """
        async with asyncio.timeout(deadline_seconds + ANSWER_SECONDS):
            await self.done.wait()
        self.check()

    async def stream(self, deadline_seconds: float) -> AsyncIterator[StreamDelta]:
        """Yield what it has made since the last look, to one reader, until it ends.

        Raises:
            ProblemError: see `check`.
        """
        until = asyncio.get_running_loop().time() + deadline_seconds + ANSWER_SECONDS
        read, ended = [0] * len(self.outputs), False
        while not ended:
            async with asyncio.timeout_at(until):
                await self.fresh.wait()
            self.fresh.clear()
            ended = self.done.is_set()  # asked first: what comes meanwhile is read once more
            for place, output in enumerate(self.outputs):
                delta = output.since(read[place])
                if delta is not None:
                    read[place] += len(delta.token_ids)
                    yield delta
        self.check()

    def response(self) -> GenerateResponse:
        """The answer of a finished flight."""
        return GenerateResponse(
            request_id=self.request_id,
            logprobs_of=self.logprobs_of,
            outputs=tuple(output.result() for output in self.outputs),
            usage=self._usage(),
            timing=self._timing(),
        )

    def stream_done(self) -> StreamDone:
        """The closing event of a finished flight."""
        return StreamDone(
            request_id=self.request_id,
            logprobs_of=self.logprobs_of,
            outputs=tuple(
                DoneOutput(
                    index=output.index,
                    stop_reason=output.stop_reason or StopReason.ABORTED,
                    stop_match=output.stop_match,
                    abort_reason=output.abort_reason,
                    **output.abort_cause,
                )
                for output in self.outputs
            ),
            usage=self._usage(),
            timing=self._timing(),
        )

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.outputs[0].request.token_ids),
            completion_tokens=sum(len(output.token_ids) for output in self.outputs),
            cached_tokens=sum(output.cached_tokens for output in self.outputs),
        )

    def _timing(self) -> Timing:
        assert self.ended is not None, "only a finished flight is answered"
        first = None if self.first_token is None else self.first_token - self.created
        return Timing(
            queued_seconds=min(output.queued_seconds for output in self.outputs),
            first_token_seconds=first,
            total_seconds=self.ended - self.created,
            preemptions=sum(output.preemptions for output in self.outputs),
        )


class Flights:
    """All requests in flight on one worker, by request id."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._flights: dict[str, Flight] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        runtime.telemetry.watch_load(lambda: runtime.stats().running, lambda: self.waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._flights

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def unfinished(self) -> dict[str, Output]:
        """All unfinished outputs, by the engine's request id."""
        return {
            output.request.request_id: output
            for flight in self._flights.values()
            for output in flight.outputs
            if output.stop_reason is None
        }

    @property
    def waiting(self) -> int:
        """Accepted outputs that the engine has not started."""
        return max(0, len(self.unfinished) - self._runtime.stats().running)

    def exact_elsewhere(self, active: WeightsId) -> list[Output]:
        """Unfinished outputs that asked for exactly one identity, other than this one."""
        return [
            output
            for flight in self._flights.values()
            if flight.exact not in (None, active)
            for output in flight.outputs
            if output.stop_reason is None
        ]

    def launch(self, flight: Flight, deadline_seconds: float) -> None:
        """Register a flight and start its pumps; call it right after the admission check."""
        self._flights[flight.request_id] = flight
        loop = asyncio.get_running_loop()
        flight.deadline = loop.call_later(deadline_seconds, self._expire, flight)
        self._runtime.telemetry.prompt_tokens.inc(len(flight.outputs[0].request.token_ids))
        for output in flight.outputs:
            output.pump = asyncio.create_task(self._pump(flight, output))
            # Not in the pump itself: one that is cancelled before its first step runs nothing.
            output.pump.add_done_callback(partial(self._land, flight, output))

    def _expire(self, flight: Flight) -> None:
        abort = asyncio.create_task(self.abort([flight], AbortReason.DEADLINE))
        self._aborts.add(abort)
        abort.add_done_callback(self._aborts.discard)

    async def _pump(self, flight: Flight, output: Output) -> None:
        try:
            async for delta in self._generate(output):
                self._take(flight, output, delta)
        except EngineCrashed as error:
            self._runtime.crashed(str(error))
        except InvalidRequest as error:
            flight.refusal = error
        except asyncio.CancelledError:
            # Only `abort` and `fail` cancel a pump, after they have recorded why.
            pass
        except Exception:
            logger.exception(
                "the engine failed during a request", extra={"request": flight.request_id}
            )

    async def _generate(self, output: Output) -> AsyncIterator[EngineDelta]:
        engine = self._runtime.engine
        # It may have been aborted since admission: the engine doesn't know about it yet.
        if output.aborting is not None or engine is None:
            return
        async for delta in engine.generate(output.request):
            yield delta

    def _take(self, flight: Flight, output: Output, delta: EngineDelta) -> None:
        output.take(delta)
        if delta.token_ids:
            self._count_tokens(flight, output, len(delta.token_ids))
            flight.fresh.set()

    def _count_tokens(self, flight: Flight, output: Output, tokens: int) -> None:
        now, telemetry = time.monotonic(), self._runtime.telemetry
        if flight.first_token is None:
            flight.first_token = now
            # Now, not at its end: a request may go on for half an hour.
            telemetry.first_token_seconds.observe(now - flight.created)
        if output.latest is not None:
            telemetry.inter_token_seconds.observe((now - output.latest) / tokens)
        output.latest = now
        telemetry.generated_tokens.inc(tokens)

    def _land(self, flight: Flight, output: Output, _: asyncio.Task[None]) -> None:
        telemetry = self._runtime.telemetry
        output.end(output.aborting or AbortReason.ENGINE)
        assert output.stop_reason is not None
        telemetry.requests.labels(output.stop_reason.value).inc()
        flight.landing -= 1
        if flight.landing:
            return
        flight.ended = time.monotonic()
        if flight.deadline is not None:
            flight.deadline.cancel()
        telemetry.request_seconds.observe(flight.ended - flight.created)
        del self._flights[flight.request_id]
        flight.done.set()
        flight.fresh.set()
        self._runtime.changed.fire()

    async def abort(self, flights: Iterable[Flight], reason: AbortReason) -> None:
        """End these flights with their partial output; return once they have ended."""
        outputs = [o for flight in flights for o in flight.outputs if o.stop_reason is None]
        await self.abort_outputs(outputs, reason)

    async def abort_outputs(self, outputs: Collection[Output], reason: AbortReason) -> None:
        """End single outputs with what they have so far; return once they have ended."""
        if not outputs:
            return
        for output in outputs:
            output.aborting = output.aborting or reason
        runtime = self._runtime
        if runtime.engine is not None:
            ids = {output.request.request_id for output in outputs}
            try:
                await runtime.call(runtime.engine.abort(ids, reason), ABORT_SECONDS, "abort")
            except EngineCrashed:
                logger.warning("the engine died while requests were being aborted")
        pumps = {output.pump for output in outputs if output.pump is not None}
        _, late = await asyncio.wait(pumps, timeout=ABORT_SECONDS)
        for pump in late:
            pump.cancel()

    async def abort_all(self, reason: AbortReason) -> None:
        """End everything in flight, with partial output."""
        await self.abort(list(self._flights.values()), reason)

    async def abort_ids(self, ids: Collection[str], reason: AbortReason) -> set[str]:
        """End the named requests; return those that were in flight."""
        known = {request_id for request_id in ids if request_id in self._flights}
        await self.abort([self._flights[request_id] for request_id in known], reason)
        return known

    def ids(self) -> list[str]:
        """Ids of all requests in flight."""
        return list(self._flights)

    def fail(self) -> None:
        """End everything as aborted (`engine`), without the engine, which is dead."""
        for output in self.unfinished.values():
            output.aborting = output.aborting or AbortReason.ENGINE
            if output.pump is not None:
                output.pump.cancel()
