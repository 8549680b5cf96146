"""Weights that wake without values: nobody gets a token of them, and one commit opens the worker."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from rollout_worker.engine import WeightsRejected
from rollout_worker.lifecycle import governor
from rollout_worker.schemas import CHECKPOINT, Lifecycle
from tests.support.unit.tiny_engine import ABLE
from tests.support.unit.tiny_worker import TinyWorker, made_by, refused
from tests.support.waiting import until

SOON: dict[str, Any] = {"deadline_seconds": 0.01}


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(governor, "TRANSITION_RETRY_SECONDS", 0.1)


async def asleep(worker: TinyWorker, level: int = 2) -> None:
    """Let it serve (1, 1) and sleep; the source of what it served is gone."""
    await worker.update(1, 1)
    await worker.sleep(level=level, **SOON)
    shutil.rmtree(worker.weights(1))


async def serves(worker: TinyWorker, version: int) -> None:
    await worker.reaches(Lifecycle.ACTIVE)
    output = await worker.ends(await worker.begin(f"r{version}", 3))
    worker.engine.free = False
    assert made_by(output) == [(version, version, False)]


def closed(worker: TinyWorker) -> None:
    """It has memory for weights, and says that it has none."""
    state = worker.worker.worker_state()
    assert (state.weights.active, state.resident.weights, state.serving) == (None, True, False)
    with refused("asleep"):
        worker.worker.check_serving()
    assert worker.worker.readiness_problem() is not None


@pytest.mark.parametrize("level", [1, 2])
async def test_a_commit_gives_them_values_and_the_old_source_is_not_read(
    worker: TinyWorker, level: int
) -> None:
    await asleep(worker, level)
    await worker.wake(tags=["weights"], load=False)
    assert worker.state is Lifecycle.ASLEEP
    closed(worker)
    await worker.update(2, 2)
    assert worker.active is not None
    assert worker.active.version == 2
    assert worker.state is Lifecycle.ASLEEP, "the KV cache sleeps on"
    await worker.wake(tags=["kv_cache"])
    await serves(worker, 2)
    assert worker.engine.refills == 0


async def test_all_memory_may_wake_before_the_commit_that_opens_the_worker(
    worker: TinyWorker,
) -> None:
    await asleep(worker)
    await worker.wake(load=False)
    assert all(worker.engine.resident.values())
    closed(worker)
    assert (await worker.update(2, 2)).active.version == 2
    await serves(worker, 2)
    assert not worker.worker.worker_state().holds


async def test_who_wants_them_loaded_after_all_gets_the_active_ones(worker: TinyWorker) -> None:
    await worker.update(1, 1)
    await worker.sleep(level=2, **SOON)
    await worker.wake(tags=["weights"], load=False)
    closed(worker)
    await worker.wake(tags=["weights"])
    active = worker.worker.worker_state().weights.active
    assert active is not None
    assert active.version == 1
    await worker.wake()
    await serves(worker, 1)


async def test_nothing_serves_before_a_commit_or_the_active_ones(worker: TinyWorker) -> None:
    await asleep(worker)
    await worker.wake(tags=["weights"], load=False)
    with refused("weights-rejected"):
        await worker.wake(tags=["kv_cache"])
    closed(worker)
    await worker.update(2, 2)
    await serves(worker, 2)


async def test_what_is_staged_meanwhile_outlives_a_wake_that_can_t_load(worker: TinyWorker) -> None:
    await asleep(worker)
    await worker.wake(tags=["weights"], load=False)
    await worker.stage(2, 2)
    with refused("weights-rejected"):
        await worker.wake()
    closed(worker)
    await worker.commit(2)
    await serves(worker, 2)


async def test_a_wake_that_loads_leaves_what_is_staged_for_later(worker: TinyWorker) -> None:
    await worker.update(1, 1)
    await worker.sleep(level=2, **SOON)
    await worker.wake(tags=["weights"], load=False)
    await worker.stage(2, 2)
    await worker.wake()
    await serves(worker, 1)
    await worker.commit(2)
    await serves(worker, 2)


async def test_a_commit_that_fails_leaves_it_closed_and_another_opens_it(
    worker: TinyWorker,
) -> None:
    await asleep(worker)
    await worker.wake(load=False)

    async def fails() -> None:
        raise WeightsRejected("not this time")

    worker.engine.before["commit"] = fails
    with refused("weights-rejected") as caught:
        await worker.update(2, 2)
    assert "no weights are loaded yet" in str(caught.value)
    closed(worker)
    del worker.engine.before["commit"]
    await worker.update(2, 2)
    await serves(worker, 2)


async def test_the_weights_that_it_had_are_staged_anew_and_only_these_bytes(
    worker: TinyWorker,
) -> None:
    await worker.update(1, 1)
    await worker.sleep(level=2, **SOON)
    await worker.wake(load=False)
    other = {"path": str(worker.weights(9))}
    with refused("content-mismatch"):
        await worker.begin_stage(1, 9, source=other)
    await worker.update(1, 1)
    await serves(worker, 1)
    assert worker.updates.previous is not None
    assert worker.updates.previous.version == 0


async def test_without_values_there_is_nothing_that_level_1_could_keep(worker: TinyWorker) -> None:
    await worker.update(1, 1)
    await worker.sleep(level=1, **SOON)
    await worker.wake(load=False)
    await worker.sleep(level=1, **SOON)
    assert not any(worker.engine.resident.values())
    await worker.wake()
    await serves(worker, 1)
    assert worker.engine.refills == 1


@pytest.mark.parametrize("gone", [True, False])
@pytest.mark.parametrize("tags", [["weights"], ["weights", "kv_cache"]])
async def test_an_engine_that_dies_there_is_replaced_by_one_that_waits_for_the_commit(
    worker: TinyWorker, tags: list[str], gone: bool
) -> None:
    await asleep(worker)
    if not gone:
        worker.weights(1)
    await worker.wake(tags=tags, load=False)
    worker.engine.die()
    worker.runtime.report_crash("the test says so")
    await until(lambda: len(worker.engines) == 2, what="another engine")
    await worker.reaches(Lifecycle.ASLEEP)
    with refused("asleep"):
        worker.worker.check_serving()
    assert worker.engine.active.identity == worker.active
    assert (worker.active == CHECKPOINT) is gone
    await worker.update(2, 2)
    await worker.wake()
    await serves(worker, 2)


async def test_what_was_pinned_to_them_goes_on_with_the_committed_ones(worker: TinyWorker) -> None:
    flight = await worker.runs("r", made=2)
    await worker.sleep(level=2, mode="keep")
    await worker.wake(load=False)
    await worker.update(2, 2, in_flight="Pin")
    await worker.reaches(Lifecycle.ACTIVE)
    assert [made[:2] for made in made_by(await worker.ends(flight))] == [(100, 0), (2, 2)]


async def test_a_commit_in_place_keeps_what_runs_and_its_kv(worker: TinyWorker) -> None:
    """Where there is no room for two copies: drop, wake without values, stage, commit."""
    flight = await worker.runs("r", made=2)
    await worker.sleep(level=2, tags=["weights"], mode="keep")
    await worker.wake(tags=["weights"], load=False)
    closed(worker)
    await worker.update(2, 2, in_flight="Keep")
    await worker.reaches(Lifecycle.ACTIVE)
    assert made_by(await worker.ends(flight)) == [(100, 0, False), (2, 2, True)]


async def test_waking_without_values_takes_none_from_who_has_them(worker: TinyWorker) -> None:
    await worker.update(1, 1)
    await worker.wake(load=False)
    await worker.sleep(tags=["kv_cache"], **SOON)
    await worker.wake(load=False)
    await serves(worker, 1)


async def test_an_engine_that_can_t_replace_its_weights_refuses_by_name(worker: TinyWorker) -> None:
    assert worker.worker.worker_state().wakes_empty
    worker.engine.capabilities = ABLE.model_copy(update={"sleep_levels": (1,)})
    assert not worker.worker.worker_state().wakes_empty
    await worker.sleep(**SOON)
    with refused("unsupported"):
        await worker.wake(load=False)
    await worker.wake()
    assert worker.state is Lifecycle.ACTIVE
