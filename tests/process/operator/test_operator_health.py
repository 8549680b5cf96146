"""Probes, metrics and logs: what people and Prometheus see of the operator."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator

import aiohttp
import pytest

from rollout_operator.operator_logs import LimitWarnings
from rollout_operator.operator_telemetry import OperatorTelemetry
from rollout_operator.probe_server import LoopLag, ProbeServer
from rollout_operator.settings import MAX_LAG_SECONDS

CONTRACT = {
    "rollout_operator_reconcile_duration_seconds",
    "rollout_operator_reconcile",
    "rollout_operator_queue_depth",
    "rollout_operator_queue_wait_seconds",
    "rollout_operator_watch_last_event_timestamp_seconds",
    "rollout_operator_api_requests",
    "rollout_operator_leader",
    "rollout_pool_replicas",
    "rollout_pool_replicas_ready",
    "rollout_pool_replicas_asleep",
    "rollout_pool_weights_version",
    "rollout_pool_weights_epoch",
    "rollout_pool_condition",
    "rollout_pool_restarts",
}


class Wrong:
    """A check that a test sets."""

    def __init__(self) -> None:
        self.text: str | None = None

    def __call__(self) -> str | None:
        return self.text


class Site:
    def __init__(self, telemetry: OperatorTelemetry, url: str, health: Wrong, ready: Wrong) -> None:
        self.telemetry = telemetry
        self.url = url
        self.health = health
        self.ready = ready

    async def get(self, path: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.get(self.url + path) as answer:
            return answer.status, await answer.text()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    telemetry, health, ready = OperatorTelemetry(), Wrong(), Wrong()
    probes = ProbeServer(telemetry, healthy=[health], ready=[ready])
    port = await probes.start("127.0.0.1", 0)
    yield Site(telemetry, f"http://127.0.0.1:{port}", health, ready)
    await probes.stop()


async def test_well(site: Site) -> None:
    assert await site.get("/healthz") == (200, "ok\n")
    assert await site.get("/readyz") == (200, "ok\n")


class Slow(OperatorTelemetry):
    """Says in which thread its page was rendered."""

    def render_page(self) -> bytes:
        return threading.current_thread().name.encode()


async def test_the_page_of_metrics_is_rendered_beside_the_event_loop() -> None:
    probes = ProbeServer(Slow(), healthy=[], ready=[])
    url = f"http://127.0.0.1:{await probes.start('127.0.0.1', 0)}"
    _, thread = await Site(OperatorTelemetry(), url, Wrong(), Wrong()).get("/metrics")
    assert thread != threading.current_thread().name
    await probes.stop()


async def test_not_ready_is_healthy_and_says_why(site: Site) -> None:
    site.ready.text = "the first list is not complete"
    assert await site.get("/healthz") == (200, "ok\n")
    assert await site.get("/readyz") == (503, "the first list is not complete\n")


async def test_unhealthy_is_not_ready_either(site: Site) -> None:
    site.health.text = "the event loop was blocked for 6.0 s"
    assert await site.get("/healthz") == (503, "the event loop was blocked for 6.0 s\n")
    assert (await site.get("/readyz"))[0] == 503


async def test_every_metric_of_the_contract_is_on_the_page(site: Site) -> None:
    site.telemetry.note_watch_event("pods")
    site.telemetry.count_request("get", "pods", 200)
    site.telemetry.reconcile_total.labels("ok").inc()
    status, page = await site.get("/metrics")
    assert status == 200
    found = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
    found = {name.removesuffix("_total") for name in found}
    assert found >= CONTRACT
    assert 'rollout_operator_api_requests_total{code="200",resource="pods",verb="get"} 1.0' in page


async def test_a_blocked_loop_is_noticed() -> None:
    lag = LoopLag()
    running = asyncio.create_task(lag.run())
    await asyncio.sleep(0.05)
    time.sleep(0.8)  # noqa: ASYNC251 - the fault that is to be found
    await asyncio.sleep(0.1)
    running.cancel()
    assert 0.2 < lag.worst_lag() < 1.5
    assert lag.check_lag() is None


def test_the_worst_lag_of_the_last_half_minute_counts() -> None:
    now = [100.0]
    lag = LoopLag(lambda: now[0])
    lag.note_lag(0.1)
    lag.note_lag(MAX_LAG_SECONDS + 1)
    lag.note_lag(0.2)
    assert lag.check_lag() == "the event loop was blocked for 6.0 s"
    now[0] += 29
    assert lag.check_lag() is not None
    now[0] += 2
    assert lag.check_lag() is None
    assert lag.worst_lag() == 0


def test_repeated_warnings_of_kopf_are_let_through_once_a_minute() -> None:
    now = [100.0]
    limit = LimitWarnings("kopf", lambda: now[0])

    def passes(name: str, level: int = logging.WARNING) -> bool:
        return bool(limit.filter(logging.LogRecord(name, level, "", 1, "retrying", None, None)))

    assert [passes("kopf.retries") for _ in range(3)] == [True, False, False]
    assert passes("kopf.activities"), "another logger"
    assert passes("kopf.retries", logging.ERROR), "an error is no routine"
    assert [passes("rollout_operator.x") for _ in range(2)] == [True, True]
    now[0] += 61
    assert passes("kopf.retries")
