"""Requests that others end: by id, by going away; and who is unknown."""

from __future__ import annotations

import httpx
import pytest

from tests.support.engine.contracts import Served, outputs_of
from tests.support.engine.reference import Reference
from tests.support.engine.workers import PROMPT
from tests.support.waiting import until_sync

LONG = {"max_tokens": 1800, "ignore_eos": True}


def test_an_abort_keeps_tokens_and_logprobs(
    worker: Served, reference: dict[int, Reference]
) -> None:
    running = worker.long("a", sampling={**LONG, "n": 2})
    other = worker.long("other", sampling={**LONG, "max_tokens": 200, "temperature": 0})
    worker.makes(50)
    answer = worker.post("abort", request_ids=["a", "nobody"])
    assert answer.json() == {"aborted": ["a"], "unknown": ["nobody"]}
    aborted = running.result(20)
    for output in outputs_of(aborted):
        assert (output["stop_reason"], output["abort_reason"]) == ("aborted", "control")
        assert 0 < len(output["token_ids"]) < 1800
        expected = reference[1].raw_logprobs(PROMPT, output["token_ids"])
        assert output["logprobs"] == pytest.approx(expected, abs=1e-4)
    [rest] = other.result(60).json()["outputs"]
    assert (rest["stop_reason"], len(rest["token_ids"])) == ("length", 200), "others go on"
    assert worker.post("abort", request_ids=["a"]).json() == {"aborted": [], "unknown": ["a"]}


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
    """Ids are exact: one that is the beginning of another is not hit with it; each is free again afterwards."""
    for _ in range(5):
        short = worker.long("r", sampling=LONG)
        longer = worker.long("r0", sampling={**LONG, "max_tokens": 60})
        answer = worker.post("abort", request_ids=["r"]).json()
        assert answer == {"aborted": ["r"], "unknown": []}
        assert short.result(20).json()["outputs"][0]["stop_reason"] == "aborted"
        assert longer.result(20).json()["outputs"][0]["stop_reason"] == "length"
