"""What the operator did between two moments, such as a restart: CPU, memory, its requests, its histograms."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.figures import SAMPLES_FOR_P99, Figure, Goal, Seen, figure
from bench.rigs.plain_workloads import ready_seconds
from tests.support.api.apiclient import PODS, POOLS, SERVICES
from tests.support.cluster.scalelab import NAMESPACE, Call, Lab, Usage

QUIET_SECONDS = 5.0
"""After so long without a write the last one is done."""

Histogram = Mapping[str, Mapping[tuple[str, ...], float]]
"""The operator's samples: name, then label values, then value."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Seconds, CPU seconds, resident bytes at the end, requests, and metrics before and after."""

    seconds: float
    cpu: float
    resident: int
    calls: list[Call]
    before: Histogram
    after: Histogram

    @property
    def writes(self) -> list[Call]:
        return [call for call in self.calls if call.is_write]

    def quantile(self, name: str, q: float) -> float:
        return quantile(self.before.get(f"{name}_bucket", {}), self.after[f"{name}_bucket"], q)

    def count(self, name: str) -> int:
        key = f"{name}_count"
        return round(sum(self.after[key].values()) - sum(self.before.get(key, {}).values()))


def phase(lab: Lab, act: Callable[[], object]) -> Phase:
    """Measure what the operator does during `act`."""
    before, used, began = lab.metrics(), lab.usage(), time.monotonic()
    act()
    return ended(lab, time.monotonic() - began, used, before)


def ended(lab: Lab, took: float, used: Usage, before: Histogram) -> Phase:
    """Return the phase that ends now, from usage and metrics at its beginning."""
    now = lab.usage()
    calls = lab.calls()
    return Phase(took, now.cpu - used.cpu, now.resident, calls, before, lab.metrics())


def histogram_figure(label: str, during: Phase, name: str, most: float | None = None) -> Figure:
    """Return the figure of a histogram's samples in one phase.

    `name`: of the histogram, without `rollout_operator_` and `_seconds`. `most`: the goal of its 99th percentile, in
    seconds.
    """
    whole = f"rollout_operator_{name}_seconds"
    count = during.count(whole)
    tail = during.quantile(whole, 0.99) if count >= SAMPLES_FOR_P99 else None
    seen = Seen(count, during.quantile(whole, 0.5), p99=tail)
    return Figure(label, "s", seen, goal=None if most is None else Goal(most, most))


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


def kinds(calls: Sequence[Call]) -> str:
    counted = Counter(f"{call.verb} {call.resource}" for call in calls if call.resource)
    return ", ".join(f"{count} {kind}" for kind, count in counted.most_common()) or "none"


def quantile(
    before: Mapping[tuple[str, ...], float], after: Mapping[tuple[str, ...], float], q: float
) -> float:
    """Return a quantile of a cumulative histogram's gain, linear within a bucket."""
    gained = sorted((float(le[0]), n - before.get(le, 0.0)) for le, n in after.items())
    wanted = q * gained[-1][1]
    low, below = 0.0, 0.0
    for high, count in gained:
        if count >= wanted:
            if high == float("inf") or count == below:
                return low
            return low + (high - low) * (wanted - below) / (count - below)
        low, below = high, count
    return low
