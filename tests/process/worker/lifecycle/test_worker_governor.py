"""Holds and verbs over a whole worker: who opens, who stays closed, what memory goes and comes."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from rollout_common.transfer.memory.slot import Slot
from rollout_common.wire.problems import ProblemError
from rollout_worker.engine import EngineCrashed, EngineError
from rollout_worker.lifecycle import control_verbs, governor
from rollout_worker.schemas import (
    AbortReason,
    AbortRequest,
    Lifecycle,
    ReleaseRequest,
    RequireRequest,
    StopReason,
)
from tests.support.unit.tiny_engine import ABLE, Gate, raising, write_weights
from tests.support.unit.tiny_worker import LONG, TinyWorker, made_by, refused, tiny_worker
from tests.support.waiting import until

GONE, THERE = {"weights": False, "kv_cache": False}, {"weights": True, "kv_cache": True}


# Pause and resume.


@pytest.mark.parametrize("mode", ["abort", "drain", "keep"])
async def test_pause_and_resume(worker: TinyWorker, mode: str) -> None:
    running = await worker.runs("r")
    worker.engine.free = mode == "drain"
    await asyncio.wait_for(worker.pause(mode=mode, deadline_seconds=600), 5)
    assert (worker.state, worker.engine.paused) == (Lifecycle.PAUSED, True)
    assert running.done.is_set() is (mode != "keep")
    with refused("paused"):
        worker.worker.check_serving()
    await worker.resume()
    assert (worker.state, worker.engine.paused) == (Lifecycle.ACTIVE, False)
    output = await worker.ends(running)
    if mode == "abort":
        assert (output.stop_reason, output.abort_reason) == (
            StopReason.ABORTED,
            AbortReason.CONTROL,
        )
        assert output.token_ids == [100, 100]
    else:
        assert (output.stop_reason, len(output.token_ids)) == (StopReason.LENGTH, LONG)


async def test_while_it_drains_nobody_new_is_taken_and_a_resume_undoes_it(
    worker: TinyWorker,
) -> None:
    running = await worker.runs("r")
    pausing = asyncio.create_task(worker.pause(deadline_seconds=60))
    await worker.reaches(Lifecycle.PAUSING)
    with refused("paused"):
        worker.worker.check_serving()
    await worker.resume()
    with refused("changed-meanwhile"):
        await pausing
    assert worker.state is Lifecycle.ACTIVE
    assert len((await worker.ends(running)).token_ids) == LONG


@pytest.mark.parametrize(("first", "second"), [(600, 0.1), (0.2, 600)])
async def test_the_earliest_deadline_of_a_drain_wins(
    worker: TinyWorker, first: float, second: float
) -> None:
    running, began = await worker.runs("r"), time.monotonic()
    pausing = asyncio.create_task(worker.pause("a", deadline_seconds=first))
    await worker.reaches(Lifecycle.PAUSING)
    await asyncio.wait_for(worker.pause("b", deadline_seconds=second), 5)
    await asyncio.wait_for(pausing, 5)
    assert time.monotonic() - began >= 0.1
    assert worker.state is Lifecycle.PAUSED
    assert running.outputs[0].abort_reason is AbortReason.CONTROL


async def test_a_drain_of_the_next_pause_is_its_own(worker: TinyWorker) -> None:
    await worker.pause(mode="abort")
    await worker.resume()
    running = await worker.runs("r")
    worker.engine.free = True
    await worker.pause(deadline_seconds=10)
    assert running.outputs[0].stop_reason is StopReason.LENGTH, "no old deadline cut it short"


async def test_a_deadline_ends_with_a_hold_that_no_step_was_taken_for(worker: TinyWorker) -> None:
    await worker.stage(1, 101)
    gate, commit = await worker.hold_call("commit", worker.commit(1))  # it holds the lock
    with refused("changed-meanwhile"):
        await asyncio.wait_for(worker.pause("short", deadline_seconds=0.1, ttl_seconds=0.05), 5)
    gate.open()
    await commit
    running = await worker.runs("r")
    pausing = asyncio.create_task(worker.pause(deadline_seconds=30))
    await worker.reaches(Lifecycle.PAUSING)
    await asyncio.sleep(0.1)
    assert running.outputs[0].stop_reason is None
    worker.engine.free = True
    await pausing


async def test_an_abort_ends_what_an_earlier_keep_froze(worker: TinyWorker) -> None:
    running = await worker.runs("r")
    await worker.pause(mode="keep")
    await worker.pause(mode="abort")
    assert running.outputs[0].abort_reason is AbortReason.CONTROL
    assert worker.state is Lifecycle.PAUSED


async def test_a_pause_with_a_ttl_falls_by_itself(worker: TinyWorker) -> None:
    await worker.pause(ttl_seconds=1)  # enough for a busy machine to reach the pause
    [hold] = worker.worker.worker_state().holds
    assert hold.ttl is not None
    assert 0 < hold.ttl <= 1
    await worker.reaches(Lifecycle.ACTIVE)
    assert worker.worker.worker_state().holds == ()


async def test_a_pause_that_expires_in_its_drain_is_told_and_ends_nobody(
    worker: TinyWorker,
) -> None:
    running = await worker.runs("r")
    with refused("changed-meanwhile"):
        await asyncio.wait_for(worker.pause(ttl_seconds=0.1, deadline_seconds=60), 5)
    await worker.reaches(Lifecycle.ACTIVE)
    assert len((await worker.ends(running)).token_ids) == LONG


@pytest.mark.parametrize("other", [False, True], ids=["it opens again", "another keeps it paused"])
async def test_a_pause_that_expired_before_it_was_met_was_not_met(
    worker: TinyWorker, other: bool
) -> None:
    """Whatever state the worker is in when the caller gets to look."""
    gate, pausing = await worker.hold_call(
        "pause", worker.pause("short", ttl_seconds=0.05, mode="keep")
    )
    if other:
        longer = asyncio.create_task(worker.pause("long", mode="keep"))
    await asyncio.sleep(0.1)
    gate.open()
    with refused("changed-meanwhile"):
        await pausing
    if other:
        await longer
    await worker.reaches(Lifecycle.PAUSED if other else Lifecycle.ACTIVE)


async def test_verbs_repeat(worker: TinyWorker) -> None:
    await worker.resume()
    await worker.wake()
    for _ in range(2):
        await worker.pause()
        assert worker.state is Lifecycle.PAUSED
    for _ in range(2):
        await worker.sleep()
        assert worker.state is Lifecycle.ASLEEP
    for _ in range(2):
        await worker.wake()
        assert worker.state is Lifecycle.ACTIVE


# Others' holds.


async def test_nobody_opens_what_another_holds(worker: TinyWorker) -> None:
    await worker.pause("operator")
    await worker.pause("trainer")
    with refused("held") as caught:
        await worker.resume("trainer")
    assert caught.value.problem.model_dump()["holders"] == ["operator"]
    assert (worker.state, worker.engine.paused) == (Lifecycle.PAUSED, True)
    await worker.sleep("trainer")
    with refused("held"):
        await worker.wake("trainer")
    assert (worker.state, worker.engine.paused) == (Lifecycle.PAUSED, True)
    assert worker.engine.resident == THERE, "the memory is back, the pause stays"
    await worker.resume("operator")
    assert worker.state is Lifecycle.ACTIVE


async def test_a_pause_below_anothers_sleep_stays_asleep(worker: TinyWorker) -> None:
    await worker.sleep("trainer")
    await worker.pause("operator")
    with refused("held"):
        await worker.resume("operator")
    assert (worker.state, worker.engine.resident) == (Lifecycle.ASLEEP, GONE)


async def test_resume_does_not_wake(worker: TinyWorker) -> None:
    await worker.sleep()
    with refused("asleep"):
        await worker.resume()
    assert (worker.state, worker.engine.resident) == (Lifecycle.ASLEEP, GONE)


async def test_a_sleeper_may_turn_to_a_pause_without_opening(worker: TinyWorker) -> None:
    await worker.sleep()
    await worker.pause()
    assert (worker.state, worker.engine.resident) == (Lifecycle.PAUSED, THERE)
    assert worker.engine.paused


async def test_a_stale_generation_changes_nothing(worker: TinyWorker) -> None:
    await worker.pause(generation=7)
    for verb in (worker.pause, worker.sleep, worker.wake):
        with refused("stale-generation") as caught:
            await verb(generation=6)
        assert caught.value.problem.model_dump()["generation"] == 7
    with refused("stale-generation"):
        await worker.verbs.resume_worker("me", ReleaseRequest(generation=6))
    assert worker.state is Lifecycle.PAUSED
    await worker.pause(generation=7)
    await worker.verbs.resume_worker("me", ReleaseRequest(generation=8))
    assert (worker.state, worker.worker.worker_state().generation) == (Lifecycle.ACTIVE, 8)


# Sleep and wake.


@pytest.mark.parametrize("level", [1, 2])
async def test_sleep_gives_memory_back_and_waking_brings_the_active_weights(
    worker: TinyWorker, level: int
) -> None:
    await worker.update(1, 7)
    await worker.sleep(level=level)
    assert (worker.state, worker.engine.resident) == (Lifecycle.ASLEEP, GONE)
    with refused("asleep"):
        worker.worker.check_serving()
    await worker.wake()
    assert (worker.state, worker.engine.resident) == (Lifecycle.ACTIVE, THERE)
    assert made_by(await worker.ends(await worker.begin("r", 3))) == [(7, 1, False)]


@pytest.mark.parametrize(("mode", "reason"), [("abort", AbortReason.SLEEP), ("drain", None)])
async def test_sleep_ends_requests_with_its_own_reason(
    worker: TinyWorker, mode: str, reason: AbortReason | None
) -> None:
    running = await worker.runs("r")
    worker.engine.free = mode == "drain"
    await asyncio.wait_for(worker.sleep(mode=mode, deadline_seconds=600), 5)
    assert running.outputs[0].abort_reason is reason


async def test_a_request_kept_through_sleep_goes_on(worker: TinyWorker) -> None:
    running = await worker.runs("r")
    await worker.sleep(mode="keep", level=2)
    assert not running.done.is_set()
    await worker.wake()
    assert len((await worker.ends(running)).token_ids) == LONG


async def test_what_a_pause_froze_is_ended_by_a_sleep_that_drains(worker: TinyWorker) -> None:
    running = await worker.runs("r")
    await worker.pause(mode="keep")
    await worker.sleep(deadline_seconds=0.1)
    assert running.outputs[0].abort_reason is AbortReason.SLEEP
    assert worker.state is Lifecycle.ASLEEP


async def test_staged_waking(worker: TinyWorker) -> None:
    await worker.sleep()
    await worker.wake(tags=("weights",))
    assert (worker.state, worker.engine.resident) == (
        Lifecycle.ASLEEP,
        {"weights": True, "kv_cache": False},
    )
    await worker.update(1, 7)
    await worker.wake(tags=("kv_cache",))
    await worker.reaches(Lifecycle.ACTIVE)


async def test_sleeping_wider_and_deeper(worker: TinyWorker) -> None:
    await worker.sleep(tags=("kv_cache",))
    assert worker.engine.resident == {"weights": True, "kv_cache": False}
    await worker.sleep(tags=("weights",), level=1)
    assert worker.engine.resident == GONE
    (worker.model / "model.safetensors").rename(worker.home / "hidden")
    await worker.sleep(level=2)
    with refused("weights-rejected"):
        await worker.wake()
    (worker.home / "hidden").rename(worker.model / "model.safetensors")


async def test_a_second_sleep_after_waking_starts_at_its_own_level(worker: TinyWorker) -> None:
    await worker.sleep(level=2)
    await worker.wake()
    await worker.sleep(level=1)
    (worker.model / "model.safetensors").unlink()
    await worker.wake()
    assert worker.engine.active.number == 100, "level 1 needs no source"


async def test_others_keep_their_share_of_the_memory(worker: TinyWorker) -> None:
    await worker.sleep("a", tags=("weights",))
    await worker.sleep("b", tags=("kv_cache",))
    with refused("held"):
        await worker.wake("a", tags=("weights",))
    assert worker.engine.resident == {"weights": True, "kv_cache": False}
    assert worker.state is Lifecycle.ASLEEP


@pytest.mark.parametrize(("levels", "said"), [((1,), "level 1"), ((), "can't sleep")])
async def test_a_level_that_the_engine_lacks_is_refused(
    worker: TinyWorker, levels: tuple[int, ...], said: str
) -> None:
    worker.engine.capabilities = ABLE.model_copy(update={"sleep_levels": levels})
    with refused("unsupported") as caught:
        await worker.sleep(level=2)
    [error] = caught.value.problem.model_dump()["errors"]
    assert error["field"] == "level"
    assert said in error["message"]
    assert worker.worker.worker_state().holds == ()


async def test_waking_at_level_2_refuses_other_bytes(
    worker: TinyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would serve under the name of those that were committed."""
    monkeypatch.setattr(governor, "TRANSITION_RETRY_SECONDS", 0.1)
    await worker.update(1, 7)
    await worker.sleep(level=2)
    write_weights(worker.home / "w7", 8)
    with refused("weights-rejected"):
        await worker.wake()
    assert worker.engine.sinks == []
    assert worker.runtime.last_error
    write_weights(worker.home / "w7", 7)
    await worker.reaches(Lifecycle.ACTIVE)
    assert worker.engine.active.number == 7


@pytest.mark.parametrize("level", [1, 2])
async def test_sleep_gives_staged_weights_back_too(worker: TinyWorker, level: int) -> None:
    await worker.stage(1, 7)
    await worker.sleep(level=level)
    assert (worker.engine.sinks, worker.updates.to_view().staged) == ([], None)
    with refused("asleep"):
        await worker.commit(1)
    await worker.wake()
    with refused("not-staged"):
        await worker.commit(1)
    await worker.update(1, 7)
    assert worker.engine.active.number == 7


async def test_sleep_waits_for_memory_that_is_still_being_freed(worker: TinyWorker) -> None:
    """Some of it becomes the spare at its end, which would stay otherwise."""
    let, spare = threading.Event(), worker.updates.pushes.spare

    def free() -> None:
        assert let.wait(10)
        spare.keep_memory(Slot(600))

    worker.updates.freeing.free_soon(free)
    sleeping = asyncio.create_task(worker.sleep())
    await until(lambda: worker.state is not Lifecycle.ACTIVE, what="the sleep to begin")
    assert not (await asyncio.wait({sleeping}, timeout=0.2))[0]
    let.set()
    await sleeping
    assert spare.nbytes == 0


async def test_memory_of_the_version_before_is_freed_in_a_thread(worker: TinyWorker) -> None:
    freed = list[threading.Thread]()

    class SlowSlot(Slot):
        def close(self) -> None:
            freed.append(threading.current_thread())
            super().close()

    worker.updates.pushes.spare.keep_memory(SlowSlot(600))
    await worker.sleep()
    assert threading.current_thread() not in freed, "the worker would have stood still"
    assert freed


async def test_sleep_ends_a_stage_under_way(worker: TinyWorker) -> None:
    await worker.hold_call("open_slot", worker.begin_stage(1, 7))
    await worker.sleep()
    assert (worker.engine.sinks, worker.updates.slot) == ([], None)


async def test_nothing_is_staged_while_the_weights_go(worker: TinyWorker) -> None:
    """Also by who asked when they were still there."""
    gate, sleeping = await worker.hold_call("sleep", worker.sleep())
    staging = asyncio.create_task(worker.begin_stage(1, 7))
    await asyncio.sleep(0)
    gate.open()
    await sleeping
    with refused("asleep"):
        await staging
    assert worker.updates.slot is None


# Who asked for exactly one version.


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("mode", ["keep", "drain"])
async def test_who_may_not_span_versions_ends_before_its_weights_sleep(
    worker: TinyWorker, mode: str, level: int
) -> None:
    """Pinned weights don't survive a sleep: who runs on them would go on with the active ones."""
    exact, free = await worker.runs("exact", exact_version=0), await worker.runs("free")
    await worker.update(1, 7, in_flight="Pin")
    newer = await worker.runs("newer", exact_version=1)
    await worker.sleep(mode=mode, level=level, deadline_seconds=0)
    output = exact.outputs[0]
    assert made_by(output) == [(100, 0, False)]
    if mode == "drain":
        assert output.abort_reason is AbortReason.SLEEP
        return
    assert (output.stop_reason, output.abort_reason) == (StopReason.ABORTED, AbortReason.WEIGHTS)
    await worker.wake()
    assert made_by(await worker.ends(newer)) == [(7, 1, False)]
    assert made_by(free.outputs[0]) == [(100, 0, False), (7, 1, False)]


async def test_who_may_not_span_versions_outlives_a_nap_of_the_kv_cache(worker: TinyWorker) -> None:
    exact = await worker.runs("exact", exact_version=0)
    await worker.update(1, 7, in_flight="Pin")
    await worker.sleep(mode="keep", tags=("kv_cache",))
    await worker.wake()
    output = await worker.ends(exact)
    assert (len(output.token_ids), made_by(output)) == (LONG, [(100, 0, False)])


async def test_who_sleeps_through_a_commit_does_not_span_versions(worker: TinyWorker) -> None:
    exact = await worker.runs("exact", exact_version=0)
    await worker.sleep(mode="keep")
    await worker.wake(tags=("weights",))
    await worker.update(1, 7, in_flight="Pin")
    await worker.wake(tags=("kv_cache",))
    output = await worker.ends(exact)
    assert set(made_by(output)) == {(100, 0, False)}


# Faults.


@pytest.mark.parametrize(
    ("call", "verb", "state"),
    [
        ("pause", "pause", Lifecycle.PAUSING),
        ("sleep", "sleep", Lifecycle.DRAINING),
        ("wake", "wake", Lifecycle.ASLEEP),
        ("resume", "wake", Lifecycle.PAUSED),
    ],
)
async def test_a_transition_that_fails_is_told_and_tried_again(
    worker: TinyWorker, monkeypatch: pytest.MonkeyPatch, call: str, verb: str, state: Lifecycle
) -> None:
    monkeypatch.setattr(governor, "TRANSITION_RETRY_SECONDS", 0.2)
    if verb == "wake":
        await worker.sleep()
    worker.engine.before[call] = raising(EngineError("not now"))
    with refused("engine-refused") as caught:
        await getattr(worker, verb)()
    assert "not now; the worker keeps retrying" in str(caught.value)
    assert (caught.value.problem.status, caught.value.retry_after) == (503, 5)
    assert worker.state is state
    del worker.engine.before[call]
    ends = {"pause": Lifecycle.PAUSED, "sleep": Lifecycle.ASLEEP, "wake": Lifecycle.ACTIVE}
    await worker.reaches(ends[verb])
    assert worker.runtime.last_error == "not now"


@pytest.mark.parametrize("call", ["pause", "sleep"])
async def test_an_engine_that_dies_in_a_transition_fails_the_verb_and_the_hold_stays(
    worker: TinyWorker, call: str
) -> None:
    worker.engine.before[call] = raising(EngineCrashed("it died"))
    with refused("failed"):
        await worker.sleep()
    await until(lambda: worker.runtime.restarts == 1, what="the restart")
    await worker.reaches(Lifecycle.ASLEEP)
    assert worker.engine.resident == GONE
    await worker.wake()


async def test_a_transition_that_hangs_is_given_up(
    worker: TinyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(governor, "ENGINE_PAUSE_SECONDS", 0.05)
    worker.engine.before["pause"] = Gate()
    with refused("failed"):
        await worker.pause()
    assert "pause took more than 0.05 s" in (worker.runtime.last_error or "")
    await worker.reaches(Lifecycle.PAUSED)


async def test_a_caller_waits_no_longer_than_it_may_and_its_hold_remains(
    worker: TinyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_verbs, "TRANSITION_SLACK_SECONDS", 0.05)
    gate = worker.engine.before["pause"] = Gate()
    with refused("deadline-exceeded") as caught:
        await asyncio.wait_for(worker.pause(deadline_seconds=0.05), 5)
    assert "still Pausing after 0.1 s; the hold remains" in str(caught.value)
    gate.open()
    await worker.reaches(Lifecycle.PAUSED)


async def test_a_crash_in_a_drain_fails_the_verb_at_once(worker: TinyWorker) -> None:
    running = await worker.runs("r")
    pausing = asyncio.create_task(worker.pause(deadline_seconds=600))
    await worker.reaches(Lifecycle.PAUSING)
    asked = {call: Gate() for call in ("abort", "pause", "resume")}
    worker.engine.before.update(asked)
    worker.engine.die()
    worker.runtime.report_crash("it died")
    with refused("failed"):
        await asyncio.wait_for(pausing, 5)
    assert not any(gate.reached.is_set() for gate in asked.values()), (
        "a dead engine is asked for nothing"
    )
    assert running.outputs[0].abort_reason is AbortReason.ENGINE


async def test_a_pause_waits_for_a_commit(worker: TinyWorker) -> None:
    await worker.stage(1, 7)
    gate, committing = await worker.hold_call("commit", worker.commit(1))
    pausing = asyncio.create_task(worker.pause())
    await asyncio.sleep(0.05)
    assert worker.state is Lifecycle.ACTIVE
    gate.open()
    await asyncio.gather(committing, pausing)
    assert (worker.state, worker.engine.paused) == (Lifecycle.PAUSED, True)


async def test_a_pause_during_a_resume_is_not_answered_before_the_engine_rests(
    worker: TinyWorker,
) -> None:
    await worker.pause("a")
    gate, resuming = await worker.hold_call("resume", worker.resume("a"))
    pausing = asyncio.create_task(worker.pause("b", mode="abort"))
    await asyncio.sleep(0.02)
    assert not pausing.done()
    gate.open()
    await pausing
    assert (worker.state, worker.engine.paused) == (Lifecycle.PAUSED, True)
    with refused("held"):
        await resuming


# Abort and cache.


async def test_abort_names_whom_it_knew(worker: TinyWorker) -> None:
    one, two = await worker.runs("r1"), await worker.begin("r10", sampling={"n": 2})
    answer = await worker.verbs.abort_requests(
        "me", AbortRequest(request_ids=("r1", "r", "r1", "r"))
    )
    assert (answer.aborted, answer.unknown) == (("r1",), ("r",))
    assert one.outputs[0].abort_reason is AbortReason.CONTROL
    assert not two.done.is_set()
    answer = await worker.verbs.abort_requests("me", AbortRequest(all=True))
    assert (answer.aborted, answer.unknown) == (("r10",), ())
    assert [o.abort_reason for o in two.outputs] == [AbortReason.CONTROL] * 2


@pytest.mark.parametrize(
    ("error", "slug"), [(EngineError("no"), "engine-refused"), (EngineCrashed("no"), "failed")]
)
async def test_the_cache_is_reset_or_the_answer_says_why_not(
    worker: TinyWorker, error: EngineError, slug: str
) -> None:
    await worker.verbs.reset_prefix_cache("me")
    assert worker.engine.resets == 1
    worker.engine.before["reset_cache"] = raising(error)
    with refused(slug) as caught:
        await worker.verbs.reset_prefix_cache("me")
    assert "no" in str(caught.value)
    assert caught.value.retry_after == 5


# The end.


@pytest.mark.parametrize("drains", [True, False], ids=["in time", "too late"])
async def test_a_shutdown_serves_on_then_drains_then_aborts(tmp_path: Path, drains: bool) -> None:
    flags = ("--shutdown-grace", "0.2", "--drain-seconds", "10" if drains else "0.1")
    async with tiny_worker(tmp_path, *flags) as worker:
        running = await worker.runs("r")
        ending = asyncio.create_task(worker.worker.shut_down())
        await until(lambda: worker.worker.readiness_problem() is not None, what="/ready to turn")
        worker.worker.check_serving()
        with refused("shutting-down"):
            await worker.pause()
        await worker.reaches(Lifecycle.DRAINING)
        with refused("shutting-down"):
            worker.worker.check_serving()
        worker.engine.free = drains
        await asyncio.wait_for(ending, 5)
        expected = None if drains else AbortReason.CONTROL
        assert running.outputs[0].abort_reason is expected


@pytest.mark.parametrize("verb", ["pause", "sleep"])
async def test_a_shutdown_in_a_drain_leaves_requests_its_own_time(
    tmp_path: Path, verb: str
) -> None:
    async with tiny_worker(tmp_path, "--shutdown-grace", "0.2", "--drain-seconds", "10") as worker:
        running = await worker.runs("r")
        resting = asyncio.create_task(getattr(worker, verb)(deadline_seconds=30))
        await worker.reaches(Lifecycle.PAUSING if verb == "pause" else Lifecycle.DRAINING)
        ending = asyncio.create_task(worker.worker.shut_down())
        await asyncio.sleep(0.4)
        assert running.outputs[0].stop_reason is None
        worker.engine.free = True
        await asyncio.wait_for(ending, 5)
        assert running.outputs[0].abort_reason is None
        with pytest.raises(ProblemError):
            await resting


async def test_a_shutdown_waits_for_nobody_who_is_frozen(tmp_path: Path) -> None:
    async with tiny_worker(tmp_path, "--shutdown-grace", "0", "--drain-seconds", "60") as worker:
        running = await worker.runs("r")
        await worker.pause(mode="keep")
        await asyncio.wait_for(worker.worker.shut_down(), 5)
        assert running.outputs[0].abort_reason is AbortReason.CONTROL


async def test_a_shutdown_drains_as_long_as_was_last_required(tmp_path: Path) -> None:
    """The operator's spec may change while the process runs."""
    async with tiny_worker(tmp_path, "--shutdown-grace", "0", "--drain-seconds", "60") as worker:
        running = await worker.runs("r")
        worker.worker.updates.raise_fence("operator", RequireRequest(epoch=0, drain_seconds=0.1))
        worker.worker.updates.raise_fence("trainer", RequireRequest(epoch=0))
        assert worker.worker.worker_state().drain_seconds == 0.1
        await asyncio.wait_for(worker.worker.shut_down(), 5)
        assert running.outputs[0].abort_reason is AbortReason.CONTROL
