"""Columns and streams: what is appended stays, what is cut is gone from every column."""

from __future__ import annotations

from array import array
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client.conversation.columns import INT32, TokenColumns
from rollout_worker.schemas import WeightsSpan

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=6)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("given"), TOKENS),
        st.tuples(st.just("sampled"), TOKENS, st.integers(0, 2), st.booleans()),
        st.tuples(st.just("vision"), st.integers(1, 3), st.integers(1, 4)),
        st.tuples(st.just("cut"), st.integers(0, 12)),
    ),
    max_size=12,
)
Token = tuple[int, int, int, float, tuple[int, bool] | None, tuple[int, int, int]]


def play(steps: list[Any]) -> tuple[TokenColumns, list[Token]]:
    """Do the steps on streams and, in the plainest way, on a list of tokens."""
    streams, tokens = TokenColumns(), list[Token]()
    for step in steps:
        after = max((max(token[5]) for token in tokens), default=-1) + 1
        match step:
            case ("cut", count):
                streams.cut_to(max(0, len(tokens) - count))
                tokens = tokens[: max(0, len(tokens) - count)]
            case ("given", ids):
                streams.append_tokens(ids)
                tokens += [(t, 0, 0, 0.0, None, (after + i,) * 3) for i, t in enumerate(ids)]
            case ("sampled", ids, version, stale):
                logprobs = [-0.5 * i for i in range(len(ids))]
                span = WeightsSpan(epoch=1, version=version, start=0, end=len(ids), stale_kv=stale)
                streams.append_tokens(
                    ids, loss=True, sampled=True, logprobs=logprobs, weights=[span]
                )
                tokens += [
                    (t, 1, 1, logprobs[i], (version, stale), (after + i,) * 3)
                    for i, t in enumerate(ids)
                ]
            case ("vision", height, width):
                grid = [(0, h, w) for h in range(height) for w in range(width)]
                rows = [array(INT32, axis) for axis in zip(*grid, strict=True)]
                streams.append_tokens([7] * len(grid), rope=(rows[0], rows[1], rows[2]))
                tokens += [(7, 0, 0, 0.0, None, (after, after + h, after + w)) for _, h, w in grid]
    return streams, tokens


@given(STEPS)
def test_streams_are_the_plain_list_of_tokens(steps: list[Any]) -> None:
    streams, tokens = play(steps)
    for at, name in enumerate(("ids", "loss", "sampled", "logprobs")):
        assert streams.column_view(name) == [token[at] for token in tokens]
    axes = streams.position_rows()
    wanted = [[t[5][axis] for t in tokens] for axis in range(len(axes))]
    assert [list(axis) for axis in axes] == wanted
    spans = [
        (key[0], key[1], group[0][0], group[-1][0] + 1)
        for key, found in groupby(enumerate(tokens), lambda pair: pair[1][4])
        if key and (group := list(found))
    ]
    assert [(s.version, s.stale_kv, s.start, s.end) for s in streams.weights] == spans


@given(STEPS, st.booleans())
def test_streams_come_back_from_their_document(steps: list[Any], binary: bool) -> None:
    streams, _ = play(steps)
    streams.prompt = len(streams) // 2
    document = streams.model_dump(mode="python" if binary else "json", context={"binary": True})
    again = TokenColumns.model_validate(document)
    assert again == streams
    again.append_tokens([1, 2])
    streams.append_tokens([1, 2])
    assert again == streams


def test_a_document_that_does_not_fit_is_refused() -> None:
    streams = TokenColumns()
    streams.append_tokens([1, 2, 3])
    whole = streams.model_dump(mode="json")
    with pytest.raises(ValueError, match="lengths differ"):
        TokenColumns.model_validate({**whole, "loss_mask": [0]})
    with pytest.raises(ValueError, match="prompt"):
        TokenColumns.model_validate({**whole, "prompt_length": 4})


def test_a_view_stays_while_the_column_grows_and_raises_once_it_was_cut() -> None:
    streams = TokenColumns()
    streams.append_tokens(range(5))
    view, short = streams.column_view("ids", 1, 4), streams.column_view("ids", 0, 2)
    streams.append_tokens(range(1000))
    assert view == [1, 2, 3] == view.tolist()
    assert (view[0], view[-1], view[1:], view[::-1]) == (1, 3, [2, 3], [3, 2, 1])
    streams.cut_to(3)
    streams.append_tokens([9, 9, 9])
    assert short == [0, 1]
    with pytest.raises(RuntimeError, match="truncated"):
        view.tolist()
    with pytest.raises(IndexError):
        short[2]
