"""Run the tests in three lanes side by side, and print one summary.

    make test                                      every test
    make test PYTEST_ARGS="-k commit"              of all lanes, those
    make test PYTEST_ARGS=tests/api                of one lane, those

What failed is tried once more if no tests were chosen and at most two failed; see `retrying`.
Each lane's own output is in the cache's logs/tests-<lane>.log, every test's time in logs/tests-seconds.tsv.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from localkube import Cluster
from localkube.home import cache

from .checks import Check
from .following import Run, Session
from .lane import TESTS, Lane, NoTestsError, is_path, lanes
from .retrying import LaneRun, run_lane
from .summary import Summary

_OF_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
"""Variables of the make that started this: a make that is started here is none of its children."""


class Tests:
    """Starts everything, and stops it if this program is stopped."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words
        self.logs = cache() / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        # A cluster that is started under this name outlives its session, for the retry.
        self.env = {name: value for name, value in os.environ.items() if name not in _OF_MAKE}
        self.env["ROLLOUT_TEST_RUN"] = str(os.getpid())
        self._running: list[Session | Check] = []

    def run(self, targets: Sequence[str]) -> Summary:
        """Run the lanes and, beside them, these targets of the Makefile."""
        began = time.monotonic()
        chosen = lanes(self.words)
        with ThreadPoolExecutor() as threads:
            try:
                tests = {lane.name: threads.submit(self._lane, lane) for lane in chosen}
                checks = {target: threads.submit(self._check, target) for target in targets}
                done = {name: future.result() for name, future in tests.items()}
                passed = {name: future.result() for name, future in checks.items()}
            except BaseException:
                self._stop()
                raise
        return Summary(done, passed, time.monotonic() - began, chosen=bool(self.words))

    def _lane(self, lane: Lane) -> LaneRun:
        log = self.logs / f"tests-{lane.name}.log"
        log.unlink(missing_ok=True)
        options = [word for word in self.words if not is_path(word) and Path(word) != TESTS]
        # With --last-failed a lane in which nothing failed has nothing to do.
        options += ["-o", f"cache_dir=.pytest_cache/{lane.name}", "--last-failed-no-failures=none"]

        def start(paths: Sequence[str]) -> Run:
            session = Session(lane.name, [*paths, *options], log, self.env)
            self._running.append(session)
            return session.follow()

        return run_lane(lane.paths, start, retry=not self.words)

    def _check(self, target: str) -> bool:
        check = Check(target, self.logs / f"{target}.log", self.env)
        self._running.append(check)
        return check.follow()

    def _stop(self) -> None:
        for each in self._running:
            each.stop()


def remove_clusters(env: Mapping[str, str]) -> None:
    """Remove the clusters that outlived their sessions."""
    if env.get("ROLLOUT_KEEP_CLUSTER"):
        return
    for name in Cluster.names():
        if name.startswith("test-") and name.endswith(f"-{os.getpid()}"):
            Cluster.remove(name)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beside", action="append", default=[], metavar="TARGET",
                        help="make it meanwhile; its failure fails the run")  # fmt: skip
    parser.add_argument("words", nargs="*", help="arguments of pytest, after `--`")
    arguments = parser.parse_args()
    # As Ctrl-C, so that what runs is stopped and clusters are removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    tests = Tests(arguments.words)
    try:
        summary = tests.run(arguments.beside)
    except NoTestsError as error:
        print(f"error: {error}", flush=True)
        return 1
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        return 130
    finally:
        remove_clusters(tests.env)
    print("\n".join(summary.lines()), flush=True)
    (tests.logs / "tests-seconds.tsv").write_text(summary.table)
    (tests.logs / "tests-totals.txt").write_text(f"{summary.totals}\n")
    return 0 if summary.succeeded else 1
