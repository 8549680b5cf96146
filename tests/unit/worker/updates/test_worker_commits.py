"""The commit: what becomes of who runs and who waits, and that nothing flips that may not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollout_worker.engine import EngineCrashed, EngineError, EngineRequest, WeightsRejected
from rollout_worker.schemas import (
    AbortReason,
    CommitResponse,
    Lifecycle,
    RequireRequest,
    SamplingParams,
    StopReason,
    WeightsId,
)
from rollout_worker.updates import weight_commits
from tests.support.unit.tiny_engine import ABLE, Gate, raising
from tests.support.unit.tiny_worker import LONG, TinyWorker, made_by, refused, tiny_worker
from tests.support.waiting import until

POLICIES = ("Drain", "Abort", "Keep", "Recompute", "Pin")
OLD, NEW = (100, 0, False), (7, 1, False)


@pytest.fixture
async def worker(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[TinyWorker]:
    async with tiny_worker(tmp_path, **getattr(request, "param", {})) as worker:
        yield worker


one_row = pytest.mark.parametrize("worker", [{"rows": 1}], indirect=True)
"""The engine runs one output at a time."""


def counts(done: CommitResponse) -> tuple[int, int, int]:
    """Who ended by itself, who was ended, who goes on."""
    return done.finished, done.aborted, done.kept


# Idle.


async def test_a_commit_makes_the_staged_weights_serve(worker: TinyWorker) -> None:
    staged = await worker.stage(1, 7, labels={"step": "3"})
    before = worker.updates.active
    done = await worker.commit(1, root_hash=staged.root_hash)
    assert (done.active.epoch, done.active.version) == (1, 1)
    assert (done.active.root_hash, done.active.labels) == (staged.root_hash, {"step": "3"})
    assert (done.previous, done.commit_seq, counts(done)) == (before, 1, (0, 0, 0))
    output = await worker.ends(await worker.begin("r", 3))
    assert made_by(output) == [NEW]
    assert worker.updates.slot is None
    assert worker.engine.sinks == [], "its memory is the engine's"
    assert worker.runtime.holds.committing is None


async def test_a_repeated_commit_answers_the_same_and_flips_once(worker: TinyWorker) -> None:
    await worker.stage(1, 7)
    first, *others = await asyncio.gather(*(worker.commit(1) for _ in range(3)))
    assert others == [first, first]
    assert await worker.commit(1, in_flight="Abort") == first
    with refused("content-mismatch"):
        await worker.commit(1, root_hash="other")
    assert (first.commit_seq, worker.updates.commit_seq) == (1, 1)


async def test_the_answer_of_a_repeat_is_that_of_its_own_commit(worker: TinyWorker) -> None:
    """After a restart without the weights of the last commit its answer no longer fits."""
    await worker.update(1, 7)
    (worker.home / "w7" / "model.safetensors").unlink()
    worker.runtime.report_crash("gone")
    await worker.is_replaced()
    assert worker.active == WeightsId(epoch=0, version=0)
    done = await worker.commit(0, epoch=0)
    assert (done.active.version, done.previous, done.pause_seconds) == (0, None, 0)
    assert counts(done) == (0, 0, 0)


@pytest.mark.parametrize(
    ("version", "fields", "slug"),
    [
        (2, {}, "not-staged"),
        (1, {"root_hash": "xxh3_128:0"}, "content-mismatch"),
        (1, {"epoch": 0}, "not-staged"),
    ],
)
async def test_what_is_not_staged_is_refused(
    worker: TinyWorker, version: int, fields: dict[str, Any], slug: str
) -> None:
    await worker.stage(1, 7)
    with refused(slug) as caught:
        await worker.commit(version, **fields)
    assert caught.value.problem.model_dump()["active"] == {"epoch": 0, "version": 0}
    assert caught.value.problem.status == 409
    assert (worker.engine.active.number, worker.updates.commit_seq) == (100, 0)
    await worker.commit(1)


async def test_a_version_below_the_active_one_is_refused(worker: TinyWorker) -> None:
    await worker.update(3, 7)
    with refused("version-regressed"):
        await worker.commit(2)
    with refused("stale-epoch"):
        await worker.commit(9, epoch=0)


async def test_a_fenced_epoch_is_refused_though_it_was_staged(worker: TinyWorker) -> None:
    await worker.stage(1, 7)
    worker.updates.raise_fence("me", RequireRequest(epoch=2))
    with refused("stale-epoch"):
        await worker.commit(1)
    assert worker.engine.active.number == 100


async def test_a_worker_that_shuts_down_commits_nothing(worker: TinyWorker) -> None:
    await worker.stage(1, 7)
    worker.runtime.shutting_down = True
    with refused("shutting-down"):
        await worker.commit(1)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"in_flight": "Keep"}, "in_flight"),
        ({"in_flight": "Pin"}, "in_flight"),
        ({"in_flight": "Drain", "on_deadline": "Keep"}, "on_deadline"),
        ({"in_flight": "Pin", "on_deadline": "Keep"}, "in_flight"),
    ],
)
async def test_a_policy_that_the_engine_lacks_is_refused_at_the_deadline_too(
    worker: TinyWorker, fields: dict[str, Any], named: str
) -> None:
    able = {"in_flight": ("Drain", "Abort", "Recompute")}
    worker.engine.capabilities = ABLE.model_copy(update=able)
    await worker.stage(1, 7)
    with refused("unsupported") as caught:
        await worker.commit(1, **fields)
    body = caught.value.problem.model_dump()
    assert [each["field"] for each in body["errors"]] == [named]
    assert ("'Abort'" if named == "on_deadline" else "Drain, Abort, Recompute") in body["detail"]
    with refused("not-staged"):  # at the deadline they end, which every engine can
        await worker.commit(2, in_flight="Drain")
    # Nothing waits for a deadline here, so nothing is asked of the engine.
    await worker.commit(1, in_flight="Recompute", on_deadline="Keep")


# Below running requests.


@pytest.mark.parametrize(
    ("fields", "stretches"),
    [
        ({"in_flight": "Keep"}, [OLD, (7, 1, True)]),
        ({"in_flight": "Recompute"}, [OLD, NEW]),
        ({"in_flight": "Pin"}, [OLD]),
        ({"in_flight": "Drain", "on_deadline": "Keep", "deadline_seconds": 0}, [OLD, (7, 1, True)]),
    ],
    ids=["keep", "recompute", "pin", "drain, then keep"],
)
async def test_who_runs_goes_on(
    worker: TinyWorker, fields: dict[str, Any], stretches: list[tuple[int, int, bool]]
) -> None:
    await worker.stage(1, 7)
    running = await worker.runs("r")
    done = await worker.commit(1, **fields)
    assert counts(done) == (0, 0, 1)
    output = await worker.ends(running)
    assert (output.stop_reason, len(output.token_ids)) == (StopReason.LENGTH, LONG)
    assert made_by(output) == stretches


@pytest.mark.parametrize("policy", POLICIES)
@one_row
async def test_who_waits_runs_on_the_new_weights(worker: TinyWorker, policy: str) -> None:
    await worker.stage(1, 7)
    running = await worker.runs("r")
    waiting = await worker.begin("w", 4)
    assert worker.flights.waiting_count == 1
    worker.engine.free = policy == "Drain"
    done = await worker.commit(1, in_flight=policy, deadline_seconds=10)
    assert sum(counts(done)) == 1, "who waited is not counted"
    assert made_by(await worker.ends(waiting)) == [NEW]
    assert made_by(await worker.ends(running))[0] == OLD


async def test_a_drain_waits_for_who_runs_and_starts_nobody(tmp_path: Path) -> None:
    async with tiny_worker(tmp_path, rows=2) as worker:
        await worker.stage(1, 7)
        short, long = await worker.runs("s", tokens=5), await worker.runs("l", 1)
        waiting = await worker.begin("w", 4)
        committing = asyncio.create_task(worker.commit(1, deadline_seconds=10))
        await until(lambda: bool(worker.runtime.holds.committing), what="the commit to begin")
        assert [hold.holder for hold in worker.worker.worker_state().holds] == ["commit"]
        assert worker.state is Lifecycle.ACTIVE
        worker.engine.step(5)
        assert made_by(await worker.ends(short)) == [OLD]
        assert not committing.done() or worker.engine.stats().running == 0
        done = await committing
        assert counts(done) == (2, 0, 0)
        assert made_by(await worker.ends(long)) == [OLD]
        assert made_by(await worker.ends(waiting)) == [NEW]


@pytest.mark.parametrize(
    "fields",
    [{"in_flight": "Abort"}, {"in_flight": "Drain", "deadline_seconds": 0.1}],
    ids=["abort", "drain past its deadline"],
)
async def test_who_runs_is_aborted(worker: TinyWorker, fields: dict[str, Any]) -> None:
    await worker.stage(1, 7)
    running = await worker.runs("r")
    began = time.monotonic()
    done = await worker.commit(1, **fields)
    assert time.monotonic() - began < 3
    assert counts(done) == (0, 1, 0)
    output = running.outputs[0]
    assert (output.stop_reason, output.abort_reason) == (StopReason.ABORTED, AbortReason.WEIGHTS)
    assert made_by(output) == [OLD]


@one_row
async def test_who_starts_before_the_queue_is_held_is_ended_too(worker: TinyWorker) -> None:
    await worker.stage(1, 7)
    first = await worker.runs("first", tokens=4)
    second = await worker.begin("second")
    gate, committing = await worker.hold_call("hold_admission", worker.commit(1, in_flight="Abort"))
    worker.engine.step(3)
    gate.open()
    done = await committing
    assert counts(done) == (1, 1, 0)
    assert first.outputs[0].stop_reason is StopReason.LENGTH
    assert second.outputs[0].abort_reason is AbortReason.WEIGHTS


@pytest.mark.parametrize("policy", ["Keep", "Recompute", "Pin"])
async def test_an_exact_version_never_spans(worker: TinyWorker, policy: str) -> None:
    await worker.stage(1, 7)
    exact = await worker.runs("exact", exact_version=0)
    free = await worker.runs("free")
    done = await worker.commit(1, in_flight=policy)
    if policy == "Pin":
        assert counts(done) == (0, 0, 2)
        assert made_by(await worker.ends(exact)) == [OLD]
        return
    assert counts(done) == (0, 1, 1)
    assert exact.outputs[0].abort_reason is AbortReason.WEIGHTS
    assert made_by(exact.outputs[0]) == [OLD]
    assert len(made_by(await worker.ends(free))) == 2


@one_row
async def test_an_exact_version_that_waits_is_ended_too(worker: TinyWorker) -> None:
    await worker.stage(1, 7)
    await worker.runs("r")
    exact = await worker.begin("exact", exact_version=0)
    done = await worker.commit(1, in_flight="Recompute")
    assert exact.outputs[0].abort_reason is AbortReason.WEIGHTS
    assert exact.outputs[0].token_ids == []
    assert counts(done) == (0, 1, 1)


async def test_an_exact_version_of_the_new_weights_goes_on(worker: TinyWorker) -> None:
    """A commit that meets a request for the very weights that it brings again."""
    await worker.update(1, 7)
    exact = await worker.runs("exact", exact_version=1)
    await worker.commit(1, in_flight="Abort")
    assert made_by(await worker.ends(exact)) == [NEW]


# Pins.


async def test_who_is_pinned_already_is_waited_for(worker: TinyWorker) -> None:
    pinned = await worker.runs("p", tokens=6)
    await worker.update(1, 7, in_flight="Pin")
    newer = await worker.runs("n", 2)
    await worker.stage(2, 8)
    committing = asyncio.create_task(worker.commit(2, in_flight="Pin", deadline_seconds=10))
    await asyncio.sleep(0.1)
    assert not committing.done()
    assert not worker.engine.paused, "everything goes on meanwhile"
    worker.engine.step(6)
    done = await committing
    assert counts(done) == (0, 0, 1)
    assert made_by(pinned.outputs[0]) == [OLD]
    assert made_by(await worker.ends(newer)) == [NEW]


@pytest.mark.parametrize("then", ["Abort", "Keep"])
async def test_who_is_pinned_past_the_deadline(worker: TinyWorker, then: str) -> None:
    pinned = await worker.runs("p")
    await worker.update(1, 7, in_flight="Pin")
    newer = await worker.runs("n", 2)
    await worker.stage(2, 8)
    fields = {"in_flight": "Pin", "deadline_seconds": 0.1, "on_deadline": then}
    done = await worker.commit(2, **fields)
    output = await worker.ends(pinned)
    if then == "Abort":
        assert (output.abort_reason, made_by(output)) == (AbortReason.WEIGHTS, [OLD])
        assert counts(done) == (0, 0, 1), "it ended before the commit began"
    else:
        assert made_by(output) == [OLD, (8, 2, True)]
        assert counts(done) == (0, 0, 2)
    assert made_by(await worker.ends(newer)) == [NEW]


# Others' holds.


@pytest.mark.parametrize(
    ("policy", "then"), [*((policy, "Abort") for policy in POLICIES), ("Drain", "Keep")]
)
async def test_a_commit_below_anothers_pause_leaves_it_paused(
    worker: TinyWorker, policy: str, then: str
) -> None:
    """What is frozen can't end by itself, so nothing waits; nothing may step afterwards."""
    await worker.stage(1, 7)
    running = await worker.runs("r")
    await worker.pause("other", mode="keep")
    began = time.monotonic()
    await worker.commit(1, in_flight=policy, on_deadline=then, deadline_seconds=30)
    assert time.monotonic() - began < 5
    assert (worker.state, worker.engine.paused) == (Lifecycle.PAUSED, True)
    made = len(running.outputs[0].token_ids)
    worker.engine.step(3)
    await asyncio.sleep(0.02)
    assert len(running.outputs[0].token_ids) == made
    await worker.resume("other")
    output = await worker.ends(running)
    if policy in ("Drain", "Abort") and then == "Abort":
        assert output.abort_reason is AbortReason.WEIGHTS
    else:
        assert made_by(output)[0] == OLD
        assert len(output.token_ids) == LONG


async def test_a_commit_waits_for_a_verb_under_way_and_gives_up_in_time(
    worker: TinyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_commits, "LOCK_SLACK_SECONDS", 0.05)
    await worker.stage(1, 7)
    async with worker.runtime.exclusive:
        with refused("deadline-exceeded"):
            await worker.commit(1, deadline_seconds=0.05)
    await worker.commit(1)


# Races for the slot.


async def test_the_order_is_checked_again_after_the_wait_for_the_slot(worker: TinyWorker) -> None:
    """Two commits and two stages of different versions at once: the higher one stays."""
    await worker.stage(2, 8)
    gate, committing = await worker.hold_call("commit", worker.commit(2))
    late = asyncio.create_task(worker.begin_stage(1, 7))
    lower = asyncio.create_task(worker.commit(1))
    await asyncio.sleep(0.02)
    assert not late.done(), "the slot is being committed"
    gate.open()
    await committing
    with refused("version-regressed"):
        await late
    with refused("version-regressed"):
        await lower
    assert (worker.engine.active.number, worker.updates.slot) == (8, None)


async def test_a_commit_outlives_its_caller(worker: TinyWorker) -> None:
    await worker.stage(1, 7)
    gate, caller = await worker.hold_call("commit", worker.commit(1))
    caller.cancel()
    await asyncio.wait({caller})
    gate.open()
    await until(lambda: worker.updates.commit_seq == 1, what="the commit")
    assert not worker.engine.paused


# Faults.


async def test_a_rejected_commit_leaves_the_old_weights_serving(worker: TinyWorker) -> None:
    await worker.stage(1, 7)
    running = await worker.runs("r")
    worker.engine.before["commit"] = raising(WeightsRejected("not these"))
    with refused("weights-rejected"):
        await worker.commit(1, in_flight="Keep")
    slot = worker.slot
    assert (slot.to_view().phase, slot.to_view().error) == ("Failed", "not these")
    assert (worker.active, worker.engine.active.number) == (WeightsId(epoch=0, version=0), 100)
    assert worker.runtime.holds.committing is None
    assert made_by(await worker.ends(running)) == [OLD], "it steps again"
    with refused("not-staged"):
        await worker.commit(1)
    del worker.engine.before["commit"]
    assert (await worker.update(1, 7)).commit_seq == 1


@pytest.mark.parametrize(
    "error",
    [EngineCrashed("it died"), RuntimeError("a defect")],
    ids=["dead", "a defect of the adapter"],
)
@pytest.mark.parametrize("call", ["pause", "commit", "resume", "hold_admission", "abort"])
async def test_an_engine_that_dies_in_a_commit_is_replaced(
    worker: TinyWorker, call: str, error: Exception
) -> None:
    await worker.stage(1, 7)
    running = await worker.runs("r")
    worker.engine.before[call] = raising(error)
    if call == "abort":  # ends the requests without the engine, then goes on to find it dead
        worker.engine.before["pause"] = raising(error)
    with refused("failed") as caught:
        await worker.commit(1, in_flight="Abort")
    assert str(error) in str(caught.value)
    assert caught.value.retry_after == 5
    await asyncio.wait_for(running.done.wait(), 10)
    assert running.outputs[0].stop_reason is StopReason.ABORTED
    await worker.is_replaced()
    flipped = call == "resume"
    assert (worker.engine.active.number, worker.updates.commit_seq) == (
        (7, 1) if flipped else (100, 0)
    )
    assert worker.runtime.holds.committing is None
    assert str(error) in (worker.runtime.last_error or "")
    if not flipped:
        assert (await worker.update(1, 7)).commit_seq == 1


@pytest.mark.parametrize("policy", POLICIES)
async def test_an_engine_that_does_not_resume_after_a_commit_is_replaced(
    worker: TinyWorker, policy: str
) -> None:
    """Else it would stand still, with a worker around it that says that it serves."""
    await worker.stage(1, 7)
    worker.engine.before["resume"] = raising(EngineError("not now"))
    with refused("failed") as caught:
        await worker.commit(1, in_flight=policy)
    assert "resume failed: not now" in str(caught.value)
    assert worker.worker.worker_state().holds == ()
    await worker.is_replaced()
    assert worker.worker.worker_state().holds == ()
    assert made_by(await worker.ends(await worker.begin("r", 3))) == [NEW]
    assert (await worker.commit(1)).commit_seq == 1, "a repeat: it was committed"


async def test_an_engine_that_hangs_in_a_commit_is_given_up(
    worker: TinyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_commits, "ENGINE_COMMIT_SECONDS", 0.05)
    await worker.stage(1, 7)
    worker.engine.before["commit"] = Gate()
    with refused("failed") as caught:
        await worker.commit(1)
    assert "commit took more than 0.05 s" in str(caught.value)
    await until(lambda: worker.runtime.restarts == 1, what="the restart")


async def test_an_engine_that_dies_in_a_drain_fails_the_commit_at_once(worker: TinyWorker) -> None:
    await worker.stage(1, 7)
    running = await worker.runs("r")
    committing = asyncio.create_task(worker.commit(1, deadline_seconds=600))
    await until(lambda: bool(worker.runtime.holds.committing), what="the commit to begin")
    worker.engine.die()
    with refused("failed"):
        await asyncio.wait_for(committing, 10)
    assert running.outputs[0].abort_reason is AbortReason.ENGINE
    await worker.is_replaced()
    assert worker.engine.active.number == 100


async def test_an_engine_that_dies_while_the_pinned_end_fails_the_commit(
    worker: TinyWorker,
) -> None:
    await worker.runs("p")
    await worker.update(1, 7, in_flight="Pin")
    await worker.stage(2, 8)
    committing = asyncio.create_task(worker.commit(2, in_flight="Pin", deadline_seconds=600))
    await asyncio.sleep(0.1)
    worker.engine.die()
    with refused("failed"):
        await asyncio.wait_for(committing, 10)
    await worker.is_replaced()
    assert worker.engine.active.number == 7, "the last active weights are back"


async def test_a_slow_commit_counts_as_its_pause(worker: TinyWorker) -> None:
    await worker.stage(1, 7)
    gate, committing = await worker.hold_call("commit", worker.commit(1))
    await asyncio.sleep(0.1)
    gate.open()
    done = await committing
    assert 0.1 <= done.pause_seconds < 5
    assert (await worker.commit(1)).pause_seconds == done.pause_seconds


async def test_engine_errors_that_reject_nothing_are_no_lasting_harm(worker: TinyWorker) -> None:
    """An engine that can't pause now says so; it goes on with the old weights."""
    await worker.stage(1, 7)
    worker.engine.before["pause"] = raising(EngineError("not now"))
    with refused("engine-refused") as caught:
        await worker.commit(1)
    assert "the old weights serve on: not now" in str(caught.value)
    assert (caught.value.problem.status, caught.value.retry_after) == (503, 5)
    assert not worker.engine.paused
    assert worker.runtime.holds.committing is None
    del worker.engine.before["pause"]
    await worker.commit(1)


async def test_an_engine_that_goes_while_a_commit_waits_its_turn(worker: TinyWorker) -> None:
    """Even one of weights that are active already: nobody could say so truly now."""
    await worker.update(1, 7)
    async with worker.runtime.exclusive:
        worker.runtime.report_crash("gone")
        await asyncio.sleep(0.05)  # the supervisor waits in front of us
        waiting = asyncio.create_task(worker.commit(1))
        await asyncio.sleep(0)
    with refused("failed"):
        await waiting
    await worker.reaches(Lifecycle.ACTIVE)


async def test_requests_of_the_engine_that_the_worker_has_given_up_are_nobodys(
    worker: TinyWorker,
) -> None:
    await worker.stage(1, 7)
    sampling = SamplingParams(max_tokens=LONG)
    stray = worker.engine.generate(EngineRequest("stray", (1,), sampling, None))
    asyncio.get_running_loop().call_later(0.05, worker.engine.step)
    await anext(stray)
    assert counts(await worker.commit(1, in_flight="Recompute")) == (0, 0, 0)
    await stray.aclose()


async def test_a_drain_looks_at_the_engine_again_and_again(worker: TinyWorker) -> None:
    """What it still runs may be nobody's here, so that nobody tells of its end."""
    await worker.stage(1, 7)
    sampling = SamplingParams(max_tokens=2)
    stray = worker.engine.generate(EngineRequest("stray", (1,), sampling, None))
    asyncio.get_running_loop().call_later(0.05, worker.engine.step)
    await anext(stray)
    committing = asyncio.create_task(worker.commit(1, deadline_seconds=60))
    await asyncio.sleep(0.02)
    worker.engine.step()
    await asyncio.wait_for(committing, 5)


@one_row
async def test_an_output_that_had_ended_before_is_not_counted(worker: TinyWorker) -> None:
    await worker.stage(1, 7)
    exact = await worker.begin("exact", 4, exact_version=0, sampling={"n": 2})
    worker.engine.step(5)
    await until(lambda: exact.outputs[0].stop_reason is not None, what="the first output")
    done = await worker.commit(1, in_flight="Recompute")
    assert counts(done) == (0, 1, 0)
    assert exact.outputs[0].stop_reason is StopReason.LENGTH
    assert exact.outputs[1].abort_reason is AbortReason.WEIGHTS


async def test_who_waits_for_a_change_hears_of_the_commit_and_of_its_end(
    worker: TinyWorker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    await worker.stage(1, 7)
    hold = worker.engine.before["hold_admission"] = Gate()
    resume = worker.engine.before["resume"] = Gate()
    begins = asyncio.create_task(worker.runtime.changed.wait_for_change(5))
    await asyncio.sleep(0)
    committing = asyncio.create_task(worker.commit(1))
    await hold.reached.wait()
    assert await begins
    hold.open()
    await resume.reached.wait()
    ends = asyncio.create_task(worker.runtime.changed.wait_for_change(5))
    await asyncio.sleep(0)
    resume.open()
    await committing
    assert await ends
    assert b"rollout_worker_engine_pause_seconds_count 1.0" in worker.worker.render_metrics()
    assert any("(1, 1), " in r.getMessage() and "(0, 0)" in r.getMessage() for r in caplog.records)
