"""The operator's metrics, by the names of the contract (API.md §4), on a registry of their own."""

from __future__ import annotations

import time
from functools import partial

import prometheus_client
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from .pool_page import PoolPage

DURATION_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class OperatorTelemetry:
    """All metrics; see the module."""

    def __init__(self) -> None:
        # They double the series of each counter, and no dashboard needs them.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.pools = PoolPage()
        """What `/metrics` has of each pool."""
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, buckets=DURATION_BUCKETS, registry=self.registry)
        self.reconcile_duration = histogram(
            "rollout_operator_reconcile_duration_seconds", "Duration of a reconcile pass."
        )
        self.queue_depth = gauge(
            "rollout_operator_queue_depth", "Pools that are due and waiting to be reconciled."
        )
        self.queue_wait = histogram(
            "rollout_operator_queue_wait_seconds",
            "How long a pool waited to be reconciled after it was due.",
        )
        self._add_api_metrics()
        self.event_loop_lag = gauge(
            "rollout_operator_event_loop_lag_seconds",
            "How late the event loop ran a timer: the worst of the last 30 seconds.",
        )

    def _add_api_metrics(self) -> None:
        gauge = partial(Gauge, registry=self.registry)
        counter = partial(Counter, registry=self.registry)
        self.watch_last_event = gauge(
            "rollout_operator_watch_last_event_timestamp_seconds",
            "When the watch last delivered an event for this resource, Unix time.",
            ["resource"],
        )
        self.api_requests = counter(
            "rollout_operator_api_requests",
            "Requests to the API server; code 0 means no answer.",
            ["verb", "resource", "code"],
        )
        self.shards = gauge(
            "rollout_operator_shards",
            "Shards that the pools are divided into, each led by a process of its own.",
        )
        self.leader = gauge("rollout_operator_leader", "1 while this process holds the Lease.")
        self.reconcile_total = counter(
            "rollout_operator_reconcile",
            "Reconcile passes by result: ok, error, conflict, fenced.",
            ["result"],
        )
        self.ghosts = counter(
            "rollout_operator_ghosts",
            "Objects that a list found gone although the watch had delivered no event.",
        )

    def count_request(self, verb: str, resource: str, code: int) -> None:
        """Count a request to the API server."""
        self.api_requests.labels(verb, resource, str(code)).inc()

    def note_watch_event(self, resource: str) -> None:
        """Note that the watch delivered an event."""
        self.watch_last_event.labels(resource).set(time.time())

    def render_page(self) -> bytes:
        """Return the text of `/metrics`."""
        return generate_latest(self.registry) + self.pools.render_page()
