"""Requests in flight over a whole worker: admission, streams, aborts, deadlines, refusals."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollout_common.wire import MAX_RECORD_BYTES
from rollout_common.wire.problems import ProblemError
from rollout_worker.engine import EngineCrashed
from rollout_worker.engines.request_checks import check_route_size
from rollout_worker.requests import in_flight_requests
from rollout_worker.requests.admission_checks import MAX_SEED, expand_request
from rollout_worker.schemas import AbortReason, GenerateRequest, StopReason, WeightsId
from tests.support.unit.tiny_engine import MAX_LENGTH, UNKNOWN, Gate, raising
from tests.support.unit.tiny_worker import TinyWorker, refused, tiny_worker
from tests.support.waiting import until


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[TinyWorker]:
    async with tiny_worker(tmp_path, "--max-queue", "4", rows=2) as worker:
        yield worker


def asked(**fields: Any) -> GenerateRequest:
    return GenerateRequest.model_validate({"token_ids": [1, 2, 3], **fields})


# Admission.


async def test_the_queue_takes_so_many_outputs_and_no_more(worker: TinyWorker) -> None:
    running = [await worker.runs(f"r{n}", 1) for n in range(2)]
    waiting = await worker.begin("w", sampling={"n": 3})
    assert (worker.flights.waiting_count, worker.worker.worker_state().queued) == (3, 3)
    assert worker.worker.worker_state().in_flight == 2
    with refused("queue-full") as caught:
        worker.worker.submit_request(asked(sampling={"n": 2}))
    assert caught.value.problem.model_dump()["queued"] == 3
    assert caught.value.headers == {"Retry-After": "1"}
    last = worker.worker.submit_request(asked())
    with refused("queue-full"):
        worker.worker.submit_request(asked())
    for flight in (*running, waiting, last):
        await worker.ends(flight)
    assert (worker.flights.waiting_count, len(worker.flights)) == (0, 0)
    assert worker.worker.worker_state().queued == 0


async def test_an_id_in_flight_is_refused_and_free_again_afterwards(worker: TinyWorker) -> None:
    first = await worker.begin("twice", 3)
    with refused("duplicate-request"):
        worker.worker.submit_request(asked(request_id="twice"))
    await worker.ends(first)
    again = await worker.begin("twice", 3)
    assert (await worker.ends(again)).stop_reason is StopReason.LENGTH


async def test_a_duplicate_is_told_before_a_full_queue(worker: TinyWorker) -> None:
    """After a 429 a client would send it again."""
    await worker.begin("twice", sampling={"n": 4})
    await worker.begin("more", sampling={"n": 2})
    with refused("queue-full"):
        worker.worker.submit_request(asked(request_id="third"))
    with refused("duplicate-request"):
        worker.worker.submit_request(asked(request_id="twice"))


def expanded(worker: TinyWorker, **fields: Any) -> list[Any]:
    engine, info = worker.runtime.loaded_engine()
    return list(expand_request(asked(**fields), "r", engine, info, "sampling"))


async def test_each_output_has_its_own_seed_and_name(worker: TinyWorker) -> None:
    three = expanded(worker, sampling={"n": 3, "seed": MAX_SEED - 2})
    assert [each.request_id for each in three] == ["r/0", "r/1", "r/2"]
    assert [each.sampling.seed for each in three] == [MAX_SEED - 2, MAX_SEED - 1, 0]
    assert {each.sampling.n for each in three} == {1}
    assert [each.sampling.seed for each in expanded(worker, sampling={"n": 2})] == [None, None]


@pytest.mark.parametrize(
    ("outputs", "tokens", "fits"), [(1, 32, True), (1, 33, False), (4, 8, True), (4, 9, False)]
)
async def test_a_response_holds_the_routes_of_all_outputs(
    worker: TinyWorker, monkeypatch: pytest.MonkeyPatch, outputs: int, tokens: int, fits: bool
) -> None:
    able = worker.engine.capabilities.model_copy(update={"return_routed_experts": True})
    monkeypatch.setattr(worker.engine, "capabilities", able)
    row_bytes = MAX_RECORD_BYTES // (3 + 32)
    monkeypatch.setattr(worker.engine, "validate", partial(check_route_size, row_bytes=row_bytes))
    fields = {"return_routed_experts": True, "sampling": {"n": outputs, "max_tokens": tokens}}
    if fits:
        assert len(expanded(worker, **fields)) == outputs
        return
    with refused("unsupported") as caught:
        expanded(worker, **fields)
    assert "return_routed_experts" in str(caught.value)
    assert "sampling.n" in str(caught.value)


@pytest.mark.parametrize(("wanted", "kind"), [(None, "sampling"), ("raw", "raw"), ("none", None)])
async def test_logprobs_are_the_pools_unless_asked(
    worker: TinyWorker, wanted: str | None, kind: str | None
) -> None:
    assert expanded(worker, logprobs=wanted)[0].logprobs == kind


async def test_everything_else_reaches_the_engine(worker: TinyWorker) -> None:
    [request] = expanded(worker, priority=3, session_id="s", stream=True)
    assert (request.priority, request.session_id, request.streamed) == (3, "s", True)
    assert request.token_ids == (1, 2, 3)


@pytest.mark.parametrize(
    ("prompt", "sampling", "length"),
    [
        (3, {}, MAX_LENGTH - 3),
        (3, {"max_tokens": MAX_LENGTH - 3}, MAX_LENGTH - 3),
        (MAX_LENGTH - 1, {}, 1),
        (MAX_LENGTH - 4, {"min_tokens": 4}, 4),
    ],
)
async def test_the_length_is_resolved(
    worker: TinyWorker, prompt: int, sampling: dict[str, int], length: int
) -> None:
    [request] = expanded(worker, token_ids=[1] * prompt, sampling=sampling)
    assert request.sampling.max_tokens == length


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [(3, {"max_tokens": MAX_LENGTH - 2}), (MAX_LENGTH, {}), (MAX_LENGTH - 4, {"min_tokens": 5})],
)
async def test_what_does_not_fit_is_refused(
    worker: TinyWorker, prompt: int, sampling: dict[str, int]
) -> None:
    with refused("too-long") as caught:
        expanded(worker, token_ids=[1] * prompt, sampling=sampling)
    assert caught.value.problem.status == 413
    [error] = caught.value.problem.model_dump()["errors"]
    assert error == {"field": "token_ids", "message": f"{prompt} of {MAX_LENGTH} tokens"}


async def test_what_the_engine_lacks_or_refuses_names_its_field(worker: TinyWorker) -> None:
    for fields, path in (({"cache_salt": "x"}, "cache_salt"), ({"token_ids": [UNKNOWN - 1]}, "")):
        with refused("unsupported") as caught:
            worker.worker.submit_request(asked(**fields))
        [error] = caught.value.problem.model_dump()["errors"]
        assert error["field"] == (path or "token_ids")
    assert len(worker.flights) == 0


async def test_a_late_refusal_is_the_answer(worker: TinyWorker) -> None:
    flight = worker.worker.submit_request(asked(token_ids=[UNKNOWN]))
    with refused("unsupported") as caught:
        await flight.wait_finished(10)
    assert "token_ids: found out late" in str(caught.value)
    streamed = worker.worker.submit_request(asked(token_ids=[UNKNOWN], stream=True))
    with refused("unsupported"):
        _ = [delta async for delta in streamed.stream_deltas(10)]


# Answers.


async def test_the_answer_has_everything(worker: TinyWorker) -> None:
    flight = await worker.begin("r", 3, sampling={"n": 2})
    await worker.ends(flight)
    await flight.wait_finished(10)
    assert flight.outputs[0].queued_seconds == 0.25
    flight.outputs[1].queued_seconds = 0.125
    answer = flight.to_response()
    assert (answer.request_id, answer.logprobs_of) == ("r", "sampling")
    assert [o.index for o in answer.outputs] == [0, 1]
    for output in answer.outputs:
        assert (output.token_ids, output.logprobs) == ((100,) * 3, (-0.5,) * 3)
        assert output.stop_reason is StopReason.LENGTH
        [span] = output.weights
        assert (span.start, span.end, span.version) == (0, 3, 0)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 6)
    timing = answer.timing
    assert timing.queued_seconds == 0.125, "until its first output began"
    assert timing.first_token_seconds is not None
    assert 0 <= timing.first_token_seconds <= timing.total_seconds


async def test_a_stream_says_the_same_in_pieces(worker: TinyWorker) -> None:
    flight = await worker.begin("r", 3, stream=True)
    worker.engine.free = True
    deltas = [delta async for delta in flight.stream_deltas(10)]
    assert [token for delta in deltas for token in delta.token_ids] == [100] * 3
    assert [delta.weights[0].start for delta in deltas] == [0, 1, 2]
    assert [delta.logprobs for delta in deltas] == [(-0.5,)] * 3
    done = flight.final_event()
    assert done.request_id == "r"
    [output] = done.outputs
    assert (output.index, output.stop_reason, output.abort_reason) == (0, "length", None)
    assert done.usage.completion_tokens == 3


async def test_a_late_reader_reads_everything_in_few_pieces(worker: TinyWorker) -> None:
    """Two weights, two outputs: each piece has its own spans, and together they are the output."""
    await worker.stage(1, 7)
    flight = await worker.runs("r", 3, stream=True, sampling={"n": 2}, tokens=6)
    reading = flight.stream_deltas(10)
    first = [await anext(reading) for _ in range(2)]
    assert [(d.index, d.token_ids) for d in first] == [(0, (100,) * 3), (1, (100,) * 3)]
    worker.engine.step(1)
    await worker.commit(1, in_flight="Keep")
    await worker.ends(flight)
    rest = [delta async for delta in reading]
    assert [(d.index, d.token_ids) for d in rest] == [(0, (100, 7, 7)), (1, (100, 7, 7))]
    for delta in rest:
        assert delta.logprobs == (-0.5,) * 3
        spans = [(s.version, s.start, s.end, s.stale_kv) for s in delta.weights]
        assert spans == [(0, 3, 4, False), (1, 4, 6, True)]


async def test_the_metrics_count(worker: TinyWorker) -> None:
    await worker.ends(await worker.begin("r", 3, sampling={"n": 2}))
    page = worker.worker.render_metrics().decode()
    assert "rollout_worker_generated_tokens_total 6.0" in page
    assert "rollout_worker_prompt_tokens_total 3.0" in page
    assert 'rollout_worker_requests_total{stop_reason="length"} 2.0' in page
    assert "rollout_worker_request_duration_seconds_count 1.0" in page
    assert "rollout_worker_time_to_first_token_seconds_count 1.0" in page
    assert "tiny_engine_steps 1" in page
    for name in ("request_duration", "time_to_first_token"):
        [total] = re.findall(rf"rollout_worker_{name}_seconds_sum (\S+)", page)
        assert 0 <= float(total) < 10


async def test_the_first_token_counts_when_it_comes(worker: TinyWorker) -> None:
    """A request may go on for an hour: its end is too late to hear of its beginning."""
    flight = await worker.runs("r")
    assert not flight.done.is_set()
    page = worker.worker.render_metrics().decode()
    assert "rollout_worker_time_to_first_token_seconds_count 1.0" in page
    assert 'rollout_worker_time_to_first_token_seconds_bucket{le="1800.0"}' in page
    assert 'rollout_worker_request_duration_seconds_bucket{le="7200.0"}' in page


async def test_the_load_is_a_metric(worker: TinyWorker) -> None:
    await worker.begin("r", sampling={"n": 3})
    page = worker.worker.render_metrics().decode()
    assert [float(n) for n in re.findall(r"^rollout_worker_requests_\w+ (\S+)$", page, re.M)] == [
        2,
        1,
    ]


# Ends.


async def test_a_deadline_keeps_what_was_made(worker: TinyWorker) -> None:
    flight = await worker.runs("r", deadline_seconds=0.2)
    waiting = await worker.runs("other")
    await asyncio.wait_for(flight.done.wait(), 5)
    output = flight.outputs[0]
    assert (output.abort_reason, output.token_ids[:2]) == (AbortReason.DEADLINE, [100, 100])
    assert not waiting.done.is_set(), "others go on"


async def test_a_finished_request_has_no_deadline_any_more(worker: TinyWorker) -> None:
    flight = await worker.begin("r", 2, deadline_seconds=0.2)
    assert (await worker.ends(flight)).stop_reason is StopReason.LENGTH
    assert flight.deadline is not None
    assert flight.deadline.cancelled()


async def test_the_first_reason_of_an_abort_stays(worker: TinyWorker) -> None:
    flight = await worker.runs("r")
    gate, first = await worker.hold_call(
        "abort", worker.flights.abort_requests([flight], AbortReason.CLIENT)
    )
    second = asyncio.create_task(worker.flights.abort_requests([flight], AbortReason.CONTROL))
    await asyncio.sleep(0)
    assert flight.outputs[0].aborting is AbortReason.CLIENT
    gate.open()
    await asyncio.gather(first, second)


async def test_an_abort_before_the_engine_knows_the_request(worker: TinyWorker) -> None:
    """Accepted, not yet handed over: the engine must never see it."""
    flight = worker.worker.submit_request(asked(request_id="r"))
    await worker.flights.abort_requests([flight], AbortReason.CLIENT)
    assert flight.outputs[0].abort_reason is AbortReason.CLIENT
    assert worker.engine.known == frozenset()
    assert worker.engine.asked == 0


async def test_an_abort_that_the_engine_does_not_end_ends_without_it(
    worker: TinyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    flight = await worker.runs("r")
    monkeypatch.setattr(in_flight_requests, "ABORT_TIMEOUT_SECONDS", 0.1)
    worker.engine.before["abort"] = Gate()
    began = time.monotonic()
    await worker.flights.abort_requests([flight], AbortReason.CLIENT)
    assert time.monotonic() - began < 5
    await asyncio.wait_for(flight.done.wait(), 5)
    assert flight.outputs[0].abort_reason is AbortReason.CLIENT
    await until(lambda: worker.runtime.restarts == 1, what="the restart: it hangs")


async def test_a_request_whose_engine_goes_before_it_is_handed_over_ends(
    worker: TinyWorker, caplog: pytest.LogCaptureFixture
) -> None:
    stopping = asyncio.create_task(worker.worker.supervisor.end_engine())
    flight = worker.worker.submit_request(asked())
    await flight.wait_finished(5)
    await stopping
    assert flight.outputs[0].abort_reason is AbortReason.ENGINE
    assert "the engine failed during a request" not in caplog.text


async def test_a_request_that_is_failed_before_its_first_step_ends(worker: TinyWorker) -> None:
    flight = worker.worker.submit_request(asked())
    worker.flights.fail_all()
    await flight.wait_finished(5)
    assert flight.outputs[0].abort_reason is AbortReason.ENGINE
    assert len(worker.flights) == 0


@pytest.mark.parametrize(
    ("error", "restarts"), [(EngineCrashed("it died"), 1), (RuntimeError("a defect"), 0)]
)
async def test_a_request_that_fails_in_the_engine_is_aborted(
    worker: TinyWorker, error: Exception, restarts: int
) -> None:
    worker.engine.before["generate"] = raising(error)
    flight = worker.worker.submit_request(asked())
    await flight.wait_finished(5)
    assert flight.outputs[0].abort_reason is AbortReason.ENGINE
    await until(lambda: worker.runtime.restarts == restarts, what="the restart")


async def test_nobody_waits_for_ever(worker: TinyWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight_requests, "ANSWER_TIMEOUT_SECONDS", 0.05)
    flight = await worker.runs("r")
    with pytest.raises(TimeoutError):
        await flight.wait_finished(0.05)
    with pytest.raises(TimeoutError):
        _ = [delta async for delta in flight.stream_deltas(0.05)]


async def test_a_commit_between_two_requests_is_seen_by_the_second(worker: TinyWorker) -> None:
    await worker.update(1, 7)
    for bounds in ({"min_version": 2}, {"exact_version": 0}, {"epoch": 2}):
        with pytest.raises(ProblemError) as caught:
            worker.worker.submit_request(asked(**bounds))
        assert caught.value.slug == "version-not-met"
    flight = worker.worker.submit_request(asked(exact_version=1, sampling={"max_tokens": 2}))
    assert flight.exact is not None
    assert flight.exact.as_tuple() == (1, 1)
    await worker.ends(flight)
    assert worker.worker.submit_request(asked(sampling={"max_tokens": 2})).exact is None


async def test_an_answer_without_a_token_has_no_first_one(worker: TinyWorker) -> None:
    flight = await worker.begin("r")
    await worker.flights.abort_all(AbortReason.CONTROL)
    timing = flight.to_response().timing
    assert timing.first_token_seconds is None
    assert timing.total_seconds >= 0


async def test_who_asked_for_exactly_other_weights(worker: TinyWorker) -> None:
    exact = await worker.begin("exact", exact_version=0)
    await worker.begin("free")
    zero, one = WeightsId(epoch=0, version=0), WeightsId(epoch=1, version=1)
    assert worker.flights.outputs_pinned_elsewhere(zero) == []
    assert worker.flights.outputs_pinned_elsewhere(one) == exact.outputs
    await worker.ends(exact)
    assert worker.flights.outputs_pinned_elsewhere(one) == []
