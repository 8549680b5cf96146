"""Outputs joined from attempts: spans shift and merge, nothing odd is taken."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client.generating.draft import BadDelta, Draft
from rollout_worker.schemas import StopReason, StreamDelta, WeightsSpan


def delta(start: int, tokens: list[int], version: int = 0, stale: bool = False) -> StreamDelta:
    span = WeightsSpan(
        epoch=0, version=version, start=start, end=start + len(tokens), stale_kv=stale
    )
    return StreamDelta(
        index=0, token_ids=tuple(tokens), logprobs=tuple(-0.5 for _ in tokens), weights=(span,)
    )


def spans(draft: Draft) -> list[tuple[int, int, int]]:
    return [(s.version, s.start, s.end) for s in draft.spans]


def test_attempts_are_joined_and_like_spans_merged() -> None:
    draft = Draft(0)
    draft.begin()
    draft.take(delta(0, [1, 2]))
    draft.take(delta(2, [3]))
    draft.begin()
    draft.take(delta(0, [4]))
    draft.take(delta(1, [5], version=7))
    assert draft.token_ids == [1, 2, 3, 4, 5]
    assert spans(draft) == [(0, 0, 4), (7, 4, 5)]
    output = draft.output(StopReason.LENGTH)
    assert output.logprobs is not None
    assert len(output.logprobs) == 5
    part = draft.delta(3, 5)
    assert [(s.version, s.start, s.end) for s in part.weights] == [(0, 3, 4), (7, 4, 5)]


def test_what_may_be_sampled_again_is_cut_with_its_spans() -> None:
    draft = Draft(0)
    draft.begin()
    draft.take(delta(0, [1, 2]))
    draft.take(delta(2, [3, 4], version=7))
    draft.begin(rewind=3)
    assert draft.token_ids == [1]
    assert spans(draft) == [(0, 0, 1)]
    draft.take(delta(0, [9], version=7))
    assert spans(draft) == [(0, 0, 1), (7, 1, 2)]
    draft.begin(rewind=9)
    assert (len(draft), draft.spans, draft.first) == (0, [], None)


@pytest.mark.parametrize(
    "bad",
    [
        delta(1, [1]),
        delta(0, [1]).model_copy(update={"weights": ()}),
        delta(0, [1]).model_copy(update={"logprobs": (-1.0, -1.0)}),
    ],
    ids=["a gap", "no span", "too many logprobs"],
)
def test_nonsense_is_not_taken(bad: StreamDelta) -> None:
    draft = Draft(0)
    draft.begin()
    with pytest.raises(BadDelta):
        draft.take(bad)


@given(
    st.lists(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2)), max_size=4), max_size=5),
    st.integers(0, 4),
)
def test_spans_always_cover_the_tokens(attempts: list[list[tuple[int, int]]], rewind: int) -> None:
    draft = Draft(0)
    for attempt in attempts:
        draft.begin(rewind)
        at = 0
        for count, version in attempt:
            draft.take(delta(at, list(range(count)), version))
            at += count
    assert len(draft.logprobs) == len(draft)
    edges = [0, *(edge for s in draft.spans for edge in (s.start, s.end)), len(draft)]
    assert edges == sorted(edges)
    assert sum(s.end - s.start for s in draft.spans) == len(draft)
    kinds = [s.version for s in draft.spans]
    assert all(a != b for a, b in itertools.pairwise(kinds))
