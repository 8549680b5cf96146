"""One call of `generate`: `n` outputs, each generated on its own, joined into a result or a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Self

from rollout_client.errors import RequestError, RolloutError
from rollout_client.results import GenerateResult
from rollout_common import tracing
from rollout_common.wire import GenerateRequest, StreamDelta, Timing, Usage

from .attempt_verdicts import RequestPolicy
from .attempts import OutputGeneration, PoolContext

MAX_SEED = 2**63


@dataclass(eq=False, repr=False)
class GenerateCall:
    """A caller's request. Run it once.

    `n` becomes single requests with the seeds that one worker would have derived, so that outputs
    spread over replicas, and one that breaks does not affect the others. `pictures`: base64 of the pictures whose
    hashes the request has, by hash.
    """

    shared: PoolContext
    request: GenerateRequest
    request_id: str
    policy: RequestPolicy
    pictures: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self.outputs = [
            OutputGeneration(self.shared, single, name, index, self.policy, self.pictures)
            for index, (name, single) in enumerate(self._single_requests())
        ]

    def _single_requests(self) -> Iterator[tuple[str, GenerateRequest]]:
        sampling = self.request.sampling
        if sampling.n == 1:
            yield self.request_id, self.request
            return
        for index in range(sampling.n):
            seed = None if sampling.seed is None else (sampling.seed + index) % MAX_SEED
            one = sampling.model_copy(update={"n": 1, "seed": seed})
            changes: dict[str, object] = {"sampling": one}
            if index:  # the outputs share their prompt: the first one scores it
                changes["prompt_logprobs"] = None
            request = self.request.model_copy(update=changes)
            yield f"{self.request_id}.{index}", request

    def to_result(self) -> GenerateResult:
        """Return what there is so far; outputs that have not ended are marked aborted."""
        outputs = tuple(each.output for each in self.outputs)
        usages = [each.usage for each in self.outputs]
        began = [each.first_token_at for each in self.outputs if each.first_token_at is not None]
        kinds = (each.logprobs_of for each in self.outputs)
        return GenerateResult(
            request_id=self.request_id,
            session_id=self.policy.session_id,
            logprobs_of=next((kind for kind in kinds if kind is not None), None),
            outputs=outputs,
            prompt_logprobs=self.outputs[0].draft.prompt.to_prompt(),
            usage=Usage(
                prompt_tokens=len(self.request.token_ids),
                completion_tokens=sum(len(output.token_ids) for output in outputs),
                cached_tokens=max(usage.cached_tokens for usage in usages),
            ),
            timing=Timing(
                queued_seconds=min(usage.queued_seconds for usage in usages),
                first_token_seconds=min(began) - self._began if began else None,
                total_seconds=time.monotonic() - self._began,
                preemptions=sum(usage.preemptions for usage in usages),
            ),
            attempts=tuple(attempt for usage in usages for attempt in usage.attempts),
        )

    async def run_call(self) -> GenerateResult:
        """Run every output to its end.

        Raises:
            RequestError: One of them failed; the others ran to their end first. `kept` has them all.
        """
        outcome = "cancelled"
        result = None
        try:
            with tracing.open_span("generate", attributes={"rollout.request_id": self.request_id}):
                await self._run_outputs()
            result = self.to_result()
            outcome = "ok"
            return result
        except RolloutError as error:
            outcome = type(error).__name__
            if isinstance(error, RequestError):
                kept = self.to_result()
                error.kept = kept if any(output.token_ids for output in kept.outputs) else None
            raise
        finally:
            self.shared.hook.request(outcome, time.monotonic() - self._began, result)

    async def _run_outputs(self) -> None:
        if len(self.outputs) == 1:
            await self.outputs[0].run_attempts()
            return
        tasks = [asyncio.create_task(output.run_attempts()) for output in self.outputs]
        try:
            await asyncio.wait(tasks)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        failed = [each for each in ended if isinstance(each, BaseException)]
        if failed:
            raise failed[0]


class GenerationStream:
    """A generation as deltas, of which no token is taken back: iterate once, inside `async with`.

    Afterwards `result` has everything.
    """

    def __init__(self, call: GenerateCall) -> None:
        self._fresh = asyncio.Event()
        self._call = call
        for output in call.outputs:
            output.on_tokens = self._fresh.set
        self._given = [0] * len(call.outputs)
        self._task: asyncio.Task[GenerateResult] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the generation if it is still running."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            if not self._task.cancelled():
                self._task.exception()  # marks it as retrieved: the caller left early

    @property
    def result(self) -> GenerateResult:
        """The result: final once the iteration has ended, until then what there is so far."""
        task = self._task
        if task is not None and task.done() and not task.cancelled() and not task.exception():
            return task.result()
        return self._call.to_result()

    async def __aiter__(self) -> AsyncGenerator[StreamDelta]:
        """Yield deltas; their spans count from the output's first token.

        Raises:
            RequestError: After the last delta, if the generation failed.
        """
        if self._task is not None:
            raise RuntimeError("a stream can be iterated only once")
        self._task = asyncio.create_task(self._call.run_call())
        self._task.add_done_callback(lambda _: self._fresh.set())
        while True:
            self._fresh.clear()
            ended = self._task.done()
            for delta in self._new_deltas(whole=ended):
                yield delta
            if ended:
                self._task.result()
                return
            await self._fresh.wait()

    def _new_deltas(self, *, whole: bool) -> list[StreamDelta]:
        deltas = []
        for index, output in enumerate(self._call.outputs):
            draft, start = output.draft, self._given[index]
            end = len(draft) - (0 if whole else output.retractable)
            if end > start:
                deltas.append(draft.delta_between(start, end))
                self._given[index] = end
        return deltas
