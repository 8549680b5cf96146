"""A trainer or a worker that stands still for longer than a lease: no answer has other bytes than its label says."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout_common.wire import GenerateResponse
from tests.support.engine.push_rig import Rig, push_rig
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import PROMPT
from tests.support.waiting import eventually

LEASE = 1.5
STANDS = 2.2
"""How long somebody stands still."""


@pytest.fixture(scope="module")
def lab(tiny_models: TinyModels) -> Iterator[Rig]:
    versions = [tiny_models.weights(2), tiny_models.weights(3)]
    with (
        tempfile.TemporaryDirectory(prefix="lease-") as folder,
        push_rig(Path(folder), tiny_models.model(1), versions, LEASE) as rig,
    ):
        eventually("the workers", lambda: all(w.serves() for w in rig.workers.values()), 90)
        yield rig


@pytest.fixture
def rig(lab: Rig) -> Rig:
    """With a trainer of its own."""
    lab.start_trainer()
    return lab


def wrong(rig: Rig, name: str) -> list[str]:
    """Ask a worker; what is wrong with the answer, judged by the content that its label has."""
    sampling = {"max_tokens": 4, "ignore_eos": True, "temperature": 0}
    body = {"token_ids": PROMPT, "logprobs": "raw", "sampling": sampling}
    url = f"{rig.workers[name].url}/v1/generate"
    answer = httpx.post(url, json=body, timeout=90, trust_env=False)
    if answer.status_code != 200:
        return []  # fenced, say: it serves nothing
    [output] = GenerateResponse.model_validate(answer.json()).outputs
    return [*rig.wrong_spans(PROMPT, output)]


def publish(rig: Rig, folder: int) -> None:
    rig.order(folder, "shm")
    said = rig.hear()
    assert said is not None
    assert "seconds" in said, said


def while_it_publishes(rig: Rig) -> tuple[dict[str, Any], list[str]]:
    """Ask both workers until the trainer has said how that went, and once more; returns that, and their faults."""
    with ThreadPoolExecutor(1) as threads:
        hearing: Future[dict[str, Any] | None] = threads.submit(rig.hear)
        faults, over = list[str](), False
        while not over:
            over = hearing.done()
            faults += [fault for name in rig.workers for fault in wrong(rig, name)]
    said = hearing.result()
    assert said is not None
    return said, faults


def test_a_trainer_that_stood_still_fails_halfway_through_the_next_version(rig: Rig) -> None:
    publish(rig, 0)
    os.kill(rig.trainer, signal.SIGSTOP)
    time.sleep(STANDS)
    os.kill(rig.trainer, signal.SIGCONT)
    time.sleep(LEASE)
    rig.order(1, "shm", slow=1.0, breaks=True)
    said, faults = while_it_publishes(rig)
    assert "own error" in said["failed"]
    assert not faults


def test_a_call_in_c_keeps_the_interpreter_for_longer_than_a_lease(rig: Rig) -> None:
    publish(rig, 0)
    rig.order(1, "shm", hold=STANDS, slow=2.0)
    said, faults = while_it_publishes(rig)
    assert said.get("replicas") == 2, said
    assert not faults
    publish(rig, 0)
    assert not [*wrong(rig, "a"), *wrong(rig, "b")]


@pytest.mark.soak  # it waits for calls of the one that stands; without processes: test_client_leases.py
def test_a_worker_that_stood_still_serves_what_it_had(rig: Rig) -> None:
    publish(rig, 0)
    with ThreadPoolExecutor() as asked:
        os.kill(rig.workers["b"].pid, signal.SIGSTOP)
        # Asked now, they are answered as soon as it goes on: before anybody can fence it.
        asking = [asked.submit(wrong, rig, "b") for _ in range(4)]
        try:
            time.sleep(STANDS)
            for _ in range(2):  # each into another slot
                publish(rig, 1)
                assert not wrong(rig, "a")
        finally:
            os.kill(rig.workers["b"].pid, signal.SIGCONT)
        faults = [fault for each in asking for fault in each.result(60)]
    assert not [*faults, *wrong(rig, "b")]
