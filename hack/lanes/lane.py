"""Which tests run where, and what each tier may cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS = Path("tests")

BUDGETS = {
    "unit": 480,
    "chart": 70,
    "api": 240,
    "scale": 90,
    "contract": 720,
    "engine": 600,
    "gpu": 40,
    "cluster": 1200,
}
"""Seconds of each tier while all lanes run; the last lane runs its tiers in this order."""

LANES: dict[str, tuple[str, ...]] = {
    "cluster": ("scale", "cluster"),
    "contract": ("contract", "chart", "api"),
    "rest": (),
}
"""The lanes and their tiers, in the order in which they run; the last lane has all other tiers.

They are about equally long. The first has what makes networks on this machine, its real nodes last: what failed on
them is tried again there, so they outlive their tests. Engines start first in the second, then in the
third: what the other one has meanwhile mostly waits, for deadlines and API servers.
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
    chosen = [word for word in words if is_path(word)]
    found = []
    named = {tier for tiers in LANES.values() for tier in tiers}
    others = tuple(tier for tier in _tiers() if tier not in named)
    for name, tiers in ((name, LANES[name] or others) for name in LANES):
        folders = tuple(str(TESTS / tier) for tier in tiers if (TESTS / tier).is_dir())
        if not folders:
            raise NoTestsError(f"lane {name!r} has no tests: none of {list(tiers)} is in {TESTS}/")
        paths = tuple(path for path in chosen if tier_of(path) in tiers) if chosen else folders
        if paths:
            found.append(Lane(name, paths))
    return found


def is_path(word: str) -> bool:
    """Whether a word of pytest's command line says which tests to run, by file or folder."""
    return Path(word.partition("::")[0]).is_relative_to(TESTS) and Path(word) != TESTS


def tier_of(test: str) -> str:
    """Return the tier of a path or node id below `tests/`."""
    return Path(test.partition("::")[0]).relative_to(TESTS).parts[0]


def _tiers() -> list[str]:
    """Every folder with tests: a new one runs without being named here."""
    there = sorted(folder.name for folder in TESTS.glob("*/") if any(folder.rglob("test_*.py")))
    return [tier for tier in BUDGETS if tier in there] + [t for t in there if t not in BUDGETS]
