"""Requests that others end: by id, all, by going away, by their deadline; and who is unknown."""

from __future__ import annotations

import time

import httpx
import pytest

from tests.support.engine.contracts import Output, Served, sound
from tests.support.engine.reference import Reference
from tests.support.engine.workers import PROMPT, slug
from tests.support.waiting import until_sync

LONG = {"max_tokens": 1800, "ignore_eos": True}


def ended_by(answer: httpx.Response, reason: str) -> list[Output]:
    assert answer.status_code == 200, answer.text
    outputs: list[Output] = answer.json()["outputs"]
    for output in outputs:
        sound(output)
        assert (output["stop_reason"], output["abort_reason"]) == ("aborted", reason)
        assert len(output["token_ids"]) < 1800
    return outputs


def test_an_abort_keeps_tokens_and_logprobs(
    worker: Served, reference: dict[int, Reference]
) -> None:
    running = worker.long("a", sampling={**LONG, "n": 2})
    other = worker.long("other", sampling={**LONG, "max_tokens": 200, "temperature": 0})
    worker.makes(50)
    answer = worker.post("abort", request_ids=["a", "nobody"])
    assert answer.json() == {"aborted": ["a"], "unknown": ["nobody"]}
    for output in ended_by(running.result(20), "control"):
        assert output["token_ids"]
        expected = reference[1].raw_logprobs(PROMPT, output["token_ids"])
        assert output["logprobs"] == pytest.approx(expected, abs=1e-4)
    [rest] = other.result(60).json()["outputs"]
    assert (rest["stop_reason"], len(rest["token_ids"])) == ("length", 200), "others go on"
    assert worker.post("abort", request_ids=["a"]).json() == {"aborted": [], "unknown": ["a"]}


def test_abort_all(worker: Served) -> None:
    running = [worker.long(f"a{i}", sampling=LONG) for i in range(5)]
    worker.makes(50)
    answer = worker.post("abort", all=True).json()
    assert sorted(answer["aborted"]) == [f"a{i}" for i in range(5)]
    for each in running:
        ended_by(each.result(20), "control")
    assert worker.post("abort", all=True).json() == {"aborted": [], "unknown": []}


def test_an_id_is_free_again_after_its_abort(worker: Served) -> None:
    first = worker.long("twice", sampling=LONG)
    answer = worker.generate(request_id="twice")
    assert (answer.status_code, slug(answer)) == (409, "duplicate-request")
    worker.post("abort", request_ids=["twice"])
    assert first.result(20).status_code == 200
    [output] = worker.outputs({"max_tokens": 2, "ignore_eos": True}, request_id="twice")
    assert len(output["token_ids"]) == 2


def test_a_deadline_keeps_what_was_made(worker: Served) -> None:
    began = time.monotonic()
    ended_by(worker.long("d", sampling=LONG, deadline_seconds=0.7).result(20), "deadline")
    assert time.monotonic() - began < 6


@pytest.mark.parametrize("stream", [False, True], ids=["answer", "stream"])
def test_a_client_that_goes_away_aborts(worker: Served, stream: bool) -> None:
    """The requests of a reader that is gone must not run on: they would take 6 s and more."""
    body = {"token_ids": PROMPT, "sampling": {**LONG, "n": 16}, "stream": stream}
    with httpx.Client(base_url=worker.data.base_url, timeout=0.7, trust_env=False) as client:
        if stream:
            with client.stream("POST", "/v1/generate", json=body) as answer:
                assert next(answer.iter_lines()) == "event: delta"
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/generate", json=body)
    until_sync(worker.idle, 3, what="the abort")


def test_aborting_what_waits_and_what_runs_over_and_over(worker: Served) -> None:
    """Ids are exact: one that is the beginning of another is not hit with it."""
    for round_ in range(5):
        short = worker.long(f"r{round_}", sampling=LONG)
        longer = worker.long(f"r{round_}0", sampling={**LONG, "max_tokens": 60})
        answer = worker.post("abort", request_ids=[f"r{round_}"]).json()
        assert answer == {"aborted": [f"r{round_}"], "unknown": []}
        assert short.result(20).json()["outputs"][0]["stop_reason"] == "aborted"
        assert longer.result(20).json()["outputs"][0]["stop_reason"] == "length"
