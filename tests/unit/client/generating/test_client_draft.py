"""Outputs joined from attempts: spans shift and merge, nothing odd is taken."""

from __future__ import annotations

from itertools import accumulate, groupby
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollout_client.generating.output_draft import BadDelta, OutputDraft
from rollout_worker.schemas import (
    AbortReason,
    GenerateRequest,
    StopMatch,
    StopReason,
    StreamDelta,
    WeightsSpan,
)

REQUEST = GenerateRequest(token_ids=(1,))


def delta(
    start: int, tokens: list[int], version: int = 0, stale: bool = False, epoch: int = 0,
    logprobs: bool = True,
) -> StreamDelta:  # fmt: skip
    end = start + len(tokens)
    span = WeightsSpan(epoch=epoch, version=version, start=start, end=end, stale_kv=stale)
    values = tuple(-float(token) for token in tokens) if logprobs else None
    return StreamDelta(index=0, token_ids=tuple(tokens), logprobs=values, weights=(span,))


def drafted(*deltas: StreamDelta) -> OutputDraft:
    draft = OutputDraft(REQUEST)
    for each in deltas:
        draft.append_delta(each)
    return draft


Token = tuple[int, tuple[int, int, bool]]
"""Its id, and the epoch, the version and the staleness of the weights that made it."""

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("attempt"), st.integers(0, 9)),
        st.tuples(st.just("delta"), st.integers(1, 4), st.sampled_from([4, 5]), st.booleans()),
        st.tuples(st.just("clear")),
    ),
    max_size=12,
)


def play(steps: list[Any]) -> tuple[OutputDraft, list[Token]]:
    """Do the steps on a draft and, in the plainest way, on a list of tokens."""
    draft, tokens, at = OutputDraft(REQUEST), list[Token](), 0
    for step in steps:
        match step:
            case ("attempt", rewind):
                draft.begin_attempt(rewind)
                tokens, at = tokens[: max(0, len(tokens) - rewind)], 0
            case ("clear",):
                draft.clear_tokens()
                tokens, at = [], 0
            case ("delta", count, version, stale):
                draft.append_delta(delta(at, list(range(count)), version, stale, epoch=at % 2))
                tokens += [(token, (at % 2, version, stale)) for token in range(count)]
                at += count
    return draft, tokens


def spans_of(tokens: list[Token]) -> list[tuple[int, tuple[int, int, bool]]]:
    """Return the ends of runs of tokens of the same weights, and these weights."""
    runs = [(key, len(list(found))) for key, found in groupby(tokens, lambda token: token[1])]
    return list(zip(accumulate(count for _, count in runs), (key for key, _ in runs), strict=True))


@given(STEPS, st.integers(0, 9), st.integers(1, 9))
@example([("delta", 2, 4, False), ("attempt", 0), ("delta", 1, 4, False)], 1, 1)
def test_a_draft_is_the_plain_list_of_its_tokens(steps: list[Any], start: int, count: int) -> None:
    """Attempts are joined and like spans merged; what is sampled again is cut; a part has its part of the spans."""
    draft, tokens = play(steps)
    assert draft.token_ids == [token for token, _ in tokens]
    assert draft.logprobs == [-float(token) for token, _ in tokens]
    ends = [(s.end, (s.epoch, s.version, s.stale_kv)) for s in draft.spans]
    assert ends == spans_of(tokens)
    assert [s.start for s in draft.spans] == [0, *(end for end, _ in ends)][: len(ends)]
    known = [draft.first_weights, draft.last_weights]
    made = [tokens[at][1][:2] if tokens else None for at in (0, -1)]
    assert [each and each.as_tuple() for each in known] == made
    wanted = tokens[start : start + count]
    if wanted:
        part = draft.delta_between(start, start + len(wanted))
        assert list(part.token_ids) == [token for token, _ in wanted]
        assert part.logprobs == tuple(-float(token) for token, _ in wanted)
        found = [(s.end - start, (s.epoch, s.version, s.stale_kv)) for s in part.weights]
        assert found == spans_of(wanted)
        assert (part.index, part.weights[0].start) == (0, start)


def test_an_output_without_logprobs_has_none_unless_they_were_asked_for() -> None:
    bare = drafted(delta(0, [1], logprobs=False))
    assert bare.delta_between(0, 1).logprobs is None
    assert bare.to_output(StopReason.STOP, logprobs=False).logprobs is None
    assert OutputDraft(REQUEST).to_output(StopReason.STOP).logprobs == ()
    assert OutputDraft(REQUEST).to_output(StopReason.STOP, logprobs=False).logprobs is None
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
    draft = OutputDraft(REQUEST)
    draft.begin_attempt()
    draft.append_delta(delta(0, [8, 9]))
    draft.begin_attempt()
    with pytest.raises(BadDelta, match=why):
        draft.append_delta(bad)
    assert (draft.spans[-1].end, len(draft)) == (2, 2), "of a delta that is refused nothing is kept"
