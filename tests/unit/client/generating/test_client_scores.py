"""Scores joined from frames and attempts: nothing odd is taken, nothing that is kept is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client.generating.continuation import remaining_request
from rollout_client.generating.output_draft import BadDelta, OutputDraft, PromptDraft
from rollout_client.routing.member_records import WeightsBounds
from rollout_worker.schemas import (
    GenerateRequest,
    PromptLogprobs,
    StopReason,
    StreamDelta,
    TopLogprobs,
    WeightsId,
    WeightsSpan,
)

REQUEST = GenerateRequest(token_ids=(5, 6), prompt_logprobs=True, top_logprobs=2)


def top(count: int) -> TopLogprobs:
    return TopLogprobs(token_ids=((5, 6),) * count, logprobs=((-0.5, -1.0),) * count)


def frame(start: int, count: int, version: int = 0, rows: int | None = None) -> PromptLogprobs:
    return PromptLogprobs(
        start=start,
        logprobs=tuple(None if start + at == 0 else -float(start + at) for at in range(count)),
        top_logprobs=None if rows is None else top(rows),
        weights=WeightsId(epoch=0, version=version),
    )


def delta(start: int, count: int, rows: int | None = None) -> StreamDelta:
    span = WeightsSpan(epoch=0, version=0, start=start, end=start + count)
    return StreamDelta(
        index=0,
        token_ids=tuple(range(count)),
        logprobs=(-0.1,) * count,
        top_logprobs=None if rows is None else top(rows),
        weights=(span,),
    )


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.booleans(), st.integers(0, 3))
def test_frames_are_joined(sizes: list[int], rows: bool, start: int) -> None:
    end = start + sum(sizes)
    draft, at = PromptDraft((start, end)), start
    for size in sizes:
        assert (draft.is_whole, draft.to_prompt()) == (False, None)
        draft.append_frame(frame(at, size, rows=size if rows else None))
        at += size
    whole = draft.to_prompt()
    assert draft.is_whole
    assert whole == frame(start, end - start, rows=end - start if rows else None)
    draft.clear_frames()
    assert (draft.is_whole, draft.to_prompt()) == (False, None)


@pytest.mark.parametrize(
    "bad",
    [frame(1, 1), frame(3, 1), frame(2, 9), frame(2, 1, version=1), frame(2, 2, rows=1)],
    ids=["again", "a gap", "too many", "other weights", "a row is missing"],
)
def test_odd_frames_are_refused(bad: PromptLogprobs) -> None:
    draft = PromptDraft((0, 4))
    draft.append_frame(frame(0, 2))
    with pytest.raises(BadDelta):
        draft.append_frame(bad)
    with pytest.raises(BadDelta):
        PromptDraft(None).append_frame(frame(0, 1))


def test_tokens_need_their_rows_and_the_scores_before_them() -> None:
    draft = OutputDraft(REQUEST)
    with pytest.raises(BadDelta, match="before the scores"):
        draft.append_delta(delta(0, 1, rows=1))
    draft.prompt.append_frame(frame(0, 2))
    for rows in (None, 1):
        with pytest.raises(BadDelta, match="top_logprobs"):
            draft.append_delta(delta(0, 2, rows=rows))
    draft.append_delta(delta(0, 2, rows=2))
    assert draft.delta_between(1, 2).top_logprobs == top(1)


def test_what_came_before_a_cut_is_kept_and_the_rest_asked_for() -> None:
    draft = OutputDraft(REQUEST)

    def asked() -> GenerateRequest:
        return remaining_request(
            REQUEST, draft, WeightsBounds(), request_id="r", session_id="s", seconds=9
        )

    draft.begin_attempt()
    draft.prompt.append_frame(frame(0, 1))
    draft.begin_attempt()  # cut before a token: the prompt is scored again, perhaps by other weights
    assert asked().prompt_logprobs is True
    draft.prompt.append_frame(frame(0, 2, version=1))
    draft.append_delta(delta(0, 3, rows=3))
    draft.begin_attempt(rewind=1)
    assert (asked().prompt_logprobs, asked().top_logprobs) == (None, 2)
    draft.append_delta(delta(0, 2, rows=2))
    output = draft.to_output(StopReason.LENGTH)
    assert output.top_logprobs == top(4)
    assert draft.prompt.to_prompt() == frame(0, 2, version=1)
    draft.begin_attempt(rewind=9)  # all tokens are sampled again
    assert asked().prompt_logprobs is True
    assert draft.to_output(StopReason.LENGTH).top_logprobs == top(0)
