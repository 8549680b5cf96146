"""Pause, sleep, wake and resume of a real worker, and every verb in every state."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.shared import Shared
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import slug
from tests.support.waiting import until_sync


def lifecycle(worker: Shared) -> str:
    return str(worker.state()["lifecycle"])


# Pause.


@pytest.mark.parametrize("mode", ["abort", "drain", "keep"])
def test_pause_and_resume(worker: Shared, mode: str) -> None:
    expected = worker.sample(150)
    running = worker.long("r", sampling={"max_tokens": 150, "ignore_eos": True, "temperature": 0})
    state = worker.post("pause", mode=mode, deadline_seconds=60).json()
    assert state["lifecycle"] == "Paused"
    assert state["holds"] == [{"holder": "anonymous", "state": "Paused", "ttl": None}]
    assert state["caller"] == "anonymous"
    assert not state["serving"]
    assert state["in_flight"] == (1 if mode == "keep" else 0)
    answer = worker.generate()
    assert (answer.status_code, slug(answer)) == (503, "paused")
    assert answer.headers["retry-after"] == "1"
    assert slug(worker.data.get("/ready")) == "paused"
    assert worker.data.get("/health").status_code == 200
    assert worker.post("resume").json()["lifecycle"] == "Active"
    assert worker.ready()
    output = running.result(60).json()["outputs"][0]
    if mode == "abort":
        assert (output["stop_reason"], output["abort_reason"]) == ("aborted", "control")
        assert output["token_ids"] == expected["token_ids"][: len(output["token_ids"])]
    else:
        assert output["token_ids"] == expected["token_ids"]


def test_a_drain_ends_at_its_deadline(worker: Shared) -> None:
    running = worker.long()
    start = time.monotonic()
    assert worker.post("pause", deadline_seconds=0.3).json()["lifecycle"] == "Paused"
    assert time.monotonic() - start < 10
    output = running.result(10).json()["outputs"][0]
    assert (output["stop_reason"], output["abort_reason"]) == ("aborted", "control")


def test_while_it_drains_new_requests_are_refused_and_a_resume_undoes_it(
    worker: Shared,
) -> None:
    running = worker.long(sampling={"max_tokens": 300, "ignore_eos": True})
    pausing = worker.in_background(lambda: worker.post("pause", deadline_seconds=60))
    until_sync(lambda: lifecycle(worker) == "Pausing", what="Pausing")
    assert slug(worker.generate()) == "paused"
    assert worker.post("resume").json()["lifecycle"] == "Active"
    answer = pausing.result(10)
    assert (answer.status_code, slug(answer)) == (409, "changed-meanwhile")
    assert running.result(60).json()["outputs"][0]["stop_reason"] == "length"


def test_an_impatient_second_pause_shortens_the_drain(worker: Shared) -> None:
    running = worker.long()
    patient = worker.in_background(lambda: worker.post("pause", deadline_seconds=600))
    until_sync(lambda: lifecycle(worker) == "Pausing", what="Pausing")
    assert worker.post("pause", mode="abort").json()["lifecycle"] == "Paused"
    assert patient.result(10).json()["lifecycle"] == "Paused"
    assert running.result(10).json()["outputs"][0]["abort_reason"] == "control"


def test_a_pause_with_a_ttl_falls_by_itself(worker: Shared) -> None:
    state = worker.post("pause", ttl_seconds=1).json()
    assert 0 < state["holds"][0]["ttl"] <= 1
    until_sync(worker.ready, 10, what="the pause to expire")
    assert worker.state()["holds"] == []
    worker.post("pause", ttl_seconds=0.5)
    worker.post("pause")
    time.sleep(0.8)
    assert lifecycle(worker) == "Paused", "a pause without ttl renews for ever"


def test_verbs_are_idempotent(worker: Shared) -> None:
    assert worker.post("resume").json()["lifecycle"] == "Active"
    assert worker.post("wake").json()["lifecycle"] == "Active"
    for _ in range(2):
        assert worker.post("pause").json()["lifecycle"] == "Paused"
    for _ in range(2):
        assert worker.post("sleep").json()["lifecycle"] == "Asleep"
    for _ in range(2):
        assert worker.post("wake").json()["lifecycle"] == "Active"


@pytest.mark.parametrize("verb", ["pause", "resume", "sleep", "wake", "cache/reset"])
def test_a_misspelt_field_changes_nothing(worker: Shared, verb: str) -> None:
    answer = worker.post(verb, deadline=5)
    assert (answer.status_code, slug(answer)) == (422, "invalid-request")
    assert answer.json()["errors"][0]["field"] == "deadline"
    said = {"Content-Type": "application/json"}
    assert worker.control.post(f"/v1/{verb}", content=b"{", headers=said).status_code == 422
    assert lifecycle(worker) == "Active"


def test_a_stale_generation_changes_nothing(worker: Shared) -> None:
    assert worker.post("pause", generation=7).json()["generation"] == 7
    for verb in ("resume", "pause", "sleep", "wake"):
        answer = worker.post(verb, generation=6)
        assert (answer.status_code, slug(answer)) == (409, "stale-generation")
    assert lifecycle(worker) == "Paused"
    assert worker.post("resume", generation=7).json()["lifecycle"] == "Active"


def test_a_commit_works_while_paused_and_leaves_it_paused(
    worker: Shared, tiny_models: TinyModels
) -> None:
    worker.post("pause")
    worker.update(worker.epoch, 1, tiny_models.weights(2))
    assert lifecycle(worker) == "Paused"
    worker.post("resume")
    assert worker.sample()["weights"][0]["version"] == 1


def test_a_frozen_request_goes_on_over_a_commit(worker: Shared, tiny_models: TinyModels) -> None:
    running = worker.long(sampling={"max_tokens": 150, "ignore_eos": True})
    worker.post("pause", mode="keep")
    done = worker.update(worker.epoch, 1, tiny_models.weights(2), in_flight="Recompute")
    assert done["kept"] == 1
    worker.post("resume")
    spans = running.result(60).json()["outputs"][0]["weights"]
    assert [(s["version"], s["stale_kv"]) for s in spans] == [(0, False), (1, False)]


# Sleep.


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back_and_wake_brings_the_same_output(
    worker: Shared, tiny_models: TinyModels, level: int
) -> None:
    worker.update(worker.epoch, 1, tiny_models.weights(2))
    before = worker.sample(16)
    state = worker.post("sleep", level=level).json()
    assert state["lifecycle"] == "Asleep"
    assert state["resident"] == {"weights": False, "kv_cache": False}
    answer = worker.generate()
    assert (answer.status_code, slug(answer)) == (503, "asleep")
    assert slug(worker.data.get("/ready")) == "asleep"
    state = worker.post("wake").json()
    assert state["lifecycle"] == "Active"
    assert state["resident"] == {"weights": True, "kv_cache": True}
    assert worker.sample(16) == before


@pytest.mark.parametrize("level", [1, 2])
def test_a_request_kept_through_sleep_ends_right(worker: Shared, level: int) -> None:
    expected = worker.sample(150)
    running = worker.long("r", sampling={"max_tokens": 150, "ignore_eos": True, "temperature": 0})
    assert worker.post("sleep", mode="keep", level=level).json()["in_flight"] == 1
    assert worker.post("wake").json()["lifecycle"] == "Active"
    output = running.result(60).json()["outputs"][0]
    assert output["token_ids"] == expected["token_ids"]
    # The prefix was prefilled in one piece, not token by token: equal up to rounding.
    assert output["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-3)


def test_sleep_aborts_with_its_own_reason(worker: Shared) -> None:
    running = worker.long()
    assert worker.post("sleep", mode="abort").json()["lifecycle"] == "Asleep"
    output = running.result(10).json()["outputs"][0]
    assert (output["stop_reason"], output["abort_reason"]) == ("aborted", "sleep")


def test_an_abort_ends_what_an_earlier_keep_froze(worker: Shared) -> None:
    running = worker.long()
    worker.post("pause", mode="keep")
    assert worker.state()["in_flight"] == 1
    assert worker.post("pause", mode="abort").json()["in_flight"] == 0
    assert running.result(10).json()["outputs"][0]["abort_reason"] == "control"


@pytest.mark.parametrize("level", [1, 2])
def test_staged_waking_updates_the_weights_in_between(
    worker: Shared, tiny_models: TinyModels, level: int
) -> None:
    worker.post("sleep", level=level)
    source = {"path": str(tiny_models.weights(2))}
    for verb in ("weights/stage", "weights/commit"):
        body = {"source": source} if verb.endswith("stage") else {}
        answer = worker.post(verb, epoch=worker.epoch, version=1, **body)
        assert answer.status_code == 409
        assert slug(answer) == "asleep"
        assert answer.json()["active"] == {"epoch": worker.epoch, "version": 0}
    state = worker.post("wake", tags=["weights"]).json()
    assert (state["lifecycle"], state["resident"]) == (
        "Asleep",
        {"weights": True, "kv_cache": False},
    )
    assert worker.update(worker.epoch, 1, tiny_models.weights(2))["active"]["version"] == 1
    assert slug(worker.generate()) == "asleep"
    assert worker.post("wake", tags=["kv_cache"]).json()["lifecycle"] == "Active"
    assert worker.sample()["weights"][0]["version"] == 1


def test_what_was_staged_is_refused_while_the_weights_sleep(
    worker: Shared, tiny_models: TinyModels
) -> None:
    worker.stage(worker.epoch, 1, tiny_models.weights(2))
    worker.post("sleep")
    answer = worker.post("weights/commit", epoch=worker.epoch, version=1)
    assert (answer.status_code, slug(answer)) == (409, "asleep")
    worker.post("wake")
    worker.update(worker.epoch, 1, tiny_models.weights(2))
    assert worker.commits == 1


def test_sleeping_deeper_and_wider(worker: Shared) -> None:
    before = worker.sample()
    state = worker.post("sleep", tags=["kv_cache"]).json()
    assert state["resident"] == {"weights": True, "kv_cache": False}
    state = worker.post("sleep", tags=["weights"], level=1).json()
    assert state["resident"] == {"weights": False, "kv_cache": False}
    assert worker.post("sleep", level=2).json()["lifecycle"] == "Asleep"
    assert worker.post("wake").json()["lifecycle"] == "Active"
    assert worker.sample() == before


def test_a_sleeper_may_turn_to_a_pause_without_opening(worker: Shared) -> None:
    worker.post("sleep")
    state = worker.post("pause").json()
    assert (state["lifecycle"], state["resident"]["weights"]) == ("Paused", True)
    worker.post("resume")
    assert worker.ready()


def test_resume_does_not_wake(worker: Shared) -> None:
    worker.post("sleep")
    answer = worker.post("resume")
    assert (answer.status_code, slug(answer)) == (409, "asleep")
    assert lifecycle(worker) == "Asleep"


def test_waking_at_level_2_needs_the_source(
    worker: Shared, tiny_models: TinyModels, tmp_path: Path
) -> None:
    """The source is gone: the worker stays asleep, says why, and wakes once it is back."""
    folder, hidden = tmp_path / "v", tmp_path / "hidden"
    folder.mkdir()
    for file in tiny_models.weights(2).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    worker.update(worker.epoch, 1, folder)
    before = worker.sample()
    worker.post("sleep", level=2)
    folder.rename(hidden)
    answer = worker.post("wake")
    assert (answer.status_code, slug(answer)) == (409, "weights-rejected")
    assert lifecycle(worker) in ("Asleep", "Waking")
    assert worker.state()["last_error"]
    hidden.rename(folder)
    until_sync(worker.ready, 30, what="the next try to wake")
    assert worker.sample() == before


# Others' holds.


def test_nobody_opens_what_another_holds(worker: Shared) -> None:
    holds = worker.worker.runtime.holds
    worker.call(lambda: holds.hold_paused("system:serviceaccount:ops:operator"))
    worker.call(worker.worker.runtime.changed.notify_all)
    until_sync(lambda: lifecycle(worker) == "Paused", what="Paused")
    worker.post("pause")
    answer = worker.post("resume")
    assert (answer.status_code, slug(answer)) == (409, "held")
    assert answer.json()["holders"] == ["system:serviceaccount:ops:operator"]
    assert "system:serviceaccount:ops:operator" in answer.json()["detail"]
    assert [h["holder"] for h in worker.state()["holds"]] == answer.json()["holders"]
    assert worker.post("sleep").json()["lifecycle"] == "Asleep"
    answer = worker.post("wake")
    assert (answer.status_code, slug(answer)) == (409, "held")
    assert lifecycle(worker) == "Paused", "the memory is back, the pause stays"


# Every verb in every state.

Enter = Callable[[Shared], None]


def _active(worker: Shared) -> None:
    pass


def _paused(worker: Shared) -> None:
    worker.post("pause")


def _asleep(worker: Shared) -> None:
    worker.post("sleep")


def _pausing(worker: Shared) -> None:
    worker.long()
    worker.in_background(lambda: worker.post("pause", deadline_seconds=600))
    until_sync(lambda: lifecycle(worker) == "Pausing", what="Pausing")


def _draining(worker: Shared) -> None:
    worker.long()
    worker.in_background(lambda: worker.post("sleep", deadline_seconds=600))
    until_sync(lambda: lifecycle(worker) == "Draining", what="Draining")


def _failed(worker: Shared) -> None:
    # The third restart waits five seconds, which is time enough for all verbs.
    for _ in range(3):
        until_sync(lambda: lifecycle(worker) == "Active", 60, what="Active")
        worker.crash()
        until_sync(lambda: lifecycle(worker) == "Failed", what="Failed")


STATES: dict[str, Enter] = {
    "Active": _active,
    "Pausing": _pausing,
    "Paused": _paused,
    "Draining": _draining,
    "Asleep": _asleep,
    "Failed": _failed,
}

# verb -> state -> what comes: a state of the worker, or status and slug.
Expected = dict[str, str | tuple[int, str]]
OK = "200"
TABLE: dict[str, Expected] = {
    "generate": {
        "Active": OK,
        "Pausing": (503, "paused"),
        "Paused": (503, "paused"),
        "Draining": (503, "asleep"),
        "Asleep": (503, "asleep"),
        "Failed": (503, "failed"),
    },
    "pause": {
        "Active": "Paused",
        "Pausing": "Paused",
        "Paused": "Paused",
        "Draining": "Paused",
        "Asleep": "Paused",
        "Failed": (409, "failed"),
    },
    "resume": {
        "Active": "Active",
        "Pausing": "Active",
        "Paused": "Active",
        "Draining": (409, "asleep"),
        "Asleep": (409, "asleep"),
        "Failed": (409, "failed"),
    },
    "sleep": {
        **dict.fromkeys(("Active", "Pausing", "Paused", "Draining", "Asleep"), "Asleep"),
        "Failed": (409, "failed"),
    },
    "wake": {
        "Active": "Active",
        "Pausing": "Pausing",
        "Paused": "Paused",
        "Draining": "Active",
        "Asleep": "Active",
        "Failed": (409, "failed"),
    },
    "stage": {
        **dict.fromkeys(("Active", "Pausing", "Paused", "Draining"), OK),
        "Asleep": (409, "asleep"),
        "Failed": (409, "failed"),
    },
    "commit": {
        **dict.fromkeys(("Active", "Paused"), (409, "not-staged")),
        "Asleep": (409, "asleep"),
        "Failed": (409, "failed"),
    },
    "discard": dict.fromkeys(STATES, OK),
    "require": dict.fromkeys(STATES, OK),
    "abort": dict.fromkeys(STATES, OK),
    "cache": {
        **dict.fromkeys(("Active", "Pausing", "Paused", "Draining", "Asleep"), OK),
        "Failed": (409, "failed"),
    },
    "state": dict.fromkeys(STATES, OK),
}


@pytest.mark.parametrize("state", list(STATES))
def test_every_verb_in_every_state(worker: Shared, tiny_models: TinyModels, state: str) -> None:
    weights = tiny_models.weights(2)
    first = {"epoch": worker.epoch, "version": 1}
    calls: dict[str, tuple[str, dict[str, Any]]] = {
        "pause": ("pause", {"mode": "abort"}),
        "resume": ("resume", {}),
        "sleep": ("sleep", {"mode": "abort"}),
        "wake": ("wake", {}),
        "stage": ("weights/stage", {**first, "source": {"path": str(weights)}}),
        "commit": ("weights/commit", {**first, "deadline_seconds": 0.1}),
        "discard": ("weights/discard", first),
        "require": ("require", {"epoch": worker.epoch, "min_version": 0}),
        "abort": ("abort", {"request_ids": ["nobody"]}),
        "cache": ("cache/reset", {}),
    }
    for verb, outcomes in TABLE.items():
        if state not in outcomes:
            continue
        if lifecycle(worker) != state:
            _home(worker)
            STATES[state](worker)
        worker.post("weights/discard", **first)
        if verb == "generate":
            answer = worker.generate(sampling={"max_tokens": 1})
        elif verb == "state":
            answer = worker.control.get("/v1/state")
        else:
            path, body = calls[verb]
            answer = worker.post(path, **body)
        expected = outcomes[state]
        if isinstance(expected, tuple):
            assert (answer.status_code, slug(answer)) == expected, (verb, answer.text)
        else:
            assert answer.status_code in (200, 202), (verb, answer.text)
            if expected != OK:
                assert answer.json()["lifecycle"] == expected, verb


def _home(worker: Shared) -> None:
    """Back to Active with nothing staged and nobody running."""
    worker.post("abort", all=True)
    worker.post("wake")
    worker.post("resume")
    until_sync(lambda: lifecycle(worker) == "Active", 60, what="Active")


def test_verbs_at_random_never_get_stuck(worker: Shared) -> None:
    """Callers at cross purposes for a while; afterwards the worker serves as before."""
    expected = worker.sample()
    until = time.monotonic() + 4
    strange: list[str] = []

    def caller(verbs: list[tuple[str, dict[str, Any]]]) -> None:
        while time.monotonic() < until:
            for verb, body in verbs:
                answer = worker.post(verb, **body)
                if answer.status_code >= 500:
                    strange.append(f"{verb}: {answer.text}")

    def client() -> None:
        while time.monotonic() < until:
            answer = worker.generate(sampling={"max_tokens": 20})
            if answer.status_code not in (200, 503):
                strange.append(answer.text)

    threads = [
        threading.Thread(target=caller, args=([("pause", {"mode": "keep"}), ("resume", {})],)),
        threading.Thread(target=caller, args=([("sleep", {"mode": "abort"}), ("wake", {})],)),
        threading.Thread(target=caller, args=([("pause", {"ttl_seconds": 0.05})],)),
        threading.Thread(target=client),
        threading.Thread(target=client),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert strange == []
    _home(worker)
    assert worker.sample() == expected
