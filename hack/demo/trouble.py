"""What happens to a pool while it is trained on: it grows, and one of its workers is killed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

import httpx

from demo.stage import Stage
from localkube.processes import process_in

IN_FLIGHT = re.compile(r"^rollout_worker_requests_in_flight(?:{.*})? ([0-9.e+]+)$", re.MULTILINE)


class Trouble:
    """Reads the trainer's lines and acts after some of its steps.

    Args:
        stage: with the cluster.
        pool: name of a pool with two replicas.
    """

    GROWS_AFTER, DIES_AFTER = 1, 4
    BUSY = 4
    """Requests in flight of a worker that is killed: some are still running when the signal arrives."""

    def __init__(self, stage: Stage, pool: str) -> None:
        self.stage, self.pool = stage, pool
        self.waiting: dict[int, Callable[[], None]] = {
            self.GROWS_AFTER: self.grow,
            self.DIES_AFTER: self.kill,
        }

    def saw(self, line: str) -> None:
        """Act on a line of the trainer's log."""
        step = re.match(r"step +([0-9]+) ", line)
        if step and (act := self.waiting.pop(int(step[1]), None)):
            act()

    def grow(self) -> None:
        self.stage.kubectl("scale", "rr", self.pool, "--replicas=3", show=True)

    def kill(self) -> None:
        """Kill -9 the first worker while it answers requests."""
        pod = self.stage.get("pod", f"{self.pool}-0-0")
        pid = process_in(pod["metadata"]["uid"], "rollout-worker")
        url = f"http://{pod['status']['podIP']}:8000/metrics"
        with httpx.Client(trust_env=False, timeout=30) as client:

            def busy() -> int:
                found = in_flight(client.get(url).raise_for_status().text)
                return found if found >= self.BUSY else 0

            running = self.stage.until(f"{self.BUSY} requests in flight", busy, 60)
            os.kill(pid, signal.SIGKILL)
        self.stage.say(f"$ kill -9 {self.pool}-0-0, which had {running} requests in flight")

    def over(self, seconds: float) -> None:
        self.stage.kubectl(
            "wait", "rr", self.pool, "--for=condition=Ready", f"--timeout={seconds:.0f}s"
        )
        self.stage.kubectl("get", "rr", self.pool, "-o", "wide", show=True)


def in_flight(page: str) -> int:
    return int(sum(float(number) for number in IN_FLIGHT.findall(page)))
