"""pytest in a process of its own that tells, a line of JSON per event, what it does.

    python hack/lanes/session.py FD [argument of pytest]...

Stdout and stderr stay pytest's. The events on descriptor FD: `collected` (how many), `start` of
a test, `phase` (its setup, call or teardown has ended) and `broken` (a file that can't be
collected). What is killed says no more, so that the last `start` names its test.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import pytest


class Teller:
    """Writes the events."""

    def __init__(self, descriptor: int) -> None:
        # What the tests start must not hold it open.
        os.set_inheritable(descriptor, False)
        self._file = os.fdopen(descriptor, "w", buffering=1)

    def tell(self, event: str, **facts: Any) -> None:
        """Write one event."""
        self._file.write(json.dumps({"event": event, **facts}) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Tell how many tests there are."""
        self.tell("collected", count=len(session.items))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Tell of a file that is broken."""
        if report.failed:
            self.tell("broken", test=report.nodeid, text=report.longreprtext)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Tell which test begins."""
        self.tell("start", test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Tell how a phase of a test ended."""
        self.tell(
            "phase",
            test=report.nodeid,
            when=report.when,
            outcome=report.outcome,
            seconds=report.duration,
            text=report.longreprtext if report.failed else "",
        )


if __name__ == "__main__":
    # A shell starts what it runs in the background with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(pytest.main(sys.argv[2:], plugins=[Teller(int(sys.argv[1]))]))
