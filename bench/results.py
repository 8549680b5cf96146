"""What a benchmark hands back, and how it is shown: text, Markdown, JSON."""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Options:
    """How much to measure. `runs`: None means the benchmark's own choice. `dtype`: see --dtype."""

    quick: bool = False
    runs: int | None = None
    dtype: str = "float32"

    def count(self, whole: int, quick: int) -> int:
        """Return how often to repeat: as asked, else `whole`, or `quick` with --quick."""
        return self.runs or (quick if self.quick else whole)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity: a median with the 99th percentile, or a single value.

    Attributes:
        label: What was measured.
        unit: Of all its values.
        p50: The median, or the single value.
        p99: None for a single value.
        baseline: Median of what it is compared with.
        against: What that is.
        goal: (p50, p99) that the project promises; None: no promise.
    """

    label: str
    unit: str
    p50: float
    p99: float | None = None
    baseline: float | None = None
    against: str = ""
    goal: tuple[float | None, float | None] = (None, None)

    @property
    def ratio(self) -> float | None:
        """Times the baseline."""
        return self.p50 / self.baseline if self.baseline else None

    @property
    def met(self) -> bool | None:
        """Whether the goals were reached; None: there are none."""
        pairs = [
            (v, g) for v, g in zip((self.p50, self.p99), self.goal, strict=True) if g is not None
        ]
        return all(v is not None and v <= g for v, g in pairs) if pairs else None


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of one benchmark; `notes` are sentences that belong to the figures.

    `part`: the engine, where each has a table of its own and can be measured alone.
    """

    name: str
    title: str
    figures: Sequence[Figure]
    notes: Sequence[str] = ()
    part: str = ""
    load_before: float = field(default_factory=lambda: os.getloadavg()[0])

    @property
    def command(self) -> str:
        """What measures it."""
        return f"{f'ROLLOUT_ENGINES={self.part} ' if self.part else ''}python -m bench {self.name}"

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        return dataclasses.asdict(self)


def quantiles(samples: Sequence[float]) -> tuple[float, float]:
    """Return median and 99th percentile (nearest rank: of fewer than 100, the largest)."""
    ordered = sorted(samples)
    return statistics.median(ordered), ordered[math.ceil(0.99 * len(ordered)) - 1]


def figure(label: str, samples: Sequence[float], unit: str = "s", **more: Any) -> Figure:
    """Return the figure of many samples."""
    p50, p99 = quantiles(samples)
    return Figure(label, unit, p50, p99, **more)


_HEAD = ("", "p50", "p99", "unit", "baseline", "ratio", "goal")


def markdown(result: Result) -> str:
    """Return a section of docs/benchmarks.md."""
    lines = [f"## {result.title}", "", f"`{result.command}`", ""]
    lines += ["| " + " | ".join(_HEAD) + " |", "|---|---:|---:|---|---|---:|---|"]
    lines += ["| " + " | ".join(_cells(f)) + " |" for f in result.figures]
    lines += ["", *(f"- {note}" for note in result.notes), ""]
    return "\n".join(lines)


def text(result: Result) -> str:
    """Return it for a terminal."""
    rows = [_HEAD, *(_cells(f) for f in result.figures)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    lines = [f"\n{result.title}"]
    for row in rows:
        cells = [c.ljust(w) if i in (0, 3, 4, 6) else c.rjust(w)
                 for i, (c, w) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        lines.append("  " + "  ".join(cells).rstrip())
    lines += [f"  - {note}" for note in result.notes]
    return "\n".join(lines)


def _cells(f: Figure) -> tuple[str, ...]:
    ratio = "" if f.ratio is None else f"{f.ratio:.2g}x"
    against = "" if f.baseline is None else f"{_number(f.baseline)} {f.unit}: {f.against}"
    p99 = "" if f.p99 is None else _number(f.p99)
    return f.label, _number(f.p50), p99, f.unit, against, ratio, _goal(f)


def _goal(f: Figure) -> str:
    if f.met is None:
        return ""
    wanted = " / ".join(_number(g) for g in f.goal if g is not None)
    return f"≤ {wanted}: {'met' if f.met else 'MISSED'}"


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return (
        f"{value:.3f}" if abs(value) < 1 else f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
    )
