"""The worker itself is killed: no process of its engine outlives it."""

from __future__ import annotations

from contracts import Fleet
from waiting import until_sync


def test_a_killed_worker_leaves_no_process(fleet: Fleet) -> None:
    worker = fleet.worker()
    worker.heal()
    worker.busy(4, 1500)
    family = worker.children()
    worker.process.kill()
    worker.process.wait(10)
    until_sync(
        lambda: not any(process.alive for process in family), 10, what=f"the end of {family}"
    )
