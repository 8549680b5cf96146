"""What a caller gets: the worker's answer, joined over all attempts, and how it came about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rollout_common.wire import (
    GenerateOutput,
    GenerateResponse,
    LogprobsOf,
    Seconds,
    Timing,
    Usage,
    Wire,
)

Outcome = Literal["finished", "aborted", "refused", "broken", "moved"]
"""How an attempt ended; `moved`: the weights changed, and the caller does not want that."""


class AttemptReport(Wire):
    """One request to one worker."""

    request_id: str
    replica: str
    outcome: Outcome
    cause: str = ""
    """The abort reason, the problem's slug, or what broke; empty for `finished`."""
    tokens: int = 0
    """Sampled tokens that it gave."""
    seconds: Seconds


class OutputReport(Wire):
    """One output, finished or given up, with its share of usage and timing."""

    output: GenerateOutput
    logprobs_of: LogprobsOf | None
    cached_tokens: int = 0
    queued_seconds: Seconds = 0.0
    first_token_seconds: Seconds | None = None
    preemptions: int = 0
    attempts: tuple[AttemptReport, ...] = ()


class GenerateResult(GenerateResponse):
    """The worker's answer, however many attempts and replicas it took.

    `outputs[i].token_ids: [T]`, `.logprobs: [T]`, `.weights`: spans that cover `[0, T)`. Usage
    counts every token once: the prompt as given, the outputs as returned. `timing` is as the caller
    saw it.
    """

    session_id: str
    attempts: tuple[AttemptReport, ...] = ()

    @property
    def output(self) -> GenerateOutput:
        """The first output; the only one unless `n` was raised."""
        return self.outputs[0]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first output."""
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> tuple[float, ...] | None:
        """Logprobs of the first output, if asked for."""
        return self.outputs[0].logprobs


def join_results(
    request_id: str,
    session_id: str,
    prompt_tokens: int,
    total_seconds: float,
    reports: Sequence[OutputReport],
) -> GenerateResult:
    """Return the result of all outputs of one request."""
    outputs = tuple(report.output for report in reports)
    first = [r.first_token_seconds for r in reports if r.first_token_seconds is not None]
    return GenerateResult(
        request_id=request_id,
        session_id=session_id,
        logprobs_of=next((r.logprobs_of for r in reports if r.logprobs_of is not None), None),
        outputs=outputs,
        usage=Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=sum(len(output.token_ids) for output in outputs),
            cached_tokens=sum(report.cached_tokens for report in reports),
        ),
        timing=Timing(
            queued_seconds=min(report.queued_seconds for report in reports),
            first_token_seconds=min(first) if first else None,
            total_seconds=total_seconds,
            preemptions=sum(report.preemptions for report in reports),
        ),
        attempts=tuple(attempt for report in reports for attempt in report.attempts),
    )
