"""A conversation of 1,024 turns, against verl's request and verl's token builder.

Every way runs in a process of its own (`baselines/conversations.py`), in one environment that holds
verl 0.9.1 beside this project's torch and transformers, with the same tokenizer, template and turns.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench import ROOT
from bench.baselines.verl_environment import environment
from bench.options import Options
from bench.reporting.figures import Figure, Goal, Result, figure

PATIENCE = 1800
CHECKED, COMPARED = 17, 9
"""Turns of the sanity check: ours alone, and both (verl's takes the square of the length)."""
PIXELS = 16 * (224 // 14) * (308 // 14) * (2 * 3 * 14 * 14) * 4
"""Bytes of 16 pictures: patches of 14 x 14 in three colours, taken twice, as float32."""
NOTES = (
    "Times are CPU times of one process each. A turn is: the ids for the engine, an answer of 241"
    " sampled ids, a tool's result of 240 words. Ours also keeps logprobs and weights.",
    "Memory is the peak resident size above that of the prepared turns.",
    "verl's request ran without its sanity check except in the last row, as that grows with the"
    " square of the text. Its template was given plain dicts, and its processor's"
    " `mm_token_type_ids` were taken away: with them it fails.",
    "The libraries alone: a process that tokenizes every result once and has transformers make the"
    " pictures' pixels, which it keeps, as both requests must. A goal below their time, or below the"
    " pixels' bytes, is out of anybody's reach.",
)

NAMES = {
    "libraries": "the libraries alone",
    "verl-request": "verl's request",
    "verl-builder": "verl's token builder",
}

Measured = Sequence[dict[str, float]]
"""What each round of one way measured."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to keep a conversation, how many turns of what kind, and what its rounds measured."""

    name: str
    turns: int
    kind: str
    rounds: Measured

    def samples(self, key: str) -> list[float]:
        """Return one quantity of every round."""
        return [each[key] for each in self.rounds]

    def growth(self) -> list[float]:
        """Return a turn of the last tenth over one of the first, of every round."""
        return [each["last"] / each["first"] for each in self.rounds]

    @property
    def size(self) -> str:
        """How many tokens it came to."""
        return f"{self.rounds[0]['tokens'] / 1000:.3g}k tokens"


def run(options: Options) -> Result:
    """Measure every way; rounds of all ways take turns."""
    turns, rounds = (128 if options.quick else 1024), options.count(5, 1)
    wanted = [
        *((way, turns, "TEXT") for way in ("ours", "libraries", "verl-request", "verl-builder")),
        *((way, turns // 4, "MEDIA") for way in ("ours", "libraries", "verl-request")),
        ("ours", CHECKED, "SANITY"),
        *((way, COMPARED, "SANITY") for way in ("ours", "verl-request")),
    ]
    python = environment()
    found: list[list[dict[str, float]]] = [[] for _ in wanted]
    for _ in range(rounds):
        for each, samples in zip(wanted, found, strict=True):
            samples.append(_measure(python, *each))
    ways = [Way(*each, samples) for each, samples in zip(wanted, found, strict=True)]
    figures = [*_text(*ways[:4]), *_media(*ways[4:7]), *_sanity(*ways[7:])]
    return Result("conversation", "Multi-turn conversations", figures, NOTES)


def _text(ours: Way, libraries: Way, request: Way, builder: Way) -> list[Figure]:
    what = f"{ours.turns:,} turns, {ours.size}"
    return [
        *_time(what, ours, request, libraries),
        _against(f"{what}: in all", "total", "s", ours, builder, 1),
        _flat(what, ours, request),
        _against(f"{what}: memory", "memory", "MiB", ours, request, 3),
        _against(f"{what}: memory", "memory", "MiB", ours, builder, 1),
    ]


def _media(ours: Way, libraries: Way, request: Way) -> list[Figure]:
    what = f"{ours.turns} turns with 16 pictures, {ours.size}"
    memory = f"{what}: memory"
    return [
        *_time(what, ours, request, libraries),
        _flat(what, ours, request),
        _against(memory, "memory", "MiB", ours, request, 3),
        _against(memory, "memory", "MiB", ours, libraries),
        figure(
            memory, ours.samples("memory"), "MiB",
            baseline=PIXELS / 2**20, against="the pixels' bytes",
        ),
    ]  # fmt: skip


def _sanity(ours: Way, short: Way, request: Way) -> list[Figure]:
    label = "sanity check of {}"
    return [
        figure(label.format(ours.size), ours.samples("end"), goal=Goal(0.1)),
        _against(label.format(short.size), "end", "s", short, request, 1),
    ]


def _time(what: str, ours: Way, request: Way, libraries: Way) -> list[Figure]:
    return [
        _against(f"{what}: in all", "total", "s", ours, request, 20),
        _against(f"{what}: in all", "total", "s", ours, libraries),
    ]


def _flat(what: str, ours: Way, request: Way) -> Figure:
    return figure(
        f"{what}: a turn of the last tenth over one of the first", ours.growth(), "x",
        baseline=request.growth(), against=NAMES[request.name], goal=Goal(1.2),
    )  # fmt: skip


def _against(
    label: str, key: str, unit: str, ours: Way, other: Way, times: float | None = None
) -> Figure:
    """Compare one quantity; the goal is to be so many times better."""
    theirs = other.samples(key)
    goal = None if times is None else Goal(median(theirs) / times)
    name = NAMES[other.name]
    return figure(label, ours.samples(key), unit, baseline=theirs, against=name, goal=goal)


def _measure(python: Path, way: str, turns: int, kind: str) -> dict[str, float]:
    """Run one way to its end and return what it measured of itself."""
    print(f"  {way}, {turns} turns, {kind.lower()} …", flush=True)
    done = subprocess.run(
        [python, "-m", "bench.baselines.conversations", way, str(turns), kind],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE,
        env={
            **os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false", "VERL_LOGGING_LEVEL": "ERROR",
        },
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{way} failed:\n{done.stderr[-2000:]}")
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured
