"""A scrape of the operator's metrics with a thousand pools: our page against prometheus_client's.

Both render the same series. Ours keeps the text of what has not changed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from bench.options import Options
from bench.reporting.figures import Goal, Result, figure
from rollout_operator.api.objects import PoolKey
from rollout_operator.operator_telemetry import OperatorTelemetry
from rollout_operator.pool_page import PoolMetrics

POOLS = 1000
CHANGED = POOLS // 10
"""Pools whose figures change between two scrapes."""
TICK_SECONDS = 0.001


class _Parsed(Collector):
    """Families that are there already: only their text remains to be written."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def measure_scrapes(options: Options) -> Result:
    """Render both pages in turn."""
    rounds = options.count(15, 5)
    telemetry = OperatorTelemetry()
    _change_figures(telemetry, range(POOLS), 0)
    page = telemetry.render_page()
    registry = CollectorRegistry()
    registry.register(_Parsed(list(text_string_to_metric_families(page.decode()))))
    ours, changing, theirs, lags = [], [], [], []
    for number in range(rounds):
        theirs.append(_seconds(lambda: generate_latest(registry)))
        ours.append(_seconds(telemetry.render_page))
        lags.append(asyncio.run(_worst_lag(telemetry.render_page)))
        begin = time.perf_counter()
        _change_figures(telemetry, range(CHANGED), number + 1)
        telemetry.render_page()
        changing.append(time.perf_counter() - begin)
    against = "prometheus_client"
    figures = [
        figure(
            "a scrape, nothing changed", ours, baseline=theirs, against=against, goal=Goal(0.02)
        ),
        figure(
            f"with {CHANGED} pools changed, their text included",
            changing,
            baseline=theirs,
            against=against,
        ),
        figure("the event loop's worst delay while a thread renders", lags, goal=Goal(0.02)),
    ]
    lines = sum(not line.startswith(b"#") for line in page.splitlines())
    notes = [
        f"{POOLS} pools with 4 versions and 4 conditions each: {lines:,} series, {len(page) / 1e6:.1f} MB."
    ]
    title = f"A scrape of the operator's metrics, {POOLS} pools"
    return Result("reconcile", title, figures, notes, part="scrape")


def _change_figures(telemetry: OperatorTelemetry, pools: range, number: int) -> None:
    conditions = dict.fromkeys(("Ready", "WeightsReady", "Progressing", "Degraded"), "True")
    which = ("committed", "target", "active_min", "active_max")
    for index in pools:
        figures = PoolMetrics(
            desired=8,
            replicas=8,
            ready=8,
            restarts=number,
            weights=dict.fromkeys(which, (1, number)),
            conditions=conditions,
        )
        telemetry.set_pool_metrics(PoolKey("train", f"pool-{index}"), figures)


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


async def _worst_lag(render: Callable[[], bytes]) -> float:
    """Return how late a timer of the loop came at most, while a thread renders."""
    rendering, worst = asyncio.create_task(asyncio.to_thread(render)), 0.0
    while not rendering.done():
        begin = time.perf_counter()
        await asyncio.sleep(TICK_SECONDS)
        worst = max(worst, time.perf_counter() - begin - TICK_SECONDS)
    return worst
