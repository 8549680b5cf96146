"""The demo's stage: runs kubectl and helm against a cluster, and prints each step with its time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

COMMAND_SECONDS = 300.0
LOOK_SECONDS = 0.5
"""Between two looks: most start kubectl, and workers need the cores."""
BOLD, DIM, GREEN, OFF = (
    ("\033[1m", "\033[2m", "\033[32m", "\033[0m") if sys.stdout.isatty() else ("", "", "", "")
)


class DemoError(Exception):
    """The demo can't continue; the text gives the reason and the fix."""


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

    def apply(self, *items: Mapping[str, Any]) -> None:
        body = {"apiVersion": "v1", "kind": "List", "items": items}
        self.kubectl("apply", "-f", "-", text=json.dumps(body))

    def apply_files(self, name: str, *paths: Path) -> None:
        """Apply a ConfigMap of files, or of a folder's files."""
        files = [f"--from-file={path}" for path in paths]
        text = self.kubectl("create", "configmap", name, *files, "--dry-run=client", "-o", "json")
        self.kubectl("apply", "-f", "-", text=text)

    def apply_shown(self, manifest: Path) -> None:
        """Apply a manifest and print it without the comments at its top."""
        text = manifest.read_text()
        self.say(text[text.index("apiVersion") :])
        self.kubectl("apply", "-f", "-", text=text, show=True)

    def delete(self, *objects: tuple[str, str]) -> None:
        """Delete objects, (kind, name), if they exist."""
        for kind, name in objects:
            self.kubectl("delete", kind, name, "--ignore-not-found", "--timeout=120s")

    def pool_status(self, name: str) -> dict[str, Any]:
        """Return a pool's status for its newest spec, empty while it is about an older one."""
        pool = self.get("rr", name)
        status: dict[str, Any] = pool.get("status") or {}
        current = status.get("observedGeneration") == pool["metadata"]["generation"]
        return status if current else {}

    def watch_pool(self, name: str, what: str, look: Callable[[], T], seconds: float) -> T:
        """Wait as `until` does, and print each new sentence of the pool's status."""
        printed: set[str] = set()

        def watch() -> T:
            message = self.pool_status(name).get("message", "")
            if message and message not in printed:
                printed.add(message)
                self.say(f"· {message}")
            return look()

        return self.until(what, watch, seconds)

    def log_lines(self, name: str, seconds: float, prefix: str = "") -> Iterator[str]:
        """Print and yield lines of a pod's or Job's log, those with `prefix`, until it ends or time is over."""
        words = ["kubectl", "-n", self.namespace, "logs", "-f", name]
        with subprocess.Popen(
            words, env=self.environment, stdout=subprocess.PIPE, text=True
        ) as reader:
            late = threading.Timer(seconds, reader.kill)
            late.start()
            try:
                for line in reader.stdout or ():
                    if line.startswith(prefix):
                        print(line, end="", flush=True)
                        yield line
            finally:
                late.cancel()
                reader.kill()

    def get(self, kind: str, name: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.kubectl("get", kind, name, "-o", "json"))
        return answer

    def until(self, what: str, look: Callable[[], T], seconds: float) -> T:
        """Return the first truthy answer of `look`."""
        end = time.monotonic() + seconds
        while not (answer := look()):
            if time.monotonic() > end:
                raise DemoError(f"waited {seconds:.0f} s in vain for: {what}")
            time.sleep(LOOK_SECONDS)
        return answer
