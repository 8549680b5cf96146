"""Four real workers that share few cores by turns, one of them slow; one can be killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from waiting import until_sync
from workers import START_SECONDS, Command

from .models import TINY

DUTY = Path(__file__).with_name("duty.py")
WORKERS, SLOW, DYING = 4, 2, 1
SHARE, SLOW_FACTOR, PERIOD_MS = 0.4, 5.0, 50


class Workers:
    """Workers of the tiny model; a dead one is started again by the next `ready`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._workers: list[Command] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.close()
            worker.process.kill()
            worker.process.wait(30)

    def ready(self) -> list[str]:
        """Start those that are missing, wait for all, and return their data URLs."""
        for index in range(WORKERS):
            if index == len(self._workers):
                self._workers.append(self._start(index))
            elif self._workers[index].process.poll() is not None:
                self._workers[index].close()
                self._workers[index] = self._start(index)
        for worker in self._workers:
            until_sync(worker.ready, START_SECONDS, what="a worker to serve")
        return [str(worker.data.base_url).rstrip("/") for worker in self._workers]

    def _start(self, index: int) -> Command:
        return Command(TINY.model(1), self._folder / f"{index}.log", (), None)

    def kill(self) -> None:
        """Kill (-9) the one that dies."""
        self._workers[DYING].process.kill()

    @contextmanager
    def on_duty(self) -> Iterator[None]:
        """Give each its share of the time while the block runs."""
        shares = [
            f"{worker.process.pid}:{SHARE / (SLOW_FACTOR if index == SLOW else 1.0)}"
            for index, worker in enumerate(self._workers)
        ]
        duty = subprocess.Popen([sys.executable, DUTY, str(PERIOD_MS), *shares])
        try:
            yield
        finally:
            duty.terminate()
            duty.wait(10)
