"""Which tests run where, and what each tier may cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS = Path("tests")

BUDGETS = {
    "unit": 180,
    "process": 700,
    "chart": 70,
    "api": 270,
    "scale": 110,
    "contract": 720,
    "engine": 630,
    "gpu": 40,
    "cluster": 1200,
}
"""Seconds of each tier while all lanes run; the last lane runs its tiers in this order."""

LANES: dict[str, tuple[str, ...]] = {
    "cluster": ("scale/", "cluster/"),
    "contract": ("contract/", "chart/", "api/", "process/operator/"),
    "rest": (),
}
"""The lanes and what runs in them, in this order: all files below `tests/` that begin so.

The last lane has what no other one has. They are about equally long. The first has what makes networks on this
machine, its real nodes last: what failed on them is tried again there, so they outlive their tests. Engines start
first in the second, then in the third: what the other one has meanwhile mostly waits, for deadlines and API servers.
"""


class NoTestsError(Exception):
    """The tests of a lane are not where they should be."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Tests that run one after the other, beside those of another lane."""

    name: str
    paths: tuple[str, ...]


def lanes(words: Sequence[str]) -> list[Lane]:
    """Return the lanes, or those that the paths among these words of a command line are in.

    Raises:
        NoTestsError: a lane has no tests at all.
    """
    everything = _files(TESTS)
    chosen = [
        path
        for word in words
        if is_path(word)
        for path in (_files(Path(word)) if Path(word).is_dir() else [word])
    ]
    found = []
    for name, entries in LANES.items():
        if name not in map(_lane_of, everything):
            raise NoTestsError(f"lane {name!r} has no tests: none of {list(entries)} in {TESTS}/")
        paths = tuple(path for path in chosen or everything if _lane_of(path) == name)
        if paths:
            found.append(Lane(name, paths))
    return found


def _files(folder: Path) -> list[str]:
    """Return the files with tests in a folder, those of one tier together, in the order in which they run."""
    order = [entry for entries in LANES.values() for entry in entries]
    tiers = list(BUDGETS)

    def rank(path: str) -> tuple[int, int, str]:
        tier = tier_of(path)
        return (
            order.index(_entry(path) or order[-1]),
            tiers.index(tier) if tier in tiers else len(tiers),
            path,
        )

    return sorted(map(str, folder.rglob("test_*.py")), key=rank)


def _entry(path: str) -> str | None:
    """Return what of `LANES` a path begins with; None: nothing."""
    inner = str(Path(path).relative_to(TESTS))
    entries = (entry for entries in LANES.values() for entry in entries)
    return next((entry for entry in entries if inner.startswith(entry)), None)


def _lane_of(path: str) -> str:
    """Return the lane in which a file or a test below `tests/` runs."""
    entry = _entry(path)
    return next((name for name, entries in LANES.items() if entry in entries), list(LANES)[-1])


def is_path(word: str) -> bool:
    """Whether a word of pytest's command line says which tests to run, by file or folder."""
    return Path(word.partition("::")[0]).is_relative_to(TESTS) and Path(word) != TESTS


def tier_of(test: str) -> str:
    """Return the tier of a path or node id below `tests/`."""
    return Path(test.partition("::")[0]).relative_to(TESTS).parts[0]
