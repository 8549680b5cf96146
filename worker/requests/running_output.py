"""One continuation: what has been generated so far, and how it ended."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from rollout_common.wire import (
    NOT_FINITE,
    AbortReason,
    GenerateOutput,
    StopMatch,
    StopReason,
    StreamDelta,
    WeightsId,
    WeightsSpan,
)
from rollout_worker.engine import EngineDelta, EngineRequest


@dataclass(slots=True, eq=False)
class RunningOutput:
    """One continuation. token_ids: [T], logprobs: [T] if requested."""

    index: int
    request: EngineRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[WeightsSpan] = field(default_factory=list)
    stop_reason: StopReason | None = None
    stop_match: StopMatch | None = None
    abort_reason: AbortReason | None = None
    not_finite: WeightsId | None = None
    """The weights whose logits were not, which aborted it."""
    cached_tokens: int = 0
    preemptions: int = 0
    queued_seconds: float = 0.0
    latest: float | None = None
    """Monotonic time of its latest tokens."""
    aborting: AbortReason | None = None
    """Set once someone asks to end it; the engine may not know the output yet."""
    pump: asyncio.Task[None] | None = None

    def append_delta(self, delta: EngineDelta) -> None:
        """Append a delta from the engine."""
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            self.logprobs.extend(delta.logprobs)
        for span in delta.spans:
            self._append_span(span)
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        self.preemptions = max(self.preemptions, delta.preemptions)
        self.queued_seconds = delta.queued_seconds
        if delta.stop_reason is not None:
            self.stop_reason = delta.stop_reason
            self.stop_match = delta.stop_match
            self.abort_reason = delta.abort_reason
            self.not_finite = delta.not_finite

    def _append_span(self, span: WeightsSpan) -> None:
        last = self.spans[-1] if self.spans else None
        if last is not None and _span_kind(last) == _span_kind(span) and last.end == span.start:
            self.spans[-1] = last.model_copy(update={"end": span.end})
        else:
            self.spans.append(span)

    def delta_since(self, start: int) -> StreamDelta | None:
        """Return what there is from the `start`-th token on, None if that is nothing."""
        end = len(self.token_ids)
        if start == end:
            return None
        return StreamDelta(
            index=self.index,
            token_ids=tuple(self.token_ids[start:]),
            logprobs=None if self.request.logprobs is None else tuple(self.logprobs[start:]),
            weights=tuple(self._spans_from(start)),
        )

    def _spans_from(self, start: int) -> list[WeightsSpan]:
        found: list[WeightsSpan] = []
        for span in reversed(self.spans):  # a reader that keeps up wants the last one only
            if span.end <= start:
                break
            found.append(span if span.start >= start else _cut_span(span, start))
        return found[::-1]

    def mark_aborted(self, reason: AbortReason) -> None:
        """Mark it aborted, without the engine."""
        if self.stop_reason is None:
            self.stop_reason, self.abort_reason = StopReason.ABORTED, reason

    @property
    def abort_cause(self) -> dict[str, str]:
        """`abort_slug` and `abort_detail`, where there are such."""
        if self.not_finite is None:
            return {}
        detail = (
            f"weights {self.not_finite} give logits that are not finite (NaN or infinite): publish sound"
            " weights under a higher version"
        )
        return {"abort_slug": NOT_FINITE, "abort_detail": detail}

    def to_result(self) -> GenerateOutput:
        """The finished output, as the client receives it."""
        assert self.stop_reason is not None
        return GenerateOutput(
            index=self.index,
            token_ids=tuple(self.token_ids),
            logprobs=None if self.request.logprobs is None else tuple(self.logprobs),
            stop_reason=self.stop_reason,
            stop_match=self.stop_match,
            abort_reason=self.abort_reason,
            **self.abort_cause,
            weights=tuple(self.spans),
        )


def _cut_span(span: WeightsSpan, start: int) -> WeightsSpan:
    return span.model_copy(update={"start": start})


def _span_kind(span: WeightsSpan) -> tuple[int, int, bool]:
    return (span.epoch, span.version, span.stale_kv)
