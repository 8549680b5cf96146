#!/usr/bin/env python3
"""Run the tests in three lanes (pytest processes) side by side, and print one summary.

    make test                                      every test
    make test PYTEST_ARGS="-k commit"              of all lanes, those
    make test PYTEST_ARGS=tests/api                of one lane, those

If every test ran, none were chosen and at most four failed, those run once more, on the same cluster.
Each lane's own output is in the cache's logs/tests-<lane>.log, every test's time in logs/tests-seconds.tsv.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "cluster"))

from lane_run import LaneRun, Result, print_lines
from localkube import Cluster
from localkube.home import cache

TESTS = Path("tests")
BUDGETS = {
    "unit": 130, "process": 770, "chart": 90, "api": 155, "scale": 75, "contract": 1000,
    "engine": 875, "gpu": 10, "cluster": 850,
}  # fmt: skip
"""Seconds of each tier while all lanes run, 22 minutes of three lanes in all; the last lane runs its tiers in this order."""

LANES: dict[str, tuple[str, ...]] = {
    "cluster": (
        "scale/",
        "cluster/",
        "engine/test_client_verl",
        "engine/test_lent_",
        "process/client/",
        "process/tools/",
    ),
    "contract": (
        "contract/",
        "chart/",
        "api/",
        "process/operator/",
    ),
    "rest": (),
}
"""What runs in each lane, in this order: files below `tests/` that begin so; the last lane has the others.

They are about equally long, for which the first lane has some files of engines and the processes of clients and tools. Tests that
make networks on this machine share a lane. Engines start first in the second, then in the third.
"""
MAX_RETRIED = 4
"""Of some 7,400: on a busy machine several may miss a deadline in one run. Each is reported as flaky, with its failure."""
SLOWEST = 25
SHOWN_FAILURES, FAILURE_LINES = 3, 12


def is_path(word: str) -> bool:
    """Whether a word of pytest's command line names a file, folder or test below `tests/`."""
    return Path(word.partition("::")[0]).is_relative_to(TESTS) and Path(word) != TESTS


def tier_of(test: str) -> str:
    return Path(test.partition("::")[0]).relative_to(TESTS).parts[0]


def lane_of(path: str) -> str:
    inner = str(Path(path).relative_to(TESTS))
    return next((name for name, starts in LANES.items() if inner.startswith(starts)), [*LANES][-1])


def list_files(folder: Path) -> list[str]:
    """Return the files with tests in a folder, in the order in which their lanes run them."""

    def rank(path: str) -> tuple[int, int, str]:
        starts, tiers = LANES[lane_of(path)], list(BUDGETS)
        inner, tier = str(Path(path).relative_to(TESTS)), tier_of(path)
        first = next((i for i, start in enumerate(starts) if inner.startswith(start)), 0)
        return first, tiers.index(tier) if tier in tiers else len(tiers), path

    return sorted(map(str, folder.rglob("test_*.py")), key=rank)


def choose_lanes(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the paths of each lane, or those among these words of a command line.

    Raises:
        SystemExit: a lane has no tests at all, or a path does not exist.
    """
    everything = list_files(TESTS)
    for name in LANES:
        if name not in map(lane_of, everything):
            raise SystemExit(f"error: lane {name!r} has no tests: none of {LANES[name]} in tests/")
    chosen = []
    for word in filter(is_path, words):
        chosen += list_files(Path(word)) if Path(word).is_dir() else [word]
    lanes = {
        name: [path for path in chosen or everything if lane_of(path) == name] for name in LANES
    }
    return {name: paths for name, paths in lanes.items() if paths}


class Check:
    """`make TARGET` next to the lanes, less urgent than the tests."""

    def __init__(self, target: str, log: Path, env: dict[str, str]) -> None:
        self.target, self._log = target, log
        command = ["nice", "-n", "5", "make", "--no-print-directory", target]
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env,
                start_new_session=True,
            )  # fmt: skip

    def follow(self) -> bool:
        """Wait for the end; print a failure with the whole output."""
        passed = self._process.wait() == 0
        text = "passed" if passed else f"FAILED\n{self._log.read_text(errors='replace')}"
        print_lines(self.target, text)
        return passed

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()


class Tests:
    """One run of all that was chosen, from its start to its summary."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words
        self.logs = cache() / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        # A make that is started here does not belong to the make that started this.
        of_make = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
        # A cluster that is started under this name outlives its session, for the retry.
        self.env = {k: v for k, v in os.environ.items() if k not in of_make}
        self.env["ROLLOUT_TEST_RUN"] = str(os.getpid())
        self.began = time.monotonic()
        self.lanes: list[LaneRun] = []
        self.retry: list[LaneRun] = []
        """At most one."""
        self.failed_checks: list[str] = []
        self._checks: list[Check] = []

    def run(self, targets: Sequence[str]) -> None:
        """Run the lanes and these targets of the Makefile at the same time, then the retry."""
        options = [w for w in self.words if not is_path(w) and Path(w) != TESTS]
        lanes = choose_lanes(self.words)
        with ThreadPoolExecutor() as threads:
            try:
                for name, paths in lanes.items():
                    self.lanes.append(self._start_lane(name, [*paths, *options]))
                for target in targets:
                    self._checks.append(Check(target, self.logs / f"{target}.log", self.env))
                passed = [threads.submit(check.follow) for check in self._checks]
                for ended in [threads.submit(lane.follow) for lane in self.lanes]:
                    ended.result()
                self._run_again()
                self.failed_checks = [
                    check.target
                    for check, future in zip(self._checks, passed, strict=True)
                    if not future.result()
                ]
            except BaseException:
                running: list[LaneRun | Check] = [*self.lanes, *self.retry, *self._checks]
                for each in running:
                    each.stop()
                raise

    def _start_lane(self, name: str, words: Sequence[str]) -> LaneRun:
        return LaneRun(name, words, self.logs / f"tests-{name}.log", self.env)

    def _run_again(self) -> None:
        """Run a few failed tests once more; a crash, or a test that never ran, is final."""
        failed = [result.test for lane in self.lanes for result in lane.failed]
        if failed and not (self.words or any(lane.problem() for lane in self.lanes)):
            if len(failed) > MAX_RETRIED:
                print_lines("again", f"{len(failed)} tests failed: at most {MAX_RETRIED} run again")
                return
            self.retry.append(self._start_lane("again", failed))
            self.retry[0].follow()

    @property
    def results(self) -> dict[str, Result]:
        return {
            test: result
            for run in (*self.lanes, *self.retry)
            for test, result in run.results.items()
        }

    @property
    def flaky(self) -> list[Result]:
        """First outcomes of the tests that failed and then passed."""
        first = [result for lane in self.lanes for result in lane.failed]
        return [result for result in first if self.results[result.test].outcome == "passed"]

    @property
    def problems(self) -> list[str]:
        """What fails the run apart from failed tests."""
        may_be_empty = bool(self.words) and any(lane.collected for lane in self.lanes)
        found = {
            run.name: run.problem(may_be_empty=may_be_empty) for run in (*self.lanes, *self.retry)
        }
        out = [f"lane {name}: {problem}" for name, problem in found.items() if problem]
        out += [] if self.lanes else ["no lane has the tests that were asked for"]
        return out + [f"`make {target}` failed" for target in self.failed_checks]

    @property
    def failed(self) -> list[str]:
        """Tests that failed or never ended, and files that can't be collected."""
        bad = [r.test for r in self.results.values() if r.outcome in ("failed", "unfinished")]
        return bad + [file for lane in self.lanes for file in lane.broken]

    @property
    def totals(self) -> str:
        counts = Counter(result.outcome for result in self.results.values())
        return f"{counts['passed']} passed, {len(self.failed)} failed, {counts['skipped']} skipped"

    def summarize(self) -> Iterator[str]:
        slowest = sorted(self.results.values(), key=lambda result: -result.seconds)[:SLOWEST]
        yield f"{f' the {SLOWEST} slowest tests ':=^80}"
        yield from (f"{result.seconds:7.1f} s  {result.test}" for result in slowest)
        yield f"{' seconds of each tier and its budget ':=^80}"
        tiers: defaultdict[str, float] = defaultdict(float)
        for result in self.results.values():
            tiers[tier_of(result.test)] += result.seconds
        for tier, seconds in sorted(tiers.items(), key=lambda item: -item[1]):
            budget = BUDGETS.get(tier)
            of = f"of {budget:5}" if budget else "(it has no budget)"
            over = f"  OVER by {seconds - budget:.0f} s" if budget and seconds > budget else ""
            yield f"{tier:<10} {seconds:6.0f} {of}{over}"
        for lane in self.lanes:
            yield f"lane {lane.name:<10} {sum(r.seconds for r in lane.results.values()):6.0f}"
        for result in self.flaky:
            yield f"{' FLAKY ':=^80}"
            yield f"{result.test}: failed, then passed when run again. The failure:"
            yield result.text.rstrip()
        for title, lines in (("failed", self.failed), ("the run fails", self.problems)):
            yield from [f"{f' {title} ':=^80}", *lines] if lines else ()
        yield from self._failure_ends()
        seconds = time.monotonic() - self.began
        clock = f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"
        yield f"{self.totals} in {seconds:.2f}s ({clock})"

    def _failure_ends(self) -> Iterator[str]:
        """Yield the end of what the last failures said, since of a long output only the end may be kept."""
        for lane in (*self.lanes, *self.retry):
            for result in lane.failed[:SHOWN_FAILURES]:
                title = f" {result.test.rpartition('::')[2]} ({lane.name}) "
                yield f"{title:-^80}"
                yield from result.text.rstrip().split("\n")[-FAILURE_LINES:]

    def remove_clusters(self) -> None:
        for name in [] if self.env.get("ROLLOUT_KEEP_CLUSTER") else Cluster.names():
            if name.startswith("test-") and name.endswith(f"-{os.getpid()}"):
                Cluster.remove(name)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beside", action="append", default=[], metavar="TARGET",
                        help="make it next to the tests; its failure fails the run")  # fmt: skip
    parser.add_argument("words", nargs="*", help="arguments of pytest, after `--`")
    arguments = parser.parse_args()
    # As Ctrl-C, so that what runs is stopped and clusters are removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    tests = Tests(arguments.words)
    try:
        tests.run(arguments.beside)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        return 130
    finally:
        tests.remove_clusters()
    print("\n".join(tests.summarize()), flush=True)
    lines = (f"{r.seconds:.2f}\t{r.outcome}\t{r.test}\n" for r in tests.results.values())
    (tests.logs / "tests-seconds.tsv").write_text("".join(lines))
    (tests.logs / "tests-totals.txt").write_text(f"{tests.totals}\n")
    return 1 if tests.failed or tests.problems else 0


if __name__ == "__main__":
    sys.exit(main())
