"""Few samples are never dressed up: verdicts, percentiles and spreads of benchmarks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3]))

from bench import tables
from bench.figures import Figure, Goal, Options, Result, Seen, Verdict, figure, p99
from bench.tables import Conditions

QUIET = Conditions("python -m bench x", 0.02, 0.09, "2 cores", "2026-11-22")
HUNDRED = [float(i) for i in range(1, 101)]


def shown(*figures: Figure, under: Conditions = QUIET) -> str:
    return tables.markdown(Result("x", "X", figures), under)


def test_a_verdict_needs_a_goal_and_five_rounds_of_both_sides() -> None:
    def verdict(rounds: int, baseline: list[float] | float | None = None) -> Verdict | None:
        return figure("f", [1.0] * rounds, baseline=baseline, goal=Goal(2)).verdict

    assert [verdict(rounds) for rounds in (1, 4, 5)] == [Verdict.OPEN, Verdict.OPEN, Verdict.MET]
    assert verdict(30, [3.0] * 4) is Verdict.OPEN
    assert verdict(30, [3.0] * 5) is Verdict.MET
    assert verdict(30, 3.0) is Verdict.MET
    assert figure("f", [1.0] * 30).verdict is None


def test_a_goal_is_missed_by_the_median_or_by_the_tail() -> None:
    samples = [1.0] * 9 + [7.0]
    assert figure("f", samples, goal=Goal(0.9)).verdict is Verdict.MISSED
    assert figure("f", samples, goal=Goal(1, tail=6)).verdict is Verdict.MISSED
    assert figure("f", samples, goal=Goal(1, tail=7)).verdict is Verdict.MET


def test_below_five_rounds_neither_met_nor_missed_is_printed() -> None:
    page = shown(figure("f", [1.0] * 4, goal=Goal(2)), figure("g", 9.0, goal=Goal(2)))
    assert "met" not in page
    assert "MISSED" not in page
    for sentence in ("4 rounds, no verdict", "one round, no verdict", "a verdict needs 5"):
        assert sentence in page


def test_a_99th_percentile_takes_a_hundred_samples() -> None:
    with pytest.raises(ValueError, match="99 samples have no 99th percentile"):
        p99(HUNDRED[:99])
    assert p99(HUNDRED) == 99
    few, enough = (
        shown(figure("f", some, goal=Goal(60, tail=99))) for some in (HUNDRED[:99], HUNDRED)
    )
    assert "max ≤ 99: met" in few
    assert few.count("p99") == 0
    assert "p99 ≤ 99: met" in enough


def test_spread_and_count_stand_beside_each_median() -> None:
    page = shown(figure("f", [3.0, 1.0, 2.0], baseline=[8.0, 4.0], against="theirs"))
    assert "6 s (4 to 8, n 2): theirs" in page
    assert "| 2 | 1 to 3 | 3 | s |" in page
    page = shown(figure("f", 3.0, baseline=[6.0], against="theirs"))
    assert "| 3 | one sample | 1 | s | 6 s (n 1): theirs | 0.5x |" in page
    page = shown(Figure("passes", "s", Seen(971, 0.5, p99=0.9)))
    assert "| 0.500 |  | 0.900 | 971 | s |" in page, "quantiles without extremes have no spread"


@pytest.mark.parametrize(("before", "after"), [(0.11, 0.01), (0.01, 0.11)])
def test_others_at_either_end_mark_a_table_as_noisy(before: float, after: float) -> None:
    busy = Conditions("python -m bench x", before, after, "2 cores", "2026-11-22")
    assert "NOISY" in shown(under=busy)
    assert "NOISY" not in shown()
    said = f"others used {before:.0%} of them just before and {after:.0%} just after"
    assert said in shown(under=busy)


def test_the_share_of_others_is_what_runs_while_the_benchmark_sleeps() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            share = tables.others_share(quick=True)
        finally:
            busy.kill()
    # Others may come and go; a process that never sleeps takes at least half of what it would alone.
    assert share > min(0.5 / (os.cpu_count() or 1), 0.25)


@pytest.mark.parametrize(
    ("options", "command"),
    [
        (Options(), "python -m bench engines"),
        (Options(True, 2, 8), "python -m bench engines --quick --runs 2 --pools 8"),
    ],
)
def test_a_table_names_the_command_that_made_it(options: Options, command: str) -> None:
    assert tables.command(Result("engines", "E", ()), options) == command
    part = Result("engines", "E", (), part="hf")
    assert tables.command(part, options) == f"ROLLOUT_ENGINES=hf {command}"
    assert f"`{command}`" in tables.markdown(part, Conditions(command, 0.1, 0.1))
