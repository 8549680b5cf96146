"""What one output took over all of its attempts: times, cached tokens, preemptions, attempts."""

from __future__ import annotations

from rollout_client.results import AttemptReport, OutputReport
from rollout_common.wire import GenerateOutput, LogprobsOf, StreamDone

PACE_TOKENS = 16
"""From fewer tokens a replica's pace can't be told."""


def seconds_per_token(tokens: int, seconds: float) -> float | None:
    """Return the seconds per token, given how long the tokens after the first one took."""
    return seconds / (tokens - 1) if tokens >= PACE_TOKENS else None


class OutputUsage:
    """Adds up what workers say of one output.

    Args:
        began: When the caller asked, on the monotonic clock.
    """

    def __init__(self, began: float) -> None:
        self.attempts: list[AttemptReport] = []
        self._began = began
        self._first_token_seconds: float | None = None
        self._logprobs_of: LogprobsOf | None = None
        self._cached = 0
        self._queued = 0.0
        self._preemptions = 0

    def note_first_token(self, now: float) -> None:
        """An attempt gave its first token."""
        if self._first_token_seconds is None:
            self._first_token_seconds = now - self._began

    def note_stream_end(self, done: StreamDone) -> None:
        """A worker ended a stream."""
        if not self.attempts:
            # Of the caller's prompt; to later attempts the tokens so far are prompt as well.
            self._cached = done.usage.cached_tokens
        self._logprobs_of = done.logprobs_of or self._logprobs_of
        self._queued += done.timing.queued_seconds
        self._preemptions += done.timing.preemptions

    def to_report(self, output: GenerateOutput, logprobs_of: LogprobsOf | None) -> OutputReport:
        """Return the output with all that was added up.

        Args:
            output: As it is.
            logprobs_of: Which logprobs it has, should no worker have ended a stream: one that was
                killed between the last token and the stream's end has not said so.
        """
        return OutputReport(
            output=output,
            logprobs_of=self._logprobs_of or logprobs_of,
            cached_tokens=self._cached,
            queued_seconds=self._queued,
            first_token_seconds=self._first_token_seconds,
            preemptions=self._preemptions,
            attempts=tuple(self.attempts),
        )
