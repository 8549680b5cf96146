"""Pause, sleep and wake, two callers at once, and nothing served in a state that can't serve."""

from __future__ import annotations

import shutil
import time
from typing import Any

import pytest

from tests.support.engine.contracts import Served, level_of, made_by, outputs_of
from tests.support.engine.judging import greedy as is_greedy
from tests.support.engine.reference import Reference
from tests.support.engine.workers import PROMPT, slug
from tests.support.processes import unnamed_files
from tests.support.waiting import until_sync

TOKENS = 500
"""Enough to be met by what a test does once a few of them were made."""
LONG = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}


def greedy(worker: Served, count: int = 8) -> list[int]:
    [output] = worker.outputs({"temperature": 0, "max_tokens": count, "ignore_eos": True})
    return list(output["token_ids"])


def refused(worker: Served, kind: str) -> None:
    answer = worker.generate()
    assert (answer.status_code, slug(answer)) == (503, kind)
    assert int(answer.headers["retry-after"]) >= 1
    assert slug(worker.data.get("/ready")) == kind
    assert worker.data.get("/health").status_code == 200


def test_a_caller_waits_for_the_next_state(worker: Served) -> None:
    """Not for requests that come and go, and no longer than it says."""

    def state(since: int, wait: float) -> dict[str, Any]:
        found = worker.control.get("/v1/state", params={"since": since, "wait": wait}).json()
        return dict(found)

    seq, began = worker.state()["seq"], time.monotonic()
    greedy(worker)
    assert state(seq, 0.3)["seq"] == seq
    assert time.monotonic() - began >= 0.3
    waiting = worker.in_background(lambda: state(seq, 30))
    time.sleep(0.2)
    assert not waiting.done()
    worker.post("pause", deadline_seconds=60, ttl_seconds=300)
    assert waiting.result(10)["seq"] > seq
    assert worker.post("resume").json()["seq"] > waiting.result()["seq"]
    began = time.monotonic()
    state(seq + 1000, 30)  # of another process: there is nothing to wait for
    assert time.monotonic() - began < 10
    for wrong in ({"since": -1}, {"since": 1, "wait": 61}, {"since": "x"}):
        assert worker.control.get("/v1/state", params=wrong).status_code == 422


@pytest.mark.parametrize("mode", ["drain", "abort", "keep"])
def test_pause_and_resume(worker: Served, reference: dict[int, Reference], mode: str) -> None:
    # What is to be aborted must not end first, where the call comes late.
    longest = {**LONG, "max_tokens": 1800} if mode == "abort" else LONG
    running = [worker.long(f"r{n}", sampling=longest) for n in range(3)]
    worker.makes(20)
    state = worker.post("pause", mode=mode, deadline_seconds=60).json()
    assert (state["lifecycle"], state["serving"]) == ("Paused", False)
    refused(worker, "paused")
    if mode == "keep":
        before = worker.made()
        time.sleep(0.5)
        assert worker.made() == before, "no token is made while paused"
        assert not any(each.done() for each in running)
    else:
        assert state["in_flight"] == 0
        assert all(each.result(5).status_code == 200 for each in running)
    assert worker.post("resume").json()["lifecycle"] == "Active"
    for each in running:
        [output] = outputs_of(each.result(60))
        if mode == "abort":
            assert (output["stop_reason"], output["abort_reason"]) == ("aborted", "control")
        else:
            assert (output["stop_reason"], len(output["token_ids"])) == ("length", TOKENS)
        assert is_greedy(reference[1], PROMPT, output["token_ids"])
        assert {stale for _, stale in made_by(output)} <= {False}


def test_an_abort_reaches_what_a_pause_froze(worker: Served) -> None:
    running = worker.long("frozen", sampling=LONG)
    worker.post("pause", mode="keep")
    assert worker.post("abort", request_ids=["frozen"]).json()["aborted"] == ["frozen"]
    [output] = running.result(10).json()["outputs"]
    assert (output["stop_reason"], output["abort_reason"]) == ("aborted", "control")
    assert worker.state()["lifecycle"] == "Paused"
    worker.post("resume")
    assert len(greedy(worker)) == 8


@pytest.mark.parametrize("level", [1, 2])
def test_what_sleep_keeps_goes_on_after_waking(
    worker: Served, reference: dict[int, Reference], level: int
) -> None:
    level = level_of(worker, level)
    worker.load(2)
    before = greedy(worker)
    running = worker.long("r", sampling=LONG)
    worker.makes(20)
    state = worker.post("sleep", level=level, mode="keep", deadline_seconds=1).json()
    assert state["lifecycle"] == "Asleep"
    assert state["resident"] == {"weights": False, "kv_cache": False}
    refused(worker, "asleep")
    state = worker.post("wake").json()
    assert state["lifecycle"] == "Active"
    assert state["resident"] == {"weights": True, "kv_cache": True}
    assert state["weights"]["active"]["labels"] == {"seed": "2"}
    [output] = outputs_of(running.result(60))
    assert (output["stop_reason"], len(output["token_ids"])) == ("length", TOKENS)
    assert is_greedy(reference[2], PROMPT, output["token_ids"])
    assert greedy(worker) == before


@pytest.mark.parametrize("level", [1, 2])
def test_what_was_pinned_wakes_on_the_active_weights(worker: Served, level: int) -> None:
    """Sleep keeps the active weights only; a prefix whose KV is lost is prefilled with them."""
    if "Pin" not in worker.able["in_flight"]:
        pytest.skip(f"{worker.kind} declares no Pin")
    level = level_of(worker, level)
    old = worker.state()["weights"]["active"]["version"]
    identity = worker.stage_next(2)
    running = worker.long("r", sampling={**LONG, "max_tokens": 300})
    worker.makes(20)
    worker.commit(*identity, in_flight="Pin")
    worker.post("sleep", level=level, mode="keep", deadline_seconds=1)
    assert worker.post("wake").json()["lifecycle"] == "Active"
    [output] = outputs_of(running.result(60))
    assert made_by(output) == [(old, False), (identity[1], False)]


def test_a_deeper_sleep_drops_what_the_lighter_one_kept(worker: Served) -> None:
    for level in (1, 2):
        level_of(worker, level)
    before = greedy(worker)
    for level in (1, 2):
        state = worker.post("sleep", level=level).json()
        assert state["resident"] == {"weights": False, "kv_cache": False}
    family = [worker.process.pid, *(each.pid for each in worker.children())]
    kept = [file for pid in family for file in unnamed_files(pid, worker.temporary)]
    assert not kept, "level 1 keeps weights in files without a name, level 2 keeps none"
    assert worker.post("wake").json()["lifecycle"] == "Active"
    assert greedy(worker) == before


@pytest.mark.parametrize("level", [1, 2])
def test_staged_waking(worker: Served, reference: dict[int, Reference], level: int) -> None:
    """Weights, update, KV: each step refuses what would need the next one."""
    level = level_of(worker, level)
    identity = worker.next_version()
    body: dict[str, Any] = dict(zip(("epoch", "version"), identity, strict=True))
    source = {"path": str(worker.models.weights(2))}
    worker.post("sleep", level=level)
    stage = worker.post("weights/stage", **body, source=source)
    assert (stage.status_code, slug(stage)) == (409, "asleep")
    assert worker.post("weights/commit", **body).status_code == 409
    refused(worker, "asleep")
    state = worker.post("wake", tags=["weights"]).json()
    assert (state["lifecycle"], state["resident"]) == (
        "Asleep",
        {"weights": True, "kv_cache": False},
    )
    worker.load(2)
    refused(worker, "asleep")
    assert worker.post("wake", tags=["kv_cache"]).json()["lifecycle"] == "Active"
    [output] = worker.outputs({"temperature": 0, "max_tokens": 8, "ignore_eos": True})
    assert made_by(output) == [(identity[1], False)]
    assert is_greedy(reference[2], PROMPT, output["token_ids"])


@pytest.mark.parametrize("level", [1, 2])
def test_weights_wake_without_values_until_a_commit(
    worker: Served, reference: dict[int, Reference], level: int
) -> None:
    """What was published meanwhile is all that is read; what served before may be gone."""
    level = level_of(worker, level)
    level_of(worker, 2)
    first = worker.next_version()
    second = (first[0], first[1] + 1)
    folder = shutil.copytree(worker.models.weights(3), worker.folder / f"before-{first[1]}")
    worker.stage(*first, folder, labels={"seed": "3"})
    worker.commit(*first)
    worker.post("sleep", level=level)
    gone = folder.rename(folder.with_suffix(".gone"))
    try:
        state = worker.post("wake", tags=["weights"], load=False).json()
        assert state["lifecycle"] == "Asleep"
        assert state["weights"]["active"] is None
        assert state["resident"] == {"weights": True, "kv_cache": False}
        refused(worker, "asleep")
        worker.stage(*second, worker.models.weights(2), labels={"seed": "2"})
        worker.commit(*second)
        refused(worker, "asleep")
        assert worker.post("wake", tags=["kv_cache"]).json()["lifecycle"] == "Active"
    finally:
        gone.rename(folder)
    [output] = worker.outputs({"temperature": 0, "max_tokens": 8, "ignore_eos": True})
    assert made_by(output) == [(second[1], False)]
    assert is_greedy(reference[2], PROMPT, output["token_ids"])


def test_weights_without_values_fall_asleep_and_wake_as_they_were(worker: Served) -> None:
    level_of(worker, 2)
    worker.load(2)
    before = greedy(worker)
    worker.post("sleep", level=2)
    assert worker.post("wake", load=False).json()["lifecycle"] == "Asleep"
    state = worker.post("sleep", level=2).json()
    assert state["resident"] == {"weights": False, "kv_cache": False}
    assert worker.post("wake", load=False).json()["weights"]["active"] is None
    assert worker.post("wake").json()["lifecycle"] == "Active"
    assert greedy(worker) == before


def test_a_commit_in_place_where_two_copies_have_no_room(
    worker: Served, reference: dict[int, Reference]
) -> None:
    """The weights go first, what runs waits, and the KV cache need not go along."""
    level_of(worker, 2)
    old = worker.state()["weights"]["active"]["version"]
    new = worker.next_version()
    running = worker.long("r", sampling=LONG)
    worker.makes(20)
    worker.post("sleep", level=2, tags=["weights"], mode="keep")
    assert worker.post("wake", tags=["weights"], load=False).json()["weights"]["active"] is None
    refused(worker, "asleep")
    worker.stage(*new, worker.models.weights(2), labels={"seed": "2"})
    worker.commit(*new, in_flight="Recompute")
    [output] = outputs_of(running.result(60))
    assert made_by(output) == [(old, False), (new[1], False)]
    until_sync(worker.ready, 10, what="the commit to open it")
    assert is_greedy(reference[2], PROMPT, greedy(worker))


def test_kv_alone_may_be_given_back(worker: Served) -> None:
    before = greedy(worker)
    state = worker.post("sleep", tags=["kv_cache"]).json()
    assert state["resident"] == {"weights": True, "kv_cache": False}
    refused(worker, "asleep")
    assert worker.post("sleep", tags=["weights"]).json()["resident"]["weights"] is False
    assert worker.post("wake").json()["lifecycle"] == "Active"
    assert greedy(worker) == before


def test_verbs_repeat_and_come_in_any_order(worker: Served) -> None:
    """None of these may end an engine, whatever state it is in."""
    before = greedy(worker)
    calls: list[tuple[str, dict[str, Any], str]] = [
        ("resume", {}, "Active"),
        ("wake", {}, "Active"),
        ("wake", {"tags": ["kv_cache"]}, "Active"),
        ("pause", {}, "Paused"),
        ("pause", {"mode": "keep"}, "Paused"),
        ("wake", {}, "Paused"),
        ("cache/reset", {}, "Paused"),
        ("sleep", {}, "Asleep"),
        ("sleep", {"tags": ["kv_cache"]}, "Asleep"),
        ("cache/reset", {}, "Asleep"),
        ("abort", {"all": True}, "Asleep"),
        ("pause", {}, "Paused"),
        ("sleep", {}, "Asleep"),
        ("wake", {}, "Active"),
        ("cache/reset", {}, "Active"),
    ]
    for verb, body, expected in calls:
        answer = worker.post(verb, **body)
        assert answer.status_code == 200, (verb, body, answer.text)
        assert worker.state()["lifecycle"] == expected, (verb, body)
    assert greedy(worker) == before


def test_sleep_under_load_ends_every_request_by_name(worker: Served) -> None:
    """Releasing memory below running requests must not be what an engine ever sees."""
    for mode in ("drain", "abort"):
        answers = worker.busy(16, 500)
        state = worker.post("sleep", mode=mode, deadline_seconds=0.2).json()
        assert state["lifecycle"] == "Asleep"
        for answer in answers():
            [output] = outputs_of(answer)
            assert output["abort_reason"] in (None, "sleep")
        worker.post("wake")
        until_sync(worker.ready, 10, what="the waking")
