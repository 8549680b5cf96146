"""Which tests run where, and what each tier may cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS = Path("tests")

BUDGETS = {
    "unit": 240,
    "chart": 60,
    "api": 210,
    "scale": 90,
    "contract": 720,
    "engine": 420,
    "gpu": 40,
    "cluster": 1080,
}
"""Seconds of each tier while both lanes run, in the order in which a lane runs them."""

WITH_CLUSTERS = ("chart", "api", "scale", "cluster")
"""The tiers of the first lane: what needs a cluster or an API server. The engines have the other.

The real nodes come last: what failed on them is tried again there, so they outlive their tests."""


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
    engines = [tier for tier in _tiers() if tier not in WITH_CLUSTERS]
    for name, tiers in (("cluster", WITH_CLUSTERS), ("rest", engines)):
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
