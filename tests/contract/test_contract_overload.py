"""More requests than fit: they wait, and beyond `--max-queue` they are told to come again."""

from __future__ import annotations

from functools import partial

import pytest

from tests.support.engine.contracts import Served, outputs_of
from tests.support.engine.engine_kinds import QUEUE, ROWS
from tests.support.engine.workers import slug
from tests.support.waiting import until_sync

TOKENS = 450
"""So many for each that runs fit the smallest KV cache, also where an engine sets them aside."""
LONG = {"max_tokens": TOKENS, "ignore_eos": True}


def test_a_full_queue_is_429(worker: Served) -> None:
    running = worker.busy(ROWS, TOKENS)
    waiting = [worker.in_background(lambda: worker.generate(sampling=LONG)) for _ in range(QUEUE)]
    until_sync(lambda: worker.state()["queued"] == QUEUE, 20, what=f"{QUEUE} to wait")
    assert worker.state()["in_flight"] == ROWS
    answer = worker.generate()
    assert (answer.status_code, slug(answer)) == (429, "queue-full")
    assert int(answer.headers["retry-after"]) >= 1
    assert worker.data.get("/health").status_code == 200
    assert worker.ready(), "a full queue is no reason to leave the Service"
    assert len(worker.post("abort", all=True).json()["aborted"]) == ROWS + QUEUE
    made = []
    for response in [*running(), *(call.result(20) for call in waiting)]:
        [output] = outputs_of(response)
        assert (output["stop_reason"], output["abort_reason"]) == ("aborted", "control")
        made.append(len(output["token_ids"]))
    assert made.count(0) >= QUEUE, "who waited made nothing"
    until_sync(worker.idle, 10, what="the end")
    assert len(worker.outputs({"max_tokens": 3, "ignore_eos": True})[0]["token_ids"]) == 3


def test_the_queue_goes_by_priority_then_by_arrival(worker: Served) -> None:
    order: list[str] = []
    if not worker.able["priority"]:
        pytest.skip(f"{worker.kind} declares no priority: test_contract_info tries the refusal")
    row = worker.long("row", sampling=LONG)
    rows = worker.busy(ROWS - 1, TOKENS)
    until_sync(lambda: worker.state()["in_flight"] == ROWS, 20, what="full rows")

    def ask(name: str, priority: int) -> None:
        sampling = {"max_tokens": 8, "ignore_eos": True}
        answer = worker.generate(request_id=name, priority=priority, sampling=sampling)
        assert answer.status_code == 200, answer.text
        order.append(name)

    waiting = []
    for name, priority in (("late", 7), ("a", 2), ("b", 2), ("first", -1)):
        waiting.append(worker.in_background(partial(ask, name, priority)))
        until_sync(lambda: worker.state()["queued"] == len(waiting), 20, what=f"{name} to wait")
    worker.post("abort", request_ids=["row"])  # one place is free: they go one after the other
    for call in waiting:
        call.result(60)
    assert order == ["first", "a", "b", "late"]
    assert worker.state()["in_flight"] == ROWS - 1, "what ran was not put back for them"
    worker.post("abort", all=True)
    assert all(answer.status_code == 200 for answer in [row.result(20), *rows()])
    until_sync(worker.idle, 10, what="the end")
