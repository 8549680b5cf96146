"""A restart of the operator: until its successor knows every pool and has heard every head."""

from __future__ import annotations

import time

from bench.rigs.phases import Phase, ended
from bench.rigs.plain_workloads import ready_seconds
from tests.support.api.apiclient import PODS, POOLS, SERVICES
from tests.support.cluster.scalelab import NAMESPACE, Lab, Usage

QUIET_SECONDS = 5.0


def list_everything(lab: Lab) -> float:
    """Return the seconds that bare lists of pools, pods and Services take."""
    began = time.monotonic()
    for path in (POOLS, PODS, SERVICES):
        lab.api.get(path.format(NAMESPACE))
    return time.monotonic() - began


def measure_restart(lab: Lab, heads: int) -> Phase:
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
