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
from pathlib import Path
from statistics import median

import torch

from bench.baselines.generation import Continuous, Dtype, Job, Ours, Static, System, Took, timed
from bench.options import Options
from bench.reporting.figures import ROUNDS_FOR_A_VERDICT, Figure, Goal, Result, figure

from .models import TINY

DTYPE: Dtype = "float32"
PROMPT, SHORTEST, LONGEST = 64, 16, 256
"""Lengths in tokens."""
MIXED, EQUAL = 128, 64
"""Requests of each kind of lengths."""
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
    runs = _measure_ways(TINY.model(1), options.count(ROUNDS_FOR_A_VERDICT, 1))
    title = "The Hugging Face engine"
    return Result("generate", title, _figures(runs), _notes(runs), part="hf")


def _jobs(count: int, *, mixed: bool) -> list[Job]:
    rng = random.Random(1)
    middle = math.sqrt(SHORTEST * LONGEST)

    def length() -> int:
        drawn = round(rng.lognormvariate(math.log(middle), 0.8)) if mixed else round(middle)
        return min(LONGEST, max(SHORTEST, drawn))

    return [
        Job(tuple(rng.randrange(3, 4096) for _ in range(PROMPT)), length()) for _ in range(count)
    ]


def _measure_ways(model: Path, rounds: int) -> Runs:
    makers: dict[str, Callable[[], System]] = {
        "ours": lambda: Ours(model, DTYPE),
        "static": lambda: Static(model, DTYPE),
        "continuous": lambda: Continuous(model, DTYPE, PROMPT + LONGEST),
    }
    work = {
        "mixed": _jobs(MIXED, mixed=True),
        "equal": _jobs(EQUAL, mixed=False),
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


def _figures(runs: Runs) -> list[Figure]:
    def samples(name: str, kind: str) -> list[float]:
        return [took.cpu / took.tokens * 1000 for took in runs[name, kind]]

    return [
        figure(
            f"tiny, {kind} lengths: CPU for 1,000 tokens", samples("ours", kind),
            baseline=samples(other, kind), against=words,
            goal=Goal(median(samples(other, kind)) / times),
        )
        for kind, other, words, times in OTHERS
    ]  # fmt: skip


def _notes(runs: Runs) -> Sequence[str]:
    rates = ", ".join(
        f"{name} {kind} {median(t.tokens / t.wall for t in some):.0f}"
        f" ({median(t.tokens / t.cpu for t in some):.0f})"
        for (name, kind), some in runs.items()
    )
    return (
        f"tiny: {MIXED} requests of {SHORTEST} to {LONGEST} tokens,"
        f" {EQUAL} of equal length, prompts of {PROMPT}, {DTYPE}, 32 in flight, one"
        " thread.",
        f"tiny: tokens per second of wall time (and of CPU time), medians: {rates}.",
    )
