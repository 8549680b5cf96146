"""One lane of `make test`: pytest in a process of its own, and the lines printed about it.

    python -P hack/lane_run.py DESCRIPTOR [argument of pytest]...

is that process: pytest, which writes a line of JSON per event to a descriptor. Stdout and stderr stay
pytest's. Events: `collected` (how many tests), `broken` (a file that can't be collected), `start` of a
test, `phase` (its setup, call or teardown has ended). A process that is killed reports nothing more, so
its last `start` names the test.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # Only the process of a lane needs it; the one that starts the lanes need not load it.
    import pytest

SLOW_SECONDS = 10.0
"""A test that takes longer gets a line of its own, so that no lane is silent for long."""
STOP_SECONDS = 60.0
TESTS_FAILED, NOTHING_COLLECTED = 1, 5
"""Exit statuses of pytest."""
_printing = threading.Lock()


def print_lines(name: str, text: str) -> None:
    """Print lines that belong together, each after the lane's name."""
    with _printing:
        for line in text.rstrip("\n").split("\n"):
            print(f"{name:<8}| {line}".rstrip(), flush=True)


@dataclass(slots=True)
class Result:
    """How one test ended; `seconds` with setup and teardown."""

    test: str
    outcome: str = "unfinished"
    seconds: float = 0.0
    text: str = ""

    def add_phase(self, when: str, outcome: str, seconds: float, text: str) -> None:
        """Add a phase: a failure stays; a skip counts unless only the teardown skips."""
        self.seconds += seconds
        if outcome == "failed":
            self.text += f"{text}\n" if when == "call" else f"{text}\n(in {when})\n"
            self.outcome = "failed"
        elif self.outcome == "unfinished" and (outcome == "skipped" or when == "call"):
            self.outcome = outcome


class LaneRun:
    """One run of pytest in a process of its own; its output goes to a log."""

    def __init__(self, name: str, words: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self.name = name
        self.results: dict[str, Result] = {}
        self.broken: list[str] = []
        self.collected: int | None = None
        self.status = 0
        self._current = ""
        reading, writing = os.pipe()
        # With --last-failed a lane in which nothing failed has nothing to do.
        options = ("-o", f"cache_dir=.pytest_cache/{name}", "--last-failed-no-failures=none")
        with log.open("w") as output:
            # -P: the files next to this one are not modules of the tests.
            self._process = subprocess.Popen(
                [sys.executable, "-P", Path(__file__), str(writing), *words, *options],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=dict(env),
                pass_fds=[writing], start_new_session=True,
            )  # fmt: skip
        os.close(writing)
        self._events = os.fdopen(reading)

    def follow(self) -> None:
        """Read events until the process has ended, and print them."""
        with self._events:
            for line in self._events:
                if line.endswith("\n"):  # a process that is killed may leave half a line
                    self._take_event(json.loads(line))
        self._print_file()
        self.status = self._process.wait()

    def _take_event(self, event: Mapping[str, Any]) -> None:
        match event:
            case {"event": "collected", "count": count}:
                self.collected = count
            case {"event": "broken", "test": test, "text": text}:
                self.broken.append(test)
                print_lines(self.name, f"can't be collected: {test}\n{text}")
            case {"event": "start", "test": test}:
                if self._current.partition("::")[0] != test.partition("::")[0]:
                    self._print_file()
                self._current = test
                self.results[test] = Result(test)
            case {"test": test, "when": when, "outcome": outcome, "seconds": seconds, "text": text}:
                result = self.results[test]
                result.add_phase(when, outcome, seconds, text)
                if outcome == "failed":
                    print_lines(self.name, f"FAILED {test} ({when})\n{text}")
                elif when == "teardown" and result.seconds > SLOW_SECONDS:
                    print_lines(self.name, f"  {result.seconds:5.1f} s  {test}")

    def _print_file(self) -> None:
        """Print one line about the file that has just ended."""
        if file := self._current.partition("::")[0]:
            ended = [r for r in self.results.values() if r.test.partition("::")[0] == file]
            counts = sorted(Counter(result.outcome for result in ended).items())
            text = ", ".join(f"{count} {outcome}" for outcome, count in counts)
            seconds, place = sum(r.seconds for r in ended), f"{len(self.results)}/{self.collected}"
            print_lines(self.name, f"{file}: {text} in {seconds:.1f} s  [{place}]")

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results.values() if result.outcome == "failed"]

    def problem(self, *, may_be_empty: bool = False) -> str | None:
        """Return why this lane fails the run, failed tests aside."""
        if self.status == NOTHING_COLLECTED or self.collected == 0:
            return None if may_be_empty else "no test was collected"
        where = f"during or after {self._current}" if self._current else "before the first test"
        if self.status < 0:
            return f"signal {-self.status} ended it {where}"
        if self.broken:
            return f"pytest can't collect {', '.join(self.broken)}"
        if self.status not in (0, TESTS_FAILED):
            return f"pytest ended with status {self.status} {where}"
        ended = [r for r in self.results.values() if r.outcome != "unfinished"]
        if len(ended) != self.collected:
            return f"it ended early: {len(self.results)} of {self.collected} tests ran, {where}"
        return None

    def stop(self) -> None:
        """Interrupt it, so that it removes what it started; kill it if it does not end."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
            self._process.kill()


class EventWriter:
    """A plugin of pytest that writes the events."""

    def __init__(self, descriptor: int) -> None:
        # A process that a test starts must not hold it open.
        os.set_inheritable(descriptor, False)
        self._file = os.fdopen(descriptor, "w", buffering=1)

    def _write_event(self, event: str, **facts: Any) -> None:
        self._file.write(json.dumps({"event": event, **facts}) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write_event("collected", count=len(session.items))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write_event("broken", test=report.nodeid, text=report.longreprtext)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write_event("start", test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        text = report.longreprtext if report.failed else ""
        facts = {"outcome": report.outcome, "seconds": report.duration, "text": text}
        self._write_event("phase", test=report.nodeid, when=report.when, **facts)


if __name__ == "__main__":
    import pytest

    # A shell starts background processes with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(pytest.main(sys.argv[2:], plugins=[EventWriter(int(sys.argv[1]))]))
