"""Outputs joined from attempts: spans shift and merge, nothing odd is taken."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client import AttemptReport
from rollout_client.generating.output_draft import BadDelta, OutputDraft, OutputUsage
from rollout_common.wire import LogprobsOf
from rollout_worker.schemas import (
    AbortReason,
    StopMatch,
    StopReason,
    StreamDelta,
    StreamDone,
    Timing,
    Usage,
    WeightsId,
    WeightsSpan,
)


def delta(
    start: int, tokens: list[int], version: int = 0, stale: bool = False, epoch: int = 0,
    logprobs: bool = True,
) -> StreamDelta:  # fmt: skip
    end = start + len(tokens)
    span = WeightsSpan(epoch=epoch, version=version, start=start, end=end, stale_kv=stale)
    values = tuple(-float(token) for token in tokens) if logprobs else None
    return StreamDelta(index=0, token_ids=tuple(tokens), logprobs=values, weights=(span,))


def drafted(*deltas: StreamDelta) -> OutputDraft:
    draft = OutputDraft(0)
    for each in deltas:
        draft.append_delta(each)
    return draft


def spans(draft: OutputDraft) -> list[tuple[int, int, int]]:
    return [(s.version, s.start, s.end) for s in draft.spans]


def test_attempts_are_joined_and_like_spans_merged() -> None:
    draft = OutputDraft(0)
    draft.begin_attempt()
    draft.append_delta(delta(0, [1, 2]))
    draft.append_delta(delta(2, [3]))
    draft.begin_attempt()
    draft.append_delta(delta(0, [4]))
    draft.append_delta(delta(1, [5], version=7))
    assert draft.token_ids == [1, 2, 3, 4, 5]
    assert spans(draft) == [(0, 0, 4), (7, 4, 5)]
    output = draft.to_output(StopReason.LENGTH)
    assert output.logprobs is not None
    assert len(output.logprobs) == 5


def test_what_may_be_sampled_again_is_cut_with_its_spans() -> None:
    draft = OutputDraft(0)
    draft.begin_attempt()
    draft.append_delta(delta(0, [1, 2]))
    draft.append_delta(delta(2, [3, 4], version=7))
    draft.begin_attempt(rewind=3)
    assert draft.token_ids == [1]
    assert spans(draft) == [(0, 0, 1)]
    draft.append_delta(delta(0, [9], version=7))
    assert spans(draft) == [(0, 0, 1), (7, 1, 2)]
    draft.begin_attempt(rewind=9)
    assert (len(draft), draft.spans, draft.first_weights) == (0, [], None)


@given(
    st.lists(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2)), max_size=4), max_size=5),
    st.integers(0, 4),
)
def test_spans_always_cover_the_tokens(attempts: list[list[tuple[int, int]]], rewind: int) -> None:
    draft = OutputDraft(0)
    for attempt in attempts:
        draft.begin_attempt(rewind)
        at = 0
        for count, version in attempt:
            draft.append_delta(delta(at, list(range(count)), version))
            at += count
    assert len(draft.logprobs) == len(draft)
    edges = [0, *(edge for s in draft.spans for edge in (s.start, s.end)), len(draft)]
    assert edges == sorted(edges)
    assert sum(s.end - s.start for s in draft.spans) == len(draft)
    kinds = [s.version for s in draft.spans]
    assert all(a != b for a, b in itertools.pairwise(kinds))


def test_an_output_knows_the_weights_of_its_first_and_its_last_token() -> None:
    draft = OutputDraft(0)
    assert (draft.first_weights, draft.last_weights) == (None, None)
    draft.append_delta(delta(0, [1], version=4, epoch=2))
    draft.append_delta(delta(1, [2], version=5, epoch=2))
    draft.append_delta(delta(2, [3], version=1, epoch=3))
    assert draft.first_weights == WeightsId(epoch=2, version=4)
    assert draft.last_weights == WeightsId(epoch=3, version=1)


def test_tokens_with_stale_caches_have_spans_of_their_own() -> None:
    draft = drafted(delta(0, [1]), delta(1, [2], stale=True), delta(2, [3], stale=True))
    assert [(s.stale_kv, s.start, s.end) for s in draft.spans] == [(False, 0, 1), (True, 1, 3)]


@pytest.mark.parametrize(
    ("start", "end", "parts"),
    [
        (0, 5, [(4, 0, 2), (5, 2, 4), (6, 4, 5)]),
        (1, 3, [(4, 1, 2), (5, 2, 3)]),
        (2, 4, [(5, 2, 4)]),
        (3, 5, [(5, 3, 4), (6, 4, 5)]),
        (0, 2, [(4, 0, 2)]),
        (4, 5, [(6, 4, 5)]),
    ],
)
def test_a_part_of_an_output_has_its_part_of_the_spans(
    start: int, end: int, parts: list[tuple[int, int, int]]
) -> None:
    draft = drafted(delta(0, [1, 2], 4), delta(2, [3, 4], 5), delta(4, [5], 6))
    part = draft.delta_between(start, end)
    assert [(s.version, s.start, s.end) for s in part.weights] == parts
    assert part.token_ids == (1, 2, 3, 4, 5)[start:end]
    assert part.logprobs == (-1.0, -2.0, -3.0, -4.0, -5.0)[start:end]
    assert part.index == 0


def test_an_output_without_logprobs_has_none_unless_they_were_asked_for() -> None:
    bare = drafted(delta(0, [1], logprobs=False))
    assert bare.delta_between(0, 1).logprobs is None
    assert bare.to_output(StopReason.STOP, logprobs=False).logprobs is None
    assert OutputDraft(0).to_output(StopReason.STOP).logprobs == ()
    assert OutputDraft(0).to_output(StopReason.STOP, logprobs=False).logprobs is None
    # What a worker sent is there, whatever was asked for.
    full = drafted(delta(0, [1]))
    assert full.to_output(StopReason.STOP, logprobs=False).logprobs == (-1.0,)


def test_logprobs_may_not_stop_in_the_middle() -> None:
    draft = drafted(delta(0, [1]))
    empty = StreamDelta(index=0, token_ids=(), logprobs=None, weights=())
    draft.append_delta(empty)
    with pytest.raises(BadDelta, match="logprobs stopped in the middle"):
        draft.append_delta(delta(1, [2], logprobs=False))


def test_how_an_output_ended_is_passed_on() -> None:
    match = StopMatch(token_id=2)
    output = drafted(delta(0, [1, 2])).to_output(StopReason.STOP, match, AbortReason.CLIENT)
    ended = output.stop_reason, output.stop_match, output.abort_reason
    assert ended == (StopReason.STOP, match, AbortReason.CLIENT)


def test_an_output_that_starts_over_has_forgotten_everything() -> None:
    draft = OutputDraft(0)
    for _ in range(2):
        draft.begin_attempt()
        draft.append_delta(delta(0, [1, 2], version=4))
    draft.clear_tokens()
    assert (len(draft), draft.logprobs, draft.spans) == (0, [], [])
    draft.append_delta(delta(0, [7], version=5))
    assert spans(draft) == [(5, 0, 1)]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (delta(1, [1]), "a span starts at 1, expected 0"),
        (delta(0, [1]).model_copy(update={"weights": ()}), "spans end at 2, tokens at 3"),
        (delta(0, [1]).model_copy(update={"logprobs": (-1.0, -1.0)}), "2 logprobs for 1 tokens"),
        (
            delta(0, [1, 2]).model_copy(update={"token_ids": (1,), "logprobs": (-1.0,)}),
            "spans end at 4, tokens at 3",
        ),
    ],
)
def test_nonsense_is_named_in_the_attempts_own_counting(bad: StreamDelta, why: str) -> None:
    draft = OutputDraft(0)
    draft.begin_attempt()
    draft.append_delta(delta(0, [8, 9]))
    draft.begin_attempt()
    with pytest.raises(BadDelta, match=why):
        draft.append_delta(bad)


# What an output took.


def done(
    cached: int, queued: float, preemptions: int, logprobs_of: LogprobsOf | None = None
) -> StreamDone:
    usage = Usage(prompt_tokens=3, completion_tokens=1, cached_tokens=cached)
    timing = Timing(queued_seconds=queued, total_seconds=9.0, preemptions=preemptions)
    return StreamDone(
        request_id="r", logprobs_of=logprobs_of, outputs=(), usage=usage, timing=timing
    )


def test_waits_and_preemptions_add_up_and_the_cache_is_that_of_the_prompt() -> None:
    usage, attempt = (
        OutputUsage(),
        AttemptReport(request_id="r.a0", replica="w0", outcome="broken", seconds=1.0),
    )
    usage.note_stream_end(done(7, 0.5, 1, "raw"))
    usage.attempts.append(attempt)
    usage.note_stream_end(done(100, 0.25, 2))
    assert usage == OutputUsage([attempt], "raw", 7, 0.75, 3)
    # An attempt that broke before its end has reported nothing.
    usage = OutputUsage([attempt])
    usage.note_stream_end(done(5, 0.0, 0, "sampling"))
    assert (usage.cached_tokens, usage.logprobs_of) == (0, "sampling")
