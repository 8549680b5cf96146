"""What tests of ranks on several nodes share."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

from rollout_common.transfer.connections.transfer_loop import transfer_loop
from tests.support.waiting import eventually

LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """No thread and no descriptor is left of what happens here."""

    def there() -> tuple[int, list[str]]:
        names = [each.name for each in threading.enumerate()]
        threads = [each for each in names if each.startswith(("weights-", "rank-"))]
        return len(os.listdir("/proc/self/fd")), threads

    def is_gone() -> bool:
        count, threads = there()
        return count <= before[0] and threads == before[1]

    transfer_loop()  # has a thread and a pair of sockets, for ever
    gc.collect()  # what errors of earlier tests have kept
    gc.freeze()  # In a process that has run thousands of tests, the next call would take half a second again.
    before = there()
    yield
    eventually("nothing left", is_gone, 5, 0.01, seen=lambda: (before, there()))
