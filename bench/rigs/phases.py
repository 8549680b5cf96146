"""What the operator did between two moments: CPU, memory, its requests, its histograms."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.reporting.figures import SAMPLES_FOR_P99, Figure, Goal, Seen
from tests.support.cluster.scalelab import Call, Lab, Usage

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
