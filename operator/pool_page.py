"""The part of `/metrics` that has series of each pool: kept as text, and written again only where a figure has changed.

A thousand pools have some fifty thousand series. Written for every scrape they would take half a second of the processor
that also reconciles; joined from what is there they take milliseconds.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.utils import floatToGoString as _untyped_number

from rollout_operator.api.objects import PoolKey

UPDATE_BOUNDS = (1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""Upper bounds of the durations of complete updates, in seconds; other outcomes have a count and a sum."""
UPDATE_OUTCOMES = ("Complete", "Superseded", "Failed")
CONDITION_STATUSES = ("True", "False", "Unknown")


@dataclass(frozen=True, slots=True)
class PoolMetrics:
    """What is shown of a pool; `_GAUGES` has the meaning of the other numbers.

    Attributes:
        restarts: Restarts of replicas since the pool was created; never decreases.
        weights: `which` (committed, target, active_min, active_max) to (epoch, version).
        conditions: Type to status.
        degraded: Reason why it is degraded; None if it isn't.
        progressing: Reason why it is progressing; None if it isn't.
    """

    desired: int = 0
    replicas: int = 0
    ready: int = 0
    asleep: int = 0
    unreachable: int = 0
    in_a_row: int = 0
    restarts: int = 0
    weights: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    conditions: Mapping[str, str] = field(default_factory=dict)
    degraded: str | None = None
    progressing: str | None = None


_GAUGES = {
    "rollout_pool_replicas_desired": ("Replicas that spec asks for.", "desired"),
    "rollout_pool_replicas": ("Replicas that exist.", "replicas"),
    "rollout_pool_replicas_ready": ("Replicas that serve.", "ready"),
    "rollout_pool_replicas_asleep": ("Replicas that are asleep.", "asleep"),
    "rollout_pool_replicas_unreachable": (
        "Replicas whose control port has not answered for a minute.",
        "unreachable",
    ),
    "rollout_pool_consecutive_failures": (
        "Most failures in a row of one replica; 0 once it has worked for ten minutes.",
        "in_a_row",
    ),
}
"""Families with one number for each pool: meaning, and the field of `PoolMetrics`."""

FAILED_WRITES = "rollout_pool_failed_writes_total"
FAILED_PASSES = "rollout_pool_failed_passes_total"
FAILED_CALLS = "rollout_pool_failed_calls_total"
UPDATE_TIMES = "rollout_pool_weights_update_seconds"

_FAMILIES = {
    **{name: ("gauge", meaning) for name, (meaning, _) in _GAUGES.items()},
    "rollout_pool_restarts_total": ("counter", "Restarts of replicas."),
    "rollout_pool_weights_version": ("gauge", "Version of weights."),
    "rollout_pool_weights_epoch": ("gauge", "Epoch of weights."),
    "rollout_pool_condition": ("gauge", "1 for the status that a condition has, 0 for the others."),
    "rollout_pool_degraded": ("gauge", "1 for the reason why a pool is degraded."),
    "rollout_pool_progressing": ("gauge", "1 for the reason why a pool is progressing."),
    UPDATE_TIMES: (
        "histogram",
        "From the start of a weights update to its outcome: Complete, Superseded or Failed (the deadline passed, or"
        " every replica refused it; it may still complete).",
    ),
    FAILED_WRITES: (
        "counter",
        "Writes for a pool that the API server refused (reason Rejected) or could not do (ApiError).",
    ),
    FAILED_PASSES: ("counter", "Reconcile passes over a pool that ended with an error."),
    FAILED_CALLS: (
        "counter",
        "Calls to a control port of the pool that were refused or not answered.",
    ),
}
"""Type and meaning of each family, in the order of the page."""


@dataclass(slots=True)
class _UpdateTimes:
    """Durations of the updates of one pool with one outcome, by the bounds, and their sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(UPDATE_BOUNDS) + 1))
    total: float = 0.0


@dataclass(slots=True)
class _PoolSeries:
    """What a pool has on the page: its figures, and the lines of each family."""

    lines: dict[str, str] = field(default_factory=dict)
    figures: PoolMetrics | None = None
    shown: PoolMetrics | None = None
    """The figures that `lines` have."""
    updates: dict[str, _UpdateTimes] = field(default_factory=dict)
    counters: dict[str, dict[tuple[tuple[str, str], ...], int]] = field(default_factory=dict)


class PoolPage:
    """The series of all pools; used in the event loop, rendered in any thread."""

    def __init__(self) -> None:
        self._pools: dict[PoolKey, _PoolSeries] = {}
        self._writing = threading.Lock()
        """Two scrapes at once would mix older and newer lines."""

    def set_figures(self, key: PoolKey, figures: PoolMetrics) -> None:
        """Show these figures for a pool; its counters begin at 0 if it is new."""
        series = self._pools.get(key) or self._begin_pool(key)
        if series.figures != figures:
            series.figures = figures

    def _write_figures(self, key: PoolKey, series: _PoolSeries) -> None:
        """Write the lines of a pool's figures; only for a page, which shows one of many that a start goes through."""
        figures, lines = series.figures, series.lines
        if figures is None or figures is series.shown:
            return
        series.shown = figures
        for name, (_, attribute) in _GAUGES.items():
            lines[name] = _line(name, key, getattr(figures, attribute))
        lines["rollout_pool_restarts_total"] = _line(
            "rollout_pool_restarts_total", key, figures.restarts
        )
        for at, part in enumerate(("epoch", "version")):
            name = f"rollout_pool_weights_{part}"
            lines[name] = "".join(
                _line(name, key, identity[at], which=which)
                for which, identity in figures.weights.items()
            )
        lines["rollout_pool_condition"] = "".join(
            _line("rollout_pool_condition", key, each == status, type=kind, status=each)
            for kind, status in figures.conditions.items()
            for each in CONDITION_STATUSES
        )
        for part in ("degraded", "progressing"):
            name, reason = f"rollout_pool_{part}", getattr(figures, part)
            lines[name] = "" if reason is None else _line(name, key, 1, reason=reason)

    def _begin_pool(self, key: PoolKey) -> _PoolSeries:
        # Exported from the start: a rate over a series that appears later misses its first event.
        series = self._pools[key] = _PoolSeries()
        series.updates = {outcome: _UpdateTimes() for outcome in UPDATE_OUTCOMES}
        self._write_updates(key, series)
        self._count_event(key, series, FAILED_PASSES, {}, 0)
        return series

    def observe_update(self, key: PoolKey, outcome: str, seconds: float) -> None:
        """Count a weights update of a pool that reached an outcome after so long."""
        series = self._pools.get(key) or self._begin_pool(key)
        times = series.updates.setdefault(outcome, _UpdateTimes())
        times.counts[bisect_left(UPDATE_BOUNDS, seconds)] += 1
        times.total += seconds
        self._write_updates(key, series)

    def count_event(self, key: PoolKey, family: str, **labels: str) -> None:
        """Count an event of a pool in a family of counters."""
        series = self._pools.get(key) or self._begin_pool(key)
        self._count_event(key, series, family, labels, 1)

    def _count_event(
        self,
        key: PoolKey,
        series: _PoolSeries,
        family: str,
        labels: Mapping[str, str],
        events: int,
    ) -> None:
        counts, at = series.counters.setdefault(family, {}), tuple(labels.items())
        counts[at] = counts.get(at, 0) + events
        series.lines[family] = "".join(
            _line(family, key, count, **dict(labels)) for labels, count in counts.items()
        )

    def _write_updates(self, key: PoolKey, series: _PoolSeries) -> None:
        series.lines[UPDATE_TIMES] = "".join(
            _update_lines(key, outcome, times) for outcome, times in series.updates.items()
        )

    def forget_pool(self, key: PoolKey) -> None:
        """Stop showing a pool."""
        self._pools.pop(key, None)

    def render_page(self) -> bytes:
        """Return all series in the text format of Prometheus."""
        known = list(self._pools.items())
        with self._writing:
            for key, series in known:
                self._write_figures(key, series)
        pools = [series.lines for _, series in known]
        parts = []
        for name, (kind, meaning) in _FAMILIES.items():
            parts.append(f"# HELP {name} {meaning}\n# TYPE {name} {kind}\n")
            parts += [lines.get(name, "") for lines in pools]
        return "".join(parts).encode()


def _update_lines(key: PoolKey, outcome: str, times: _UpdateTimes) -> str:
    lines, below = [], 0
    for bound, count in zip((*UPDATE_BOUNDS, float("inf")), times.counts, strict=True):
        below += count
        if outcome == UPDATE_OUTCOMES[0] or bound == float("inf"):
            edge = _number(bound)
            lines.append(_line(f"{UPDATE_TIMES}_bucket", key, below, outcome=outcome, le=edge))
    lines.append(_line(f"{UPDATE_TIMES}_count", key, below, outcome=outcome))
    lines.append(_line(f"{UPDATE_TIMES}_sum", key, times.total, outcome=outcome))
    return "".join(lines)


def _line(name: str, key: PoolKey, value: float, **labels: str) -> str:
    """Return one sample, with its labels in alphabetical order, as clients of Prometheus write them."""
    given = sorted({"namespace": key.namespace, "pool": key.name, **labels}.items())
    text = ",".join(f'{label}="{_escape(said)}"' for label, said in given)
    return f"{name}{{{text}}} {_number(float(value))}\n"


def _number(value: float) -> str:
    return str(_untyped_number(value))  # type: ignore[no-untyped-call]


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
