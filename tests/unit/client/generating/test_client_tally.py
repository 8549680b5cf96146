"""What an output took over all of its attempts."""

from __future__ import annotations

from typing import Literal

import pytest

from rollout_client import AttemptReport
from rollout_client.generating.output_usage import PACE_TOKENS, OutputUsage, seconds_per_token
from rollout_worker.schemas import GenerateOutput, StopReason, StreamDone, Timing, Usage

OUTPUT = GenerateOutput(index=0, token_ids=(), stop_reason=StopReason.STOP, weights=())
ATTEMPT = AttemptReport(request_id="r.a0", replica="w0", outcome="broken", seconds=1.0)


def done(
    cached: int, queued: float, preemptions: int, logprobs_of: Literal["sampling", "raw"] | None
) -> StreamDone:
    return StreamDone(
        request_id="r",
        logprobs_of=logprobs_of,
        outputs=(),
        usage=Usage(prompt_tokens=3, completion_tokens=1, cached_tokens=cached),
        timing=Timing(queued_seconds=queued, total_seconds=9.0, preemptions=preemptions),
    )


def test_a_pace_is_told_from_enough_tokens_and_without_the_wait_for_the_first() -> None:
    assert PACE_TOKENS == 16
    assert seconds_per_token(16, 3.0) == pytest.approx(0.2)
    assert seconds_per_token(15, 3.0) is None
    assert seconds_per_token(0, 3.0) is None


def test_waits_and_preemptions_add_up_and_the_cache_is_that_of_the_prompt() -> None:
    tally = OutputUsage(began=10.0)
    tally.note_stream_end(done(7, 0.5, 1, "raw"))
    tally.attempts.append(ATTEMPT)
    tally.note_stream_end(done(100, 0.25, 2, None))
    report = tally.to_report(OUTPUT, None)
    assert (report.cached_tokens, report.queued_seconds, report.preemptions) == (7, 0.75, 3)
    assert report.logprobs_of == "raw"
    assert report.attempts == (ATTEMPT,)
    assert report.output is OUTPUT


def test_the_first_token_is_the_first_one_of_all_attempts() -> None:
    tally = OutputUsage(began=10.0)
    assert tally.to_report(OUTPUT, None).first_token_seconds is None
    tally.note_first_token(12.5)
    tally.note_first_token(15.0)
    assert tally.to_report(OUTPUT, None).first_token_seconds == 2.5


def test_an_attempt_that_told_nothing_counts_for_nothing() -> None:
    tally = OutputUsage(began=10.0)
    tally.attempts.append(ATTEMPT)
    tally.note_stream_end(done(5, 0.0, 0, "sampling"))
    report = tally.to_report(OUTPUT, None)
    assert (report.cached_tokens, report.logprobs_of) == (0, "sampling")
