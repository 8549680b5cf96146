"""What weights updates, sleep and start cost the hf engine, without the worker around it."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path

import torch
from safetensors.torch import load_file

from rollout_worker.engine import Engine, KvPolicy
from rollout_worker.engines import EngineOptions, create
from rollout_worker.schemas import AbortReason, MemoryTag, WeightsId, WeightsSource

from .hf import HALF_B, TINY, Load
from .hfsystems import Job, engine_request, plain_model
from .results import Figure, Options, Result, figure

SUMMARY = "pause of an update by policy, update time, sleep, wake and start of the hf engine"
POLICIES: tuple[tuple[str, KvPolicy | None], ...] = (
    ("Keep", "keep"),
    ("Recompute", "recompute"),
    ("Pin", "pin"),
    ("Abort", None),
)
RUNNING = 8


def run(options: Options) -> Result:
    """Measure."""
    torch.set_num_threads(1)
    load = TINY if options.quick else HALF_B
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(_measure(Path(folder), load, options.count(3, 3)))
    notes = [
        f"{load.label}, {load.dtype}, {RUNNING} requests running, one thread. Pause: from the call that "
        "stops steps until the next token could be made; a step that runs ends first. Drain pauses as "
        "Abort does, once its requests have ended.",
    ]
    return Result(
        "hfupdates", "Weights, sleep and start of the Hugging Face engine", figures, notes
    )


async def _timed(work: Awaitable[object]) -> float:
    began = time.monotonic()
    await work
    return time.monotonic() - began


async def _measure(folder: Path, load: Load, rounds: int) -> list[Figure]:
    from tinymodel import Shape, make_weights

    shape = Shape(**load.shape)  # type: ignore[arg-type]  # numbers and names as they are
    paths = [folder / "a", folder / "b"]
    for seed, path in enumerate(paths):
        make_weights(path, seed + 1, shape)
    copies = [_copy(paths[index % 2], load) for index in range(rounds)]
    plain = time.monotonic()
    plain_model(paths[0], load.dtype)
    plain = time.monotonic() - plain
    engine = create("hf", EngineOptions(model=paths[0], device="cpu", dtype=load.dtype))
    start = await _timed(engine.start(lambda _: None))
    try:
        found = [Figure("start to serving", "s", start, baseline=plain, against="from_pretrained")]
        version, staged = 0, []
        for name, kv in POLICIES:
            pauses = []
            for _ in range(rounds):
                version += 1
                readers = await _busy(engine, version, load)
                source = WeightsSource(path=str(paths[version % 2]))
                identity = WeightsId(epoch=1, version=version)
                staged.append(await _timed(engine.stage(identity, source, lambda *_: None)))
                pauses.append(await _timed(_commit(engine, identity, kv)))
                await engine.abort(None, AbortReason.CONTROL)
                await readers
            found.append(figure(f"pause at a commit, {name}", pauses))
        found += await _idle_update(engine, paths, version, rounds, copies)
        found.append(figure("the same reading while requests run", staged))
        return [*found, *await _sleep(engine, paths[(rounds - 1) % 2])]
    finally:
        await engine.stop()


def _copy(path: Path, load: Load) -> float:
    """Seconds to read a file with safetensors and copy it into a model."""
    tensors = {n: torch.empty_like(t) for n, t in load_file(path / "model.safetensors").items()}
    began = time.monotonic()
    for name, tensor in load_file(path / "model.safetensors").items():
        tensors[name].copy_(tensor)
    return time.monotonic() - began


async def _busy(engine: Engine, version: int, load: Load) -> asyncio.Future[list[None]]:
    started = asyncio.Semaphore(0)

    async def follow(index: int) -> None:
        job = Job((5, 6, 7, 8), 1000)
        first = True
        async for _ in engine.generate(engine_request(f"{version}-{index}", job)):
            if first:
                first = False
                started.release()

    readers = asyncio.gather(*(follow(index) for index in range(RUNNING)))
    for _ in range(RUNNING):
        await started.acquire()
    return readers


async def _commit(engine: Engine, identity: WeightsId, kv: KvPolicy | None) -> None:
    if kv is None:
        await engine.abort(None, AbortReason.WEIGHTS)
    await engine.pause()
    await engine.commit(identity, kv or "recompute")
    await engine.resume()


async def _idle_update(
    engine: Engine, paths: list[Path], version: int, rounds: int, copies: list[float]
) -> list[Figure]:
    took = []
    for index in range(rounds):
        identity = WeightsId(epoch=2, version=version + index)
        source = WeightsSource(path=str(paths[index % 2]))
        began = time.monotonic()
        await engine.stage(identity, source, lambda *_: None)
        await _commit(engine, identity, "keep")
        took.append(time.monotonic() - began)
    against = "safetensors load and copy_, nothing verified"
    baseline = figure("", copies).p50
    return [
        figure(
            "update, read from the page cache and hashed", took, baseline=baseline, against=against
        )
    ]


async def _sleep(engine: Engine, source: Path) -> list[Figure]:
    found = []
    for level in (1, 2):
        awake = _resident()
        await engine.pause()
        tags: tuple[MemoryTag, ...] = ("weights", "kv_cache")
        slept = await _timed(engine.sleep(1 if level == 1 else 2, tags))
        asleep = _resident()
        path = WeightsSource(path=str(source))
        woke = await _timed(engine.wake(tags, path))
        await engine.resume()
        found += [
            Figure(f"level {level}: memory asleep", "MiB", asleep, baseline=awake, against="awake"),
            Figure(f"level {level}: to fall asleep", "s", slept),
            Figure(f"level {level}: to wake", "s", woke),
        ]
    return found


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20
