"""Hooks that receive a pool's measurements, and one that feeds Prometheus.

Hooks are called in the pool's loop: they must be quick and must not raise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec
from weakref import WeakKeyDictionary

from typing_extensions import override

from .results import AttemptReport, GenerateResult

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

logger = logging.getLogger(__name__)

P = ParamSpec("P")


class Hook:
    """Does nothing: override the methods whose measurements you want."""

    def attempt(self, report: AttemptReport) -> None:
        """Called when an attempt has ended."""

    def request(self, outcome: str, seconds: float, result: GenerateResult | None) -> None:
        """Called when a `generate` has ended: outcome `ok` or the name of the error."""

    def members(self, present: int, serving: int) -> None:
        """Called when discovery reports members; `serving` of them are ready."""

    def published(self, outcome: str, seconds: float) -> None:
        """Called when a `publish_weights` has ended: outcome `ok` or the name of the error."""


def _make_metrics(registry: CollectorRegistry) -> dict[str, Any]:
    import prometheus_client as prometheus

    def make(kind: Callable[..., Any], name: str, text: str, *labels: str) -> Any:
        return kind(f"rollout_client_{name}", text, ("pool", *labels), registry=registry)

    counter, histogram = prometheus.Counter, prometheus.Histogram
    return {
        "requests": make(counter, "requests_total", "Calls of generate", "outcome"),
        "attempts": make(counter, "attempts_total", "Requests to workers", "outcome"),
        "tokens": make(counter, "tokens_total", "Sampled tokens received"),
        "seconds": make(histogram, "request_duration_seconds", "Duration of generate"),
        "members": make(prometheus.Gauge, "members", "Members by state", "state"),
        "publishes": make(histogram, "publish_seconds", "Duration of a publish", "outcome"),
    }


_METRICS: WeakKeyDictionary[CollectorRegistry, dict[str, Any]] = WeakKeyDictionary()
"""By registry: a name can be registered only once, and a process may have many pools."""


class PrometheusHook(Hook):
    """Metrics `rollout_client_*` of one pool; needs the package prometheus-client.

    Args:
        pool: Label of every series.
        registry: Default: that of the process. Pools may share one.
    """

    def __init__(self, pool: str, registry: CollectorRegistry | None = None) -> None:
        import prometheus_client as prometheus

        where = prometheus.REGISTRY if registry is None else registry
        if where not in _METRICS:
            _METRICS[where] = _make_metrics(where)
        self._pool = pool
        self._metrics = _METRICS[where]

    def _series(self, metric: str, *labels: str) -> Any:
        return self._metrics[metric].labels(self._pool, *labels)

    @override
    def attempt(self, report: AttemptReport) -> None:
        self._series("attempts", report.outcome).inc()
        self._series("tokens").inc(report.tokens)

    @override
    def request(self, outcome: str, seconds: float, result: GenerateResult | None) -> None:
        self._series("requests", outcome).inc()
        self._series("seconds").observe(seconds)

    @override
    def members(self, present: int, serving: int) -> None:
        self._series("members", "present").set(present)
        self._series("members", "serving").set(serving)

    @override
    def published(self, outcome: str, seconds: float) -> None:
        self._series("publishes", outcome).observe(seconds)


def guard_progress(progress: Callable[P, object]) -> Callable[P, None]:
    """Return the caller's `progress`, with its errors logged instead of raised."""

    def report(*args: P.args, **more: P.kwargs) -> None:
        try:
            progress(*args, **more)
        except Exception:
            logger.exception("progress raised an error; the call that it reports on continues")

    return report
