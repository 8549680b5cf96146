"""Abort, hold, stop, crash: no reader hangs and no token is lost."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from rollout_worker.engine import Engine, EngineCrashed, EngineError
from rollout_worker.engines import EngineOptions, create_engine
from rollout_worker.engines.hf.hf_engine import HfEngine
from rollout_worker.schemas import AbortReason, Progress
from tests.support.broken_models import DAMAGE, damage
from tests.support.engine.engines import (
    begun,
    launch,
    request,
    run,
    run_all,
    serving,
    waiting,
)
from tests.support.engine.tinymodels import TinyModels
from tests.support.waiting import until


async def test_no_attention_is_planned_anew_for_each_length(tiny_models: TinyModels) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    async with serving(tiny_models.model(1), guest=False):
        assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]


async def test_a_cancelled_reader_aborts_also_from_the_queue(engine: Engine) -> None:
    await engine.pause()
    _, task = launch(engine, "waiting")
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.wait([task])
    await engine.abort([], AbortReason.CONTROL)  # a later command has run
    assert waiting(engine) == 0


def wreck(engine: Engine) -> None:
    """Take the weights from under the engine, so that its next step raises."""
    parts = cast("HfEngine", engine)._parts
    assert parts is not None
    parts.loaded.model.model.norm.weight.data = torch.zeros(3)


async def test_a_step_that_raises_ends_everybody(
    tiny_models: TinyModels, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tiny_models.model(1), "--max-batch-size", "1") as (engine, _):
        running, running_task = await begun(engine, 3, "running")
        queued, queued_task = launch(engine, "queued")
        await asyncio.sleep(0)
        await engine.pause()
        wreck(engine)
        await engine.resume()
        async with asyncio.timeout(10):
            await asyncio.gather(running_task, queued_task)
        wrong = engine.alive()
        for call in (engine.pause(), engine.abort(None, AbortReason.CONTROL), engine.open_slot([])):
            with pytest.raises(EngineCrashed):
                await call
        with pytest.raises(EngineCrashed):
            await run(engine, request("later"))
    assert wrong is not None
    assert "the step thread died" in wrong
    assert running.abort_reason is queued.abort_reason is AbortReason.ENGINE
    assert len(running.token_ids) >= 3
    assert "the step thread died" in caplog.text


async def test_a_hung_step_is_noticed(tiny_models: TinyModels) -> None:
    deadline = ("--step-deadline-seconds", "0.05")
    async with serving(tiny_models.model(1), *deadline) as (engine, _):
        assert engine.alive() is None
        parts = cast("HfEngine", engine)._parts
        assert parts is not None
        hold = asyncio.Event()
        loop = asyncio.get_running_loop()

        def block() -> None:
            asyncio.run_coroutine_threadsafe(hold.wait(), loop).result(10)

        blocked = parts.thread.run_command(block)
        await asyncio.sleep(0.2)
        wrong = engine.alive()
        hold.set()
        await asyncio.wrap_future(blocked)
        await until(lambda: engine.alive() is None)
    assert wrong is not None
    assert "deadline" in wrong


async def test_stop_ends_everybody_and_is_final(engine: Engine) -> None:
    output, task = await begun(engine, 2, "r")
    await engine.stop()
    async with asyncio.timeout(5):
        await task
    assert output.abort_reason is AbortReason.ENGINE
    assert (engine.stats().running, engine.stats().resident.weights) == (0, False)
    with pytest.raises(EngineCrashed, match="stopped"):
        await run(engine, request())
    await engine.stop()


async def test_progress_and_metrics(tiny_models: TinyModels) -> None:
    engine = create_engine("hf", EngineOptions(tiny_models.model(1), device="cpu"))
    seen: list[Progress] = []
    assert engine.metrics() == ""
    assert engine.alive() is None
    await engine.start(seen.append)
    await run_all(engine, [request("a"), request("b")])
    page = engine.metrics()
    await engine.stop()
    assert any(progress.message == "loading weights 100%" for progress in seen)
    assert all(0 <= (progress.fraction or 0) <= 1 for progress in seen)
    assert "hf_engine_prefill_tokens_total 16\n" in page
    assert "hf_engine_decode_tokens_total 14\n" in page


async def started(options: EngineOptions) -> None:
    await create_engine("hf", options).start(lambda _: None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"args": ("--nonsense", "3")}, "--max-batch-size"),
        ({"args": ("--max-batch-size", "0")}, "--max-batch-size"),
        ({"max_length": 4096}, "above the model's 2048"),
        ({"max_batch_tokens": 2047}, "below the maximum length 2048"),
        ({"model": Path("/nowhere")}, "config.json"),
    ],
    ids=["flag", "value", "length", "batch", "folder"],
)
async def test_bad_options_say_what_to_change(
    tiny_models: TinyModels, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(EngineError, match=words):
        await started(EngineOptions(**{"model": tiny_models.model(1), "device": "cpu", **options}))


@pytest.mark.parametrize(("name", "text", "said"), DAMAGE)
async def test_a_broken_model_folder_is_told(
    tiny_models: TinyModels, tmp_path: Path, name: str, text: str | None, said: str
) -> None:
    folder = shutil.copytree(tiny_models.model(1), tmp_path / "model")
    damage(folder, name, text)
    with pytest.raises(EngineError, match=said):
        await started(EngineOptions(folder, device="cpu"))


def test_engines_are_imported_only_when_made() -> None:
    code = "import sys, rollout_worker.engines; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
