"""The hf engine against three other ways to generate with transformers.

Mixed lengths are log-normal, clipped; equal ones show what the engine itself costs. Figures are the
CPU time of the process for 1,000 tokens, the best of some rounds that take turns: with one compute
thread that is what a quiet core needs, and it holds on a machine that others use, too. The wall clock
is given in the notes. Ours records log-probabilities, the others none, which is in their favour.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .hfsystems import Continuous, Dtype, Job, Ours, Static, System, Took, timed
from .models import TINY, half_billion
from .results import Figure, Options, Result

SUMMARY = "the hf engine against generate, sorted batches and transformers' continuous batching"


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


TINY_LOAD = Load("tiny", "float32", 64, 128, 64, 16, 256, 2)
HALF_B = Load("0.5B shape", "float32", 16, 64, 32, 4, 64, 1)
"""A quarter of the lengths, or a round takes an hour; float32, for many CPUs only emulate bfloat16."""


def run(options: Options) -> Result:
    """Measure."""
    torch.set_num_threads(1)
    loads = [(TINY_LOAD, TINY.model(1))]
    if not options.quick:
        loads.append((HALF_B, half_billion(1, HALF_B.dtype)))
    figures: list[Figure] = []
    notes: list[str] = []
    for load, model in loads:
        best = _measure(model, load, options.runs or load.rounds)
        figures += _figures(load, best)
        notes += _notes(load, best)
    return Result("hf", "The Hugging Face engine", figures, notes)


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


def _measure(model: Path, load: Load, rounds: int) -> dict[tuple[str, str], Took]:
    makers: dict[str, Callable[[], System]] = {
        "ours": lambda: Ours(model, load.dtype),
        "static": lambda: Static(model, load.dtype),
        "sorted": lambda: Static(model, load.dtype, by_length=True),
        "continuous": lambda: Continuous(model, load.dtype, load.prompt + load.longest),
    }
    work = {
        "mixed": _jobs(load, load.mixed, mixed=True),
        "equal": _jobs(load, load.equal, mixed=False),
    }
    took: dict[tuple[str, str], list[Took]] = {}
    for _ in range(rounds):
        for name, make in makers.items():
            system = make()
            try:
                system.generate([Job(job.prompt, 2) for job in work["equal"]])
                for kind, jobs in work.items():
                    # Of equal lengths sorted batches are the static ones.
                    if (name, kind) != ("sorted", "equal"):
                        took.setdefault((name, kind), []).append(timed(system, jobs))
            finally:
                system.close()
    return {key: min(found, key=lambda each: each.cpu) for key, found in took.items()}


def _per_thousand(took: Took) -> float:
    return took.cpu / took.tokens * 1000


def _figures(load: Load, best: dict[tuple[str, str], Took]) -> Sequence[Figure]:
    def figure(kind: str, other: str, words: str, goal: float) -> Figure:
        ours, theirs = _per_thousand(best["ours", kind]), _per_thousand(best[other, kind])
        return Figure(
            f"{load.label}, {kind} lengths: CPU for 1,000 tokens",
            "s",
            ours,
            baseline=theirs,
            against=words,
            goal=(theirs / goal, None),
        )

    return [
        figure("mixed", "static", "static batches", 1.5),
        figure("mixed", "sorted", "batches sorted by length", 1.2),
        figure("mixed", "continuous", "transformers' continuous batching", 1.2),
        figure("equal", "static", "one static batch after another", 0.95),
        figure("equal", "continuous", "transformers' continuous batching", 0.95),
    ]


def _notes(load: Load, best: dict[tuple[str, str], Took]) -> Sequence[str]:
    words = ", ".join(
        f"{name} {kind} {took.tokens / took.wall:.0f} (CPU {took.tokens / took.cpu:.0f})"
        for (name, kind), took in best.items()
    )
    shape = (
        f"{load.label}: {load.mixed} requests of {load.shortest} to {load.longest} tokens, "
        f"{load.equal} of equal length, prompts of {load.prompt}, {load.dtype}, 32 in flight, one thread"
    )
    return [shape, f"{load.label}, tokens a second by the clock (and of CPU time): {words}"]
