"""A process of an engine: it joins the turn of its worker, and has memory of the device when it is told to.

    python -S turn_child.py MEMORY

MEMORY is a file whose flock stands for the device's memory: the judge sees it, and who finds it taken says OVERLAP.
"""

from __future__ import annotations

import fcntl
import os
import random
import sys
import time

from rollout_common.turn.sharing import join

DYING_SECONDS = 0.02
"""So long, at most, it has the device when its worker is no more."""
SLOW_BYTES = 32 << 20


def opened(path: str) -> int:
    """Open a device so that its memory outlives a lock that was opened later, by as long as a driver may take.

    The kernel closes a dying process's files one after the other, the last one first, and takes some milliseconds for
    memory without a name.
    """
    memory = os.open(path, os.O_RDONLY)
    slow = os.memfd_create("slow")
    for at in range(0, SLOW_BYTES, 1 << 20):
        os.pwrite(slow, b"x" * (1 << 20), at)
    return memory


def have(memory: int) -> str:
    """Take memory of the device; with a turn it can't fail."""
    try:
        fcntl.flock(memory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(memory, fcntl.LOCK_SH | fcntl.LOCK_NB)  # the judge shall see both
        return "OVERLAP"
    fcntl.flock(memory, fcntl.LOCK_SH)
    return "has"


def say(answer: str) -> None:
    sys.stdout.write(answer + "\n")
    sys.stdout.flush()


def main() -> None:
    memory = opened(sys.argv[1])
    join()
    say("joined")
    for order in sys.stdin:
        if order == "have\n":
            say(have(memory))
        else:
            fcntl.flock(memory, fcntl.LOCK_UN)
            say("freed")
    time.sleep(random.uniform(0, DYING_SECONDS))


if __name__ == "__main__":
    main()
