"""Runs pytest and reports, a line of JSON per event on a descriptor, what it does.

    python -P hack/pytest_events.py DESCRIPTOR [argument of pytest]...

Stdout and stderr stay pytest's. Events: `collected` (how many tests), `broken` (a file that can't be
collected), `start` of a test, `phase` (its setup, call or teardown has ended). A process that is
killed reports nothing more, so its last `start` names the test.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import pytest


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
    # A shell starts background processes with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(pytest.main(sys.argv[2:], plugins=[EventWriter(int(sys.argv[1]))]))
