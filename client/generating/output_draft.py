"""One output while it is being made, over any number of attempts, and what these took.

Each attempt counts its tokens and spans from zero; the draft counts them from the output's first
token. What an attempt has sent stays, however the attempt ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollout_client.results import AttemptReport
from rollout_client.weights_spans import append_span, cut_spans, shifted_span
from rollout_common import wire

from .record_drafts import MasksDraft, RoutesDraft
from .score_drafts import BadDelta, PromptDraft, TopRows, check_rows


class OutputDraft:
    """Tokens so far: token_ids [T], logprobs [T] and rows of the most likely tokens if asked for, spans that cover [0, T).

    `scored`: positions of the prompt to score. `has_top`: whether each token comes with the most likely ones.
    `routes`, `masks`: where its replay records are kept; None: not asked for.
    """

    def __init__(
        self,
        index: int,
        scored: tuple[int, int] | None = None,
        *,
        has_top: bool = False,
        routes: RoutesDraft | None = None,
        masks: MasksDraft | None = None,
    ) -> None:
        self.index = index
        self.routes, self.masks = routes, masks
        self.prompt = PromptDraft(scored)
        self.top = TopRows()
        self.has_top = has_top
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[wire.WeightsSpan] = []
        self.has_logprobs = False
        self._base = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    def begin_attempt(self, rewind: int = 0) -> None:
        """Begin an attempt after the tokens so far, except for the last `rewind` of them."""
        self._truncate_to(max(0, len(self) - rewind))
        self._base = len(self)
        if self.routes is not None:
            self.routes.begin_attempt()
        if not self._base:  # the same weights score the prompt and make the first token
            self.prompt.clear_frames()

    def clear_tokens(self) -> None:
        """Drop all tokens: the output starts over."""
        self._truncate_to(0)
        self._base = 0

    def _truncate_to(self, length: int) -> None:
        del self.token_ids[length:]
        del self.logprobs[length:]
        self.top.truncate(length)
        if self.routes is not None:
            self.routes.truncate(length)
        if self.masks is not None:
            self.masks.truncate(length)
        cut_spans(self.spans, length)

    def append_delta(self, delta: wire.StreamDelta) -> None:
        """Append what an attempt sent; raise BadDelta if logprobs or spans do not cover the tokens."""
        count = len(delta.token_ids)
        if delta.logprobs is not None:
            if len(delta.logprobs) != count:
                raise BadDelta(f"{len(delta.logprobs)} logprobs for {count} tokens")
            self.has_logprobs = True
        elif self.has_logprobs and count:
            raise BadDelta("logprobs stopped in the middle of an output")
        if self.has_top and delta.top_logprobs is None and count:
            raise BadDelta(f"{count} tokens came without their top_logprobs")
        check_rows(delta.top_logprobs, count)
        if count and not self.prompt.is_whole:
            raise BadDelta("tokens came before the scores of their prompt")
        end = len(self)
        for span in delta.weights:
            if self._base + span.start != end:
                raise BadDelta(f"a span starts at {span.start}, expected {end - self._base}")
            end = self._base + span.end
            append_span(self.spans, shifted_span(span, self._base))
        if end != len(self) + count:
            raise BadDelta(f"spans end at {end}, tokens at {len(self) + count}")
        self._append_records(delta)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs or ())
        self.top.extend(delta.top_logprobs)

    @property
    def first_weights(self) -> wire.WeightsId | None:
        """Weights that made the first token; None without a token."""
        return _span_identity(self.spans[0]) if self.spans else None

    @property
    def last_weights(self) -> wire.WeightsId | None:
        """Weights that made the last token; None without a token."""
        return _span_identity(self.spans[-1]) if self.spans else None

    def delta_between(self, start: int, end: int) -> wire.StreamDelta:
        """Return tokens [start, end) as an event of the joined stream."""
        spans = tuple(
            span.model_copy(update={"start": max(span.start, start), "end": min(span.end, end)})
            for span in self.spans
            if span.start < end and span.end > start
        )
        return wire.StreamDelta(
            index=self.index,
            token_ids=tuple(self.token_ids[start:end]),
            logprobs=tuple(self.logprobs[start:end]) if self.has_logprobs else None,
            top_logprobs=self.top.to_wire(start, end) if self.has_top else None,
            **self._record_fields(start, end),
            weights=spans,
        )

    def _append_records(self, delta: wire.StreamDelta) -> None:
        count = len(delta.token_ids)
        if self.masks is not None:
            self.masks.append_rows(delta.sampling_mask, count)
        if self.routes is not None:
            if delta.routed_experts is not None:
                self.routes.append_rows(delta.routed_experts)
            self.routes.check_tokens(len(self) + count)

    def _record_fields(self, start: int, end: int) -> dict[str, Any]:
        return {
            "routed_experts": self.routes and self.routes.to_wire(start, end),
            "sampling_mask": self.masks and self.masks.to_wire(start, end),
        }

    def to_output(
        self,
        stop_reason: wire.StopReason,
        stop_match: wire.StopMatch | None = None,
        abort_reason: wire.AbortReason | None = None,
        *,
        logprobs: bool = True,
    ) -> wire.GenerateOutput:
        """Return the output as the caller gets it."""
        return wire.GenerateOutput(
            index=self.index,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs) if self.has_logprobs or logprobs else None,
            top_logprobs=self.top.to_wire() if self.has_top else None,
            **self._record_fields(0, len(self)),
            stop_reason=stop_reason,
            stop_match=stop_match,
            abort_reason=abort_reason,
            weights=tuple(self.spans),
        )


def _span_identity(span: wire.WeightsSpan) -> wire.WeightsId:
    return wire.WeightsId(epoch=span.epoch, version=span.version)


@dataclass(slots=True)
class OutputUsage:
    """What one output took over all of its attempts, as workers reported it."""

    attempts: list[AttemptReport] = field(default_factory=list)
    logprobs_of: wire.LogprobsOf | None = None
    cached_tokens: int = 0
    queued_seconds: float = 0.0
    preemptions: int = 0

    def note_stream_end(self, done: wire.StreamDone) -> None:
        """Add what a worker reports at the end of a stream."""
        if not self.attempts:
            # Only the first attempt's prompt is the caller's: later ones include tokens so far.
            self.cached_tokens = done.usage.cached_tokens
        self.logprobs_of = done.logprobs_of or self.logprobs_of
        self.queued_seconds += done.timing.queued_seconds
        self.preemptions += done.timing.preemptions
