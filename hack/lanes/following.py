"""A lane's run: pytest's process, what it told, and what is printed of it meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SLOW_SECONDS = 10.0
"""A test that takes longer gets a line of its own, so that a lane is never silent for long."""
STOP_SECONDS = 60.0

_SESSION = Path(__file__).with_name("session.py")
_printing = threading.Lock()


def say(who: str, text: str) -> None:
    """Print lines that belong together, each with the lane's name before it."""
    with _printing:
        for line in text.rstrip("\n").split("\n"):
            print(f"{who:<8}| {line}".rstrip(), flush=True)


@dataclass(slots=True)
class Result:
    """What became of one test; `seconds` with setup and teardown."""

    test: str
    outcome: str = "unfinished"
    seconds: float = 0.0
    text: str = ""

    def take(self, when: str, outcome: str, seconds: float, text: str) -> None:
        """Add a phase: a failure stays, a skip of the test itself is none of its teardown's."""
        self.seconds += seconds
        if outcome == "failed":
            self.text += f"{text}\n" if when == "call" else f"{text}\n(in {when})\n"
            self.outcome = "failed"
        elif self.outcome == "unfinished" and (outcome == "skipped" or when == "call"):
            self.outcome = outcome


@dataclass(slots=True)
class Run:
    """One run of pytest. `status` is negative if a signal ended it."""

    name: str
    status: int = 0
    collected: int | None = None
    results: dict[str, Result] = field(default_factory=dict)
    under_way: str = ""
    broken: list[str] = field(default_factory=list)

    @property
    def failed(self) -> list[Result]:
        """Tests that failed, errors in setup and teardown included."""
        return [result for result in self.results.values() if result.outcome == "failed"]

    @property
    def is_whole(self) -> bool:
        """Whether every test that was collected came to an end."""
        ended = [r for r in self.results.values() if r.outcome != "unfinished"]
        return self.collected is not None and len(ended) == self.collected

    def take(self, event: Mapping[str, Any]) -> None:
        """Remember an event of the session."""
        match event:
            case {"event": "collected", "count": count}:
                self.collected = count
            case {"event": "broken", "test": test, "text": text}:
                self.broken.append(test)
                say(self.name, f"can't be collected: {test}\n{text}")
            case {"event": "start", "test": test}:
                self._start(test)
            case {"event": "phase", "test": test, "when": when, **facts}:
                self._phase(self.results[test], when, facts)

    def _start(self, test: str) -> None:
        if self.under_way and _file(test) != _file(self.under_way):
            self.tell_file()
        self.under_way = test
        self.results[test] = Result(test)

    def _phase(self, result: Result, when: str, facts: Mapping[str, Any]) -> None:
        result.take(when, facts["outcome"], facts["seconds"], facts["text"])
        if facts["outcome"] == "failed":
            say(self.name, f"FAILED {result.test} ({when})\n{facts['text']}")
        elif when == "teardown" and result.seconds > SLOW_SECONDS:
            say(self.name, f"  {result.seconds:5.1f} s  {result.test}")

    def tell_file(self) -> None:
        """Print one line about the file that has just ended."""
        if not self.under_way:
            return
        file = _file(self.under_way)
        here = [result for result in self.results.values() if _file(result.test) == file]
        counts = Counter(result.outcome for result in here)
        said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        seconds = sum(result.seconds for result in here)
        place = f"{len(self.results)}/{self.collected}"
        say(self.name, f"{file}: {said} in {seconds:.1f} s  [{place}]")


def _file(test: str) -> str:
    return test.partition("::")[0]


class Session:
    """pytest's process; its own output goes to a log."""

    def __init__(
        self, name: str, arguments: Sequence[str], log: Path, env: Mapping[str, str]
    ) -> None:
        self.run = Run(name)
        reading, writing = os.pipe()
        with log.open("a") as output:
            # -P: what lies beside session.py is no module of the tests.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_SESSION), str(writing), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                pass_fds=[writing],
                start_new_session=True,  # Ctrl-C is told to it once, by `stop`
            )
        os.close(writing)
        self._reading = reading

    def follow(self) -> Run:
        """Read until the process has ended."""
        with os.fdopen(self._reading) as lines:
            for line in lines:
                if line.endswith("\n"):  # a process that is killed may leave half a line
                    self.run.take(json.loads(line))
        self.run.tell_file()
        self.run.status = self._process.wait()
        return self.run

    def stop(self) -> None:
        """Interrupt it, so that it removes what it started; kill it if it does not end."""
        if self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
