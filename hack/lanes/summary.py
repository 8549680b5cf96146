"""The end of `make test`: what failed, what was slow, what each tier cost, and one line."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .following import Result
from .lane import BUDGETS, tier_of
from .retrying import MAX_FLAKY, LaneRun

SLOWEST = 25


@dataclass(frozen=True, slots=True)
class Summary:
    """What all lanes did. `checks` says of each target run beside them whether it passed."""

    lanes: Mapping[str, LaneRun]
    checks: Mapping[str, bool]
    seconds: float
    chosen: bool
    """Whether the command line chose tests, so that a lane may have none."""

    @property
    def results(self) -> list[Result]:
        """The last outcome of each test."""
        return [result for lane in self.lanes.values() for result in lane.results]

    @property
    def flaky(self) -> list[Result]:
        """First outcomes of the tests that passed at the second try."""
        return [result for lane in self.lanes.values() for result in lane.flaky]

    @property
    def problems(self) -> list[str]:
        """Everything but failed tests that fails the run."""
        found = []
        some = any(lane.first.collected for lane in self.lanes.values())
        for name, lane in self.lanes.items():
            if problem := lane.problem(may_be_empty=self.chosen and some):
                found.append(f"lane {name}: {problem}")
        if not self.lanes:
            found.append("no lane has the tests that were asked for")
        if len(self.flaky) > MAX_FLAKY:
            found.append(f"{len(self.flaky)} tests are flaky, at most {MAX_FLAKY} may be")
        return found + [
            f"`make {name}` failed" for name, passed in self.checks.items() if not passed
        ]

    @property
    def failed(self) -> list[str]:
        """Tests that failed or never ended, and files that can't be collected."""
        found = [r.test for r in self.results if r.outcome in ("failed", "unfinished")]
        return found + [file for lane in self.lanes.values() for file in lane.first.broken]

    @property
    def totals(self) -> str:
        """`N passed, N failed, N skipped`."""
        counts = Counter(result.outcome for result in self.results)
        return f"{counts['passed']} passed, {len(self.failed)} failed, {counts['skipped']} skipped"

    @property
    def succeeded(self) -> bool:
        """Whether everything is as it must be."""
        return not self.problems and not self.failed

    def lines(self) -> Iterator[str]:
        """Yield what is printed."""
        yield from self._slowest()
        yield from self._tiers()
        for name, lane in self.lanes.items():
            seconds = sum(result.seconds for result in lane.results)
            yield f"lane {name:<10} {seconds:6.0f}"
        for result in self.flaky:
            yield _title("FLAKY")
            yield f"{result.test}: failed, then passed when run again. The failure:"
            yield result.text.rstrip()
        if self.failed:
            yield _title("failed")
            yield from self.failed
        if self.problems:
            yield _title("the run fails")
            yield from self.problems
        hours, minutes = divmod(int(self.seconds) // 60, 60)
        clock = f"{hours}:{minutes:02}:{int(self.seconds) % 60:02}"
        yield f"{self.totals} in {self.seconds:.2f}s ({clock})"

    @property
    def table(self) -> str:
        """Every test with its seconds, a line each."""
        return "".join(f"{r.seconds:.2f}\t{r.outcome}\t{r.test}\n" for r in self.results)

    def _slowest(self) -> Iterator[str]:
        yield _title(f"the {SLOWEST} slowest tests")
        for result in sorted(self.results, key=lambda r: -r.seconds)[:SLOWEST]:
            yield f"{result.seconds:7.1f} s  {result.test}"

    def _tiers(self) -> Iterator[str]:
        yield _title("seconds of each tier and its budget")
        used: defaultdict[str, float] = defaultdict(float)
        for result in self.results:
            used[tier_of(result.test)] += result.seconds
        for tier, seconds in sorted(used.items(), key=lambda item: -item[1]):
            budget = BUDGETS.get(tier)
            of = f"of {budget:5}" if budget else "(it has no budget)"
            over = f"  OVER by {seconds - budget:.0f} s" if budget and seconds > budget else ""
            yield f"{tier:<10} {seconds:6.0f} {of}{over}"


def _title(text: str) -> str:
    return f"{f' {text} ':=^80}"
