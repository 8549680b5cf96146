"""Turns on a pool without an operator: a real worker behind its ports, and trainers that are not alone."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollout_client import AsyncRolloutPool, RolloutPool, SteeringFailed
from rollout_client.steering import direct_steering
from rollout_client.turn import local_turn, locks
from rollout_common.turn.lock_files import holders
from rollout_worker.schemas import Lifecycle
from tests.support.unit.served import served
from tests.support.unit.tiny_worker import TinyWorker
from tests.support.waiting import until

GPU = "gpu-0"


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "turn"
    folder.mkdir()
    monkeypatch.setenv("ROLLOUT_TURN_DIRECTORY", str(folder))
    monkeypatch.setenv("ROLLOUT_TURN_DEVICES", GPU)
    monkeypatch.setenv("ROLLOUT_TURN_HOLDER", "trainer-0")
    monkeypatch.setattr(direct_steering, "STATE_ASK_SECONDS", 0.5)
    monkeypatch.setattr(direct_steering, "RETRY_INTERVAL_SECONDS", 0.1)
    return folder


@contextlib.asynccontextmanager
async def taking_turns(
    home: Path, ports: tuple[int, int] = (0, 0), *, loads: bool = True
) -> AsyncIterator[tuple[TinyWorker, tuple[int, int]]]:
    """A worker that takes turns, and its ports."""
    flags = ("--turn-directory", str(home / "turn"), "--turn-devices", GPU, "--turn-holder", "me")
    async with served(home, *flags, ports=ports, loads=loads) as worker:
        yield worker.tiny, (worker.data, worker.control)


def trainer(ports: tuple[int, int]) -> AsyncRolloutPool:
    """A pool object of a trainer's."""
    data, control = (f"http://127.0.0.1:{port}" for port in ports)
    return AsyncRolloutPool.from_urls([data], control_urls=[control])


async def test_a_worker_that_is_restarted_within_the_turn_serves_after_it(
    tmp_path: Path, directory: Path
) -> None:
    """It comes back while nobody asks, and finds the devices in use; the pool's end of the turn waits for it."""
    async with contextlib.AsyncExitStack() as stack:
        first = contextlib.AsyncExitStack()
        _, ports = await first.enter_async_context(taking_turns(tmp_path))
        pool = await stack.enter_async_context(trainer(ports))
        again: asyncio.Task[TinyWorker] | None = None

        async def restart() -> TinyWorker:
            await asyncio.sleep(0.5)  # nobody answers at the turn's end
            tiny, _ = await stack.enter_async_context(taking_turns(tmp_path, ports, loads=False))
            return tiny

        async with pool.turn(seconds=60):
            await first.aclose()
            again = asyncio.create_task(restart())
        assert (await again).state is Lifecycle.ACTIVE
        assert holders(directory) == {GPU: "me"}


async def test_a_worker_that_is_back_within_the_turn_is_waited_for_until_it_has_loaded(
    tmp_path: Path, directory: Path
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        first = contextlib.AsyncExitStack()
        _, ports = await first.enter_async_context(taking_turns(tmp_path))
        pool = await stack.enter_async_context(trainer(ports))
        async with pool.turn(seconds=60):
            await first.aclose()
            tiny, _ = await stack.enter_async_context(taking_turns(tmp_path, ports, loads=False))
            await until(lambda: tiny.state is Lifecycle.LOADING, what="it waits for the devices")
            assert holders(directory) == {GPU: "trainer-0"}
        assert tiny.state is Lifecycle.ACTIVE


async def test_a_worker_that_restarts_when_a_turn_begins_is_waited_for(
    tmp_path: Path, directory: Path
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with taking_turns(tmp_path) as (_, ports):
            pass
        pool = await stack.enter_async_context(trainer(ports))
        with pytest.raises(SteeringFailed, match=r"Asleep within [01]\.?\d* s: no worker answers"):
            async with pool.turn(seconds=1):
                raise AssertionError

        async def train() -> None:
            async with pool.turn(seconds=60):
                assert holders(directory) == {GPU: "trainer-0"}

        training = asyncio.create_task(train())
        await asyncio.sleep(0.5)
        tiny, _ = await stack.enter_async_context(taking_turns(tmp_path, ports))
        await training
        assert tiny.state is Lifecycle.ACTIVE
        assert [each.holds for each in [tiny.worker.worker_state()]] == [()]


async def test_several_trainers_have_their_turns_one_after_the_other(tmp_path: Path) -> None:
    """They have one token, so the worker can't tell them apart."""
    inside = 0

    async def train(pool: AsyncRolloutPool) -> None:
        nonlocal inside
        for _ in range(4):
            async with pool.turn(seconds=60):
                inside += 1
                assert inside == 1
                await asyncio.sleep(0.05)
                assert tiny.engine.resident == {"weights": False, "kv_cache": False}
                inside -= 1

    async with contextlib.AsyncExitStack() as stack:
        tiny, ports = await stack.enter_async_context(taking_turns(tmp_path))
        pools = [await stack.enter_async_context(trainer(ports)) for _ in range(3)]
        await asyncio.gather(*map(train, pools))
        assert tiny.state is Lifecycle.ACTIVE
        assert tiny.worker.worker_state().holds == ()


async def test_after_an_error_the_worker_wakes_once_the_devices_are_free(
    tmp_path: Path, directory: Path
) -> None:
    """By itself: the trainer's process may end before anybody could ask again."""
    async with taking_turns(tmp_path) as (tiny, ports):
        pool = trainer(ports)
        with pytest.raises(ZeroDivisionError) as error:
            async with pool.turn(seconds=60):
                raise ZeroDivisionError
        await pool.close()
        assert len(error.value.__notes__) == 1, "the pool was asked"
        assert tiny.state is Lifecycle.WAKING
        assert holders(directory) == {GPU: "trainer-0"}
        for turn in itertools.chain(*locks._idle_turns.values()):  # what the process's end does
            turn.give()
        await tiny.reaches(Lifecycle.ACTIVE)


async def test_a_program_that_goes_on_after_an_error_has_its_next_turn(
    tmp_path: Path, directory: Path
) -> None:
    async with taking_turns(tmp_path) as (tiny, ports):
        data, control = (f"http://127.0.0.1:{port}" for port in ports)

        def train() -> None:
            with RolloutPool.from_urls([data], control_urls=[control]) as pool:
                with pytest.raises(ZeroDivisionError), pool.turn(seconds=60):
                    raise ZeroDivisionError
                with pool.turn(seconds=60):
                    assert holders(directory) == {GPU: "trainer-0"}

        await asyncio.to_thread(train)
        assert tiny.state is Lifecycle.ACTIVE
        with pytest.raises(ZeroDivisionError), local_turn(["gpu-1"]):
            raise ZeroDivisionError
        with local_turn(["gpu-1"]):
            pass
