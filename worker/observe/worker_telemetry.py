"""The worker's metrics: names, help texts, and the page that Prometheus scrapes.

Docs and dashboards rely on these names. Each series names its pool, so that dashboards don't depend on how
the page is scraped. The engine's own metrics follow on the same page, under their own names and labels.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from typing_extensions import override

from rollout_common.wire import Lifecycle, StopReason, WeightsId

from .processes import find_descendants

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 7200)
_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, *_REQUEST_BUCKETS)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_PAUSE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 30)
_TURN_BUCKETS = (0.001, 0.005, 0.05, 0.5, 1, 5, 15, 30, 60, 120, 300, 600, 1800, 3600)
_UPDATE_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 7200)

PHASES = ("stage", "commit")
TRANSITIONS = ("load", "quiesce", "resume", "sleep", "wake")
REFUSALS = (
    *("duplicate-request", "version-not-met", "unknown-media"),
    *("queue-full", "fenced", "shutting-down"),
    *("starting", "loading", "failed", "pausing", "paused", "draining", "asleep", "waking"),
)
"""Slugs of the problems that say "not now" or "not here": 409, 429 and 503."""


class _PoolRegistry(CollectorRegistry):
    """A registry that adds the same labels to all its series."""

    def __init__(self, labels: dict[str, str]) -> None:
        super().__init__()
        self._labels = labels

    @override
    def collect(self) -> Iterable[Metric]:
        for family in super().collect():
            family.samples = [
                sample._replace(labels={**self._labels, **sample.labels})
                for sample in family.samples
            ]
            yield family


class WorkerTelemetry:
    """All metrics of one worker, in a registry of its own; those of a worker by itself name no pool."""

    def __init__(self, pool: str | None = None, namespace: str | None = None) -> None:
        # They double the series of each counter, and no dashboard needs them.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        labels = {"namespace": namespace or "", "pool": pool} if pool else {}
        self.registry = _PoolRegistry(labels)
        self._counter = partial(Counter, registry=self.registry)
        self._gauge = partial(Gauge, registry=self.registry)
        self._histogram = partial(Histogram, registry=self.registry)
        self._info = self._gauge(
            "rollout_worker_info",
            "What this worker serves; always 1.",
            ["engine", "engine_version", "model"],
        )
        self._state = self._gauge(
            "rollout_worker_lifecycle_state",
            "1 for the current state, 0 for the others.",
            ["state"],
        )
        self._version = self._gauge(
            "rollout_worker_weights_version", "Version of the active weights."
        )
        self._epoch = self._gauge("rollout_worker_weights_epoch", "Epoch of the active weights.")
        self._add_traffic_metrics()
        self._add_change_metrics()
        self.memory = self._gauge(
            "rollout_worker_memory_resident_bytes", "Resident memory of the worker and its engine."
        )
        # Exported from the start: a rate over a series that appears later misses its first event.
        for reason in StopReason:
            self.requests.labels(reason.value)
        for slug in REFUSALS:
            self.refused.labels(slug)
        for phase in PHASES:
            self.update_seconds.labels(phase)
        for transition in TRANSITIONS:
            self._transitions.labels(transition)
        self.export_lifecycle(Lifecycle.STARTING)
        self.export_weights(WeightsId(epoch=0, version=0))

    def _add_traffic_metrics(self) -> None:
        self.requests = self._counter(
            "rollout_worker_requests_total",
            "Finished outputs; a request with n > 1 counts n times.",
            ["stop_reason"],
        )
        self.refused = self._counter(
            "rollout_worker_refused_total",
            "Requests that were refused, by the problem that was answered; a body that is not valid is "
            "not counted.",
            ["reason"],
        )
        self._in_flight = self._gauge(
            "rollout_worker_requests_in_flight", "Outputs the engine is working on."
        )
        self._queued = self._gauge(
            "rollout_worker_requests_queued", "Accepted outputs waiting for the engine."
        )
        self.generated_tokens = self._counter(
            "rollout_worker_generated_tokens_total", "Generated tokens."
        )
        self.prompt_tokens = self._counter(
            "rollout_worker_prompt_tokens_total", "Prompt tokens of accepted requests."
        )
        self.request_seconds = self._histogram(
            "rollout_worker_request_duration_seconds",
            "Time from accepting a request to its end.",
            buckets=_REQUEST_BUCKETS,
        )
        self.first_token_seconds = self._histogram(
            "rollout_worker_time_to_first_token_seconds",
            "Time from accepting a request to its first token.",
            buckets=_FIRST_TOKEN_BUCKETS,
        )
        self.inter_token_seconds = self._histogram(
            "rollout_worker_inter_token_seconds",
            "Time between two tokens of an output; the mean of those that arrive together.",
            buckets=_TOKEN_BUCKETS,
        )

    def _add_change_metrics(self) -> None:
        self.update_seconds = self._histogram(
            "rollout_worker_weights_update_seconds",
            "Duration of each phase of a weights update, including failed ones.",
            ["phase"],
            buckets=_UPDATE_BUCKETS,
        )
        self.pause_seconds = self._histogram(
            "rollout_worker_engine_pause_seconds",
            "Time during a commit in which the engine generated no tokens.",
            buckets=_PAUSE_BUCKETS,
        )
        self.restarts = self._counter(
            "rollout_worker_engine_restarts_total", "Engine restarts within this process."
        )
        self._transitions = self._histogram(
            "rollout_worker_transition_seconds",
            "Duration of lifecycle transitions.",
            ["transition"],
            buckets=_UPDATE_BUCKETS,
        )

        self.turn_seconds = self._histogram(
            "rollout_worker_turn_wait_seconds",
            "Time from wanting the turn for the devices to having it.",
            buckets=_TURN_BUCKETS,
        )
        self.turn_residue = self._gauge(
            "rollout_worker_turn_residue_bytes",
            "Memory of a device that other processes kept when the engine was last to take its own.",
            ["device"],
        )

    def export_info(self, engine: str, engine_version: str, model: str) -> None:
        """Export what is served."""
        self._info.clear()
        self._info.labels(engine, engine_version, model).set(1)

    def export_lifecycle(self, state: Lifecycle) -> None:
        """Export the state."""
        for each in Lifecycle:
            self._state.labels(each.value).set(each is state)

    def export_weights(self, active: WeightsId) -> None:
        """Export the active identity."""
        self._version.set(active.version)
        self._epoch.set(active.epoch)

    def watch_load(self, in_flight: Callable[[], float], queued: Callable[[], float]) -> None:
        """Read the load from these callbacks at each scrape."""
        self._in_flight.set_function(in_flight)
        self._queued.set_function(queued)

    @contextmanager
    def time_transition(self, name: str) -> Iterator[None]:
        """Time a transition; a failed one is not recorded."""
        start = time.monotonic()
        yield
        self._transitions.labels(name).observe(time.monotonic() - start)

    def render_page(self, engine_metrics: str) -> bytes:
        """The whole page in the Prometheus text format."""
        return generate_latest(self.registry) + engine_metrics.encode()


def resident_bytes(pid: int | None = None) -> float:
    """Memory of a process, this one by default, and of those below it; shared memory counts once.

    It is the sum of their proportional set sizes; 0 where the system does not report them. Blocks:
    the kernel looks at every page, which takes some 50 ms for each GiB.
    """
    first = os.getpid() if pid is None else pid
    pids = (first, *(process.pid for process in find_descendants(first)))
    return float(sum(map(_proportional_bytes, pids)))


def _proportional_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended in the meantime
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)
