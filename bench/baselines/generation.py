"""Ways to generate with transformers: our engine, static batches, continuous batching.

Each takes the same prompts and output lengths, and is timed by the wall clock and by the CPU time
of the whole process. Ours records log-probabilities; the others don't, which is in their favour.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import transformers
from transformers.generation.continuous_batching import cache
from typing_extensions import override

from rollout_worker.engine import Engine, EngineRequest
from rollout_worker.engines import EngineOptions, create_engine
from rollout_worker.schemas import SamplingParams

IN_FLIGHT = 32

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class Job:
    """One request: prompt, and how many tokens to generate."""

    prompt: tuple[int, ...]
    length: int


@dataclass(frozen=True, slots=True)
class Took:
    """What a run took, and the tokens asked for (any made beyond them don't count)."""

    wall: float
    cpu: float
    tokens: int


class System(Protocol):
    """Generates jobs."""

    def generate(self, jobs: Sequence[Job]) -> None:
        """Generate for all jobs; each gets exactly its length."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


def timed(system: System, jobs: Sequence[Job]) -> Took:
    wall, cpu = time.monotonic(), time.process_time()
    system.generate(jobs)
    return Took(time.monotonic() - wall, time.process_time() - cpu, sum(job.length for job in jobs))


class Ours(System):
    """The worker's engine with 32 requests in flight, recording log-probabilities."""

    def __init__(self, model: Path, dtype: Dtype) -> None:
        self._runner = asyncio.Runner()
        limit = ("--max-batch-size", str(IN_FLIGHT))
        options = EngineOptions(model=model, device="cpu", dtype=dtype, args=limit)
        self.engine: Engine = create_engine("hf", options)
        self._runner.run(self.engine.start(lambda _: None))
        self._count = 0

    @override
    def generate(self, jobs: Sequence[Job]) -> None:
        self._runner.run(self._all(jobs))

    async def _all(self, jobs: Sequence[Job]) -> None:
        gate = asyncio.Semaphore(IN_FLIGHT)

        async def one(job: Job) -> None:
            async with gate:
                self._count += 1
                request = engine_request(f"r{self._count}", job)
                made = 0
                async for delta in self.engine.generate(request):
                    made += len(delta.token_ids)
                assert made == job.length, (made, job.length)

        await asyncio.gather(*map(one, jobs))

    @override
    def close(self) -> None:
        self._runner.run(self.engine.stop())
        self._runner.close()


def engine_request(name: str, job: Job) -> EngineRequest:
    """Return the job as an engine request, sampled at temperature 1, that never ends early."""
    sampling = SamplingParams(max_tokens=job.length, temperature=1, ignore_eos=True)
    return EngineRequest(name, job.prompt, sampling, "sampling")


class Static(System):
    """`generate` on batches of 32 in the order of arrival, each as long as its longest output."""

    def __init__(self, model: Path, dtype: str) -> None:
        self._model = plain_model(model, dtype)

    @override
    def generate(self, jobs: Sequence[Job]) -> None:
        for start in range(0, len(jobs), IN_FLIGHT):
            self._batch(jobs[start : start + IN_FLIGHT])

    @torch.no_grad()
    def _batch(self, jobs: Sequence[Job]) -> None:
        ids = torch.tensor([job.prompt for job in jobs])
        longest = max(job.length for job in jobs)
        made = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=sampled(max_new_tokens=longest),
        )
        assert made.shape == (len(jobs), ids.shape[1] + longest), made.shape

    @override
    def close(self) -> None:
        del self._model


def sampled(**more: Any) -> Any:
    """Return a config that samples the model's own distribution and never ends early."""
    return transformers.GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0, **more
    )


class Continuous(System):
    """transformers' own continuous batching, with the same 32 in flight and room for them all."""

    PAGE = 16

    def __init__(self, model: Path, dtype: str, longest: int) -> None:
        self._model = plain_model(model, dtype)
        # It asks psutil for the memory; where that is not installed, it assumes none.
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        cache.get_device_and_memory_breakdown = lambda: (torch.device("cpu"), memory, 0, 0)
        config = transformers.ContinuousBatchingConfig(
            num_blocks=IN_FLIGHT * (-(-longest // self.PAGE) + 2),
            page_size=self.PAGE,
            max_batch_tokens=512,
            max_requests_per_batch=IN_FLIGHT,
            allow_block_sharing=False,
            use_async_batching=False,
            use_cuda_graph=False,
        )
        self._manager = self._model.init_continuous_batching(
            generation_config=sampled(), continuous_batching_config=config
        )
        self._manager.start()
        self._count = 0

    @override
    def generate(self, jobs: Sequence[Job]) -> None:
        todo = list(reversed(jobs))
        running: dict[str, Job] = {}
        while todo or running:
            while todo and len(running) < IN_FLIGHT:
                job = todo.pop()
                self._count += 1
                name = self._manager.add_request(
                    list(job.prompt), request_id=f"r{self._count}", max_new_tokens=job.length
                )
                running[name] = job
            result = self._manager.get_result(timeout=300)
            assert result is not None, "continuous batching gave no result within 300 s"
            assert result.error is None, result.error
            job = running.pop(result.request_id)
            assert len(result.generated_tokens) == job.length

    @override
    def close(self) -> None:
        self._manager.stop(block=True)
        del self._manager, self._model


def plain_model(folder: Path, dtype: str) -> Any:
    """Return the model as transformers loads it, with its default attention."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype).eval()
