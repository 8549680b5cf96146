"""Lent weights: what becomes of them, of the turn and of the pool, whatever the trainer does or whenever it dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollout_client import PublishFailed, RolloutPool
from rollout_client.turn import bucket_stream, local_turn, locks
from rollout_common.transfer.tensor_sums import sum_tensors
from rollout_common.turn.lock_files import holders
from rollout_worker.ports import lending_port
from tests.support.engine.lending_worker import (
    GPUS,
    LendingRig,
    WeightsIdentity,
    has_turn,
    lend,
    lending_rig,
    serve_lent,
    tokens_of,
    wake_up,
)
from tests.support.engine.push_rig import Nursery
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import ports_of
from tests.support.waiting import until_sync


@pytest.fixture(scope="module")
def rig(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LendingRig]:
    with lending_rig(tiny_models, tmp_path_factory.mktemp("turn")) as rig:
        yield rig


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, rig: LendingRig) -> Iterator[None]:
    monkeypatch.setattr(lending_port, "LENT_IDLE_SECONDS", 0.5)
    monkeypatch.setattr(lending_port, "LENDING_LOOK_SECONDS", 0.05)
    yield
    # A test that failed in its turn would keep the devices from all that follow.
    if any(turn.held for idle in locks._idle_turns.values() for turn in idle):
        with rig.take_turn():
            pass


@pytest.fixture
def asleep(rig: LendingRig) -> WeightsIdentity:
    return rig.sleep_anew()


def test_a_trainer_that_is_killed_before_any_message_leaves_the_old_weights(
    rig: LendingRig, nursery: Nursery, tmp_path: Path
) -> None:
    survived = False
    for kill_at in range(1, 40):
        identity = rig.sleep_anew()
        out = tmp_path / f"{kill_at}.out"
        trainer = rig.directory, ",".join(GPUS), rig.models.weights(2), *identity, kill_at
        pid = nursery.start("lender", [*map(str, trainer)], out, None)
        assert nursery.ended(pid, 60)
        survived = "sum" in out.read_text()
        if survived and has_turn(rig.worker):
            break
        # Its turn ended with it, and with the engine that shared it.
        with rig.take_turn():
            assert rig.worker.state()["resident"] == {"weights": False, "kv_cache": False}
        assert wake_up(rig.worker) == rig.tokens[1], kill_at
    assert survived
    assert kill_at > 8
    assert serve_lent(rig.worker, identity) == rig.tokens[2]


def test_tensors_that_the_model_lacks_leave_it_as_it_was(
    rig: LendingRig, asleep: WeightsIdentity
) -> None:
    good = rig.tensors[2]
    name = next(iter(good))
    wrong: dict[str, tuple[dict[str, Tensor], str]] = {
        "missing": ({k: v for k, v in good.items() if k != name}, "is missing"),
        "unknown": ({**good, "no.such.weight": torch.zeros(3)}, "is unknown to the model"),
        "shape": ({**good, name: torch.zeros(3)}, "the model's checkpoint has"),
    }
    with rig.take_turn() as turn:
        for tensors, why in wrong.values():
            with pytest.raises(PublishFailed, match=why):
                lend(turn, asleep, tensors)
        lend(turn, asleep, good)
    assert serve_lent(rig.worker, asleep) == rig.tokens[2]


def test_a_later_version_replaces_one_that_was_lent_in_the_same_turn(
    rig: LendingRig, asleep: WeightsIdentity
) -> None:
    epoch, version = asleep
    with rig.take_turn() as turn:
        lend(turn, asleep, rig.tensors[2])
        lend(turn, (epoch, version + 1), rig.tensors[3])
    assert serve_lent(rig.worker, (epoch, version + 1)) == rig.tokens[3]


def test_a_worker_that_wakes_without_a_commit_serves_the_old_weights(
    rig: LendingRig, asleep: WeightsIdentity
) -> None:
    with rig.take_turn() as turn:
        lend(turn, asleep, rig.tensors[2])
    assert wake_up(rig.worker) == rig.tokens[1]


def test_a_discarded_version_gives_its_memory_back(
    rig: LendingRig, asleep: WeightsIdentity
) -> None:
    epoch, version = asleep
    with rig.take_turn() as turn:
        lend(turn, asleep, rig.tensors[2])
        assert rig.worker.state()["resident"]["weights"]
        rig.worker.post("weights/discard", epoch=epoch, version=version)
        until_sync(lambda: not rig.worker.state()["resident"]["weights"], what="its memory to go")
        until_sync(
            lambda: rig.worker.state()["turn"]["state"] == "Released",
            what="its share of the turn to go",
        )
    assert wake_up(rig.worker) == rig.tokens[1]


def test_a_worker_that_nobody_wakes_lets_others_have_the_devices(
    rig: LendingRig, asleep: WeightsIdentity
) -> None:
    with rig.take_turn() as turn:
        lend(turn, asleep, rig.tensors[2])
    assert rig.worker.state()["turn"]["state"] == "Held"
    with rig.take_turn():
        assert rig.worker.state()["resident"] == {"weights": False, "kv_cache": False}
    assert wake_up(rig.worker) == rig.tokens[1]


def test_damaged_values_never_serve(
    rig: LendingRig, asleep: WeightsIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = sum_tensors
    monkeypatch.setattr(
        bucket_stream, "sum_tensors", lambda tensors: ["0" * 16, *right(tensors)[1:]]
    )
    with rig.take_turn() as turn, pytest.raises(PublishFailed, match="damaged"):
        lend(turn, asleep, rig.tensors[2])
    assert wake_up(rig.worker) == rig.tokens[1]


def test_an_error_in_the_block_takes_the_memory_back(
    rig: LendingRig, asleep: WeightsIdentity
) -> None:
    tensors = rig.tensors[2]

    def fail_in_turn() -> None:
        with rig.take_turn() as turn:
            lend(turn, asleep, tensors)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_turn()
    assert rig.worker.state()["turn"]["state"] == "Released"
    assert rig.worker.state()["resident"] == {"weights": False, "kv_cache": False}
    waking = rig.worker.in_background(lambda: rig.worker.post("wake"))
    assert set(holders(rig.directory)) == set(GPUS)
    with rig.take_turn():  # the same process may go on
        assert rig.worker.state()["resident"] == {"weights": False, "kv_cache": False}
    waking.result(60)
    assert tokens_of(rig.worker) == rig.tokens[1]


def test_a_pool_without_an_operator_publishes_what_was_lent(
    rig: LendingRig, asleep: WeightsIdentity
) -> None:
    del asleep
    wake_up(rig.worker)
    with RolloutPool.from_urls(**ports_of([rig.worker])) as pool:
        epoch, version = pool.acquire(), 1
        with pool.turn(devices=GPUS, directory=rig.directory, seconds=60) as turn:
            handed = lend(turn, (epoch, version), rig.tensors[3])
            done = pool.publish_handed_over(handed)
            assert done.root_hash == handed.root_hash
        assert tokens_of(rig.worker) == rig.tokens[3]
        with pool.turn(devices=GPUS, directory=rig.directory, seconds=60) as turn:
            handed = lend(turn, (epoch, version + 1), rig.tensors[2])
            pool.publish_handed_over(handed)
        assert tokens_of(rig.worker) == rig.tokens[2]


def test_nobody_lends_outside_a_turn_or_where_nobody_sleeps(
    rig: LendingRig, asleep: WeightsIdentity
) -> None:
    tensors = rig.tensors[2]
    with rig.take_turn() as turn:
        pass
    with pytest.raises(PublishFailed, match="only the process that holds a turn"):
        lend(turn, asleep, tensors)
    with (
        local_turn(["gpu-9"], rig.directory, seconds=5) as turn,
        pytest.raises(PublishFailed, match="no engine sleeps on gpu-9"),
    ):
        lend(turn, asleep, tensors)
    rig.worker.post("wake")
