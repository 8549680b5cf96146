from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_worker.engine import EngineDelta, EngineRequest
from rollout_worker.replay_records import ExpertRoutes
from rollout_worker.requests.in_flight_requests import InFlightRequest
from rollout_worker.requests.running_output import RunningOutput
from rollout_worker.requests.score_frames import FRAME_BYTES, FRAME_TOKENS
from rollout_worker.schemas import AbortReason, SamplingParams, StopMatch, StopReason, WeightsSpan

REQUEST = EngineRequest(
    request_id="r/0", token_ids=(1,), sampling=SamplingParams(), logprobs="sampling"
)


def delta(start: int, count: int, version: int, stale: bool = False) -> EngineDelta:
    span = WeightsSpan(epoch=1, version=version, start=start, end=start + count, stale_kv=stale)
    return EngineDelta(
        token_ids=tuple(range(start, start + count)),
        logprobs=tuple(-0.5 for _ in range(count)),
        spans=(span,) if count else (),
    )


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.booleans()), max_size=30))
def test_spans_merge_and_cover(steps: list[tuple[int, int, bool]]) -> None:
    output = RunningOutput(0, REQUEST)
    kinds: list[tuple[int, bool]] = []
    for count, version, stale in steps:
        output.append_delta(delta(len(output.token_ids), count, version, stale))
        kinds += [(version, stale)] * count
    output.mark_aborted(AbortReason.CLIENT)
    result = output.to_result()
    edges = [0, *(span.end for span in result.weights)]
    assert [span.start for span in result.weights] == edges[: len(result.weights)]
    assert edges[-1] == len(result.token_ids)
    expanded = [
        (span.version, span.stale_kv)
        for span in result.weights
        for _ in range(span.end - span.start)
    ]
    assert expanded == kinds
    neighbours = zip(result.weights, result.weights[1:], strict=False)
    assert all((a.version, a.stale_kv) != (b.version, b.stale_kv) for a, b in neighbours)
    assert result.logprobs is not None
    assert len(result.logprobs) == len(result.token_ids)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 3), st.booleans(), st.booleans()), max_size=30
    )
)
def test_what_is_read_in_pieces_adds_up(steps: list[tuple[int, int, bool, bool]]) -> None:
    """Whenever its reader looks: each piece follows the former and has its own spans and logprobs."""
    output, pieces = RunningOutput(2, REQUEST), RunningOutput(2, REQUEST)
    for count, version, stale, looks in [*steps, (0, 1, False, True)]:
        output.append_delta(delta(len(output.token_ids), count, version, stale))
        piece = output.delta_since(len(pieces.token_ids)) if looks else None
        if piece is None:
            continue
        assert piece.index == 2
        assert piece.weights[0].start == len(pieces.token_ids)
        assert piece.weights[-1].end == len(output.token_ids)
        pieces.append_delta(EngineDelta(piece.token_ids, piece.logprobs, piece.weights))
    for each in (output, pieces):
        each.mark_aborted(AbortReason.CLIENT)
    assert pieces.to_result() == output.to_result()
    assert output.delta_since(len(output.token_ids)) is None


@pytest.mark.parametrize(
    ("row_bytes", "most"), [(None, FRAME_TOKENS), (FRAME_BYTES // 100, 100), (2 * FRAME_BYTES, 1)]
)
async def test_a_reader_that_comes_late_gets_frames(row_bytes: int | None, most: int) -> None:
    """At once, megabytes of routes or logprobs would hold the event loop."""
    count = 3 * most + 1
    asked = replace(REQUEST, token_ids=(1, 2), routed_from=None if row_bytes is None else 0)
    flight = InFlightRequest("r", [asked, asked], None)
    for output in flight.outputs:
        made = replace(delta(0, count, 1), stop_reason=StopReason.LENGTH)
        if row_bytes is not None:
            rows = bytearray(row_bytes * (count + 1))
            made = replace(made, routes=ExpertRoutes(0, 1, row_bytes, "uint8", rows))
        output.append_delta(made)
    flight.done.set()
    flight.fresh.set()
    pieces = [piece async for piece in flight.stream_deltas(10)]
    for output in flight.outputs:
        mine = [piece for piece in pieces if piece.index == output.index]
        assert [len(piece.token_ids) for piece in mine] == [most, most, most, 1]
        assert [token for piece in mine for token in piece.token_ids] == output.token_ids
        assert [piece.weights[0].start for piece in mine] == [0, most, 2 * most, 3 * most]
        if row_bytes is not None:
            routes = [piece.routed_experts for piece in mine]
            assert [each and (each.start, each.rows) for each in routes] == [
                (1 + at * most, len(piece.token_ids)) for at, piece in enumerate(mine)
            ]


def test_the_first_end_counts() -> None:
    output = RunningOutput(0, REQUEST)
    last = EngineDelta(
        token_ids=(), logprobs=(), spans=(), stop_reason=StopReason.LENGTH, queued_seconds=0.5
    )
    output.append_delta(last)
    output.mark_aborted(AbortReason.ENGINE)
    assert (output.stop_reason, output.abort_reason) == (StopReason.LENGTH, None)
    assert output.queued_seconds == 0.5


def test_an_output_that_never_ran_is_empty() -> None:
    output = RunningOutput(3, REQUEST)
    output.mark_aborted(AbortReason.DEADLINE)
    result = output.to_result()
    assert (result.index, result.token_ids, result.weights, result.logprobs) == (3, (), (), ())
    assert (result.stop_reason, result.abort_reason) == (StopReason.ABORTED, AbortReason.DEADLINE)


def test_everything_of_a_delta_is_kept() -> None:
    output = RunningOutput(0, REQUEST)
    match = StopMatch(token_id=7)
    for cached, preempted in ((3, 1), (0, 0)):
        output.append_delta(EngineDelta((), (), (), cached_tokens=cached, preemptions=preempted))
    output.append_delta(EngineDelta((), (), (), stop_reason=StopReason.STOP, stop_match=match))
    assert (output.cached_tokens, output.preemptions) == (3, 1)
    assert (output.to_result().stop_reason, output.to_result().stop_match) == (
        StopReason.STOP,
        match,
    )


def test_who_asked_for_no_logprobs_gets_none() -> None:
    output = RunningOutput(0, replace(REQUEST, logprobs=None))
    output.append_delta(EngineDelta((5,), None, (WeightsSpan(epoch=0, version=0, start=0, end=1),)))
    output.mark_aborted(AbortReason.CLIENT)
    assert (output.to_result().logprobs, output.to_result().token_ids) == (None, (5,))
    piece = output.delta_since(0)
    assert piece is not None
    assert (piece.logprobs, piece.token_ids) == (None, (5,))
