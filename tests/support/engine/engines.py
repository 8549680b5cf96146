"""Drives an engine directly, without the worker around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from rollout_common.garbage_collection import freeze_heap
from rollout_worker.engine import (
    Engine,
    EngineDelta,
    EngineInfo,
    EngineRequest,
    Sink,
    WeightsRefill,
    WeightsRejected,
)
from rollout_worker.engines import EngineOptions, create_engine
from rollout_worker.engines.model_folder import checkpoint_layout
from rollout_worker.schemas import (
    AbortReason,
    LogprobsOf,
    SamplingParams,
    StopMatch,
    StopReason,
    WeightsId,
    WeightsSpan,
)
from rollout_worker.sources.checkpoint_files import open_source
from rollout_worker.sources.source_reading import Report
from rollout_worker.sources.tensor_filling import SinkFilling

PROMPT = (5, 6, 7, 8, 9, 100, 200, 300)
V1, V2 = WeightsId(epoch=1, version=1), WeightsId(epoch=1, version=2)


@dataclass
class Output:
    """What came of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    spans: list[WeightsSpan] = field(default_factory=list)
    stop_reason: StopReason | None = None
    stop_match: StopMatch | None = None
    abort_reason: AbortReason | None = None
    preemptions: int = 0
    deltas: int = 0
    grew: asyncio.Condition = field(default_factory=asyncio.Condition)

    def add(self, delta: EngineDelta) -> None:
        """Append a delta, checking what every delta promises."""
        start = len(self.token_ids)
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            assert len(delta.logprobs) == len(delta.token_ids)
            self.logprobs = [*(self.logprobs or []), *delta.logprobs]
        for span in delta.spans:
            assert span.start == start
            start = span.end
        assert start == len(self.token_ids)
        self.spans += delta.spans
        self.stop_reason, self.stop_match = delta.stop_reason, delta.stop_match
        self.abort_reason, self.preemptions = delta.abort_reason, delta.preemptions
        self.deltas += 1

    @property
    def versions(self) -> list[tuple[int, bool]]:
        """(version, stale_kv) of every token."""
        return [(s.version, s.stale_kv) for s in self.spans for _ in range(s.end - s.start)]


def request(
    name: str = "r",
    prompt: Sequence[int] = PROMPT,
    *,
    logprobs: LogprobsOf | None = "sampling",
    priority: int = 0,
    **sampling: Any,
) -> EngineRequest:
    """Build a request; greedy for 8 tokens unless said otherwise."""
    params = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, **sampling}
    return EngineRequest(
        name, tuple(prompt), SamplingParams.model_validate(params), logprobs, priority
    )


async def run(engine: Engine, wanted: EngineRequest) -> Output:
    output = Output()
    await follow(engine, wanted, output)
    return output


async def follow(engine: Engine, wanted: EngineRequest, output: Output) -> None:
    """Generate to the end into an output that others watch."""
    async for delta in engine.generate(wanted):
        output.add(delta)
        async with output.grew:
            output.grew.notify_all()


LONG = 1500
"""Tokens that take longer than a test looks at."""


def launch(
    engine: Engine, name: str = "r", prompt: Sequence[int] = PROMPT, **sampling: Any
) -> tuple[Output, asyncio.Task[None]]:
    """Begin an output, a long one unless said otherwise."""
    output = Output()
    wanted = request(name, prompt, **{"max_tokens": LONG, **sampling})
    return output, asyncio.create_task(follow(engine, wanted, output))


async def begun(
    engine: Engine, tokens: int, *args: Any, **sampling: Any
) -> tuple[Output, asyncio.Task[None]]:
    """Begin an output, and wait until it has so many tokens."""
    output, task = launch(engine, *args, **sampling)
    await reaches(output, tokens)
    return output, task


async def run_all(engine: Engine, wanted: Sequence[EngineRequest]) -> list[Output]:
    return list(await asyncio.gather(*(run(engine, each) for each in wanted)))


async def reaches(output: Output, tokens: int, seconds: float = 30) -> None:
    async with asyncio.timeout(seconds), output.grew:
        await output.grew.wait_for(lambda: len(output.token_ids) >= tokens)


def sglang_options(model: Path, *args: str, python: Path, **options: Any) -> EngineOptions:
    """A small SGLang on the CPU, in the environment of an interpreter."""
    flags = ("--python", str(python), *args)
    return EngineOptions(model, "float32", 256, "cpu", args=flags, **options)


TWO_RANKS_ON_A_CPU = {
    "ROLLOUT_TENSOR": "2",
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",  # a group of cores for each rank
    "SGLANG_NCCL_SO_PATH": "/nowhere",  # else it looks for a GPU
    "OMP_NUM_THREADS": "1",
}


@cache
def _freeze_imports() -> None:
    """Keep the collector off what the first engine has imported."""
    freeze_heap()


@asynccontextmanager
async def serving(
    model: Path, *args: str, **options: Any
) -> AsyncIterator[tuple[Engine, EngineInfo]]:
    """Run an hf engine on the CPU, by default as a guest.

    One that is none freezes this process' heap at its start, and thaws it at its end if a test still has a part of it: one
    or two seconds of a process that has thousands of tests.
    """
    by_default = {"guest": True, **options}
    engine = create_engine("hf", EngineOptions(model=model, device="cpu", args=args, **by_default))
    info = await engine.start(lambda _: None)
    if "guest" not in options:
        _freeze_imports()
    try:
        yield engine, info
    finally:
        await engine.stop()


async def staged(engine: Engine, folder: Path, report: Report = lambda done, total: None) -> Staged:
    """Fill and seal a sink of the engine, as the worker does."""
    layout = checkpoint_layout(open_source(folder).entries)
    filling = SinkFilling(engine.open_slot, layout, lambda _: None, report)
    return Staged(await filling.fill_from_files((folder, ())), filling.root_hash)


@dataclass(frozen=True)
class Staged:
    """A sealed sink and the root hash of what was read into it."""

    sink: Sink
    root_hash: str


async def update(engine: Engine, folder: Path, identity: WeightsId = V1, kv: Any = "keep") -> str:
    """Stage and commit under a pause; return the root hash."""
    version = await staged(engine, folder)
    await flip(engine, version.sink, identity, kv)
    return version.root_hash


async def flip(engine: Engine, sink: Sink, identity: WeightsId, kv: Any) -> None:
    """Commit what is staged, under a pause: all that is left to do beside a request that is to cross it."""
    await engine.pause()
    await engine.commit(identity, sink, kv)
    await engine.resume()


def refilling(engine: Engine, folder: Path) -> WeightsRefill:
    """What the worker gives to `sleep` and `wake` when a folder's are the active weights."""

    async def refill(*, on_disk: bool = False) -> Sink:
        source = open_source(folder)
        layout = checkpoint_layout(source.entries)
        open_slot = partial(engine.open_slot, on_disk=on_disk)
        return await SinkFilling(open_slot, layout, lambda _: None).fill_from_files((folder, ()))

    return refill


async def nothing(*, on_disk: bool = False) -> Sink:
    """A refill that nobody should need: the source has gone."""
    raise WeightsRejected("the source of the active weights has gone")


def figure(engine: Engine, name: str) -> float:
    lines = dict(line.rsplit(" ", 1) for line in engine.metrics().splitlines())
    return float(lines[name])


def waiting(engine: Engine) -> float:
    """How many outputs an hf engine has queued."""
    return figure(engine, "hf_engine_waiting")
