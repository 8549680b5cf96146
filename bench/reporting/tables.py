"""A result as a table of Markdown: for a terminal, and for its section of docs/benchmarks.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from bench import ROOT

from .conditions import Conditions
from .figures import ROUNDS_FOR_A_VERDICT, Figure, Result, Seen, Verdict

PAGE = ROOT / "docs" / "benchmarks.md"
HEAD = ("", "median", "min to max", "p99", "n", "unit", "baseline", "ratio", "goal")
LEFT = ("", "unit", "baseline", "goal")
"""Columns of words; the others hold numbers."""


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
