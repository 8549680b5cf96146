"""Calls to an engine that hangs, dies or errs, and the lock that verbs and commits share."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import cast

import pytest

from rollout_worker.core import worker_runtime as module
from rollout_worker.core.worker_runtime import ChangeNotifier, WorkerRuntime
from rollout_worker.engine import Engine, EngineCrashed, WeightsRejected
from rollout_worker.schemas import Lifecycle
from tests.support.unit.tiny_engine import TinyEngine, raising
from tests.support.unit.tiny_worker import refused, settings


@pytest.fixture
async def runtime() -> WorkerRuntime:
    """As it is once an engine was loaded."""
    runtime = WorkerRuntime(settings())
    runtime.died = asyncio.get_running_loop().create_future()
    return runtime


async def test_a_call_that_takes_too_long_is_given_up_and_cleaned_up(
    runtime: WorkerRuntime,
) -> None:
    cleaned = False

    async def hang() -> None:
        nonlocal cleaned
        try:
            await asyncio.Event().wait()
        finally:
            cleaned = True

    with pytest.raises(EngineCrashed, match=r"ask took more than 0\.05 s"):
        await runtime.call_engine(hang(), 0.05, "ask")
    assert cleaned
    with pytest.raises(EngineCrashed, match="took more"):
        runtime.check_alive()


async def test_a_call_that_cannot_be_cancelled_holds_nobody_up(
    runtime: WorkerRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CANCEL_GRACE_SECONDS", 0.05)
    over = asyncio.Event()

    async def deaf() -> None:
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue

    began = time.monotonic()
    with pytest.raises(EngineCrashed):
        await runtime.call_engine(deaf(), 0.05, "ask")
    assert time.monotonic() - began < 2
    over.set()


async def test_a_call_ends_when_the_engine_is_found_dead(runtime: WorkerRuntime) -> None:
    asyncio.get_running_loop().call_later(0.05, runtime.report_crash, "somebody saw it")
    with pytest.raises(EngineCrashed, match="somebody saw it"):
        await asyncio.wait_for(runtime.call_engine(asyncio.Event().wait(), 60, "ask"), 5)


async def test_a_cancelled_call_is_cancelled(runtime: WorkerRuntime) -> None:
    ended = asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.create_task(runtime.call_engine(wait(), 60, "ask"))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    assert runtime.died is not None
    assert not runtime.died.done(), "the engine is not to blame"


@pytest.mark.parametrize(
    ("error", "fatal", "raised", "dead"),
    [
        (EngineCrashed("it died"), True, EngineCrashed, True),
        (EngineCrashed("it died"), False, EngineCrashed, True),
        (WeightsRejected("no"), True, WeightsRejected, False),
        (ValueError("a defect"), True, EngineCrashed, True),
        (ValueError("a defect"), False, ValueError, False),
    ],
)
async def test_what_an_error_says_of_the_engine(
    runtime: WorkerRuntime, error: Exception, fatal: bool, raised: type[Exception], dead: bool
) -> None:
    fail = raising(error)
    with pytest.raises(raised):
        await runtime.call_engine(fail(), 5, "ask", fatal=fatal)  # type: ignore[arg-type]
    assert runtime.died is not None
    assert runtime.died.done() is dead
    if dead:
        assert str(error) in runtime.died.result()


async def test_the_first_reason_of_a_death_stays(runtime: WorkerRuntime) -> None:
    waiting = asyncio.create_task(runtime.changed.wait_for_change(5))
    await asyncio.sleep(0)
    runtime.report_crash("first")
    runtime.report_crash("second")
    with pytest.raises(EngineCrashed, match="first"):
        runtime.check_alive()
    assert await waiting, "who waits is told"
    assert not runtime.is_alive


async def test_one_at_a_time_and_nobody_waits_for_ever(runtime: WorkerRuntime) -> None:
    async with runtime.exclusive_within(5):
        with refused("deadline-exceeded") as caught:
            async with runtime.exclusive_within(0.05):
                raise AssertionError("two at once")
        assert caught.value.retry_after == 1
    async with runtime.exclusive_within(0.05):
        pass
    with pytest.raises(RuntimeError):
        async with runtime.exclusive_within(0.05):
            raise RuntimeError
    assert not runtime.exclusive.locked()


async def test_a_verb_without_an_engine_is_told_the_state_and_why(runtime: WorkerRuntime) -> None:
    with refused("starting") as caught:
        runtime.loaded_engine()
    assert caught.value.problem.status == 409
    assert caught.value.problem.model_dump()["lifecycle"] == "Starting"
    runtime.lifecycle.move_to(Lifecycle.FAILED)
    runtime.last_error = "no memory"
    with refused("failed") as caught:
        runtime.loaded_engine()
    assert "no memory" in str(caught.value)
    runtime.lifecycle.move_to(Lifecycle.LOADING)
    with refused("loading") as caught:
        runtime.loaded_engine()
    assert "no memory" not in str(caught.value), "it is told only while it lasts"
    stats = runtime.engine_stats()
    assert (stats.running, stats.resident.weights, stats.resident.kv_cache) == (0, False, False)


async def test_a_hold_that_expired_is_none(runtime: WorkerRuntime) -> None:
    runtime.holds.hold_paused("me", time.monotonic() + 0.05)
    assert runtime.is_held
    await asyncio.sleep(0.06)
    assert not runtime.is_held


async def test_a_pulse_wakes_all_who_wait_and_nobody_later() -> None:
    pulse = ChangeNotifier()
    waiting = [asyncio.create_task(pulse.wait_for_change(None)) for _ in range(2)]
    await asyncio.sleep(0)
    pulse.notify_all()
    assert await asyncio.gather(*waiting) == [True, True]
    assert not await pulse.wait_for_change(0.01)


def test_a_worker_without_an_engine_cannot_lose_it() -> None:
    runtime = WorkerRuntime(settings())
    runtime.report_crash("there is none")
    runtime.check_alive()
    assert not runtime.is_alive


async def test_an_engine_that_is_being_replaced_has_no_counts(
    runtime: WorkerRuntime, tmp_path: Path
) -> None:
    runtime.engine = cast(Engine, TinyEngine(tmp_path))
    assert not runtime.engine_stats().resident.weights
    runtime.lifecycle.move_to(Lifecycle.LOADING)
    runtime.lifecycle.move_to(Lifecycle.ACTIVE)
    assert runtime.engine_stats().resident.weights
