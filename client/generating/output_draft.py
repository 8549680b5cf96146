"""One output while it is being made, over any number of attempts: tokens, scores, replay records, and what these took.

Each attempt counts its tokens and spans from zero; the draft counts them from the output's first
token. What an attempt has sent stays, however the attempt ended.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_client.results import AttemptReport
from rollout_client.weights_spans import append_span, cut_spans, shifted_span
from rollout_common import wire


class BadDelta(ValueError):
    """A worker sent tokens, logprobs and spans that do not fit together."""


TopRow = tuple[tuple[int, ...], tuple[float, ...]]
"""The most likely tokens at one position, and their logprobs."""


class OutputDraft:
    """Tokens so far: token_ids [T], logprobs [T], spans that cover [0, T), and what else the request asks for."""

    def __init__(self, request: wire.GenerateRequest, index: int = 0) -> None:
        self.index = index
        self.prompt = PromptDraft(request.scored_range)
        routed = request.return_routed_experts
        self.routes = RoutesDraft(len(request.token_ids)) if routed else None
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[wire.WeightsSpan] = []
        self.has_logprobs = False
        self._has_top = request.top_logprobs > 0
        self._top: list[TopRow] = []
        self._has_masks = request.return_sampling_mask
        self._masks: list[tuple[int, bytes]] = []
        """Of each token: how many could be drawn, and its row of the mask."""
        self._vocab_size: int | None = None
        """Of the masks; None: none has come."""
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
        columns: tuple[list[Any], ...] = (self.token_ids, self.logprobs, self._top, self._masks)
        for column in columns:
            del column[length:]
        if self.routes is not None:
            self.routes.truncate(length)
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
        if self._has_top and delta.top_logprobs is None and count:
            raise BadDelta(f"{count} tokens came without their top_logprobs")
        top = top_rows(delta.top_logprobs, count)
        if count and not self.prompt.is_whole:
            raise BadDelta("tokens came before the scores of their prompt")
        at = self.attempt_tokens
        for span in delta.weights:
            if span.start != at:
                raise BadDelta(f"a span starts at {span.start}, expected {at}")
            at = span.end
        if self._base + at != len(self) + count:
            raise BadDelta(f"spans end at {self._base + at}, tokens at {len(self) + count}")
        self._append_records(delta)
        for span in delta.weights:
            append_span(self.spans, shifted_span(span, self._base))
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs or ())
        self._top += top

    @property
    def attempt_tokens(self) -> int:
        """How many tokens the attempt has given."""
        return len(self) - self._base

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
            **self._record_fields(start, end),
            weights=spans,
        )

    def _append_records(self, delta: wire.StreamDelta) -> None:
        count = len(delta.token_ids)
        if self._has_masks:
            self._append_masks(delta.sampling_mask, count)
        if self.routes is not None:
            if delta.routed_experts is not None:
                self.routes.append_rows(delta.routed_experts)
            self.routes.check_tokens(len(self) + count)

    def _append_masks(self, part: wire.SamplingMask | None, tokens: int) -> None:
        if tokens and (part is None or len(part.counts) != tokens):
            raise BadDelta(f"{0 if part is None else len(part.counts)} masks for {tokens} tokens")
        if part is None:
            return
        if self._vocab_size not in (None, part.vocab_size):
            raise BadDelta("the vocabulary changed in the middle of an output")
        try:
            self._masks += zip(part.counts, part.to_rows(), strict=True)
        except ValueError as error:
            raise BadDelta(str(error)) from None
        self._vocab_size = part.vocab_size

    def _record_fields(self, start: int, end: int) -> dict[str, Any]:
        return {
            "top_logprobs": top_of_rows(self._top[start:end]) if self._has_top else None,
            "routed_experts": self.routes and self.routes.to_wire(start, end),
            "sampling_mask": self._mask_between(start, end),
        }

    def _mask_between(self, start: int, end: int) -> wire.SamplingMask | None:
        if self._vocab_size is None:
            return None
        rows = self._masks[start:end]
        data = base64.b64encode(b"".join(row for _, row in rows)).decode()
        counts = tuple(count for count, _ in rows)
        return wire.SamplingMask(vocab_size=self._vocab_size, counts=counts, data=data)

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


# Scores.


class PromptDraft:
    """The scores of a prompt's positions [start, end) so far, frame by frame; all by the same weights."""

    def __init__(self, scored: tuple[int, int] | None) -> None:
        self._scored = scored
        self._frames: list[wire.PromptLogprobs] = []
        self._end = scored[0] if scored else 0

    @property
    def is_whole(self) -> bool:
        """Whether everything that was asked for is there."""
        return self._scored is None or self._end == self._scored[1]

    def append_frame(self, frame: wire.PromptLogprobs) -> None:
        """Append what an attempt sent; raise BadDelta if it does not follow what is there."""
        end = frame.start + len(frame.logprobs)
        if self._scored is None or frame.start != self._end or end > self._scored[1]:
            raise BadDelta(f"scores of positions {frame.start} to {end}, expected {self._end}")
        if self._frames and frame.weights != self._frames[0].weights:
            raise BadDelta("a prompt was scored by two versions of the weights")
        top_rows(frame.top_logprobs, len(frame.logprobs))
        self._frames.append(frame)
        self._end = end

    def clear_frames(self) -> None:
        """Drop all scores: the prompt is scored again."""
        self._frames.clear()
        self._end = self._scored[0] if self._scored else 0

    def to_prompt(self) -> wire.PromptLogprobs | None:
        """Return the whole; None if it was not asked for, or is not there."""
        if not (self._frames and self.is_whole):
            return None
        first = self._frames[0]
        rows = [
            row for each in self._frames for row in top_rows(each.top_logprobs, len(each.logprobs))
        ]
        return wire.PromptLogprobs(
            start=first.start,
            logprobs=tuple(value for frame in self._frames for value in frame.logprobs),
            top_logprobs=None if first.top_logprobs is None else top_of_rows(rows),
            weights=first.weights,
        )


def top_rows(top: wire.TopLogprobs | None, count: int) -> list[TopRow]:
    """Return the row of each position; raise BadDelta unless there are so many, or none."""
    if top is None:
        return []
    if not len(top.token_ids) == len(top.logprobs) == count:
        raise BadDelta(f"{len(top.logprobs)} rows of top_logprobs for {count} tokens")
    return list(zip(top.token_ids, top.logprobs, strict=True))


def top_of_rows(rows: Sequence[TopRow]) -> wire.TopLogprobs:
    """Return the rows as the caller gets them."""
    return wire.TopLogprobs(
        token_ids=tuple(ids for ids, _ in rows), logprobs=tuple(values for _, values in rows)
    )


# Replay records.


class RoutesDraft:
    """The experts of the tokens of prompt and output so far; row r is of the token at position r.

    The row at `prompt` - 1 + t was read to make token t. An attempt sends all rows of its own prompt, which has the
    tokens so far: those that are there already stay as they are.
    """

    def __init__(self, prompt: int) -> None:
        self._prompt = prompt
        self._shape: wire.RoutedExperts | None = None
        self._rows = bytearray()
        self._sent = 0

    @property
    def _count(self) -> int:
        return 0 if self._shape is None else len(self._rows) // self._shape.row_bytes

    def begin_attempt(self) -> None:
        """Expect the rows of an attempt, from the prompt's first token on."""
        self._sent = 0

    def append_rows(self, part: wire.RoutedExperts) -> None:
        """Append what an attempt sent; raise BadDelta if it does not follow what is there."""
        shape = self._shape = self._shape or part
        same = (part.layers, part.top_k, part.dtype) == (shape.layers, shape.top_k, shape.dtype)
        if not same or part.start != self._sent:
            raise BadDelta(f"routes of position {part.start}, expected {self._sent}")
        try:
            data = part.to_bytes()
        except ValueError as error:
            raise BadDelta(str(error)) from None
        known = max(0, self._count - self._sent)
        self._rows += data[known * shape.row_bytes :]
        self._sent += part.rows

    def check_tokens(self, tokens: int) -> None:
        """Raise BadDelta unless there is a row for each token that was read to make `tokens` of them."""
        if tokens and self._count != self._prompt - 1 + tokens:
            raise BadDelta(f"{self._count} routes for {self._prompt} + {tokens} tokens")

    def truncate(self, tokens: int) -> None:
        """Keep what was read to make this many tokens."""
        if self._shape is not None:
            kept = self._prompt - 1 + tokens if tokens else 0
            del self._rows[kept * self._shape.row_bytes :]

    def to_wire(self, start: int, end: int) -> wire.RoutedExperts | None:
        """Return the rows that belong to tokens [start, end), with those of the prompt before the first one."""
        if self._shape is None or end == start:
            return None
        first = self._prompt - 1 + start if start else 0
        last, size = self._prompt - 1 + end, self._shape.row_bytes
        data = base64.b64encode(self._rows[first * size : last * size]).decode()
        changes = {"start": first, "rows": last - first, "data": data}
        return self._shape.model_copy(update=changes)
