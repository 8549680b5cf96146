"""A worker that takes turns: it holds its devices' locks exactly while its engine may have their memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rollout_common.turn import Turn, TurnTimeout
from rollout_common.turn.lock_files import holders, lock_name
from rollout_common.turn.sharing import SOCKET
from rollout_common.wire.problems import ProblemError
from rollout_worker.engine import EngineError
from rollout_worker.lifecycle import governor
from rollout_worker.schemas import Lifecycle
from tests.support.unit.tiny_engine import ABLE, Gate, raising
from tests.support.unit.tiny_worker import TinyWorker, refused, tiny_worker
from tests.support.waiting import until

GPU = "gpu.example.com/node-1/gpu-0"
WAITS = f"waiting for the turn: {GPU} is held by trainer-0"


@pytest.fixture
def trainer(directory: Path) -> Iterator[Turn]:
    """Somebody else who uses the device."""
    turn = Turn(directory, [GPU], "trainer-0")
    yield turn
    turn.give()


@contextlib.asynccontextmanager
async def taking_turns(
    tmp_path: Path, directory: Path, *, loads: bool = True
) -> AsyncIterator[TinyWorker]:
    """A worker that shares its device."""
    flags = ("--turn-directory", str(directory), "--turn-devices", GPU, "--turn-holder", "me")
    async with tiny_worker(tmp_path, *flags, loads=loads) as worker:
        yield worker
    # Of a turn that was kept to the end, the name goes only when the next one has taken it.
    await until(lambda: holders(directory).get(GPU) != "me", what="the turn to be given back")
    assert SOCKET not in os.environ


@pytest.fixture
async def worker(tmp_path: Path, directory: Path) -> AsyncIterator[TinyWorker]:
    async with taking_turns(tmp_path, directory) as made:
        yield made


def turn_of(worker: TinyWorker) -> str:
    """State of the turn, as `/v1/state` says it."""
    turn = worker.worker.worker_state().turn
    assert turn is not None
    assert turn.devices == (GPU,)
    return turn.state


async def waits(worker: TinyWorker, state: Lifecycle) -> None:
    """Until the worker says that it waits, and for whom."""

    def told() -> bool:
        progress = worker.worker.worker_state().progress
        return progress is not None and progress.message == WAITS

    await until(told, what="the worker says whom it waits for")
    assert worker.state is state
    assert turn_of(worker) == "Waiting"
    turn = worker.worker.worker_state().turn
    assert turn is not None
    assert turn.waiting_for == {GPU: "trainer-0"}


def has(directory: Path) -> str | None:
    """Who has the turn."""
    return holders(directory)[GPU]


async def test_a_worker_without_turns_says_so(tmp_path: Path) -> None:
    async with tiny_worker(tmp_path) as worker:
        assert worker.worker.worker_state().turn is None


async def test_it_has_the_turn_while_its_engine_has_memory(
    worker: TinyWorker, directory: Path, trainer: Turn
) -> None:
    assert turn_of(worker) == "Held"
    await worker.sleep()
    assert turn_of(worker) == "Released"
    await trainer.take_async(5)
    trainer.give()
    await worker.wake()
    assert worker.state is Lifecycle.ACTIVE
    assert has(directory) == "me"
    with pytest.raises(TurnTimeout):
        await trainer.take_async(0.1)
    page = worker.worker.render_metrics().decode()
    assert "rollout_worker_turn_wait_seconds_count 2.0" in page


@pytest.mark.parametrize("first", ["weights", "kv_cache"])
async def test_memory_that_is_partly_given_back_keeps_the_turn(
    tmp_path: Path, directory: Path, first: str
) -> None:
    rest = ({"weights", "kv_cache"} - {first}).pop()
    async with taking_turns(tmp_path, directory) as worker:
        await worker.sleep(tags=(first,))
        assert turn_of(worker) == "Held"
        await worker.sleep(tags=(rest,))
        assert turn_of(worker) == "Released"
        await worker.wake(tags=(first,))
        assert worker.state is Lifecycle.ASLEEP
        assert turn_of(worker) == "Held"
        await worker.sleep(tags=(first,))
        assert turn_of(worker) == "Released"


async def test_no_engine_is_made_before_the_turn_is_had(
    tmp_path: Path, directory: Path, trainer: Turn
) -> None:
    trainer.take(5)
    async with taking_turns(tmp_path, directory, loads=False) as worker:
        await waits(worker, Lifecycle.LOADING)
        assert worker.worker.supervisor.health_problem() is None
        assert not worker.engines
        trainer.give()
        await worker.reaches(Lifecycle.ACTIVE)
        assert has(directory) == "me"


async def test_a_worker_that_ends_while_it_waits_takes_nothing(
    tmp_path: Path, directory: Path, trainer: Turn
) -> None:
    trainer.take(5)
    async with taking_turns(tmp_path, directory, loads=False) as worker:
        await waits(worker, Lifecycle.LOADING)
    trainer.give()
    await trainer.take_async(5)


async def test_a_worker_wakes_when_its_turn_has_come(worker: TinyWorker, trainer: Turn) -> None:
    await worker.sleep()
    await trainer.take_async(5)
    waking = asyncio.create_task(worker.wake())
    await waits(worker, Lifecycle.WAKING)
    assert worker.engine.resident == {"weights": False, "kv_cache": False}
    trainer.give()
    await waking
    assert worker.state is Lifecycle.ACTIVE
    assert worker.worker.worker_state().progress is None


async def test_who_waits_to_wake_falls_asleep_again_when_asked_to(
    worker: TinyWorker, trainer: Turn
) -> None:
    await worker.sleep()
    await trainer.take_async(5)
    waking = asyncio.create_task(worker.wake())
    await waits(worker, Lifecycle.WAKING)
    await asyncio.wait_for(worker.sleep("other"), 5)
    assert worker.state is Lifecycle.ASLEEP
    assert turn_of(worker) == "Released"
    with refused("held"):
        await waking
    trainer.give()
    await trainer.take_async(5)
    trainer.give()
    await worker.wake("other")
    assert turn_of(worker) == "Held"


async def test_a_worker_told_to_end_while_it_waits_to_wake_ends(
    tmp_path: Path, directory: Path, trainer: Turn
) -> None:
    flags = ("--turn-directory", str(directory), "--turn-devices", GPU, "--shutdown-grace", "0")
    async with tiny_worker(tmp_path, *flags) as worker:
        await worker.sleep()
        await trainer.take_async(5)
        waking = asyncio.create_task(worker.wake())
        await until(lambda: worker.state is Lifecycle.WAKING, what="it waits")
        await asyncio.wait_for(worker.worker.shut_down(), 10)
        assert worker.state is Lifecycle.ASLEEP
        with refused("waking"):
            await waking


async def test_an_engine_that_dies_while_it_waits_to_wake_is_loaded_in_its_turn(
    worker: TinyWorker, trainer: Turn
) -> None:
    await worker.sleep()
    await trainer.take_async(5)
    waking = asyncio.create_task(worker.wake())
    await waits(worker, Lifecycle.WAKING)
    worker.engine.wrong = "it died"
    with refused("failed"):
        await waking
    await waits(worker, Lifecycle.LOADING)
    assert len(worker.engines) == 1
    trainer.give()
    await worker.reaches(Lifecycle.ACTIVE)
    assert len(worker.engines) == 2


async def test_an_engine_that_dies_awake_is_loaded_again_in_its_turn(
    worker: TinyWorker, trainer: Turn
) -> None:
    theirs = asyncio.create_task(trainer.take_async(20))
    await until(lambda: trainer.blocked_by, what="the trainer waits")
    worker.engine.wrong = "it died"
    await theirs
    assert worker.engines[0].stopped
    await waits(worker, Lifecycle.LOADING)
    assert len(worker.engines) == 1
    trainer.give()
    await worker.reaches(Lifecycle.ACTIVE)


async def test_an_engine_that_dies_asleep_is_not_loaded_before_it_is_to_wake(
    worker: TinyWorker, trainer: Turn
) -> None:
    await worker.update(1, 7)
    await worker.sleep()
    worker.engine.wrong = "it died"
    await until(lambda: worker.runtime.engine is None, what="it is buried")
    await worker.reaches(Lifecycle.ASLEEP)
    state = worker.worker.worker_state()
    assert state.last_error == "it died"
    assert not state.resident.weights
    assert [hold.state for hold in state.holds] == ["Asleep"]
    # It stays so, and answers as one that sleeps does, the operator's repetition, too.
    await worker.sleep()
    await worker.sleep("other", level=2)
    await trainer.take_async(5)
    trainer.give()
    with refused("held"):
        await _until_loaded(worker, "other")
    assert worker.state is Lifecycle.ASLEEP
    assert len(worker.engines) == 1
    await _until_loaded(worker, "me")
    await worker.reaches(Lifecycle.ACTIVE)
    assert len(worker.engines) == 2
    assert worker.active is not None
    assert worker.active.version == 1


async def _until_loaded(worker: TinyWorker, holder: str) -> None:
    """Wake, and ask again while it loads: what every caller does with a 409."""
    while True:
        try:
            return await worker.wake(holder)
        except ProblemError as problem:
            if problem.slug not in ("loading", "asleep", "failed"):
                raise
        await asyncio.sleep(0.01)


async def test_one_who_died_asleep_and_shall_pause_loads_for_it(worker: TinyWorker) -> None:
    await worker.sleep()
    worker.engine.wrong = "it died"
    await until(lambda: worker.runtime.engine is None, what="it is buried")
    await worker.reaches(Lifecycle.ASLEEP)
    with contextlib.suppress(Exception):
        await worker.pause()
    await worker.reaches(Lifecycle.PAUSED)
    assert turn_of(worker) == "Held"


async def test_an_engine_that_dies_falling_asleep_counts_as_asleep(
    worker: TinyWorker, trainer: Turn
) -> None:
    """Else whoever waits for the pool to sleep before it trains would wait for ever."""
    gate = Gate()
    worker.engine.before["sleep"] = gate
    asleep = asyncio.create_task(worker.sleep())
    await gate.reached.wait()
    worker.engine.wrong = "it died"
    await worker.reaches(Lifecycle.ASLEEP)
    gate.open()
    with contextlib.suppress(Exception):
        await asleep
    assert turn_of(worker) == "Released"
    await worker.sleep()
    await trainer.take_async(5)


async def test_a_wake_that_fails_gives_the_turn_back_until_the_next_try(
    worker: TinyWorker, trainer: Turn
) -> None:
    await worker.sleep()
    worker.engine.before["wake"] = raising(EngineError("no room"))
    with refused("engine-refused"):
        await worker.wake()
    assert worker.state is Lifecycle.ASLEEP
    await trainer.take_async(5)


async def test_an_engine_that_does_not_stop_keeps_the_turn(
    worker: TinyWorker, directory: Path, trainer: Turn
) -> None:
    """What it has in this process, nobody can know."""
    worker.engine.before["stop"] = raising(EngineError("stuck"))
    worker.engine.wrong = "it died"
    await until(lambda: len(worker.engines) == 2, what="the next engine")
    await worker.reaches(Lifecycle.ACTIVE)
    assert has(directory) == "me"
    with pytest.raises(TurnTimeout):
        await trainer.take_async(0.1)


async def test_a_process_that_is_spent_keeps_the_turn_until_it_has_ended(
    tmp_path: Path, directory: Path, trainer: Turn
) -> None:
    """No engine works in it any more, but memory of the last one is still there."""
    worker = TinyWorker(tmp_path, ("--turn-directory", str(directory), "--turn-devices", GPU))
    running = asyncio.create_task(worker.worker.run_until_cancelled())
    await worker.reaches(Lifecycle.ACTIVE)
    worker.engine.spent = "CUDA is gone"
    await asyncio.wait({running}, timeout=10)
    assert isinstance(running.exception(), ExceptionGroup)
    await worker.worker.supervisor.end_engine()
    with pytest.raises(TurnTimeout):
        await trainer.take_async(0.1)
    assert worker.runtime.turn is not None
    worker.runtime.turn.close()
    await trainer.take_async(5)


async def test_an_engine_that_gives_nothing_back_is_refused(
    tmp_path: Path, directory: Path, trainer: Turn
) -> None:
    flags = ("--turn-directory", str(directory), "--turn-devices", GPU)
    worker = TinyWorker(tmp_path, (*flags, "--restart-delays", "60"))
    worker.able = ABLE.model_copy(update={"sleep_levels": (), "memory_release": False})
    running = asyncio.create_task(worker.worker.run_until_cancelled())
    await worker.reaches(Lifecycle.FAILED)
    assert "nobody else would get a turn" in str(worker.runtime.last_error)
    await trainer.take_async(5)
    running.cancel()
    await asyncio.wait({running})
    await worker.worker.supervisor.end_engine()


async def test_a_lock_directory_that_is_gone_is_told_and_waited_for(
    worker: TinyWorker, tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(governor, "TRANSITION_RETRY_SECONDS", 0.1)
    await worker.sleep()
    os.rename(directory, tmp_path / "away")
    with refused("engine-refused") as told:
        await worker.wake()
    assert "mount the node's lock directory" in str(told.value)
    assert worker.state is Lifecycle.ASLEEP
    os.rename(tmp_path / "away", directory)
    # The next try comes by itself.
    await until(lambda: worker.state is Lifecycle.ACTIVE, seconds=20, what="it wakes")


async def test_a_missing_lock_directory_loads_nothing(tmp_path: Path, directory: Path) -> None:
    os.rmdir(directory)
    async with taking_turns(tmp_path, tmp_path / "turn", loads=False) as worker:
        await until(lambda: worker.runtime.last_error, what="it says so")
        assert "mount the node's lock directory" in str(worker.runtime.last_error)
        assert not worker.engines
        os.mkdir(directory)
        await worker.reaches(Lifecycle.ACTIVE)


async def test_a_replaced_lock_file_replaces_the_engine(
    worker: TinyWorker, directory: Path, trainer: Turn
) -> None:
    """Its processes share the old lock, which nobody asks any more."""
    _share(worker)
    await worker.sleep()
    (directory / lock_name(GPU)).unlink()
    with contextlib.suppress(Exception):
        await worker.wake()
    await until(lambda: len(worker.engines) == 2, what="the next engine")
    await worker.reaches(Lifecycle.ACTIVE)
    with pytest.raises(TurnTimeout):
        await trainer.take_async(0.1)


async def test_a_lock_file_that_is_removed_within_the_turn_is_told(
    worker: TinyWorker, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Any trainer can do so, and the next holder would not wait."""
    (directory / lock_name(GPU)).unlink()
    said = f"the lock files of {GPU} were removed while this worker has the turn"
    await until(lambda: said in str(worker.worker.worker_state().last_error), what="it says so")
    assert [each.getMessage() for each in caplog.records].count(str(worker.runtime.last_error)) == 1
    assert worker.state is Lifecycle.ACTIVE
    await worker.sleep()
    await worker.wake()
    assert has(directory) == "me"


def _share(worker: TinyWorker) -> None:
    """Do what a process of an engine does."""
    import socket

    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(os.environ[SOCKET])
        for file in socket.recv_fds(peer, 16, 16)[1]:
            os.close(file)
