"""A lane from start to end: its tests, and once more those few that failed.

A retry must hide no defect. So a run is only tried again if it ran every test and pytest says that
tests failed (status 1), only what failed runs again, on the same cluster, and both outcomes are
told. Anything else (a crash, a broken file, no test) is final.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .following import Result, Run, say

MAX_FLAKY = 2
"""More tests than this that pass at the second try only fail the whole run."""

TESTS_FAILED, NOTHING_COLLECTED = 1, 5
"""Exit statuses of pytest."""

Start = Callable[[Sequence[str]], Run]
"""Runs pytest on these paths or node ids."""


@dataclass(frozen=True, slots=True)
class LaneRun:
    """What a lane did: all its tests, and the failed ones again."""

    first: Run
    again: Run | None = None

    @property
    def results(self) -> list[Result]:
        """The last outcome of each test."""
        second = self.again.results if self.again else {}
        return [second.get(test, result) for test, result in self.first.results.items()]

    @property
    def flaky(self) -> list[Result]:
        """First outcomes of the tests that failed and then passed."""
        second = self.again.results if self.again else {}
        return [r for r in self.first.failed if r.test in second and _passed(second[r.test])]

    def problem(self, *, may_be_empty: bool) -> str | None:
        """Why this lane fails the run, beside its failed tests."""
        for run in (self.first, self.again):
            if run is None:
                continue
            if run.status == NOTHING_COLLECTED or run.collected == 0:
                if run is self.first and may_be_empty:
                    continue
                return "no test was collected"
            if run.status not in (0, TESTS_FAILED):
                return _ended(run)
            if not run.is_whole:
                ran = len(run.results)
                return f"it ended early: {ran} of {run.collected} tests ran, {_where(run)}"
        return None


def run_lane(paths: Sequence[str], start: Start, *, retry: bool) -> LaneRun:
    """Run a lane's tests, and what failed once more if that is allowed."""
    first = start(paths)
    failed = first.failed
    if not (retry and first.status == TESTS_FAILED and first.is_whole and failed):
        return LaneRun(first)
    if len(failed) > MAX_FLAKY:
        say(first.name, f"{len(failed)} tests failed: more than {MAX_FLAKY} are not tried again")
        return LaneRun(first)
    say(first.name, f"tries again what failed: {', '.join(r.test for r in failed)}")
    return LaneRun(first, start([result.test for result in failed]))


def _passed(result: Result) -> bool:
    return result.outcome == "passed"


def _ended(run: Run) -> str:
    if run.status < 0:
        return f"signal {-run.status} ended it {_where(run)}"
    if run.broken:
        return f"pytest can't collect {', '.join(run.broken)}"
    return f"pytest ended with status {run.status} {_where(run)}"


def _where(run: Run) -> str:
    return f"during or after {run.under_way}" if run.under_way else "before the first test"
