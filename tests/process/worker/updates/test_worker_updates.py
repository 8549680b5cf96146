"""Staging: one slot, bound to its content and in order; what is given up gives its memory back."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from rollout_common.wire.problems import ProblemError
from rollout_worker.engine import EngineCrashed, EngineError, WeightsRejected
from rollout_worker.lifecycle import supervisor
from rollout_worker.schemas import (
    DiscardRequest,
    Lifecycle,
    RequireRequest,
    StagedWeights,
    StageRequest,
    WeightsId,
)
from tests.support.unit.tiny_engine import Gate, raising, write_weights
from tests.support.unit.tiny_worker import TinyWorker, refused, tiny_worker
from tests.support.waiting import until, until_sync


async def discard(worker: TinyWorker, version: int, epoch: int = 1) -> str:
    request = DiscardRequest(epoch=epoch, version=version)
    return (await worker.updates.discard_staged("me", request)).outcome


async def test_staging_leaves_what_serves_alone_and_tells_its_progress(worker: TinyWorker) -> None:
    gate = worker.engine.before["open_slot"] = Gate()
    begun = await worker.begin_stage(1, 7, labels={"a": "b"})
    assert (begun.phase, begun.root_hash, begun.labels) == ("Staging", None, {"a": "b"})
    gate.open()
    staged = await worker.stage(1, 7)
    assert (staged.phase, staged.error) == ("Staged", None)
    assert staged.bytes_done == staged.bytes_total == 2
    assert worker.engine.active.number == 100
    state = worker.updates.to_view()
    assert (state.active, state.staged) == (worker.updates.active, staged)
    assert (state.previous, state.required, state.fence_epoch, state.commit_seq) == (
        *(None, None),
        *(0, 0),
    )


# Content.


async def test_a_wrong_hash_is_refused_and_its_memory_given_back(worker: TinyWorker) -> None:
    staged = await worker.stage(1, 7, root_hash="xxh3_128:0")
    assert staged.phase == "Failed"
    assert "content-mismatch: (1, 1) should have root_hash xxh3_128:0" in (staged.error or "")
    assert staged.slug == "content-mismatch"
    await until(lambda: worker.engine.sinks == [], what="the memory to come back")
    with refused("not-staged"):
        await worker.commit(1)
    right = (await worker.stage(1, 7)).root_hash
    assert right is not None
    assert await discard(worker, 1) == "discarded"
    assert (await worker.stage(1, 7, root_hash=right)).phase == "Staged"


@pytest.mark.parametrize(
    ("tensors", "said"),
    [({"other": 1}, "'other'"), ({"copy": 9}, "'copy'")],
    ids=["unknown", "not tied"],
)
async def test_what_is_no_version_of_this_model_is_refused(
    worker: TinyWorker, tensors: dict[str, int], said: str
) -> None:
    folder = write_weights(worker.home / "bad", 7, **tensors)
    staged = await worker.stage(1, 7, source={"path": str(folder)})
    assert staged.phase == "Failed"
    assert said in (staged.error or "")
    assert worker.engine.sinks == []
    assert (await worker.update(1, 7)).active.version == 1, "a failed stage may be repeated"


async def test_an_identity_is_bound_to_its_content(worker: TinyWorker) -> None:
    staged = await worker.stage(1, 7)
    copy = {"path": str(write_weights(worker.home / "copy", 7))}
    other = {"path": str(worker.weights(8))}
    assert await worker.begin_stage(1, 7) == staged
    same = await worker.begin_stage(1, 7, source=copy, root_hash=staged.root_hash)
    assert same == staged, "what it is counts, not where"
    for fields in ({"source": other}, {"source": copy}, {"root_hash": "xxh3_128:0"}):
        with refused("content-mismatch"):
            await worker.begin_stage(1, 7, **fields)
    assert worker.updates.slot is not None
    assert worker.updates.slot.is_staged, "a refusal changes nothing"


async def test_once_active_it_stays_bound(worker: TinyWorker) -> None:
    staged = await worker.stage(1, 7, labels={"a": "b"})
    await worker.commit(1)
    again = await worker.begin_stage(1, 7)
    assert (again.phase, again.root_hash, again.labels, again.source) == (
        *("Staged", staged.root_hash),
        *({"a": "b"}, staged.source),
    )
    copy = {"path": str(write_weights(worker.home / "copy", 7))}
    assert (await worker.begin_stage(1, 7, source=copy, root_hash=staged.root_hash)) == again
    with refused("content-mismatch"):
        await worker.begin_stage(1, 8)
    with refused("content-mismatch"):
        await worker.begin_stage(1, 7, root_hash="xxh3_128:0")
    assert worker.updates.slot is None


async def test_a_stage_that_waits_for_the_commit_of_its_identity_finds_it_active(
    worker: TinyWorker,
) -> None:
    staged = await worker.stage(1, 7)
    gate, committing = await worker.hold_call("commit", worker.commit(1))
    repeats = [
        asyncio.create_task(worker.begin_stage(1, number, deadline_seconds=5)) for number in (7, 8)
    ]
    await asyncio.sleep(0.1)
    gate.open()
    await committing
    same, other = await asyncio.gather(*repeats, return_exceptions=True)
    assert isinstance(same, StagedWeights)
    assert (same.phase, same.root_hash) == ("Staged", staged.root_hash)
    assert isinstance(other, ProblemError)
    assert other.slug == "content-mismatch"
    assert worker.updates.slot is None


async def test_a_repeat_may_bring_the_hash_while_it_is_staged(worker: TinyWorker) -> None:
    """Then it is checked against it, as if it had come with the first call."""
    gate = worker.engine.before["open_slot"] = Gate()
    await worker.begin_stage(1, 7)
    repeat = await worker.begin_stage(1, 7, root_hash="xxh3_128:0")
    assert repeat.root_hash == "xxh3_128:0"
    with refused("content-mismatch"):
        await worker.begin_stage(1, 7, root_hash="xxh3_128:1")
    gate.open()
    slot = worker.slot
    await until(lambda: slot.to_view().phase == "Failed", what="the mismatch")
    assert worker.engine.sinks == []


# Order.


async def test_a_higher_version_takes_the_slot_and_a_lower_one_is_refused(
    worker: TinyWorker,
) -> None:
    await worker.stage(5, 7)
    with refused("version-regressed") as caught:
        await worker.begin_stage(4, 8)
    assert caught.value.problem.model_dump()["staged"] == {"epoch": 1, "version": 5}
    with refused("stale-epoch"):
        await worker.begin_stage(9, 8, epoch=0)
    assert (await worker.stage(6, 8)).phase == "Staged"
    assert len(worker.engine.sinks) == 1, "one slot"
    await worker.commit(6)
    with refused("version-regressed") as caught:
        await worker.begin_stage(5, 7)
    assert caught.value.problem.model_dump()["active"] == {"epoch": 1, "version": 6}


async def test_a_failed_stage_gives_way_to_a_lower_version(worker: TinyWorker) -> None:
    await worker.stage(5, 7, root_hash="xxh3_128:0")
    assert (await worker.stage(4, 8)).phase == "Staged"


async def test_a_higher_version_ends_the_reading_of_a_lower_one(worker: TinyWorker) -> None:
    await worker.hold_call("open_slot", worker.begin_stage(1, 7))
    del worker.engine.before["open_slot"]
    assert (await worker.stage(2, 8)).version == 2
    assert len(worker.engine.sinks) == 1
    assert (await worker.commit(2)).active.version == 2
    assert worker.engine.active.number == 8


async def test_a_fenced_epoch_stages_nothing(worker: TinyWorker) -> None:
    worker.updates.raise_fence("me", RequireRequest(epoch=2))
    with refused("stale-epoch") as caught:
        await worker.begin_stage(1, 7)
    body = caught.value.problem.model_dump()
    assert (body["fence_epoch"], body["active"]) == (2, {"epoch": 0, "version": 0})
    worker.worker.check_serving()  # the old weights go on


# Discard, deadlines, faults.


async def test_discard_drops_its_own_identity_only(worker: TinyWorker) -> None:
    await worker.stage(2, 7)
    assert await discard(worker, 1) == "unchanged"
    assert await discard(worker, 2, epoch=2) == "unchanged"
    assert len(worker.engine.sinks) == 1
    assert await discard(worker, 2) == "discarded"
    assert await discard(worker, 2) == "unchanged"
    assert (worker.engine.sinks, worker.updates.slot) == ([], None)
    assert (await worker.stage(1, 8)).phase == "Staged", "lower than what was discarded"


async def test_discard_ends_a_reading(worker: TinyWorker) -> None:
    await worker.hold_call("open_slot", worker.begin_stage(1, 7))
    assert await asyncio.wait_for(discard(worker, 1), 5) == "discarded"
    assert (worker.engine.sinks, worker.updates.slot) == ([], None)


async def test_a_stage_has_a_deadline(worker: TinyWorker) -> None:
    worker.engine.before["open_slot"] = Gate()
    staged = await worker.stage(1, 7, deadline_seconds=0.05)
    assert "not staged within 0.05 s: raise deadline_seconds" in (staged.error or "")
    assert worker.engine.sinks == []
    assert worker.state is Lifecycle.ACTIVE, "the engine is not to blame"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (EngineError("no room: use a smaller model"), "no room"),
        (WeightsRejected("not these"), "not these"),
        (RuntimeError("a defect"), "internal error: a defect"),
    ],
    ids=["no room", "rejected", "a defect"],
)
async def test_a_slot_that_the_engine_does_not_give_harms_nobody(
    worker: TinyWorker, error: Exception, said: str
) -> None:
    worker.engine.before["open_slot"] = raising(error)
    assert said in ((await worker.stage(1, 7)).error or "")
    assert (worker.state, worker.runtime.restarts) == (Lifecycle.ACTIVE, 0)
    del worker.engine.before["open_slot"]
    assert (await worker.update(1, 7)).commit_seq == 1


async def test_an_engine_that_dies_while_it_stages_fails_the_slot(worker: TinyWorker) -> None:
    worker.engine.before["open_slot"] = raising(EngineCrashed("it died"))
    await worker.stage(1, 7)
    await worker.is_replaced()
    slot = worker.slot
    assert slot.to_view().phase == "Failed"
    assert (await worker.update(1, 7)).commit_seq == 1


async def test_a_process_that_does_not_let_go_of_staged_bytes_holds_up_no_other_engine(
    worker: TinyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a stopped rank: it never answers, and nobody waits for it once the engine is stopped."""
    monkeypatch.setattr(supervisor, "STAGED_RELEASE_SECONDS", 0.1)
    await worker.stage(1, 7)
    first = worker.engine
    (sink,) = first.sinks
    close = sink.close

    def blocked() -> None:
        until_sync(lambda: first.stopped, what="the engine's stop")
        close()

    vars(sink)["close"] = blocked
    worker.runtime.report_crash("gone")
    await worker.is_replaced()
    assert first.sinks == []


# States.


async def test_nothing_is_staged_while_the_weights_sleep_which_is_told_before_anything_else(
    worker: TinyWorker,
) -> None:
    """Whoever brings the active weights again must not hear that they are there."""
    await worker.update(1, 7)
    await worker.sleep()
    for body in ({"version": 1}, {"version": 0}, {"version": 2, "source": {"path": "/nowhere"}}):
        request = {"epoch": 1, "source": {"path": str(worker.home / "w7")}, **body}
        with refused("asleep") as caught:
            await worker.updates.stage_weights("me", StageRequest.model_validate(request))
        assert caught.value.problem.status == 409
        assert caught.value.problem.model_dump()["active"] == {"epoch": 1, "version": 1}
    await worker.wake()
    await worker.update(2, 8)


async def test_the_kv_cache_may_sleep_while_weights_are_staged(worker: TinyWorker) -> None:
    await worker.stage(1, 7)
    await worker.sleep(tags=("kv_cache",))
    await worker.commit(1)
    await worker.update(2, 8)
    assert worker.state is Lifecycle.ASLEEP
    await worker.wake()
    assert worker.engine.active.number == 8


async def test_nothing_is_staged_without_an_engine(worker: TinyWorker) -> None:
    worker.before_start["start"] = gate = Gate()
    worker.runtime.report_crash("gone")
    await gate.reached.wait()
    with refused("loading"):
        await worker.begin_stage(1, 7)
    gate.open()
    await worker.reaches(Lifecycle.ACTIVE)


# The checkpoint as a source, and going back.


async def test_going_back_to_the_checkpoint(worker: TinyWorker) -> None:
    root = worker.updates.active
    await worker.update(1, 7)
    request = StageRequest.model_validate({"epoch": 2, "version": 0, "source": {"checkpoint": {}}})
    await worker.updates.stage_weights("me", request)
    slot = worker.slot
    await until(lambda: slot.is_staged, what="the checkpoint")
    done = await worker.commit(0, epoch=2)
    assert (done.active.identity, worker.engine.active.number) == (
        WeightsId(epoch=2, version=0),
        100,
    )
    assert root is not None
    assert done.active.root_hash == root.root_hash


# Where bytes may lie.


async def test_paths_and_files_are_confined(tmp_path: Path) -> None:
    roots, outside = tmp_path / "roots", write_weights(tmp_path / "outside", 7)
    (roots / "linked").mkdir(parents=True)
    (roots / "linked" / "model.safetensors").symlink_to(outside / "model.safetensors")
    write_weights(roots / "inside", 7)
    async with tiny_worker(tmp_path, "--weights-roots", str(roots)) as worker:
        with refused("invalid-request"):
            await worker.begin_stage(1, 7, source={"path": str(outside)})
        staged = await worker.stage(1, 7, source={"path": "linked"})
        assert staged.phase == "Failed"
        assert "leads out" in (staged.error or "")
        assert (await worker.stage(1, 7, source={"path": "inside"})).phase == "Staged"


# The floor.


async def test_a_floor_fences_until_it_is_met(worker: TinyWorker) -> None:
    worker.updates.raise_fence("me", RequireRequest(epoch=1, min_version=2))
    with refused("fenced") as caught:
        worker.worker.check_serving()
    body = caught.value.problem.model_dump()
    assert body["required"] == {"epoch": 1, "version": 2}
    assert not worker.worker.worker_state().serving
    await worker.update(1, 7)
    with refused("fenced"):
        worker.worker.check_serving()
    await worker.update(2, 8)
    worker.worker.check_serving()
    assert worker.worker.worker_state().serving


# What the engine is asked for.


async def test_a_refill_lies_where_the_engine_asks(worker: TinyWorker) -> None:
    for on_disk in (False, True):
        sink = await worker.updates.refill_active(on_disk=on_disk)
        assert worker.engine.sinks[-1].on_disk is on_disk
        sink.close()
    await worker.stage(1, 7)
    assert not worker.engine.sinks[-1].on_disk


async def test_files_are_not_read_into_memory_of_a_device(worker: TinyWorker) -> None:
    worker.engine.memory = "device"
    staged = await worker.stage(1, 7)
    assert "device memory" in (staged.error or "")
    assert worker.engine.sinks == []


async def test_an_engine_that_goes_while_a_stage_waits_for_the_slot(worker: TinyWorker) -> None:
    gate = worker.before_start["start"] = Gate()
    async with worker.updates.slot_lock:
        waiting = asyncio.create_task(worker.begin_stage(1, 7))
        await asyncio.sleep(0)
        worker.runtime.report_crash("gone")
        await gate.reached.wait()
    with refused("loading"):
        await waiting
    assert worker.updates.slot is None
    gate.open()
    await worker.reaches(Lifecycle.ACTIVE)


async def test_both_phases_are_timed_and_told(
    worker: TinyWorker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    await worker.stage(1, 7, root_hash="xxh3_128:0")
    await worker.update(1, 7)
    page = worker.worker.render_metrics().decode()
    for phase, count in (("stage", 2), ("commit", 1)):
        assert f'weights_update_seconds_count{{phase="{phase}"}} {count}.0' in page
    assert re.search(r"^rollout_worker_weights_version\S* 1\.0$", page, re.MULTILINE)
    levels = [r.levelname for r in caplog.records if "(1, 1)" in r.getMessage()]
    assert levels == ["INFO", "WARNING", "INFO", "INFO", "INFO", "INFO"]


async def test_only_a_requirement_that_names_it_changes_the_drain(worker: TinyWorker) -> None:
    before = worker.runtime.drain_seconds
    worker.updates.raise_fence("me", RequireRequest(epoch=1))
    assert worker.runtime.drain_seconds == before
    worker.updates.raise_fence("me", RequireRequest(epoch=1, drain_seconds=before + 1))
    assert worker.runtime.drain_seconds == before + 1


async def test_a_floor_wakes_who_waits(worker: TinyWorker) -> None:
    waiting = asyncio.create_task(worker.runtime.changed.wait_for_change(5))
    await asyncio.sleep(0)
    state = worker.updates.raise_fence("me", RequireRequest(epoch=0, min_version=0))
    assert state.required == WeightsId(epoch=0, version=0)
    assert await waiting


async def test_a_stage_waits_for_the_slot_no_longer_than_it_may(worker: TinyWorker) -> None:
    async with worker.updates.slot_lock:
        with refused("deadline-exceeded") as caught:
            await worker.begin_stage(1, 7, deadline_seconds=0.05)
    assert caught.value.retry_after == 1
