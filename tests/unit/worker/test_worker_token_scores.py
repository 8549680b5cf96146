"""Scores: kept compactly, sent in frames that together are the whole; what an engine may be asked for."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_worker.engine import EngineRequest, InvalidRequest
from rollout_worker.engines.sglang.sglang_records import (
    first_counted,
    pack_prompt,
    pack_top,
    unpack_prompt,
    unpack_top,
)
from rollout_worker.requests.record_checks import check_scoring
from rollout_worker.requests.score_frames import (
    FRAME_VALUES,
    OutputArrays,
    frame_positions,
    prompt_frames,
    response_pieces,
)
from rollout_worker.schemas import (
    MAX_SCORED_VALUES,
    GenerateOutput,
    GenerateResponse,
    SamplingParams,
    StopReason,
    Timing,
    Usage,
    WeightsId,
)
from rollout_worker.token_scores import PromptScores, TopTokens
from tests.support.unit.tiny_engine import ABLE

WEIGHTS = WeightsId(epoch=3, version=8)
SCORING = ABLE.model_copy(update={"prompt_logprobs": True, "top_logprobs": 256})


def rows(count: int, width: int) -> TopTokens:
    """Rows whose numbers tell where they are."""
    top = TopTokens(width)
    for at in range(count):
        top.append_row(range(at, at + width), [-float(at + rank) for rank in range(width)])
    return top


def scores(start: int, count: int, width: int) -> PromptScores:
    values = [None if start + at == 0 else -float(at) for at in range(count)]
    return PromptScores(start, values, rows(count, width) if width else None, WEIGHTS)


@given(st.lists(st.lists(st.floats(-50, 0, width=32), max_size=5), max_size=8), st.data())
def test_rows_come_back_without_what_is_impossible(
    wanted: list[list[float]], data: st.DataObject
) -> None:
    top = TopTokens(5)
    for values in wanted:
        top.append_row(range(len(values)), values)
    cut = data.draw(st.integers(0, len(wanted)))
    joined = top.slice_rows(0, cut)
    joined.extend(top.slice_rows(cut, len(wanted)))
    assert len(joined) == len(wanted)
    found = joined.to_wire(0, len(wanted))
    assert [list(row) for row in found.logprobs] == wanted
    assert [list(row) for row in found.token_ids] == [[*range(len(v))] for v in wanted]


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1), st.integers(1, 40), st.sampled_from([0, 1, 3, 256]))
def test_frames_are_bounded_and_together_the_whole(start: int, count: int, width: int) -> None:
    given_scores = scores(start, count, width)
    frames = list(prompt_frames(given_scores))
    whole = given_scores.to_wire(0, count)
    assert [f.start for f in frames] == [
        start + at for at in range(0, count, frame_positions(width))
    ]
    assert sum((f.logprobs for f in frames), ()) == whole.logprobs
    assert all(len(f.logprobs) * (1 + width) <= FRAME_VALUES for f in frames)
    if width:
        assert whole.top_logprobs is not None
        joined = [row for f in frames if f.top_logprobs for row in f.top_logprobs.token_ids]
        assert joined == list(whole.top_logprobs.token_ids)


@pytest.mark.parametrize(("count", "width"), [(0, 2), (1, 2), (70, 256), (9000, 0)])
async def test_the_pieces_of_a_response_are_its_json(count: int, width: int) -> None:
    usage, timing = (
        Usage(prompt_tokens=3, completion_tokens=0),
        Timing(queued_seconds=0, total_seconds=1),
    )
    output = GenerateOutput(
        index=0, token_ids=(), logprobs=(), stop_reason=StopReason.LENGTH, weights=()
    )
    plain = GenerateResponse(
        request_id="r", logprobs_of="raw", outputs=(output, output), usage=usage, timing=timing
    )
    prompt = scores(0, count, width) if count else None
    tops = [rows(count, width), None] if width else [None, None]
    arrays = [OutputArrays(top=top) for top in tops]
    pieces = [piece async for piece in response_pieces(plain, arrays, prompt)]
    found = GenerateResponse.model_validate_json(b"".join(pieces))
    top = None if tops[0] is None else tops[0].to_wire(0, count)
    tailed = output.model_copy(update={"top_logprobs": top})
    wanted = plain.model_copy(
        update={"outputs": (tailed, output), "prompt_logprobs": prompt and prompt.to_wire(0, count)}
    )
    assert found == wanted
    assert max(map(len, pieces)) < 40 * FRAME_VALUES


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 9), st.data(), st.sampled_from([0, 1, 4]))
def test_what_sglang_counts_becomes_what_was_asked_for(
    length: int, data: st.DataObject, width: int
) -> None:
    """The first position that it counts has no logprob, whether it is asked for or not."""
    start = data.draw(st.integers(0, length - 1))
    end = data.draw(st.integers(start + 1, length))
    first, whole = first_counted(start), scores(0, length, width)
    meta: dict[str, Any] = {
        "input_token_logprobs": [
            (None if at == first else whole.logprobs[at], 0, None) for at in range(first, length)
        ]
    }
    if width:
        assert whole.top is not None
        kept = whole.top.slice_rows(first + 1, length)
        meta |= {
            "input_top_logprobs_shape": [len(kept), width],
            "input_top_logprobs_null_prefix": 1,
            "input_top_logprobs_idx_flat_b64": _b64(kept.token_ids),
            "input_top_logprobs_val_flat_b64": _b64(kept.logprobs),
        }
    packed = json.loads(json.dumps(pack_prompt(meta, start, end)))
    found = unpack_prompt(packed, start, WEIGHTS)
    assert list(found.logprobs) == list(whole.logprobs[start:end])
    if width:
        assert whole.top is not None
        assert found.top is not None
        wire, want = found.top.to_wire(0, end - start), whole.top.to_wire(start, end)
        skipped = int(start == 0)
        assert wire.token_ids[skipped:] == want.token_ids[skipped:]
        assert wire.logprobs[skipped:] == want.logprobs[skipped:]
        assert not skipped or wire.token_ids[0] == ()


def _b64(values: array[Any]) -> str:
    import base64

    return base64.b64encode(values.tobytes()).decode()


def test_the_rows_of_a_step_go_through_the_childs_socket() -> None:
    given_rows = [[(-0.5, 7, None), (-2.0, 9, None)], [(-1.0, 1, None), (-float("inf"), 3, None)]]
    top = unpack_top(json.loads(json.dumps(pack_top(given_rows))))
    assert top.to_wire(0, 2).token_ids == ((7, 9), (1,))


REQUEST = EngineRequest(
    "r", tuple(range(40000)), SamplingParams(max_tokens=0), "raw", scored=(0, 40000)
)


@pytest.mark.parametrize(
    ("changes", "able", "altering", "field"),
    [
        ({}, {"prompt_logprobs": False}, (), "prompt_logprobs"),
        ({"top_logprobs": 3}, {"top_logprobs": 2}, (), "top_logprobs"),
        ({"logprobs": "sampling"}, {}, ("temperature",), "prompt_logprobs"),
        ({"top_logprobs": 52}, {}, (), "prompt_logprobs"),
        ({"scored": None, "top_logprobs": 256}, {}, (), "top_logprobs"),
    ],
)
def test_what_can_not_be_scored_is_refused_by_field_and_fix(
    changes: dict[str, Any], able: dict[str, Any], altering: tuple[str, ...], field: str
) -> None:
    request = replace(REQUEST, **changes)
    if request.scored is None:  # what would be sampled instead
        request = replace(request, sampling=SamplingParams(max_tokens=2**18 + 1))
    with pytest.raises(InvalidRequest) as caught:
        check_scoring([request], SCORING.model_copy(update=able), "hf", altering)
    assert caught.value.field == field


def test_the_largest_answer_is_served() -> None:
    width = MAX_SCORED_VALUES // 40000 - 1
    check_scoring([replace(REQUEST, top_logprobs=width)], SCORING, "hf", ("temperature",))
    tokens = SamplingParams(max_tokens=2**18)
    drawn = replace(REQUEST, scored=None, sampling=tokens, top_logprobs=256)
    check_scoring([drawn], SCORING, "hf", ("temperature",))


def test_hidden_tokens_have_no_logprob() -> None:
    scores = PromptScores(1, [-1.0, -2.0, -3.0], None, WeightsId(epoch=0, version=0))
    assert scores.without_tokens((9, 9, 5, 9, 9), {9}).logprobs == [None, -2.0, None]
    assert scores.without_tokens((9, 9, 5, 9), frozenset()) is scores
