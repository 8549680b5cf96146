"""The operator's metrics, by the names of the contract (API.md §4), on a registry of their own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import prometheus_client
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from rollout_operator.api.objects import PoolKey

DURATION_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
UPDATE_BUCKETS = (*DURATION_BUCKETS[6:], 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 7200.0)
UPDATE_OUTCOMES = ("Complete", "Superseded", "Failed")
CONDITION_STATUSES = ("True", "False", "Unknown")

T = TypeVar("T", bound=MetricWrapperBase)


@dataclass(frozen=True, slots=True)
class PoolMetrics:
    """What is shown of a pool.

    Attributes:
        desired: Replicas that spec asks for.
        replicas: Replicas that exist.
        ready: Those of them that serve.
        asleep: Those of them that are asleep.
        unreachable: Those of them whose control port has been silent for a minute.
        in_a_row: Most failures in a row of a replica that has not proven itself since.
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


class OperatorTelemetry:
    """All metrics; see the module."""

    def __init__(self) -> None:
        # They double the series of each counter, and no dashboard needs them.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._pools = _PoolCollector()
        self.registry.register(self._pools)
        self._add_pool_metrics()
        self._of_pool: dict[PoolKey, set[tuple[MetricWrapperBase, tuple[str, ...]]]] = {}
        self.reconcile_duration = Histogram(
            "rollout_operator_reconcile_duration_seconds",
            "Duration of a reconcile pass.",
            buckets=DURATION_BUCKETS,
            registry=self.registry,
        )
        self.reconcile_total = Counter(
            "rollout_operator_reconcile",
            "Reconcile passes by result: ok, error, conflict, fenced.",
            ["result"],
            registry=self.registry,
        )
        self.queue_depth = Gauge(
            "rollout_operator_queue_depth",
            "Pools that are due and waiting to be reconciled.",
            registry=self.registry,
        )
        self.queue_wait = Histogram(
            "rollout_operator_queue_wait_seconds",
            "How long a pool waited to be reconciled after it was due.",
            buckets=DURATION_BUCKETS,
            registry=self.registry,
        )
        self._add_api_metrics()
        self.event_loop_lag = Gauge(
            "rollout_operator_event_loop_lag_seconds",
            "How late the event loop ran a timer: the worst of the last 30 seconds.",
            registry=self.registry,
        )

    def _add_pool_metrics(self) -> None:
        self._updates = Histogram(
            "rollout_pool_weights_update_seconds",
            "From the start of a weights update to its outcome: Complete, Superseded or Failed (the "
            "deadline passed, or every replica refused it; it may still complete).",
            ["namespace", "pool", "outcome"],
            buckets=UPDATE_BUCKETS,
            registry=self.registry,
        )
        self._failed_writes = Counter(
            "rollout_pool_failed_writes",
            "Writes for a pool that the API server refused (reason Rejected) or could not do (ApiError).",
            ["namespace", "pool", "verb", "resource", "reason"],
            registry=self.registry,
        )
        self._failed_passes = Counter(
            "rollout_pool_failed_passes",
            "Reconcile passes over a pool that ended with an error.",
            ["namespace", "pool"],
            registry=self.registry,
        )
        self._failed_calls = Counter(
            "rollout_pool_failed_calls",
            "Calls to a control port of the pool that were refused or not answered.",
            ["namespace", "pool", "verb"],
            registry=self.registry,
        )

    def _add_api_metrics(self) -> None:
        self.watch_last_event = Gauge(
            "rollout_operator_watch_last_event_timestamp_seconds",
            "When the watch last delivered an event for this resource, Unix time.",
            ["resource"],
            registry=self.registry,
        )
        self.api_requests = Counter(
            "rollout_operator_api_requests",
            "Requests to the API server; code 0 means no answer.",
            ["verb", "resource", "code"],
            registry=self.registry,
        )
        self.shards = Gauge(
            "rollout_operator_shards",
            "Shards that the pools are divided into, each led by a process of its own.",
            registry=self.registry,
        )
        self.leader = Gauge(
            "rollout_operator_leader",
            "1 while this process holds the Lease.",
            registry=self.registry,
        )
        self.ghosts = Counter(
            "rollout_operator_ghosts",
            "Objects that a list found gone although the watch had delivered no event.",
            registry=self.registry,
        )

    def count_request(self, verb: str, resource: str, code: int) -> None:
        """Count a request to the API server."""
        self.api_requests.labels(verb, resource, str(code)).inc()

    def note_watch_event(self, resource: str) -> None:
        """Note that the watch delivered an event."""
        self.watch_last_event.labels(resource).set(time.time())

    def set_pool_metrics(self, key: PoolKey, figures: PoolMetrics) -> None:
        """Show these figures for a pool."""
        self._pools.figures[key] = figures
        # Exported from the start: a rate over a series that appears later misses its first event.
        for outcome in UPDATE_OUTCOMES:
            self._pool_series(key, self._updates, outcome)
        self._pool_series(key, self._failed_passes)

    def count_ended_update(self, key: PoolKey, outcome: str, seconds: float) -> None:
        """Count a weights update of a pool that reached an outcome."""
        self._pool_series(key, self._updates, outcome).observe(seconds)

    def count_failed_write(self, key: PoolKey, verb: str, resource: str, reason: str) -> None:
        """Count a write for a pool that the API server did not do."""
        self._pool_series(key, self._failed_writes, verb, resource, reason).inc()

    def count_failed_call(self, key: PoolKey, verb: str) -> None:
        """Count a call to a worker of a pool that failed."""
        self._pool_series(key, self._failed_calls, verb).inc()

    def count_failed_pass(self, key: PoolKey) -> None:
        """Count a pass over a pool that ended with an error."""
        self._pool_series(key, self._failed_passes).inc()

    def _pool_series(self, key: PoolKey, metric: T, *labels: str) -> T:
        """The pool's series of a metric with these further labels; it goes with the pool."""
        values = (key.namespace, key.name, *labels)
        self._of_pool.setdefault(key, set()).add((metric, values))
        return metric.labels(*values)

    def forget_pool(self, key: PoolKey) -> None:
        """Stop showing a pool."""
        self._pools.figures.pop(key, None)
        for metric, values in self._of_pool.pop(key, ()):
            metric.remove(*values)

    def render_page(self) -> bytes:
        """Return the text of `/metrics`."""
        return generate_latest(self.registry)


_COUNT_FAMILIES = (
    ("rollout_pool_replicas_desired", "Replicas that spec asks for.", "desired"),
    ("rollout_pool_replicas", "Replicas that exist.", "replicas"),
    ("rollout_pool_replicas_ready", "Replicas that serve.", "ready"),
    ("rollout_pool_replicas_asleep", "Replicas that are asleep.", "asleep"),
    (
        "rollout_pool_replicas_unreachable",
        "Replicas whose control port has not answered for a minute.",
        "unreachable",
    ),
    (
        "rollout_pool_consecutive_failures",
        "Most failures in a row of one replica; 0 once it has worked for ten minutes.",
        "in_a_row",
    ),
)
"""Families with one number for each pool: name, meaning, and the field of `PoolMetrics`."""

_REASON_FAMILIES = (
    ("rollout_pool_degraded", "1 for the reason why a pool is degraded.", "degraded"),
    ("rollout_pool_progressing", "1 for the reason why a pool is progressing.", "progressing"),
)
"""Families with a reason for each pool that has one, likewise."""


class _PoolCollector(Collector):
    """The `rollout_pool_*` families, made from the figures when they are asked for."""

    def __init__(self) -> None:
        self.figures: dict[PoolKey, PoolMetrics] = {}

    def describe(self) -> list[Metric]:
        return list(self.collect())

    def collect(self) -> Iterator[Metric]:
        labels, figures = ["namespace", "pool"], list(self.figures.items())
        for name, meaning, figure in _COUNT_FAMILIES:
            family = GaugeMetricFamily(name, meaning, labels=labels)
            for key, shown in figures:
                family.add_metric([key.namespace, key.name], getattr(shown, figure))
            yield family
        restarts = CounterMetricFamily(
            "rollout_pool_restarts", "Restarts of replicas.", labels=labels
        )
        version = GaugeMetricFamily(
            "rollout_pool_weights_version", "Version of weights.", labels=[*labels, "which"]
        )
        epoch = GaugeMetricFamily(
            "rollout_pool_weights_epoch", "Epoch of weights.", labels=[*labels, "which"]
        )
        condition = GaugeMetricFamily(
            "rollout_pool_condition",
            "1 for the status that a condition has, 0 for the others.",
            labels=[*labels, "type", "status"],
        )
        for key, shown in figures:
            at = [key.namespace, key.name]
            restarts.add_metric(at, shown.restarts)
            for which, identity in shown.weights.items():
                epoch.add_metric([*at, which], identity[0])
                version.add_metric([*at, which], identity[1])
            for kind, status in shown.conditions.items():
                for each in CONDITION_STATUSES:
                    condition.add_metric([*at, kind, each], float(each == status))
        yield from (restarts, version, epoch, condition)
        for name, meaning, figure in _REASON_FAMILIES:
            family = GaugeMetricFamily(name, meaning, labels=[*labels, "reason"])
            for key, shown in figures:
                if (reason := getattr(shown, figure)) is not None:
                    family.add_metric([key.namespace, key.name, reason], 1.0)
            yield family
