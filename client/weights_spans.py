"""Lists of spans that say which weights made which tokens: append to one, cut one."""

from __future__ import annotations

from rollout_common.wire import WeightsSpan


def shifted_span(span: WeightsSpan, offset: int) -> WeightsSpan:
    """Return a span whose tokens are counted from `offset` tokens earlier."""
    return span.model_copy(update={"start": span.start + offset, "end": span.end + offset})


def append_span(spans: list[WeightsSpan], span: WeightsSpan) -> None:
    """Append a span unless it is empty; one that continues the last span extends that instead."""
    if span.end <= span.start:
        return
    if spans and (last := spans[-1]).end == span.start and _same_weights(last, span):
        spans[-1] = last.model_copy(update={"end": span.end})
    else:
        spans.append(span)


def _same_weights(a: WeightsSpan, b: WeightsSpan) -> bool:
    return (a.epoch, a.version, a.stale_kv, a.adapter) == (
        b.epoch,
        b.version,
        b.stale_kv,
        b.adapter,
    )


def cut_spans(spans: list[WeightsSpan], length: int) -> None:
    """Drop what spans say of the tokens from `length` on."""
    while spans and spans[-1].start >= length:
        spans.pop()
    if spans and spans[-1].end > length:
        spans[-1] = spans[-1].model_copy(update={"end": length})
