"""Lent weights: the worker is killed or stopped while a trainer lends to it."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from torch import Tensor

from localkube.settings import free_ports
from rollout_client import PublishFailed
from rollout_client.turn import lending, local_turn
from rollout_common.turn.lock_files import holders
from tests.support.engine.lending_trainer import read_tensors
from tests.support.engine.lending_worker import GPUS, fall_asleep, lend, tokens_of, turn_flags
from tests.support.engine.push_rig import Nursery
from tests.support.engine.reference import Reference
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import LOOPBACK, PROMPT, Client
from tests.support.waiting import until_sync

Start = Callable[[int], tuple[int, Client]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("turn")


@pytest.fixture
def start(
    nursery: Nursery, directory: Path, tiny_models: TinyModels, tmp_path: Path
) -> Iterator[Start]:
    """Start a worker that will be killed before this message (0: never); returns it once it sleeps."""
    with contextlib.ExitStack() as stack:

        def start_worker(kill_at: int) -> tuple[int, Client]:
            data_port, control_port = free_ports(2)
            flags = ["--model", str(tiny_models.model(1)), "--auth", "none", *LOOPBACK]
            flags += ["--data-port", str(data_port), "--control-port", str(control_port)]
            flags += ["--weights-port", "0", *turn_flags(directory)]
            pid = nursery.start(
                "borrower", [str(kill_at), *flags], tmp_path / f"{kill_at}.out", None
            )
            stack.callback(end_process, nursery, pid)
            client = Client(data_port, control_port)
            stack.callback(client.close)
            until_sync(lambda: answers(client), 60, what="the worker's ports")
            client.post("require", epoch=0, min_version=0)
            return pid, client

        yield start_worker


def answers(client: Client) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return client.ready()
    return False


def end_process(nursery: Nursery, pid: int) -> None:
    if not nursery.ended(pid):
        os.kill(pid, signal.SIGKILL)
        assert nursery.ended(pid, 10)


def test_a_worker_that_is_killed_before_any_message_fails_the_trainer_at_once(
    start: Start, nursery: Nursery, directory: Path, tiny_models: TinyModels
) -> None:
    old = Reference(tiny_models.weights(1)).greedy(PROMPT, 8)
    tensors = read_tensors(tiny_models.weights(2))
    for kill_at in itertools.count(1):
        pid, worker = start(kill_at)
        assert tokens_of(worker) == old, "the one before left nothing"
        fall_asleep(worker, directory)
        with local_turn(GPUS, directory, seconds=10) as turn:
            began = time.monotonic()
            try:
                lend(turn, (1, 1), tensors)
                break
            except PublishFailed:
                took = time.monotonic() - began
            assert nursery.ended(pid, 5)
            assert took < 3, kill_at
            assert set(holders(directory).values()) != {None}, "the trainer has its turn still"
        assert not any(holders(directory).values())
    assert kill_at > 6
    # It had the turn with its trainer, which has left: its end frees it.
    until_sync(lambda: set(holders(directory).values()) == {"w"}, what="its name")
    end_process(nursery, pid)
    assert not any(holders(directory).values())


@pytest.mark.parametrize("when", ["offer", "first", "last"])
def test_a_worker_that_stands_still_fails_the_trainer_by_its_deadline(
    start: Start,
    directory: Path,
    tiny_models: TinyModels,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
) -> None:
    monkeypatch.setattr(lending, "LOAN_END_SECONDS", 0.5)
    pid, worker = start(0)
    old = tokens_of(worker)
    fall_asleep(worker, directory)
    tensors = read_tensors(tiny_models.weights(2))

    def stop_in_them() -> Iterator[tuple[str, Tensor]]:
        for number, each in enumerate(tensors.items(), 1):
            if number == {"first": 1, "last": len(tensors)}.get(when):
                os.kill(pid, signal.SIGSTOP)
            yield each

    with local_turn(GPUS, directory, seconds=10) as turn:
        if when == "offer":
            os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(PublishFailed):
            turn.hand_over(1, stop_in_them(), epoch=1, seconds=2, bucket_bytes=64 << 10)
        assert 1.5 < time.monotonic() - began < 4
    os.kill(pid, signal.SIGCONT)
    until_sync(lambda: not any(holders(directory).values()), what="the turn to end")
    fall_asleep(worker, directory)
    with local_turn(GPUS, directory, seconds=10) as turn:
        lend(turn, (1, 2), tensors)
    worker.post("wake")
    assert tokens_of(worker) == old
