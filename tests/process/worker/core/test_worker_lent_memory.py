"""The memory of a worker whose trainer lends it weights: what wakes in whose turn, and what falls asleep again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rollout_common.turn import Turn, TurnError, TurnTimeout
from rollout_common.turn.lock_files import holders
from rollout_worker.device_turn import DeviceTurn
from rollout_worker.schemas import Lifecycle
from tests.support.unit.tiny_worker import TinyWorker, refused, tiny_worker
from tests.support.waiting import until

GPU = "gpu.example.com/node-1/gpu-0"
LENT = {"weights": True, "kv_cache": False}
GONE = {"weights": False, "kv_cache": False}


@pytest.fixture
def trainer(directory: Path) -> Iterator[Turn]:
    turn = Turn(directory, [GPU], "trainer-0")
    yield turn
    turn.give()
    turn.leave()


@pytest.fixture
async def worker(tmp_path: Path, directory: Path, trainer: Turn) -> AsyncIterator[TinyWorker]:
    """A worker that sleeps while a trainer has lent it its turn."""
    flags = ("--turn-directory", str(directory), "--turn-devices", GPU, "--turn-holder", "me")
    async with tiny_worker(tmp_path, *flags) as made:
        await made.update(1, 7)
        await made.sleep(level=2)
        await trainer.take_async(5)
        turn_of(made).adopt_turn(copy_files(trainer))
        set_lending(made, lending=True)
        await until(lambda: made.engine.resident == LENT, what="the weights to wake")
        yield made


def copy_files(turn: Turn) -> dict[str, tuple[int, int]]:
    return {device: (os.dup(a), os.dup(b)) for device, (a, b) in turn.lend_files().items()}


def turn_of(worker: TinyWorker) -> DeviceTurn:
    assert worker.runtime.turn is not None
    return worker.runtime.turn


def set_lending(worker: TinyWorker, *, lending: bool) -> None:
    worker.runtime.holds.lending = lending
    worker.runtime.changed.notify_all()


async def test_lent_weights_wake_without_values_and_go_again(
    worker: TinyWorker, trainer: Turn, directory: Path
) -> None:
    assert (worker.engine.empty, worker.engine.refills, worker.state) == (
        True,
        0,
        Lifecycle.ASLEEP,
    )
    set_lending(worker, lending=False)
    await until(lambda: worker.engine.resident == GONE, what="the weights to go")
    await until(lambda: not turn_of(worker).is_lent, what="its share to go")
    assert trainer.held
    assert holders(directory)[GPU] is not None
    trainer.give()
    assert holders(directory)[GPU] is None
    await worker.wake()
    assert (worker.state, worker.engine.active.number) == (Lifecycle.ACTIVE, 7)


@pytest.mark.parametrize("leaves", [True, False])
async def test_the_rest_wakes_once_the_trainer_has_left(
    worker: TinyWorker, trainer: Turn, leaves: bool
) -> None:
    waking = asyncio.create_task(worker.wake())
    told = "waiting until the trainer that lends its turn has left it"

    def waits() -> bool:
        progress = worker.worker.worker_state().progress
        return progress is not None and progress.message == told

    await until(waits, what="it says that it waits")
    assert worker.engine.resident == LENT
    if leaves:
        trainer.give()
        turn_of(worker).note_lender_left()
        await waking
        assert worker.engine.active.number == 7
    else:
        worker.runtime.report_crash("the trainer has ended")
        with refused("failed"):
            await waking
        assert len(worker.engines) == 1, "the next one is loaded in its own turn"
        trainer.give()
        await worker.reaches(Lifecycle.ACTIVE)
    assert not worker.runtime.holds.lending
    with pytest.raises(TurnTimeout):
        await trainer.take_async(0)


async def test_an_engine_that_dies_takes_its_share_of_the_turn_along(
    worker: TinyWorker, trainer: Turn, directory: Path
) -> None:
    worker.engine.wrong = "it died"
    await until(lambda: not turn_of(worker).is_lent, what="its share to go")
    assert not worker.runtime.holds.lending
    assert trainer.held
    trainer.give()
    assert holders(directory)[GPU] is None
    assert len(worker.engines) == 1, "nobody wants it awake"


async def test_only_a_turn_for_all_its_devices_is_adopted_and_once(
    worker: TinyWorker, trainer: Turn, directory: Path
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TurnError, match="or it has its turn"):
        turn_of(worker).adopt_turn(copy_files(trainer))
    other = Turn(directory, ["gpu-9"], "trainer-0")
    await other.take_async(5)
    with pytest.raises(TurnError, match="not for the devices"):
        turn_of(worker).adopt_turn(copy_files(other))
    other.leave()
    await until(lambda: len(os.listdir("/proc/self/fd")) == before, what="its descriptors to go")
    assert turn_of(worker).is_lent
