"""The engine's own figures as Prometheus text, under its own names."""

from __future__ import annotations

from dataclasses import dataclass

from .kv import KvRows
from .weights.weights_memory import WeightsMemory


@dataclass(slots=True)
class StepTotals:
    """What happened since the start, for `metrics`."""

    steps: int = 0
    step_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0


@dataclass(frozen=True, slots=True)
class BatchCensus:
    """Who runs, which of them on the former weights, and how many wait."""

    running: frozenset[str] = frozenset()
    queued: int = 0
    pinned: frozenset[str] = frozenset()


def render_metrics(
    totals: StepTotals, census: BatchCensus, kv: KvRows, memory: WeightsMemory
) -> str:
    """Return the page."""
    rows = (
        ("hf_engine_steps_total", "counter", "Steps made.", totals.steps),
        ("hf_engine_step_seconds_total", "counter", "Time in steps.", totals.step_seconds),
        (
            "hf_engine_prefill_tokens_total",
            "counter",
            "Tokens fed as prefixes, again after a lost cache included.",
            totals.prefill_tokens,
        ),
        (
            "hf_engine_decode_tokens_total",
            "counter",
            "Tokens fed one by one.",
            totals.decode_tokens,
        ),
        ("hf_engine_batch_rows", "gauge", "Outputs in the batch.", len(census.running)),
        ("hf_engine_waiting", "gauge", "Outputs waiting for a row.", census.queued),
        ("hf_engine_kv_cache_bytes", "gauge", "Memory of keys and values.", kv.nbytes),
        (
            "hf_engine_weights_bytes",
            "gauge",
            "Memory of the weights, those of pinned outputs included.",
            memory.nbytes,
        ),
    )
    lines = []
    for name, kind, text, value in rows:
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name} {value}"]
    return "\n".join(lines) + "\n"
