"""Lent weights: several trainers' processes, several workers on a device, and strangers at the worker's socket."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from rollout_client import PublishFailed
from rollout_client.turn import lending
from rollout_common.transfer.connections.descriptor_messages import (
    close_descriptors,
    dial_messages,
    make_socket,
    receive_message,
    send_message,
)
from rollout_common.transfer.connections.frames import TransferError
from rollout_common.turn import Turn
from rollout_common.turn.lock_files import holders
from rollout_worker.ports import lending_port
from tests.support.engine.lending_worker import (
    GPUS,
    LendingRig,
    WeightsIdentity,
    fall_asleep,
    has_turn,
    lend,
    lending_rig,
    serve_lent,
    turn_flags,
    turn_of,
    wake_up,
)
from tests.support.engine.push_rig import Nursery
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import in_process
from tests.support.waiting import until_sync

SPACE = ("--namespace", "test")


@pytest.fixture(scope="module")
def rig(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LendingRig]:
    """Its worker is of the pool a."""
    pool = *SPACE, "--pool", "a"
    with lending_rig(tiny_models, tmp_path_factory.mktemp("turn"), *pool) as rig:
        yield rig


@pytest.fixture
def asleep(rig: LendingRig) -> WeightsIdentity:
    return rig.sleep_anew()


# Several processes of a trainer.


class SecondTrainer:
    """Starts processes that lend on the second device."""

    def __init__(self, nursery: Nursery, rig: LendingRig, folder: Path) -> None:
        self._nursery, self._rig, self._folder = nursery, rig, folder
        self._numbers = itertools.count()

    def start(self, weights: Path, identity: WeightsIdentity, kill_at: int = 0) -> tuple[int, Path]:
        """Start one; returns its id, and the file where it writes the root hash."""
        out = self._folder / f"{next(self._numbers)}.out"
        words = [str(self._rig.directory), GPUS[1], str(weights), *map(str, identity), str(kill_at)]
        return self._nursery.start("lender", words, out, None), out


@pytest.fixture
def second(nursery: Nursery, rig: LendingRig, tmp_path: Path) -> SecondTrainer:
    return SecondTrainer(nursery, rig, tmp_path)


def test_all_processes_of_a_trainer_lend_or_none(
    rig: LendingRig, asleep: WeightsIdentity, second: SecondTrainer, nursery: Nursery
) -> None:
    with rig.take_turn(GPUS[:1]) as turn:
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(PublishFailed):
                lend(turn, asleep, rig.tensors[2], seconds=0.3)
            assert time.monotonic() - began < 2
            assert rig.worker.state()["resident"] == {"weights": False, "kv_cache": False}
        pid, out = second.start(rig.models.weights(2), asleep)
        until_sync(lambda: holders(rig.directory)[GPUS[1]], what="the second to have its turn")
        assert rig.worker.state()["weights"]["staged"] is None
        done = lend(turn, asleep, rig.tensors[2])
        assert nursery.ended(pid, 20)
        assert out.read_text() == done.root_hash
        assert not turn_of(rig.worker).lender_left.is_set(), "the first has not left"
    assert serve_lent(rig.worker, asleep) == rig.tokens[2]


def test_processes_with_other_tensors_are_refused(
    rig: LendingRig, asleep: WeightsIdentity, second: SecondTrainer, nursery: Nursery
) -> None:
    pid, out = second.start(rig.models.weights(3), asleep)
    with rig.take_turn(GPUS[:1]) as turn:
        with pytest.raises(PublishFailed, match="different tensors"):
            lend(turn, asleep, rig.tensors[2])
        assert nursery.ended(pid, 20)
        assert "different tensors" in out.read_text()
        for _ in range(2):
            with pytest.raises(PublishFailed):
                lend(turn, asleep, rig.tensors[2], seconds=0.3)
    assert wake_up(rig.worker) == rig.tokens[1]


def test_the_death_of_one_process_fails_the_others(
    rig: LendingRig, second: SecondTrainer, nursery: Nursery
) -> None:
    failures = 0
    for kill_at in itertools.count(1):
        identity = rig.sleep_anew()
        pid, out = second.start(rig.models.weights(2), identity, kill_at)
        with rig.take_turn(GPUS[:1]) as turn:
            try:
                lend(turn, identity, rig.tensors[2], seconds=3)
            except PublishFailed:
                failures += 1
            assert nursery.ended(pid, 20)
        if has_turn(rig.worker):
            break
        with rig.take_turn():
            assert rig.worker.state()["resident"] == {"weights": False, "kv_cache": False}
        assert wake_up(rig.worker) == rig.tokens[1], kill_at
    assert out.read_text()
    assert failures > 3
    assert serve_lent(rig.worker, identity) == rig.tokens[2]


def test_a_trainer_that_takes_longer_than_it_said_leaves_no_engine_waiting(
    rig: LendingRig, asleep: WeightsIdentity
) -> None:
    ended: list[float] = []

    def gather_slowly() -> Iterator[tuple[str, Tensor]]:
        began = time.monotonic()
        until_sync(
            lambda: not rig.worker.state()["resident"]["weights"], 5, what="its memory to go"
        )
        ended.append(time.monotonic() - began)
        yield from rig.tensors[2].items()

    with rig.take_turn() as turn:
        with pytest.raises(PublishFailed):
            turn.hand_over(asleep[1], gather_slowly(), epoch=asleep[0], seconds=1)
        assert ended
        assert ended[0] > 0.5
        lend(turn, asleep, rig.tensors[2])
    assert serve_lent(rig.worker, asleep) == rig.tokens[2]


# Several workers on one device.


def test_who_of_two_pools_gets_the_weights_is_said(
    rig: LendingRig, asleep: WeightsIdentity
) -> None:
    del asleep
    flags = *turn_flags(rig.directory, "v"), "--weights-port", "0", *SPACE, "--pool", "b"
    with in_process(rig.models.model(1), *flags) as other:
        other.post("require", epoch=0, min_version=0)
        fall_asleep(other, rig.directory)
        with rig.take_turn() as turn:
            with pytest.raises(PublishFailed, match=r"of pool [ab] .*same device: say whose pool="):
                lend(turn, (1, 1), rig.tensors[2])
            with pytest.raises(PublishFailed, match="no engine sleeps"):
                turn.hand_over(1, rig.tensors[2].items(), epoch=1, pool="c", seconds=5)
            turn.hand_over(1, rig.tensors[2].items(), epoch=1, pool="b", seconds=60)
            assert rig.worker.state()["weights"]["staged"] is None
        assert serve_lent(other, (1, 1)) == rig.tokens[2]
        fall_asleep(other, rig.directory)


# Strangers.


def offer(**fields: Any) -> dict[str, Any]:
    """An offer as a trainer makes it, but for these fields."""
    return {
        "protocol": 1,
        "epoch": 1,
        "version": 99,
        "seconds": 60,
        "devices": list(GPUS),
        "memory": ["cpu"],
        **fields,
    }


ODD_VALUES: dict[str, list[Any]] = {
    "protocol": [2, "1", None],
    "seconds": [math.nan, -1, 0, None, "x", [], 10**400],
    "epoch": [-1, "x"],
    "version": [-1, 1.5, None, "x", 10**30],
    "devices": [None, 7, "gpu-0", [None], [[]], [], {}, [GPUS[0]] * 2, ["gpu-9", GPUS[0]]],
    "memory": [None, 7],
}
ODD_OFFERS = [{}, *(offer(**{name: each}) for name, odd in ODD_VALUES.items() for each in odd)]


def make_offer(path: Path, head: dict[str, Any], files: Sequence[int]) -> None:
    """Make an offer, and go once the worker has said something."""
    with dial_messages(path, 5) as sock, contextlib.suppress(TransferError):
        close_descriptors(receive_message(sock)[1])
        send_message(sock, head, files)
        close_descriptors(receive_message(sock)[1])


@pytest.fixture
def lend_socket(rig: LendingRig) -> Path:
    [path] = rig.directory.glob(".lend-*")
    return path


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_odd_offers_are_refused_and_a_trainer_lends_after_all(
    rig: LendingRig, asleep: WeightsIdentity, lend_socket: Path
) -> None:
    with rig.take_turn() as turn:
        before = descriptors()
        for head in ODD_OFFERS:
            for files in (turn.filenos[:4], turn.filenos[:3], (), (0, 1, 2, 0)):
                make_offer(lend_socket, head, files)
        assert rig.worker.state()["lifecycle"] == "Asleep"
        until_sync(lambda: descriptors() <= before, 5, what="descriptors to be closed")
        with pytest.raises(PublishFailed, match="below the active"):
            lend(turn, (0, 1), rig.tensors[2])
        lend(turn, asleep, rig.tensors[2])
    assert serve_lent(rig.worker, asleep) == rig.tokens[2]


def silent(path: Path) -> Iterator[socket.socket]:
    for _ in range(200):
        with contextlib.suppress(TransferError):
            yield dial_messages(path, 0.05)


def talking(path: Path) -> Iterator[socket.socket]:
    deep = b"[" * 100_000
    for said in (b"x", b"{}", json.dumps(offer()).encode(), deep, b'"' + b"x" * 200_000 + b'"'):
        for sock in itertools.islice(silent(path), 8):
            with contextlib.suppress(OSError):
                socket.send_fds(sock, [said], [0, 1, 2, 0])
            yield sock


def without_locks(path: Path) -> Iterator[socket.socket]:
    """Offers with the lock files, but without their locks, that stay."""
    turn = Turn(path.parent, GPUS, "stranger")
    for _ in range(3):
        files = [os.open(path.parent / each, os.O_RDWR) for each in GPUS for _ in (0, 1)]
        sock = dial_messages(path, 5)
        close_descriptors(receive_message(sock)[1])
        send_message(sock, offer(), files)
        for each in files:
            os.close(each)
        yield sock
    turn.leave()


@pytest.mark.parametrize("strange", [silent, talking, without_locks])
def test_strangers_keep_no_trainer_out(
    rig: LendingRig,
    asleep: WeightsIdentity,
    lend_socket: Path,
    monkeypatch: pytest.MonkeyPatch,
    strange: Callable[[Path], Iterator[socket.socket]],
) -> None:
    monkeypatch.setattr(lending_port, "LENDER_GREETING_SECONDS", 1.0)
    before, threads = descriptors(), threading.active_count()
    with contextlib.ExitStack() as strangers:
        with rig.take_turn() as turn:
            for sock in strange(lend_socket):
                strangers.enter_context(sock)
            lend(turn, asleep, rig.tensors[2])
            for sock in itertools.islice(strange(lend_socket), 20):
                strangers.enter_context(sock)
            staged = rig.worker.state()["weights"]["staged"]
            assert (staged["phase"], staged["version"]) == ("Staged", asleep[1])
        assert serve_lent(rig.worker, asleep) == rig.tokens[2]
        until_sync(lambda: rig.worker.call(lambda: None, 1) is None, what="its loop to go on")
    until_sync(lambda: descriptors() <= before + 8, 10, what="descriptors to be closed")
    assert threading.active_count() <= threads + 8
    assert rig.worker.sample(8)["token_ids"] == rig.tokens[2]


def greet_oddly(listener: socket.socket, said: bytes) -> None:
    with contextlib.suppress(OSError):
        while True:
            with listener.accept()[0] as sock:
                sock.send(said)


def test_a_worker_that_says_nothing_or_nonsense_keeps_no_trainer_out(
    rig: LendingRig, asleep: WeightsIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "BORROWER_SECONDS", 0.2)
    said = [b"x", b"{}", json.dumps({"protocol": 1, "holder": "x", "devices": 7}).encode()]
    with contextlib.ExitStack() as stack, rig.take_turn() as turn:
        for number in range(len(said) + 1):
            path = rig.directory / f".lend-{number}"
            listener = stack.enter_context(make_socket())
            listener.bind(str(path))
            listener.listen()
            stack.callback(path.unlink)
            if number < len(said):
                thread = threading.Thread(target=greet_oddly, args=(listener, said[number]))
                stack.callback(thread.join, 10)
                stack.callback(listener.shutdown, socket.SHUT_RDWR)
                thread.start()
        lend(turn, asleep, rig.tensors[2])
        with pytest.raises(PublishFailed, match=r"no engine sleeps on .*lend-3: no message"):
            turn.hand_over(9, rig.tensors[2].items(), epoch=9, pool="c", seconds=5)
    assert rig.worker.state()["weights"]["staged"] is None
    assert wake_up(rig.worker) == rig.tokens[1]
