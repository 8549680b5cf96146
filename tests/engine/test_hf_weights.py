"""New weights next to the serving ones, and the switch to them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rollout_worker.engine import Engine
from tests.support.engine.engines import (
    PROMPT,
    V1,
    V2,
    begun,
    figure,
    launch,
    reaches,
    request,
    run,
    serving,
    staged,
    update,
)
from tests.support.engine.reference import Reference
from tests.support.engine.tinymodels import TinyModels


async def test_staging_does_not_disturb_what_runs(
    tiny_models: TinyModels, engine: Engine, reference: Reference
) -> None:
    seen: list[tuple[int, int]] = []
    output, task = await begun(engine, 5, max_tokens=100)
    version = await staged(
        engine, tiny_models.weights(2), lambda done, total: seen.append((done, total))
    )
    assert version.sink.memory == "host"
    assert version.sink.nbytes == seen[-1][1] == figure(engine, "hf_engine_weights_bytes")
    version.sink.close()
    version.sink.close()
    assert version.sink.nbytes == 0
    await task
    assert seen[-1][0] == seen[-1][1]
    assert output.token_ids == reference.greedy(PROMPT, 100)


async def test_kept_kv_is_what_transformers_has_with_the_old_keys(
    tiny_models: TinyModels, engine: Engine, reference: Reference, reference_2: Reference
) -> None:
    """`keep` mixes KV of both weights; plain transformers with a cache does the same."""
    output, task = await begun(engine, 10, max_tokens=60)
    await update(engine, tiny_models.weights(2))
    await task
    old = output.versions.count((0, False))
    ids = [*PROMPT, *output.token_ids[:old]]
    with torch.no_grad():
        cache = reference.model(torch.tensor([ids[:-1]]), use_cache=True).past_key_values
        expected = []
        for _ in range(60 - old):
            step = reference_2.model(torch.tensor([ids[-1:]]), past_key_values=cache)
            ids.append(int(step.logits[0, -1].argmax()))
            expected.append(ids[-1])
    assert output.token_ids[old:] == expected


async def test_queued_requests_run_on_the_new_version(
    tiny_models: TinyModels, engine: Engine, reference_2: Reference
) -> None:
    await engine.pause()
    task = asyncio.create_task(run(engine, request()))
    version = await staged(engine, tiny_models.weights(2))
    await engine.commit(V1, version.sink, "keep")
    await engine.resume()
    output = await task
    assert set(output.versions) == {(1, False)}
    assert output.token_ids == reference_2.greedy(PROMPT, 8)


async def test_another_compute_dtype_keeps_the_checkpoints_on_disk(
    tiny_models: TinyModels,
) -> None:
    async with serving(tiny_models.model(1), dtype="bfloat16") as (engine, info):
        first = await run(engine, request())
        root = await update(engine, tiny_models.weights(2))
        second = await run(engine, request())
        weights = figure(engine, "hf_engine_weights_bytes")
    async with serving(tiny_models.model(2)) as (_, info_2):
        assert root == info_2.root_hash != info.root_hash
    assert weights == 3281408 // 2
    assert first.token_ids != second.token_ids
    assert len(second.token_ids) == 8


async def test_weights_that_are_no_numbers_abort_and_leave_no_trace(
    tiny_models: TinyModels, engine: Engine, reference_2: Reference, tmp_path: Path
) -> None:
    tensors = load_file(tiny_models.weights(2) / "model.safetensors")
    save_file(
        {n: torch.full_like(t, torch.nan) for n, t in tensors.items()},
        tmp_path / "model.safetensors",
    )
    pairs = [launch(engine, f"r{i}", max_tokens=500) for i in range(3)]
    outputs, tasks = zip(*pairs, strict=True)
    await asyncio.gather(*(reaches(output, 4) for output in outputs))
    await update(engine, tmp_path, V1)
    await asyncio.gather(*tasks)
    broken = await run(engine, request("broken"))
    await update(engine, tiny_models.weights(2), V2)
    after = await asyncio.gather(*(run(engine, request(f"a{i}")) for i in range(5)))
    for output in (*outputs, broken):
        assert (output.stop_reason, output.abort_reason) == ("aborted", "engine")
        assert set(output.versions) <= {(0, False)}
    assert [output.token_ids for output in after] == [reference_2.greedy(PROMPT, 8)] * 5
