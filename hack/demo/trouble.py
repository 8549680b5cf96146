"""What happens to a pool while it is trained on: it grows, and one of its workers is killed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx

from demo.stage import Stage
from localkube.pods import process_in

IN_FLIGHT = re.compile(r"^rollout_worker_requests_in_flight(?:{.*})? ([0-9.e+]+)$", re.MULTILINE)


class Trouble:
    """Reads the trainer's lines and acts after some of its steps.

    Args:
        stage: with the cluster.
        pool: name of a pool with two replicas.
    """

    GROWS_AFTER, DIES_AFTER = 1, 4

    def __init__(self, stage: Stage, pool: str) -> None:
        self.stage, self.pool = stage, pool
        self.waiting: dict[int, Callable[[], None]] = {
            self.GROWS_AFTER: self.grow,
            self.DIES_AFTER: self.kill,
        }

    def saw(self, line: str) -> None:
        """Take a line of the trainer's log into account."""
        step = re.match(r"step +([0-9]+) ", line)
        if step and (act := self.waiting.pop(int(step[1]), None)):
            act()

    def grow(self) -> None:
        """Scale the pool up; the new worker joins when it has the weights."""
        self.stage.kubectl("scale", "rr", self.pool, "--replicas=3", show=True)

    def kill(self) -> None:
        """Kill -9 the first worker while it answers requests."""
        pod = self.stage.get("pod", f"{self.pool}-0-0")
        pid = process_in(pod["metadata"]["uid"], "rollout-worker")
        running = self.stage.until("the worker to be busy", lambda: self.running(pod), 60)
        os.kill(pid, signal.SIGKILL)
        self.stage.say(f"$ kill -9 {self.pool}-0-0, which had {running} requests in flight")

    def running(self, pod: dict[str, Any]) -> int:
        """Return how many requests a worker answers now."""
        with suppress(httpx.HTTPError):
            url = f"http://{pod['status']['podIP']}:8000/metrics"
            page = httpx.get(url, timeout=5, trust_env=False).text
            return int(sum(float(number) for number in IN_FLIGHT.findall(page)))
        return 0

    def over(self, seconds: float) -> None:
        """Wait until all three replicas serve again, and show them."""
        self.stage.kubectl(
            "wait", "rr", self.pool, "--for=condition=Ready", f"--timeout={seconds:.0f}s"
        )
        self.stage.kubectl("get", "rr", self.pool, "-o", "wide", show=True)
