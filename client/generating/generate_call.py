"""One call of `generate`: `n` outputs, each seen through on its own, joined into one result."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rollout_client.errors import RequestError, RolloutError
from rollout_client.results import GenerateResult, join_results
from rollout_common.wire import GenerateRequest

from .attempt_verdicts import RequestPolicy
from .attempts import OutputGeneration, PoolContext
from .generate_options import OnVersionChange

MAX_SEED = 2**63


@dataclass(frozen=True, slots=True)
class CallOptions:
    """How a call is to be seen through, apart from the request itself."""

    on_version_change: OnVersionChange
    max_failures: int
    group_id: str | None = None
    deterministic: bool = False


class GenerateCall:
    """A caller's request. Run it once.

    `n` becomes single requests with the seeds that one worker would have derived, so that outputs
    spread over replicas, and one that breaks does not affect the others.
    """

    def __init__(
        self,
        shared: PoolContext,
        request: GenerateRequest,
        options: CallOptions,
        on_tokens: Callable[[int], None] = lambda index: None,
    ) -> None:
        self._shared = shared
        self._request = request
        self._began = time.monotonic()
        self.request_id = request.request_id or uuid.uuid4().hex
        self.session_id = request.session_id or self.request_id
        key = options.group_id or request.session_id
        if key is None and options.deterministic:
            key = self.request_id
        policy = RequestPolicy(
            key=key,
            session_id=self.session_id,
            until=self._began + request.deadline_seconds,
            on_version_change=options.on_version_change,
            max_failures=options.max_failures,
        )
        self.outputs = [
            OutputGeneration(shared, single, request_id, index, policy, partial(on_tokens, index))
            for index, (request_id, single) in enumerate(self._single_requests())
        ]

    def _single_requests(self) -> Sequence[tuple[str, GenerateRequest]]:
        sampling = self._request.sampling
        if sampling.n == 1:
            return [(self.request_id, self._request)]
        found = []
        for index in range(sampling.n):
            seed = None if sampling.seed is None else (sampling.seed + index) % MAX_SEED
            one = sampling.model_copy(update={"n": 1, "seed": seed})
            request = self._request.model_copy(update={"sampling": one})
            found.append((f"{self.request_id}.{index}", request))
        return found

    def to_result(self) -> GenerateResult:
        """Return what there is so far; outputs that have not ended are marked aborted."""
        return join_results(
            self.request_id,
            self.session_id,
            len(self._request.token_ids),
            time.monotonic() - self._began,
            [output.to_report for output in self.outputs],
        )

    async def run_call(self) -> GenerateResult:
        """See all outputs through.

        Raises:
            RequestError: One of them failed; the others ran to their end first. `kept` has them all.
        """
        outcome = "cancelled"
        result = None
        try:
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
            self._shared.hook.request(outcome, time.monotonic() - self._began, result)

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
