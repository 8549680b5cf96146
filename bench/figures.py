"""What a benchmark is asked for, and its result: medians with their spread, a baseline, a goal, and a verdict.

Few samples prove little: fewer than five rounds get no verdict, fewer than a hundred samples no 99th
percentile.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

ROUNDS_FOR_A_VERDICT = 5
SAMPLES_FOR_P99 = 100

Samples = Sequence[float] | float


@dataclass(frozen=True, slots=True)
class Options:
    """What a benchmark is asked for.

    `runs`: rounds of everything that is repeated; None leaves it to the benchmark. `pools`, `replicas`: of
    `reconcile`; None leaves them to it.
    """

    quick: bool = False
    runs: int | None = None
    pools: int | None = None
    replicas: int | None = None

    def count(self, whole: int, quick: int) -> int:
        """Return how often to repeat: as asked, else `whole`, or `quick` with --quick."""
        return self.runs or (quick if self.quick else whole)

    def words(self) -> str:
        """Return the flags that ask for this; empty for the defaults."""
        numbers = {"runs": self.runs, "pools": self.pools, "replicas": self.replicas}
        given = (f"--{name} {value}" for name, value in numbers.items() if value is not None)
        return " ".join((*(["--quick"] if self.quick else ()), *given))


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of one quantity.

    `least` and `most` are None where only quantiles are known, `p99` where there are fewer than
    100 samples.
    """

    count: int
    median: float
    least: float | None = None
    most: float | None = None
    p99: float | None = None

    @property
    def tail(self) -> float | None:
        """The 99th percentile, or the maximum of samples that are too few for one."""
        return self.most if self.p99 is None else self.p99


@dataclass(frozen=True, slots=True)
class Goal:
    """What the project promises: no more than this; `tail` is the bound of `Seen.tail`."""

    median: float
    tail: float | None = None


class Verdict(StrEnum):
    """Whether a goal was reached."""

    MET = "met"
    MISSED = "MISSED"
    OPEN = "no verdict"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity.

    `baseline`: what it is compared with, measured (`Seen`) or known beforehand (a number);
    `against` says what that is.
    """

    label: str
    unit: str
    seen: Seen
    baseline: Seen | float | None = None
    against: str = ""
    goal: Goal | None = None

    @property
    def ratio(self) -> float | None:
        base = self.baseline.median if isinstance(self.baseline, Seen) else self.baseline
        return self.seen.median / base if base else None

    @property
    def rounds(self) -> int:
        """How many rounds the comparison has: the fewer of both sides."""
        if isinstance(self.baseline, Seen):
            return min(self.seen.count, self.baseline.count)
        return self.seen.count

    @property
    def verdict(self) -> Verdict | None:
        """Whether the goal was reached; None without a goal."""
        if self.goal is None:
            return None
        if self.rounds < ROUNDS_FOR_A_VERDICT:
            return Verdict.OPEN
        pairs = ((self.seen.median, self.goal.median), (self.seen.tail, self.goal.tail))
        kept = all(goal is None or (v is not None and v <= goal) for v, goal in pairs)
        return Verdict.MET if kept else Verdict.MISSED


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one benchmark; `notes` are sentences that belong to the figures.

    `part`: the engine, where each has a table of its own and can be measured alone; or which table it is.
    """

    name: str
    title: str
    figures: Sequence[Figure]
    notes: Sequence[str] = ()
    part: str = ""


def seen(samples: Samples) -> Seen:
    some = [samples] if isinstance(samples, float | int) else list(samples)
    tail = p99(some) if len(some) >= SAMPLES_FOR_P99 else None
    return Seen(len(some), statistics.median(some), min(some), max(some), tail)


def p99(samples: Sequence[float]) -> float:
    """Return the 99th percentile by nearest rank.

    Raises:
        ValueError: fewer than 100 samples, of which it would be the greatest.
    """
    if len(samples) < SAMPLES_FOR_P99:
        raise ValueError(f"{len(samples)} samples have no 99th percentile: show their maximum")
    return sorted(samples)[math.ceil(0.99 * len(samples)) - 1]


def figure(
    label: str,
    samples: Samples,
    unit: str = "s",
    *,
    baseline: Sequence[float] | Seen | float | None = None,
    against: str = "",
    goal: Goal | None = None,
) -> Figure:
    """Return the figure of samples; a baseline that is a sequence was measured, too."""
    if isinstance(baseline, Sequence):
        baseline = seen(baseline)
    return Figure(label, unit, seen(samples), baseline, against, goal)
