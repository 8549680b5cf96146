"""The hf engine and two other ways to generate with transformers, under the same loads.

Mixed lengths are log-normal, clipped; equal ones show what the engine itself costs. Figures are the
CPU time of the process for 1,000 tokens, the ways taking turns: with one compute thread that is what
a quiet core needs, and it holds on a machine that others use, too. The wall clock is given in the
notes. Ours records log-probabilities; the others don't, which is in their favour.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from bench.baselines.generation import Continuous, Dtype, Job, Ours, Static, System, Took, timed
from bench.options import Options
from bench.reporting.figures import Figure, Goal, Result, figure

from .models import TINY


@dataclass(frozen=True, slots=True)
class Load:
    """What is generated with one model: how many requests, their prompts and lengths in tokens."""

    label: str
    dtype: Dtype
    prompt: int
    mixed: int
    equal: int
    shortest: int
    longest: int
    rounds: int


TINY_LOAD = Load("tiny", "float32", 64, 128, 64, 16, 256, 5)
OTHERS = (
    ("mixed", "static", "static batches", 1.5),
    ("mixed", "continuous", "transformers' continuous batching", 1.2),
    ("equal", "static", "one static batch after another", 0.95),
    ("equal", "continuous", "transformers' continuous batching", 0.95),
)
"""Which lengths against which way, and how many times better ours is to be."""

Runs = dict[tuple[str, str], list[Took]]
"""By way and kind of lengths: what each round took."""


def measure(options: Options) -> Result:
    torch.set_num_threads(1)
    runs = _measure_ways(TINY.model(1), TINY_LOAD, options.count(TINY_LOAD.rounds, 1))
    figures, notes = _figures(TINY_LOAD, runs), _notes(TINY_LOAD, runs)
    return Result("generate", "The Hugging Face engine", figures, notes, part="hf")


def _jobs(load: Load, count: int, *, mixed: bool) -> list[Job]:
    rng = random.Random(1)
    middle = math.sqrt(load.shortest * load.longest)

    def length() -> int:
        drawn = round(rng.lognormvariate(math.log(middle), 0.8)) if mixed else round(middle)
        return min(load.longest, max(load.shortest, drawn))

    return [
        Job(tuple(rng.randrange(3, 4096) for _ in range(load.prompt)), length())
        for _ in range(count)
    ]


def _measure_ways(model: Path, load: Load, rounds: int) -> Runs:
    makers: dict[str, Callable[[], System]] = {
        "ours": lambda: Ours(model, load.dtype),
        "static": lambda: Static(model, load.dtype),
        "continuous": lambda: Continuous(model, load.dtype, load.prompt + load.longest),
    }
    work = {
        "mixed": _jobs(load, load.mixed, mixed=True),
        "equal": _jobs(load, load.equal, mixed=False),
    }
    took: Runs = {}
    for _ in range(rounds):
        for name, make in makers.items():
            system = make()
            try:
                system.generate([Job(job.prompt, 2) for job in work["equal"]])
                for kind, jobs in work.items():
                    took.setdefault((name, kind), []).append(timed(system, jobs))
            finally:
                system.close()
    return took


def _figures(load: Load, runs: Runs) -> list[Figure]:
    def samples(name: str, kind: str) -> list[float]:
        return [took.cpu / took.tokens * 1000 for took in runs[name, kind]]

    return [
        figure(
            f"{load.label}, {kind} lengths: CPU for 1,000 tokens", samples("ours", kind),
            baseline=samples(other, kind), against=words,
            goal=Goal(median(samples(other, kind)) / times),
        )
        for kind, other, words, times in OTHERS
    ]  # fmt: skip


def _notes(load: Load, runs: Runs) -> Sequence[str]:
    rates = ", ".join(
        f"{name} {kind} {median(t.tokens / t.wall for t in some):.0f}"
        f" ({median(t.tokens / t.cpu for t in some):.0f})"
        for (name, kind), some in runs.items()
    )
    return (
        f"{load.label}: {load.mixed} requests of {load.shortest} to {load.longest} tokens,"
        f" {load.equal} of equal length, prompts of {load.prompt}, {load.dtype}, 32 in flight, one"
        " thread.",
        f"{load.label}: tokens per second of wall time (and of CPU time), medians: {rates}.",
    )
