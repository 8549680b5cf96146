"""The engine's life under a worker: deaths, hangs, back-off, and the weights that come back."""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from rollout_worker.engine import EngineCrashed, EngineError, ProcessSpent, WeightsRejected
from rollout_worker.lifecycle import supervisor
from rollout_worker.schemas import AbortReason, Lifecycle, RequireRequest, WeightsId
from tests.support.unit.tiny_engine import Gate, raising, write_weights
from tests.support.unit.tiny_worker import TinyWorker, made_by, refused, tiny_worker
from tests.support.waiting import until


def page(worker: TinyWorker) -> str:
    """Its metrics."""
    return worker.worker.render_metrics().decode()


async def restarted(worker: TinyWorker, count: int = 1) -> None:
    await until(lambda: worker.runtime.restarts == count, what=f"restart {count}")
    await until(lambda: worker.runtime.lifecycle.has_engine, what="the engine")


async def test_a_start_tells_its_progress_and_what_it_loaded(tmp_path: Path) -> None:
    async with tiny_worker(tmp_path) as worker:
        gate = worker.before_start["start"] = Gate()
        worker.runtime.report_crash("gone")
        await gate.reached.wait()
        assert worker.state is Lifecycle.LOADING
        assert worker.runtime.progress is not None
        assert worker.runtime.progress.message == "creating the engine"
        with refused("starting"):
            worker.worker.check_serving()
        gate.open()
        await restarted(worker)
        assert worker.runtime.progress is None
        info = worker.worker.worker_info(chat=True, tool_parser="x")
        assert (info.engine, info.max_length, info.capabilities.chat) == ("tiny", 64, True)
        [labels] = re.findall(r"^rollout_worker_info\{(.*)\} 1", page(worker), re.MULTILINE)
        assert {'engine="tiny"', 'engine_version="1.0"', 'model="model"'} <= set(labels.split(","))
        assert worker.worker.worker_state().in_flight_policies == info.capabilities.in_flight != ()
        assert worker.updates.active is not None
        assert worker.updates.active.root_hash == worker.runtime.loaded_engine()[1].root_hash


@pytest.mark.parametrize(
    ("kind", "told"), [("sampling", ("sampling", "raw")), ("raw", ("raw", "sampling"))]
)
async def test_the_kind_of_logprobs_that_nobody_has_to_ask_for_is_told_first(
    tmp_path: Path, kind: str, told: tuple[str, ...]
) -> None:
    async with tiny_worker(tmp_path, "--logprobs", kind) as worker:
        info = worker.worker.worker_info(chat=False, tool_parser=None)
    assert info.capabilities.logprobs == told


async def test_a_death_ends_requests_as_aborted_and_is_told(worker: TinyWorker) -> None:
    running, gate = await worker.runs("r"), Gate()
    worker.before_start["start"] = gate
    first, boot = worker.engine, worker.runtime.boot_id
    first.die("the test ended it")
    await asyncio.wait_for(running.done.wait(), 5)
    assert (running.outputs[0].abort_reason, made_by(running.outputs[0])) == (
        AbortReason.ENGINE,
        [(100, 0, False)],
    )
    await gate.reached.wait()
    assert worker.runtime.last_error == "the test ended it"
    assert first.stopped
    gate.open()
    await restarted(worker)
    state = worker.worker.worker_state()
    assert (state.boot_id, state.restarts, state.serving) == (boot, 1, True)
    assert b"rollout_worker_engine_restarts_total 1.0" in worker.worker.render_metrics()


async def test_a_death_ends_requests_though_a_verb_holds_the_worker(worker: TinyWorker) -> None:
    running = await worker.runs("r")
    async with worker.runtime.exclusive:
        worker.runtime.report_crash("gone")
        await asyncio.wait_for(running.done.wait(), 5)
    assert running.outputs[0].abort_reason is AbortReason.ENGINE
    await restarted(worker)


async def test_nothing_is_served_by_an_engine_that_was_found_dead(worker: TinyWorker) -> None:
    """Also in the moment before the state says so."""
    worker.runtime.report_crash("gone")
    assert worker.state is Lifecycle.ACTIVE
    with refused("failed"):
        worker.worker.check_serving()


# Weights.


async def test_a_new_engine_serves_the_last_weights(worker: TinyWorker) -> None:
    await worker.update(3, 7, in_flight="Abort")
    active = worker.updates.active
    gate = worker.before_start["open_slot"] = Gate()
    worker.engine.die()
    await gate.reached.wait()
    assert worker.runtime.progress is not None
    assert worker.runtime.progress.message == "reloading weights (1, 3)"
    gate.open()
    await restarted(worker)
    assert (worker.updates.active, worker.updates.commit_seq) == (active, 1)
    assert worker.engine.sinks == []
    assert not worker.engine.paused
    assert made_by(await worker.ends(await worker.begin("r", 3))) == [(7, 3, False)]


@pytest.mark.parametrize("damage", ["gone", "changed"])
async def test_weights_that_are_lost_leave_the_worker_fenced(
    worker: TinyWorker, damage: str
) -> None:
    await worker.update(1, 7)
    shutil.rmtree(worker.home / "w7")
    if damage == "changed":
        write_weights(worker.home / "w7", 8)
    worker.engine.die()
    await restarted(worker)
    await worker.reaches(Lifecycle.ACTIVE)
    assert worker.active == WeightsId(epoch=0, version=0)
    assert worker.engine.active.number == 100
    assert (worker.updates.previous, worker.engine.sinks) == (None, [])
    assert worker.updates.fence.floor == WeightsId(epoch=1, version=1)
    assert "weights (1, 1) could not be " in (worker.runtime.last_error or "")
    with refused("fenced"):
        worker.worker.check_serving()
    await worker.update(1, 7)
    worker.worker.check_serving()


async def test_what_was_staged_dies_with_its_engine(worker: TinyWorker) -> None:
    await worker.stage(1, 7)
    first = worker.engine
    first.die()
    await restarted(worker)
    assert first.sinks == []
    staged = worker.updates.to_view().staged
    assert staged is not None
    assert (staged.phase, staged.error) == ("Failed", "the engine was restarted: stage again")
    with refused("not-staged"):
        await worker.commit(1)
    await worker.update(1, 7)
    assert worker.engine.active.number == 7


async def test_a_higher_floor_stays_when_weights_are_lost(worker: TinyWorker) -> None:
    await worker.update(1, 7)
    worker.updates.raise_fence("me", RequireRequest(epoch=1, min_version=5))
    shutil.rmtree(worker.home / "w7")
    worker.engine.die()
    await restarted(worker)
    assert worker.updates.fence.floor == WeightsId(epoch=1, version=5)


async def test_weights_that_a_new_engine_rejects_are_lost_and_it_serves_on(
    worker: TinyWorker,
) -> None:
    await worker.update(1, 7)
    worker.before_start["commit"] = raising(WeightsRejected("not these"))
    worker.engine.die()
    await restarted(worker)
    await worker.reaches(Lifecycle.ACTIVE)
    assert not worker.engine.paused
    assert worker.active == worker.engine.active.identity == WeightsId(epoch=0, version=0)
    assert "(1, 1) could not be reloaded: not these" in (worker.runtime.last_error or "")
    with refused("fenced"):
        worker.worker.check_serving()
    del worker.engine.before["commit"]
    await worker.update(1, 7)
    assert made_by(await worker.ends(await worker.begin("r", 3))) == [(7, 1, False)]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        *((call, EngineCrashed("again")) for call in ("open_slot", "pause", "commit", "resume")),
        *((call, RuntimeError("again")) for call in ("open_slot", "pause", "commit", "resume")),
        *((call, EngineError("again")) for call in ("pause", "commit", "resume")),
    ],
)
async def test_a_death_while_weights_come_back_loses_nothing(
    worker: TinyWorker, call: str, error: Exception
) -> None:
    """It says nothing of their source: the next engine gets the same weights, after a while."""
    await worker.update(1, 7)
    deaths = 3

    async def die() -> None:
        nonlocal deaths
        deaths -= 1
        if deaths == 0:
            worker.before_start.clear()
        raise error

    worker.before_start[call] = die
    worker.engine.die()
    await restarted(worker, 4)
    await worker.reaches(Lifecycle.ACTIVE)
    assert worker.active == worker.engine.active.identity == WeightsId(epoch=1, version=1)
    assert made_by(await worker.ends(await worker.begin("r", 3))) == [(7, 1, False)]
    assert "again" in (worker.runtime.last_error or "")
    assert [sink for engine in worker.engines for sink in engine.sinks] == []


async def test_a_death_while_weights_come_back_serves_nobody_meanwhile(tmp_path: Path) -> None:
    async with tiny_worker(tmp_path, "--restart-delays", "0,0,30") as worker:
        await worker.update(1, 7)
        worker.before_start["commit"] = raising(EngineCrashed("again"))
        worker.engine.die()
        await until(lambda: worker.runtime.restarts == 2, what="the second death")
        await worker.reaches(Lifecycle.FAILED)
        assert worker.active == WeightsId(epoch=1, version=1)
        with refused("failed"):
            worker.worker.check_serving()


async def test_the_checkpoint_needs_nothing_brought_back(worker: TinyWorker) -> None:
    worker.before_start["open_slot"] = raising(EngineError("no room"))
    worker.runtime.report_crash("gone")
    await restarted(worker)
    assert worker.runtime.last_error == "gone"
    assert worker.worker.worker_state().serving


# Holds.


@pytest.mark.parametrize("verb", ["pause", "sleep"])
async def test_holds_outlive_a_death(worker: TinyWorker, verb: str) -> None:
    await getattr(worker, verb)()
    settled = worker.state
    resident = dict(worker.engine.resident)
    worker.engine.wrong = "gone"
    await until(lambda: worker.runtime.restarts == 1, what="the restart")
    await worker.reaches(settled)
    assert (worker.engine.resident, worker.engine.paused) == (resident, True)
    await (worker.resume() if verb == "pause" else worker.wake())
    assert (worker.state, worker.engine.paused) == (Lifecycle.ACTIVE, False)


async def test_a_pause_that_expired_meanwhile_opens(worker: TinyWorker) -> None:
    gate = worker.before_start["start"] = Gate()
    await worker.pause(ttl_seconds=1.0)
    worker.engine.wrong = "gone"
    await gate.reached.wait()
    await asyncio.sleep(1.05)
    gate.open()
    await worker.reaches(Lifecycle.ACTIVE)


# Starts that fail.


@pytest.mark.parametrize(
    ("error", "said"),
    [(EngineError("no such model"), "no such model"), (KeyError("x"), "KeyError: 'x'")],
    ids=["on purpose", "a defect"],
)
async def test_a_start_that_fails_is_told_and_tried_again(
    worker: TinyWorker, error: Exception, said: str
) -> None:
    worker.before_start["start"] = raising(error)
    worker.runtime.report_crash("gone")
    await until(lambda: worker.runtime.last_error == said, what=said)
    worker.before_start.clear()
    await worker.reaches(Lifecycle.ACTIVE)
    assert [engine.stopped for engine in worker.engines[:-1]] == [True] * worker.runtime.restarts


async def test_a_start_that_says_that_none_will_do_is_not_tried_again(tmp_path: Path) -> None:
    worker = TinyWorker(tmp_path, ())
    worker.before_start["start"] = raising(ProcessSpent("the GPU is lost"))
    with pytest.raises(ProcessSpent, match="the GPU is lost"):
        await asyncio.wait_for(worker.worker.supervisor.supervise_engine(), 30)
    assert len(worker.engines) == 1


async def test_a_start_has_a_deadline(tmp_path: Path) -> None:
    async with tiny_worker(tmp_path, "--start-timeout", "0.2") as worker:
        worker.before_start["start"] = Gate()
        worker.runtime.report_crash("gone")
        said = "--start-timeout"
        await until(lambda: said in (worker.runtime.last_error or ""), what=said)
        worker.before_start.clear()
        await worker.reaches(Lifecycle.ACTIVE)


@pytest.mark.parametrize("healthy", [False, True], ids=["at once", "after a healthy life"])
async def test_the_wait_grows_until_an_engine_lived_long_enough(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    healthy: bool,
) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF_RESET_SECONDS", 0.0 if healthy else 60.0)
    async with tiny_worker(tmp_path, "--restart-delays", "0,0.1") as worker:
        began = time.monotonic()
        for count in (1, 2, 3, 4):
            worker.runtime.report_crash("gone")
            await restarted(worker, count)
        took = time.monotonic() - began
    told = re.findall(r"restarting the engine in (\S+) s", caplog.text)
    # Beyond the last delay it stays with it.
    assert told == (["0"] * 4 if healthy else ["0", "0.1", "0.1", "0.1"])
    assert took >= sum(map(float, told))


@pytest.mark.parametrize(
    "stop",
    [Gate, lambda: raising(EngineError("no")), lambda: raising(OSError("a defect"))],
    ids=["hangs", "refuses", "a defect"],
)
async def test_an_engine_that_does_not_stop_is_left_behind(
    worker: TinyWorker, monkeypatch: pytest.MonkeyPatch, stop: Any
) -> None:
    monkeypatch.setattr(supervisor, "ENGINE_STOP_SECONDS", 0.05)
    worker.engine.before["stop"] = stop()
    worker.runtime.report_crash("gone")
    await restarted(worker)
    assert worker.state is Lifecycle.ACTIVE


# The end.


async def test_the_end_does_not_wait_for_a_volume_that_does_not_answer(
    worker: TinyWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "ENGINE_STOP_SECONDS", 0.05)
    monkeypatch.setattr(supervisor, "STAGED_RELEASE_SECONDS", 0.01)
    gate = Gate()
    monkeypatch.setattr(worker.updates, "drop_lost_engine", gate.__call__)
    await asyncio.wait_for(worker.worker.supervisor.end_engine(), 5)
    assert "staged weights are not given up after 0.05 s" in caplog.text
    gate.open()


@pytest.mark.parametrize("policy", ["Drain", "Pin"])
async def test_a_commit_under_way_ends_before_the_engine(worker: TinyWorker, policy: str) -> None:
    await worker.runs("r")
    await worker.update(1, 7, in_flight="Pin")
    await worker.stage(2, 8)
    fields = {"in_flight": policy, "deadline_seconds": 600}
    committing = asyncio.create_task(worker.commit(2, **fields))
    await until(worker.runtime.exclusive.locked, what="the commit to begin")
    await worker.worker.supervisor.end_engine()
    with refused("failed"):
        await committing
    assert worker.engines[0].stopped
    assert worker.active == WeightsId(epoch=1, version=1)


async def test_a_stage_under_way_ends_before_the_engine(worker: TinyWorker) -> None:
    await worker.hold_call("open_slot", worker.begin_stage(1, 7))
    slot = worker.slot
    assert slot.task is not None
    await worker.worker.supervisor.end_engine()
    assert slot.task.done(), "nothing is left that could fill it"
    assert worker.engines[0].sinks == []


async def test_a_call_made_in_the_moment_of_the_end_comes_before_it(worker: TinyWorker) -> None:
    """An abort waits for no verb: what it called may not have begun when the engine is stopped."""
    await worker.runs("r")
    aborting = asyncio.create_task(worker.flights.abort_all(AbortReason.CONTROL))
    await asyncio.sleep(0)
    await worker.worker.supervisor.end_engine()
    await asyncio.wait_for(aborting, 5)
    assert worker.engines[0].stopped


# Health.


async def test_it_is_healthy_while_it_makes_progress(worker: TinyWorker) -> None:
    health = worker.worker.supervisor.health_problem
    assert health() is None
    gate = worker.before_start["start"] = Gate()
    worker.runtime.report_crash("gone")
    await gate.reached.wait()
    assert health() is None, "a load may take --start-timeout"
    gate.open()
    await restarted(worker)


async def test_a_stuck_supervisor_says_so(
    worker: TinyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "HEARTBEAT_SLACK_SECONDS", -60.0)
    health = worker.worker.supervisor.health_problem
    await until(lambda: health() is not None, what="the next look at the engine")
    assert "stuck" in (health() or "")


@pytest.mark.parametrize(
    ("call", "spent", "healthy"),
    [
        *(("start", 290.0, True), ("start", 301.0, False)),
        *(("stop", 190.0, True), ("stop", 201.0, False)),
    ],
)
async def test_a_load_and_a_burial_may_take_their_time_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, spent: float, healthy: bool
) -> None:
    """As if so much of it were over already: 100 s to start and 200 to seed, or 2 x 50 to stop and 100 for calls."""
    monkeypatch.setattr(supervisor, "RELOAD_WEIGHTS_SECONDS", 200.0)
    monkeypatch.setattr(supervisor, "ENGINE_STOP_SECONDS", 50.0)
    monkeypatch.setattr(supervisor, "ENGINE_CALL_SECONDS", 100.0)
    async with tiny_worker(tmp_path, "--start-timeout", "100") as worker:
        calls = worker.before_start if call == "start" else worker.engine.before
        gate = calls[call] = Gate()
        monkeypatch.setattr(supervisor, "HEARTBEAT_SLACK_SECONDS", -spent)
        worker.runtime.report_crash("gone")
        await gate.reached.wait()
        assert (worker.worker.supervisor.health_problem() is None) is healthy
        gate.open()
        await restarted(worker)
