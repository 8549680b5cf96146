"""A process that takes and gives a turn on order, by our lock or by a bare one, and prints when."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

from rollout_common.turn import Turn

DEVICE = "bench"


class TurnProcess:
    """Such a process, from outside; times are of the clock that all processes share."""

    def __init__(self, directory: Path, kind: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", __file__, str(directory), kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self.read_time()

    def send_order(self, order: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()

    def read_time(self) -> float:
        """Return when it had carried out the last order."""
        assert self._process.stdout is not None
        return float(self._process.stdout.readline())

    def take(self) -> None:
        self.send_order("take")
        self.read_time()

    def kill(self) -> float:
        when = time.monotonic()
        self._process.kill()
        return when

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def _run_orders(directory: Path, kind: str) -> None:
    turn = Turn(directory, [DEVICE], "bench")
    file = os.open(directory / f"bare-{DEVICE}", os.O_RDWR | os.O_CREAT, 0o666)
    _print_time(time.monotonic())
    for order in sys.stdin:
        began = time.monotonic()
        took = order.strip() == "take"
        if kind == "bare":
            fcntl.flock(file, fcntl.LOCK_EX if took else fcntl.LOCK_UN)
        elif took:
            turn.take()
        else:
            turn.give()
        # A turn is had when the call returns, and given when it is made.
        _print_time(time.monotonic() if took else began)


def _print_time(when: float) -> None:
    sys.stdout.write(f"{when!r}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _run_orders(Path(sys.argv[1]), sys.argv[2])
