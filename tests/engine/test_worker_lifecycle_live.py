"""Every verb of a real worker in every state, verbs at random, and the fence of a worker in a pool.

What each verb does to requests, memory and weights: tests/contract, and tests/process/worker/lifecycle without a model.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import InProcess, in_process, slug
from tests.support.waiting import until_sync


@pytest.fixture(scope="module")
def shared_worker(tiny_models: TinyModels) -> Iterator[InProcess]:
    with in_process(tiny_models.model(1)) as worker:
        yield worker


@pytest.fixture
def worker(shared_worker: InProcess) -> InProcess:
    _home(shared_worker)
    return shared_worker


def lifecycle(worker: InProcess) -> str:
    return str(worker.state()["lifecycle"])


@pytest.mark.parametrize("verb", ["pause", "resume", "sleep", "wake", "cache/reset"])
def test_a_misspelt_field_changes_nothing(worker: InProcess, verb: str) -> None:
    answer = worker.post(verb, deadline=5)
    assert (answer.status_code, slug(answer)) == (422, "invalid-request")
    assert answer.json()["errors"][0]["field"] == "deadline"
    said = {"Content-Type": "application/json"}
    assert worker.control.post(f"/v1/{verb}", content=b"{", headers=said).status_code == 422
    assert lifecycle(worker) == "Active"


def test_verbs_at_random_never_get_stuck(worker: InProcess) -> None:
    """Callers at cross purposes for a while; afterwards the worker serves as before."""
    expected = worker.sample()
    until = time.monotonic() + 2
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


# Every verb in every state.

Enter = Callable[[InProcess], None]


def _active(worker: InProcess) -> None:
    pass


def _paused(worker: InProcess) -> None:
    worker.post("pause")


def _asleep(worker: InProcess) -> None:
    worker.post("sleep")


def _pausing(worker: InProcess) -> None:
    worker.long()
    worker.in_background(lambda: worker.post("pause", deadline_seconds=600))
    until_sync(lambda: lifecycle(worker) == "Pausing", what="Pausing")


def _draining(worker: InProcess) -> None:
    worker.long()
    worker.in_background(lambda: worker.post("sleep", deadline_seconds=600))
    until_sync(lambda: lifecycle(worker) == "Draining", what="Draining")


def _failed(worker: InProcess) -> None:
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
def test_every_verb_in_every_state(worker: InProcess, tiny_models: TinyModels, state: str) -> None:
    weights = tiny_models.weights(2)
    first = {"epoch": 0, "version": 1}
    calls: dict[str, tuple[str, dict[str, Any]]] = {
        "pause": ("pause", {"mode": "abort"}),
        "resume": ("resume", {}),
        "sleep": ("sleep", {"mode": "abort"}),
        "wake": ("wake", {}),
        "stage": ("weights/stage", {**first, "source": {"path": str(weights)}}),
        "commit": ("weights/commit", {**first, "deadline_seconds": 0.1}),
        "discard": ("weights/discard", first),
        "require": ("require", {"epoch": 0, "min_version": 0}),
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


def _home(worker: InProcess) -> None:
    """Back to Active with nothing staged and nobody running."""
    worker.post("abort", all=True)
    worker.post("wake")
    worker.post("resume")
    until_sync(lambda: lifecycle(worker) == "Active", 60, what="Active")


def test_in_a_pool_a_worker_starts_fenced(tiny_models: TinyModels) -> None:
    folder = tiny_models.weights(2)
    flags = ("--pool", "p", "--namespace", "n", "--weights-roots", str(folder.parent))
    with in_process(tiny_models.model(1), *flags) as worker:
        answer = worker.generate()
        assert (answer.status_code, slug(answer)) == (503, "fenced")
        assert slug(worker.data.get("/ready")) == "fenced"
        worker.post("require", epoch=0)
        assert not worker.ready(), "an epoch alone lifts no fence"
        worker.post("require", epoch=0, min_version=0)
        assert worker.ready()
        assert worker.update(1, 1, folder.name)["active"]["version"] == 1
        outside = worker.post(
            "weights/stage", epoch=1, version=2, source={"path": str(folder.parents[1])}
        )
        assert (outside.status_code, slug(outside)) == (422, "invalid-request")
        assert outside.json()["errors"][0]["field"] == "source.path"
