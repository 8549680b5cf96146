"""New weights next to the serving ones, and the switch to them."""

from __future__ import annotations

import torch

from rollout_worker.engine import Engine
from tests.support.engine.engines import (
    PROMPT,
    begun,
    figure,
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
