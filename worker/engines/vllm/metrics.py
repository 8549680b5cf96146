"""vLLM's own figures as Prometheus text, under its own names."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

METRIC_PREFIX = "vllm:"


def render_metrics() -> str:
    """Return the families of vLLM; what else this process counts is shown elsewhere."""
    registry = CollectorRegistry()
    for collector, names in list(REGISTRY._collector_to_names.items()):
        if any(name.startswith(METRIC_PREFIX) for name in names):
            registry.register(collector)
    return generate_latest(registry).decode()
