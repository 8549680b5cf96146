"""Targets of the Makefile that run beside the lanes; their output is kept apart."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from .following import STOP_SECONDS, say


class Check:
    """One `make TARGET`, less urgent than the tests."""

    def __init__(self, target: str, log: Path, env: Mapping[str, str]) -> None:
        self.target, self.log = target, log
        self._began = time.monotonic()
        with log.open("w") as output:
            self._process = subprocess.Popen(
                ["nice", "-n", "5", "make", "--no-print-directory", target],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
            )

    def follow(self) -> bool:
        """Wait for its end and tell it; a failure with everything that it printed."""
        passed = self._process.wait() == 0
        took = time.monotonic() - self._began
        said = "passed" if passed else f"FAILED\n{self.log.read_text(errors='replace')}"
        say(self.target, f"{said} after {took:.0f} s" if passed else said)
        return passed

    def stop(self) -> None:
        """End it."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(STOP_SECONDS)
