"""A program: give each process a share of the time, in turns.

`python duty.py PERIOD_MS PID:SHARE…` stops each process (SIGSTOP) for the rest of every period. The
turns are spread over the period, so that no more processes run at once than their shares demand. On
SIGTERM, or when its parent ends, it lets all of them run again.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress


def main(period: float, shares: dict[int, float]) -> None:
    """Stop and continue until ended."""
    turns = []
    for index, (pid, share) in enumerate(shares.items()):
        start = period * index / len(shares)
        turns += [
            (start, pid, signal.SIGCONT),
            ((start + period * share) % period, pid, signal.SIGSTOP),
        ]
    turns.sort()
    parent, began = os.getppid(), time.monotonic()
    try:
        while os.getppid() == parent:
            for at, pid, what in turns:
                time.sleep(max(0.0, began + at - time.monotonic()))
                with suppress(ProcessLookupError):
                    os.kill(pid, what)
            began = max(began + period, time.monotonic() - period)
    finally:
        for pid in shares:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    pairs = (word.split(":") for word in sys.argv[2:])
    main(float(sys.argv[1]) / 1000, {int(pid): float(share) for pid, share in pairs})
