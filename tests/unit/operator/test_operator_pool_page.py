"""The page of all pools: what Prometheus' own parser reads of it, and that only what changed is written again."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from rollout_operator.api.objects import PoolKey
from rollout_operator.pool_page import (
    CONDITION_STATUSES,
    FAILED_CALLS,
    FAILED_WRITES,
    UPDATE_BOUNDS,
    PoolMetrics,
    PoolPage,
)

KEY, OTHER = PoolKey("ns", "pool"), PoolKey("ns", "other")
FIGURES = PoolMetrics(
    desired=9, replicas=8, ready=7, asleep=6, unreachable=5, in_a_row=4, restarts=3,
    weights={"target": (1, 12)}, conditions={"Ready": "False"}, degraded='odd "reason"\\',
    progressing="Starting",
)  # fmt: skip


def at(name: str, *labels: str) -> str:
    return " ".join([name, *sorted(labels)])


SHOWN = {
    "replicas_desired": 9, "replicas": 8, "replicas_ready": 7, "replicas_asleep": 6,
    "replicas_unreachable": 5, "consecutive_failures": 4, "restarts_total": 3,
    at("weights_epoch", "target"): 1, at("weights_version", "target"): 12,
    at("degraded", 'odd "reason"\\'): 1, at("progressing", "Starting"): 1,
    **{at("condition", each, "Ready"): float(each == "False") for each in CONDITION_STATUSES},
}  # fmt: skip
"""What the page has of these figures: name and values of labels, without those of the pool."""


def samples_of(page: PoolPage, key: PoolKey) -> dict[str, float]:
    """A pool's samples; counts of events and updates only if there are any."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page.render_page().decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            if (labels.pop("namespace"), labels.pop("pool")) != key:
                continue
            name = sample.name.removeprefix("rollout_pool_")
            spot = at(name, *labels.values())
            assert spot not in found, f"twice: {spot}"
            if sample.value or not name.startswith(("weights_update", "failed")):
                found[spot] = sample.value
    return found


def test_the_page_says_what_was_set() -> None:
    page = PoolPage()
    page.set_figures(KEY, FIGURES)
    page.set_figures(OTHER, PoolMetrics())
    assert samples_of(page, KEY) == SHOWN
    for _ in range(2):
        page.count_event(KEY, FAILED_WRITES, verb="patch", resource="pods", reason="x")
    page.count_event(KEY, FAILED_CALLS, verb="stage")
    page.observe_update(KEY, "Complete", 7.0)
    page.observe_update(KEY, "Failed", 9e4)
    counted: dict[str, float] = {
        at("failed_writes_total", "patch", "pods", "x"): 2,
        at("failed_calls_total", "stage"): 1,
    }
    name, bounds = "weights_update_seconds", [str(each) for each in UPDATE_BOUNDS if each >= 7]
    for outcome, seconds, edges in (
        ("Complete", 7.0, [*bounds, "+Inf"]),
        ("Failed", 9e4, ["+Inf"]),
    ):
        counted |= {at(f"{name}_count", outcome): 1, at(f"{name}_sum", outcome): seconds}
        counted |= {at(f"{name}_bucket", outcome, edge): 1 for edge in edges}
    assert samples_of(page, KEY) == SHOWN | counted
    page.set_figures(KEY, PoolMetrics(ready=1))
    left = samples_of(page, KEY)
    assert left["replicas_ready"] == 1
    gone = ("condition", "degraded", "progressing", "weights_version")
    assert not [at for at in left if at.startswith(gone)]
    assert left["failed_calls_total stage"] == 1, "counters stay"
    page.forget_pool(KEY)
    assert (samples_of(page, KEY), len(samples_of(page, OTHER))) == ({}, 7)


def test_figures_that_stay_are_not_written_again() -> None:
    page = PoolPage()
    page.set_figures(KEY, PoolMetrics(ready=3))
    page.render_page()
    kept = {name: id(text) for name, text in page._pools[KEY].lines.items()}
    page.set_figures(KEY, PoolMetrics(ready=3))
    page.render_page()
    assert {name: id(text) for name, text in page._pools[KEY].lines.items()} == kept
