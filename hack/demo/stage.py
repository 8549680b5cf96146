"""Where the demo plays: a cluster, a way to run kubectl and helm, and a voice with a clock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

COMMAND_SECONDS = 300.0
BOLD, DIM, GREEN, OFF = (
    ("\033[1m", "\033[2m", "\033[32m", "\033[0m") if sys.stdout.isatty() else ("", "", "", "")
)


class DemoError(Exception):
    """The story can't go on; the text says why and what to do."""


class Stage:
    """Runs commands against one cluster and shows them.

    Args:
        environment: variables that lead kubectl and helm to the cluster.
        namespace: where the pool lives.
    """

    def __init__(self, environment: Mapping[str, str], namespace: str) -> None:
        self.environment = {**os.environ, **environment}
        self.namespace = namespace
        self.began = time.monotonic()

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Announce a step and print how long it took."""
        began = time.monotonic()
        print(f"\n{BOLD}{title}{OFF}", flush=True)
        yield
        took, total = time.monotonic() - began, time.monotonic() - self.began
        print(f"  {GREEN}done in {took:.1f} s{OFF}{DIM}   ({total:.0f} s since the start){OFF}")

    def say(self, text: str) -> None:
        for line in text.rstrip().splitlines():
            print(f"  {line}", flush=True)

    def run(self, *words: str | Path, text: str | None = None, show: bool = False) -> str:
        """Run a command and return its output."""
        if show:
            self.say(f"{DIM}$ {' '.join(str(w) for w in words)}{OFF}")
        done = subprocess.run(
            [str(w) for w in words],
            env=self.environment,
            input=text,
            text=True,
            capture_output=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        if done.returncode != 0:
            raise DemoError(f"{words[0]} {words[1]} failed: {done.stderr or done.stdout}")
        if show:
            self.say(done.stdout)
        return done.stdout

    def kubectl(self, *words: str, text: str | None = None, show: bool = False) -> str:
        return self.run("kubectl", "-n", self.namespace, *words, text=text, show=show)

    def get(self, kind: str, name: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.kubectl("get", kind, name, "-o", "json"))
        return answer

    def until(self, what: str, look: Callable[[], T], seconds: float) -> T:
        """Return the first truthy answer of `look`."""
        end = time.monotonic() + seconds
        while not (answer := look()):
            if time.monotonic() > end:
                raise DemoError(f"waited {seconds:.0f} s in vain for: {what}")
            time.sleep(0.5)  # most looks start kubectl, and workers need the cores
        return answer
