"""Pin: outputs end on the weights that they began with, while later ones use the new."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout_worker.engine import Engine
from rollout_worker.schemas import AbortReason
from tests.support.engine.engines import (
    PROMPT,
    V1,
    V2,
    Output,
    begun,
    figure,
    launch,
    nothing,
    reaches,
    request,
    run,
    update,
)
from tests.support.engine.reference import Reference
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import in_process
from tests.support.waiting import until, until_sync

PROMPTS = (PROMPT, PROMPT[:2], PROMPT * 4)


async def launched(engine: Engine, tokens: int) -> tuple[list[Output], asyncio.Future[Any]]:
    """Begin an output of each prompt and wait until all make tokens."""
    pairs = [launch(engine, f"old{i}", p, max_tokens=tokens) for i, p in enumerate(PROMPTS)]
    await asyncio.gather(*(reaches(output, 5) for output, _ in pairs))
    return [output for output, _ in pairs], asyncio.gather(*(task for _, task in pairs))


async def test_old_and_new_run_side_by_side(
    tiny_models: TinyModels, engine: Engine, reference: Reference, reference_2: Reference
) -> None:
    one = figure(engine, "hf_engine_weights_bytes")
    old, running = await launched(engine, 150)
    await update(engine, tiny_models.weights(2), kv="pin")
    names = {f"old{i}" for i in range(3)}
    assert engine.stats().pinned_ids == names
    assert figure(engine, "hf_engine_weights_bytes") == 2 * one
    fresh = [await run(engine, request(f"new{i}", p)) for i, p in enumerate(PROMPTS)]
    assert engine.stats().pinned_ids == names, "the new ones ended while the old ones ran"
    await running
    await until(lambda: figure(engine, "hf_engine_weights_bytes") == one)
    assert not engine.stats().pinned_ids
    for prompt, output in zip(PROMPTS, old, strict=True):
        assert output.versions == [(0, False)] * 150
        assert output.token_ids == reference.greedy(prompt, 150)
    for prompt, output in zip(PROMPTS, fresh, strict=True):
        assert output.versions == [(1, False)] * 8
        assert output.token_ids == reference_2.greedy(prompt, 8)


async def test_a_third_version_takes_the_oldest_along(
    tiny_models: TinyModels, engine: Engine, reference: Reference, reference_2: Reference
) -> None:
    """Never more than two sets: the engine moves the oldest on, the worker waits before that."""
    one = figure(engine, "hf_engine_weights_bytes")
    old, running = await launched(engine, 200)
    await update(engine, tiny_models.weights(2), V1, kv="pin")
    middle, task = await begun(engine, 5, "mid", max_tokens=200)
    await update(engine, tiny_models.weights(3), V2, kv="pin")
    assert engine.stats().pinned_ids == {"mid"}
    assert figure(engine, "hf_engine_weights_bytes") == 2 * one
    await asyncio.gather(running, task)
    assert middle.token_ids == reference_2.greedy(PROMPT, 200)
    assert set(middle.versions) == {(1, False)}
    for prompt, output in zip(PROMPTS, old, strict=True):
        count = output.versions.count((0, False))
        assert output.versions == [(0, False)] * count + [(2, True)] * (200 - count)
        assert output.token_ids[:count] == reference.greedy(prompt, count)


@pytest.mark.parametrize("ends", ["commit", "sleep"])
async def test_penalties_count_what_was_made_while_pinned(
    tiny_models: TinyModels, engine: Engine, ends: str
) -> None:
    """The versions are alike, so an output that goes through them is one that sees none."""
    sampling: dict[str, Any] = {"max_tokens": 300, "frequency_penalty": 2.0}
    plain = await run(engine, request(**sampling))
    output, task = await begun(engine, 5, **sampling)
    await update(engine, tiny_models.weights(1), V1, kv="pin")
    await reaches(output, len(output.token_ids) + 30)
    if ends == "commit":
        await update(engine, tiny_models.weights(1), V2, kv="pin")
    else:
        await engine.pause()
        await engine.sleep(1, ("weights", "kv_cache"), nothing)
        await engine.wake(("weights", "kv_cache"), nothing)
        await engine.resume()
    await task
    assert {version for version, _ in output.versions} == {0, 2 if ends == "commit" else 1}
    assert output.token_ids == plain.token_ids


@pytest.mark.parametrize("end", ["keep", "recompute", "abort", "stop"])
async def test_whatever_ends_the_pin_frees_the_old_weights(
    tiny_models: TinyModels, engine: Engine, end: Any
) -> None:
    one = figure(engine, "hf_engine_weights_bytes")
    old, running = await launched(engine, 400)
    await update(engine, tiny_models.weights(2), V1, kv="pin")
    match end:
        case "abort":
            await engine.abort(None, AbortReason.CONTROL)
        case "stop":
            await engine.stop()
        case _:
            await update(engine, tiny_models.weights(3), V2, kv=end)
    await running
    if end != "stop":
        assert figure(engine, "hf_engine_weights_bytes") == one
        assert not engine.stats().pinned_ids
    wanted = {"abort": "control", "stop": "engine"}.get(end)
    assert [output.abort_reason for output in old] == [wanted] * 3
    if wanted is None:
        assert {output.versions[-1] for output in old} == {(2, end == "keep")}


async def test_nothing_running_means_nothing_pinned(
    tiny_models: TinyModels, engine: Engine
) -> None:
    one = figure(engine, "hf_engine_weights_bytes")
    await update(engine, tiny_models.weights(2), V1, kv="pin")
    assert figure(engine, "hf_engine_weights_bytes") == one


async def test_sleep_forgets_the_pinned_weights(
    tiny_models: TinyModels, engine: Engine, reference_2: Reference
) -> None:
    """Its callers end what runs first; what runs all the same goes on with the active weights."""
    old, running = await launched(engine, 100)
    await update(engine, tiny_models.weights(2), V1, kv="pin")
    await engine.pause()
    await engine.sleep(1, ("weights", "kv_cache"), nothing)
    assert figure(engine, "hf_engine_weights_bytes") == 0
    assert figure(engine, "hf_engine_kv_cache_bytes") == 0
    await engine.wake(("weights", "kv_cache"), nothing)
    await engine.resume()
    await running
    for prompt, output in zip(PROMPTS, old, strict=True):
        count = output.versions.count((0, False))
        assert output.versions == [(0, False)] * count + [(1, False)] * (100 - count)
        rest = reference_2.greedy([*prompt, *output.token_ids[:count]], 100 - count)
        assert output.token_ids[count:] == rest


def spans(output: dict[str, Any]) -> list[tuple[int, bool]]:
    return [(span["version"], span["stale_kv"]) for span in output["weights"]]


def test_a_crash_with_two_sets_restarts_on_the_active_one(tiny_models: TinyModels) -> None:
    with in_process(tiny_models.model(1)) as worker:
        pinned = worker.long("pinned")
        worker.update(1, 1, tiny_models.weights(2), in_flight="Pin")
        alone = worker.sample()
        worker.crash()
        output = pinned.result(60).json()["outputs"][0]
        assert (output["stop_reason"], output["abort_reason"]) == ("aborted", "engine")
        assert spans(output) == [(0, False)]
        until_sync(worker.ready, 60, what="the engine to be back")
        again = worker.sample()
    assert (again["token_ids"], spans(again)) == (alone["token_ids"], [(1, False)])
