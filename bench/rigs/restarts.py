"""A restart of the operator: until its successor knows every pool and has heard every head."""

from __future__ import annotations

import time

from bench.reporting.figures import Figure, Goal, figure
from bench.rigs.phases import QUIET_SECONDS, Phase, ended
from bench.rigs.plain_workloads import ready_seconds
from tests.support.api.apiclient import PODS, POOLS, SERVICES
from tests.support.cluster.scalelab import NAMESPACE, Lab, Usage


def measure_restarts(
    lab: Lab, heads: int, rounds: int, most: float
) -> tuple[list[Phase], Figure, Figure]:
    """Restart the operator so often, next to bare lists of everything.

    `most`: the goal in seconds. Returns what it did, and the figures of the time that it took and of its writes.
    """
    listing = [_list_everything(lab) for _ in range(rounds)]
    restarts = [_measure_restart(lab, heads) for _ in range(rounds)]
    took = figure(
        "restart of the operator until it knows every worker", [r.seconds for r in restarts],
        baseline=listing, against="a bare list of pools, pods, Services", goal=Goal(most),
    )  # fmt: skip
    writes = figure("… writes", [len(r.writes) for r in restarts], "calls", goal=Goal(0, tail=0))
    return restarts, took, writes


def _list_everything(lab: Lab) -> float:
    """Return the seconds that bare lists of pools, pods and Services take."""
    began = time.monotonic()
    for path in (POOLS, PODS, SERVICES):
        lab.api.get(path.format(NAMESPACE))
    return time.monotonic() - began


def _measure_restart(lab: Lab, heads: int) -> Phase:
    """Kill the operator and wait until its successor knows every pool and has heard every head."""
    lab.stop_operator()
    lab.calls()
    asked, began = lab.counts()["/v1/state"], time.monotonic()
    lab.start_operator()
    end = began + ready_seconds(heads)
    while not _converged(lab, heads, asked):
        if time.monotonic() > end:
            raise RuntimeError(f"the restarted operator has not converged in {end - began:g} s")
        time.sleep(0.05)
    took = time.monotonic() - began
    time.sleep(QUIET_SECONDS)  # a write that comes late counts, too
    return ended(lab, took, Usage(0, 0, began), {})


def _converged(lab: Lab, heads: int, asked: int) -> bool:
    if lab.counts()["/v1/state"] - asked < heads:
        return False
    return sum(lab.samples("rollout_pool_replicas_ready")) == heads
