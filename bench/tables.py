"""A result as a table of Markdown, for a terminal and for its section of docs/benchmarks.md, with the conditions of its measurement.

These are the exact command, the machine, and what others did to it. The benchmark's own load says nothing against it, so
others are measured when nothing of the benchmark runs: just before it starts, and when its processes have ended.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from bench import ROOT
from bench.figures import ROUNDS_FOR_A_VERDICT, Figure, Options, Result, Seen, Verdict
from tests.support.engine.engine_kinds import KINDS

QUIET = 0.1
"""A machine of which others use more than this share is noisy."""

LOOKS, LOOK_SECONDS, QUICK_LOOK_SECONDS = 5, 1.0, 0.1
"""The least of so many looks counts: what a benchmark has just ended still cleans up."""

PAGE = ROOT / "docs" / "benchmarks.md"
HEAD = ("", "median", "min to max", "p99", "n", "unit", "baseline", "ratio", "goal")
LEFT = ("", "unit", "baseline", "goal")
"""Columns of words; the others hold numbers."""


def others_share(*, quick: bool = False) -> float:
    """Return the share of all cores, 0 to 1, that is in use while this process sleeps."""
    seconds = QUICK_LOOK_SECONDS if quick else LOOK_SECONDS
    return min(_busy_share(seconds) for _ in range(LOOKS))


def _busy_share(seconds: float) -> float:
    before = _ticks()
    time.sleep(seconds)
    busy, idle = (now - then for now, then in zip(_ticks(), before, strict=True))
    return busy / (busy + idle)


def _ticks() -> tuple[int, int]:
    """Return the busy and idle ticks of all cores since the machine started (proc(5))."""
    found = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = found[3] + found[4]
    return sum(found) - idle, idle


def machine() -> str:
    """Describe the machine in words that do not name it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores, {memory:.0f} GiB, Linux {platform.release().split('-')[0]}"


def command(result: Result, options: Options) -> str:
    part = f"ROLLOUT_ENGINES={result.part} " if result.part in KINDS else ""
    return f"{part}python -m bench {result.name} {options.words()}".rstrip()


def today() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d")


@dataclass(frozen=True, slots=True)
class Conditions:
    """The conditions of a measurement, with others' share of the machine just before and just after it."""

    command: str
    others_before: float
    others_after: float
    machine: str = field(default_factory=machine)
    date: str = field(default_factory=today)

    @property
    def noisy(self) -> bool:
        return max(self.others_before, self.others_after) > QUIET

    def sentences(self) -> list[str]:
        shares = (
            f"{self.others_before:.0%} of them just before and {self.others_after:.0%} just after"
        )
        said = [f"Measured {self.date} on {self.machine}; others used {shares}."]
        if self.noisy:
            said.append(
                f"NOISY: others used more than {QUIET:.0%} of the cores."
                " Trust the ratios more than the absolute figures, and neither to the last digit."
            )
        return said


def markdown(result: Result, conditions: Conditions) -> str:
    head, rows = _table(result)
    rules = ["---" if name in LEFT else "---:" for name in head]
    lines = [f"## {result.title}", "", f"`{conditions.command}`", ""]
    lines += ["| " + " | ".join(head) + " |", "|" + "|".join(rules) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    lines += ["", *(f"- {note}" for note in _notes(result)), ""]
    lines += ["\n".join(conditions.sentences()), ""]
    return "\n".join(lines)


def _table(result: Result) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return head and rows, without an empty column of 99th percentiles."""
    rows = [_cells(each) for each in result.figures]
    shown = [i for i, name in enumerate(HEAD) if name != "p99" or any(row[i] for row in rows)]
    return tuple(HEAD[i] for i in shown), [tuple(row[i] for i in shown) for row in rows]


def _notes(result: Result) -> Sequence[str]:
    """Return the notes, with a remark if rounds were too few for a verdict."""
    fewest = [f.rounds for f in result.figures if f.verdict is Verdict.OPEN]
    if not fewest:
        return result.notes
    need = f"a verdict needs {ROUNDS_FOR_A_VERDICT} of both sides: `--runs {ROUNDS_FOR_A_VERDICT}`"
    return [*result.notes, f"No verdict on goals measured in {_rounds(min(fewest))}; {need}."]


def _cells(f: Figure) -> tuple[str, ...]:
    tail = "" if f.seen.p99 is None else number(f.seen.p99)
    ratio = "" if f.ratio is None else f"{f.ratio:.2g}x"
    return (
        *(f.label, number(f.seen.median), _spread(f.seen), tail, str(f.seen.count), f.unit),
        *(_baseline(f), ratio, _goal(f)),
    )


def _spread(seen: Seen) -> str:
    if seen.count == 1:
        return "one sample"
    if seen.least is None or seen.most is None:
        return ""
    return f"{number(seen.least)} to {number(seen.most)}"


def _baseline(f: Figure) -> str:
    if f.baseline is None:
        return ""
    if not isinstance(f.baseline, Seen):
        return f"{number(f.baseline)} {f.unit}: {f.against}"
    spread = f"{_spread(f.baseline)}, " if f.baseline.count > 1 and _spread(f.baseline) else ""
    return f"{number(f.baseline.median)} {f.unit} ({spread}n {f.baseline.count}): {f.against}"


def _goal(f: Figure) -> str:
    if f.goal is None:
        return ""
    bounds = f"≤ {number(f.goal.median)}"
    if f.goal.tail is not None:
        bounds += f", {'max' if f.seen.p99 is None else 'p99'} ≤ {number(f.goal.tail)}"
    if f.verdict is Verdict.OPEN:
        return f"{bounds}: {_rounds(f.rounds)}, no verdict"
    return f"{bounds}: {f.verdict}"


def _rounds(count: int) -> str:
    return "one round" if count == 1 else f"{count} rounds"


def number(value: float) -> str:
    """Return a number with three significant digits, or whole."""
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    if abs(value) < 0.01:
        return f"{value:.2g}"
    return f"{value:.3f}" if abs(value) < 1 else f"{value:.{2 if abs(value) < 100 else 0}f}"


def write_section(name: str, section: str, path: Path = PAGE) -> None:
    """Replace the section of this name in the page, or append it if there is none.

    Only what stands between the section's two comments is replaced: notes before and after stay.

    Raises:
        ValueError: one of the comments is missing or doubled: what was written by hand could be lost.
    """
    begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->\n"
    page, block = path.read_text(), f"{begin}{section.strip()}\n{end}"
    if begin not in page and end not in page:
        path.write_text(f"{page.rstrip()}\n\n{block}")
        return
    before, *rest = re.split(f"{re.escape(begin)}|{re.escape(end)}", page)
    if len(rest) != 2 or not page.startswith(before + begin):
        raise ValueError(
            f"{path.name} needs one {begin.strip()!r} and one {end.strip()!r} after it"
        )
    path.write_text(before + block + rest[1])
