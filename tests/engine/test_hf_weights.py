"""New weights beside the old ones, and the flip."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines import (
    PROMPT,
    V1,
    V2,
    Output,
    follow,
    reaches,
    request,
    run,
    serving,
    update,
)
from reference import Reference
from rollout_worker.engine import Engine, WeightsRejected
from rollout_worker.schemas import Checkpoint, WeightsSource
from tinymodels import TinyModels

NORM = "model.layers.1.input_layernorm.weight"


def ignore(done: int, total: int) -> None:
    """Take no notice of progress."""


def source(folder: Path) -> WeightsSource:
    return WeightsSource(path=str(folder))


CHECKPOINT_SOURCE = WeightsSource(checkpoint=Checkpoint())


async def test_an_update_changes_outputs_and_labels(
    tiny_models: TinyModels, reference: Reference, reference_2: Reference
) -> None:
    async with serving(tiny_models.model(1)) as (engine, info):
        before = await run(engine, request(max_tokens=20))
        root = await update(engine, tiny_models.weights(2))
        after = await run(engine, request(max_tokens=20))
        back = await engine.stage(V2, CHECKPOINT_SOURCE, ignore)
        await engine.commit(V2, "keep")
        again = await run(engine, request(max_tokens=20))
    assert before.token_ids == again.token_ids == reference.greedy(PROMPT, 20)
    assert after.token_ids == reference_2.greedy(PROMPT, 20)
    assert root != info.root_hash == back.root_hash
    assert set(before.versions) == {(0, False)}
    assert set(after.versions) == {(1, False)}
    assert set(again.versions) == {(2, False)}
    assert after.spans[0].epoch == 1


async def test_staging_does_not_disturb_what_runs(
    tiny_models: TinyModels, reference: Reference
) -> None:
    seen: list[tuple[int, int]] = []
    async with serving(tiny_models.model(1)) as (engine, _):
        output = Output()
        task = asyncio.create_task(follow(engine, request(max_tokens=100), output))
        await reaches(output, 5)
        staged = await engine.stage(
            V1, source(tiny_models.weights(2)), lambda done, total: seen.append((done, total))
        )
        assert engine.stats().resident_bytes["weights"] == 2 * staged.bytes_total
        await engine.discard()
        await engine.discard()
        assert engine.stats().resident_bytes["weights"] == staged.bytes_total
        await task
        with pytest.raises(WeightsRejected, match="not staged"):
            await engine.commit(V1, "keep")
    assert seen[-1] == (staged.bytes_total, staged.bytes_total)
    assert output.token_ids == reference.greedy(PROMPT, 100)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_running_outputs_over_a_commit(
    tiny_models: TinyModels, reference: Reference, reference_2: Reference, kv: Any
) -> None:
    async with serving(tiny_models.model(1)) as (engine, _):
        outputs = [Output() for _ in range(3)]
        prompts = [PROMPT, PROMPT[:2], PROMPT * 4]
        tasks = [
            asyncio.create_task(follow(engine, request(f"r{i}", p, max_tokens=90), output))
            for i, (p, output) in enumerate(zip(prompts, outputs, strict=True))
        ]
        await asyncio.gather(*(reaches(output, 10) for output in outputs))
        await update(engine, tiny_models.weights(2), kv=kv)
        fresh = await run(engine, request("fresh"))
        await asyncio.gather(*tasks)
    assert set(fresh.versions) == {(1, False)}
    assert fresh.token_ids == reference_2.greedy(PROMPT, 8)
    for prompt, output in zip(prompts, outputs, strict=True):
        old = output.versions.count((0, False))
        assert 10 <= old < 90
        assert output.versions == [(0, False)] * old + [(1, kv == "keep")] * (90 - old)
        assert output.token_ids[:old] == reference.greedy(prompt, old)
        clean = reference_2.greedy([*prompt, *output.token_ids[:old]], 90 - old)
        # With its old KV an output goes on otherwise than the new weights alone would have it.
        assert (output.token_ids[old:] == clean) is (kv == "recompute")


async def test_kept_kv_is_what_transformers_has_with_the_old_keys(
    tiny_models: TinyModels, reference: Reference, reference_2: Reference
) -> None:
    """`keep` mixes KV of both weights; plain transformers with a cache does the same."""
    async with serving(tiny_models.model(1)) as (engine, _):
        output = Output()
        task = asyncio.create_task(follow(engine, request(max_tokens=60), output))
        await reaches(output, 10)
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
    tiny_models: TinyModels, reference_2: Reference
) -> None:
    async with serving(tiny_models.model(1)) as (engine, _):
        await engine.pause()
        task = asyncio.create_task(run(engine, request()))
        await engine.stage(V1, source(tiny_models.weights(2)), ignore)
        await engine.commit(V1, "keep")
        await engine.resume()
        output = await task
    assert set(output.versions) == {(1, False)}
    assert output.token_ids == reference_2.greedy(PROMPT, 8)


def spoil(tensors: dict[str, torch.Tensor], how: str) -> str:
    """Spoil a version in one way; return what the refusal must name."""
    norm = tensors[NORM]
    match how:
        case "missing":
            del tensors[NORM]
        case "shape":
            tensors[NORM] = norm[:-1].clone()
        case "dtype":
            tensors[NORM] = norm.bfloat16()
        case "head":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
            return "lm_head.weight"
        case "extra":
            tensors["model.layers.2.surprise"] = norm.clone()
            return "model.layers.2.surprise"
    return NORM


@pytest.mark.parametrize("how", ["missing", "shape", "dtype", "head", "extra"])
async def test_rejected_weights_change_nothing(
    tiny_models: TinyModels, reference: Reference, tmp_path: Path, how: str
) -> None:
    tensors = load_file(tiny_models.weights(2) / "model.safetensors")
    named = spoil(tensors, how)
    save_file(tensors, tmp_path / "model.safetensors")
    async with serving(tiny_models.model(1)) as (engine, _):
        output = Output()
        task = asyncio.create_task(follow(engine, request(max_tokens=60), output))
        await reaches(output, 3)
        with pytest.raises(WeightsRejected, match=named) as refused:
            await engine.stage(V1, source(tmp_path), ignore)
        with pytest.raises(WeightsRejected, match="not staged"):
            await engine.commit(V1, "keep")
        await task
        assert engine.alive() is None
    assert refused.value.tensor == named
    assert output.token_ids == reference.greedy(PROMPT, 60)
    assert set(output.versions) == {(0, False)}


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.999])
async def test_truncated_files_change_nothing(
    tiny_models: TinyModels, reference: Reference, tmp_path: Path, keep: float
) -> None:
    file = tmp_path / "model.safetensors"
    whole = (tiny_models.weights(2) / "model.safetensors").read_bytes()
    file.write_bytes(whole[: int(len(whole) * keep)])
    async with serving(tiny_models.model(1)) as (engine, _):
        with pytest.raises(WeightsRejected, match=str(file)):
            await engine.stage(V1, source(tmp_path), ignore)
        assert (await run(engine, request())).token_ids == reference.greedy(PROMPT, 8)


async def test_a_manifest_that_does_not_fit_is_refused(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    folder = tmp_path / "v"
    shutil.copytree(tiny_models.weights(2), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[NORM] = tensors[NORM] + 1e-3
    save_file(tensors, folder / "model.safetensors")
    async with serving(tiny_models.model(1)) as (engine, _):
        with pytest.raises(WeightsRejected, match="manifest says") as refused:
            await engine.stage(V1, source(folder), ignore)
    assert refused.value.tensor == NORM


async def test_sources_stay_below_the_roots(tiny_models: TinyModels, tmp_path: Path) -> None:
    shutil.copytree(tiny_models.weights(2), tmp_path / "root" / "v2")
    (tmp_path / "root" / "out").symlink_to(tiny_models.weights(2))
    roots = (tmp_path / "root",)
    async with serving(tiny_models.model(1), weights_roots=roots) as (engine, info):
        for path in ("../root2", "out", str(tiny_models.weights(2)), "gone"):
            with pytest.raises(WeightsRejected):
                await engine.stage(V1, WeightsSource(path=path), ignore)
        await engine.stage(V1, WeightsSource(path="v2"), ignore)
        checkpoint = await engine.stage(V1, CHECKPOINT_SOURCE, ignore)
    assert checkpoint.root_hash == info.root_hash


class Brake:
    """A progress callback that holds the reading thread until released."""

    def __init__(self) -> None:
        self.reading, self.go = threading.Event(), threading.Event()

    def __call__(self, done: int, total: int) -> None:
        self.reading.set()
        if done:
            self.go.wait(10)


@pytest.mark.parametrize("how", ["later stage", "discard", "cancel"])
async def test_the_slot_has_one_tenant(
    tiny_models: TinyModels, reference_2: Reference, how: str
) -> None:
    async with serving(tiny_models.model(1)) as (engine, _):
        brake = Brake()
        first = asyncio.create_task(engine.stage(V1, source(tiny_models.weights(3)), brake))
        await asyncio.to_thread(brake.reading.wait, 10)
        later = {
            "later stage": lambda: asyncio.create_task(
                stage_and_wait(engine, tiny_models.weights(2))
            ),
            "discard": lambda: asyncio.create_task(engine.discard()),
            "cancel": lambda: asyncio.create_task(cancelled(first)),
        }[how]()
        await asyncio.sleep(0.05)
        brake.go.set()
        await later
        with pytest.raises(asyncio.CancelledError if how == "cancel" else WeightsRejected):
            await first
        with pytest.raises(WeightsRejected, match="not staged"):
            await engine.commit(V1, "keep")
        if how == "later stage":
            await engine.commit(V2, "keep")
            assert (await run(engine, request())).token_ids == reference_2.greedy(PROMPT, 8)


async def stage_and_wait(engine: Engine, folder: Path) -> None:
    await engine.stage(V2, source(folder), ignore)


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])


async def test_staging_the_same_identity_again_takes_the_later_bytes(
    tiny_models: TinyModels, reference_2: Reference
) -> None:
    async with serving(tiny_models.model(1)) as (engine, _):
        await engine.stage(V1, source(tiny_models.weights(3)), ignore)
        await engine.stage(V1, source(tiny_models.weights(2)), ignore)
        await engine.commit(V1, "keep")
        assert (await run(engine, request())).token_ids == reference_2.greedy(PROMPT, 8)


async def test_another_compute_dtype_keeps_the_checkpoints_on_disk(
    tiny_models: TinyModels,
) -> None:
    async with serving(tiny_models.model(1), dtype="bfloat16") as (engine, info):
        first = await run(engine, request())
        root = await update(engine, tiny_models.weights(2))
        second = await run(engine, request())
        weights = engine.stats().resident_bytes["weights"]
    async with serving(tiny_models.model(2)) as (_, info_2):
        assert root == info_2.root_hash != info.root_hash
    assert weights == 3281408 // 2
    assert first.token_ids != second.token_ids
    assert len(second.token_ids) == 8


async def test_weights_that_are_no_numbers_abort_and_leave_no_trace(
    tiny_models: TinyModels, reference_2: Reference, tmp_path: Path
) -> None:
    tensors = load_file(tiny_models.weights(2) / "model.safetensors")
    save_file(
        {n: torch.full_like(t, torch.nan) for n, t in tensors.items()},
        tmp_path / "model.safetensors",
    )
    async with serving(tiny_models.model(1)) as (engine, _):
        outputs = [Output() for _ in range(3)]
        tasks = [
            asyncio.create_task(follow(engine, request(f"r{i}", max_tokens=500), output))
            for i, output in enumerate(outputs)
        ]
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


async def test_of_many_stages_at_once_one_stands(tiny_models: TinyModels) -> None:
    async with serving(tiny_models.model(1)) as (engine, _):
        brakes = [Brake() for _ in range(4)]
        tasks = [
            asyncio.create_task(engine.stage(V1, source(tiny_models.weights(2 + i % 2)), brake))
            for i, brake in enumerate(brakes)
        ]
        await asyncio.sleep(0.05)
        for brake in brakes:
            brake.go.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        staged = [result for result in results if not isinstance(result, BaseException)]
        assert staged  # those before it may have been whole, too, before they were dropped
        held = engine.stats().resident_bytes["weights"]
        await engine.commit(V1, "keep")
    assert all(isinstance(r, WeightsRejected) for r in results if isinstance(r, BaseException))
    assert held == 2 * staged[0].bytes_total
