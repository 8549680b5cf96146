"""One continuation of a request: what the engine has made of it so far, and how clients get it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rollout_common import wire
from rollout_common.wire import AbortReason, StopReason, WeightsId, WeightsSpan
from rollout_worker.engine import EngineDelta, EngineRequest
from rollout_worker.replay_records import ExpertRoutes, TokenMasks
from rollout_worker.token_scores import PromptScores, TopTokens

from .score_frames import (
    FRAME_BYTES,
    FRAME_TOKENS,
    OutputArrays,
    frame_positions,
    route_frames,
    route_positions,
)


@dataclass(slots=True, eq=False)
class RunningOutput:
    """One continuation. token_ids: [T], logprobs: [T] if requested."""

    index: int
    request: EngineRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[WeightsSpan] = field(default_factory=list)
    top: TopTokens | None = None
    """The most likely tokens at each of its tokens, if requested."""
    routes: ExpertRoutes | None = None
    """The experts of the tokens that were read, if requested."""
    masks: TokenMasks | None = None
    """Which tokens could be drawn for each of its tokens, if requested."""
    prompt: PromptScores | None = None
    """The scores of the prompt, once they are there."""
    stop_reason: StopReason | None = None
    stop_match: wire.StopMatch | None = None
    abort_reason: AbortReason | None = None
    not_finite: WeightsId | None = None
    """The weights that gave it logits that are not finite, and so aborted it."""
    grammar_error: str | None = None
    """Why its grammar could not go on, which aborted it."""
    cached_tokens: int = 0
    preemptions: int = 0
    queued_seconds: float = 0.0
    latest: float | None = None
    """Monotonic time of its latest tokens."""
    aborting: AbortReason | None = None
    """Set once a caller asks to end it; the engine may not know the output yet."""
    pump: asyncio.Task[None] | None = None

    def append_delta(self, delta: EngineDelta) -> None:
        """Add what the engine has made since the last delta."""
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            self.logprobs.extend(delta.logprobs)
        if delta.top is not None:
            self.top = self.top or TopTokens(delta.top.width)
            self.top.extend(delta.top)
        self.prompt = delta.prompt or self.prompt
        if delta.routes is not None:
            if self.routes is None:
                self.routes = delta.routes
            else:
                self.routes.extend(delta.routes)
        if delta.masks is not None:
            self.masks = self.masks or TokenMasks(delta.masks.vocab_size)
            self.masks.extend(delta.masks)
        for span in delta.spans:
            if self.request.adapter is not None:
                span = span.model_copy(update={"adapter": self.request.adapter})
            self._append_span(span)
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        self.preemptions = max(self.preemptions, delta.preemptions)
        self.queued_seconds = delta.queued_seconds
        if delta.stop_reason is not None:
            self.stop_reason = delta.stop_reason
            self.stop_match = delta.stop_match
            self.abort_reason = delta.abort_reason
            self.not_finite = delta.not_finite
            self.grammar_error = delta.grammar_error

    def _append_span(self, span: WeightsSpan) -> None:
        last = self.spans[-1] if self.spans else None
        if last is not None and _span_kind(last) == _span_kind(span) and last.end == span.start:
            self.spans[-1] = last.model_copy(update={"end": span.end})
        else:
            self.spans.append(span)

    def delta_since(self, start: int) -> wire.StreamDelta | None:
        """Return what there is from token `start` on, or None; no more than fits into a frame."""
        end = min(len(self.token_ids), start + FRAME_TOKENS)
        if start == end:
            return None
        if self.routes is not None:
            end = min(end, start + route_positions(self.routes))
        if self.top is not None:
            end = min(end, start + frame_positions(self.top.width))
        if self.masks is not None:
            end = self._masks_end(start, end)
        return wire.StreamDelta(
            index=self.index,
            token_ids=tuple(self.token_ids[start:end]),
            logprobs=None if self.request.logprobs is None else tuple(self.logprobs[start:end]),
            top_logprobs=None if self.top is None else self.top.to_wire(start, end),
            routed_experts=self._routes_between(start, end),
            sampling_mask=None if self.masks is None else self.masks.to_wire(start, end),
            weights=tuple(self._spans_between(start, end)),
        )

    def _masks_end(self, start: int, end: int) -> int:
        """Where a frame from token `start` on ends, with masks of `FRAME_BYTES` but for one row."""
        assert self.masks is not None
        size = 0
        for at in range(start, end):
            size += len(self.masks.rows[at])
            if size > FRAME_BYTES:
                return at + 1
        return end

    def _routes_between(self, start: int, end: int) -> wire.RoutedExperts | None:
        """The experts of the tokens that were read to make tokens [start, end)."""
        if self.routes is None:
            return None
        first = len(self.request.token_ids) - 1  # the token that was read to make the first one
        return self.routes.to_wire(first + start, first + end)

    def _spans_between(self, start: int, end: int) -> list[WeightsSpan]:
        found: list[WeightsSpan] = []
        for span in reversed(self.spans):  # a reader that keeps up wants the last one only
            if span.end <= start:
                break
            if start <= span.start and span.end <= end:
                found.append(span)
            elif span.start < end:
                within = {"start": max(start, span.start), "end": min(end, span.end)}
                found.append(span.model_copy(update=within))
        return found[::-1]

    def response_arrays(self) -> OutputArrays:
        """What it has for each token besides its logprob, for an answer that is not streamed."""
        top = self.top or (TopTokens(1) if self.request.top_logprobs else None)
        return OutputArrays(top, self.routes, self.masks)

    def prompt_routes(self) -> Iterator[wire.RoutedExperts]:
        """Yield the experts of the prompt's tokens that no delta has, in frames of a stream."""
        if self.routes is None:
            return iter(())
        return route_frames(self.routes, len(self.request.token_ids) - 1)

    def mark_aborted(self, reason: AbortReason) -> None:
        """Mark it aborted, unless it has ended; the engine is not asked."""
        if self.stop_reason is None:
            self.stop_reason, self.abort_reason = StopReason.ABORTED, reason

    def _end_fields(self) -> dict[str, Any]:
        """How it ended, as both kinds of answers say it."""
        found: dict[str, Any] = {
            "index": self.index,
            "stop_reason": self.stop_reason,
            "stop_match": self.stop_match,
            "abort_reason": self.abort_reason,
        }
        if self.not_finite is not None:
            detail = (
                f"weights {self.not_finite} give logits that are not finite (NaN or infinite): publish"
                " sound weights under a higher version"
            )
            found |= {"abort_slug": wire.NOT_FINITE, "abort_detail": detail}
        elif self.grammar_error is not None:
            detail = f"structured: can't be followed further: {self.grammar_error[:500]}; make it simpler"
            found |= {"abort_slug": wire.GRAMMAR_FAILED, "abort_detail": detail}
        return found

    def to_result(self) -> wire.GenerateOutput:
        """The finished output, as the client receives it."""
        return wire.GenerateOutput(
            **self._end_fields(),
            token_ids=tuple(self.token_ids),
            logprobs=None if self.request.logprobs is None else tuple(self.logprobs),
            weights=tuple(self.spans),
        )

    def to_done(self) -> wire.DoneOutput:
        """The finished output without its arrays, which the stream had."""
        return wire.DoneOutput(**self._end_fields())


def _span_kind(span: WeightsSpan) -> tuple[int, int, bool]:
    return (span.epoch, span.version, span.stale_kv)
