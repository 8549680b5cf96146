"""The worker's page of metrics: whose series they are, and what is counted where."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollout_common.wire.problems import KINDS
from rollout_worker.observe import worker_telemetry
from rollout_worker.observe.worker_telemetry import REFUSALS, WorkerTelemetry
from rollout_worker.ports.data_routes import make_data_app
from rollout_worker.ports.port_connections import ConcurrencyLimit
from rollout_worker.requests import http_requests
from rollout_worker.schemas import GenerateRequest
from rollout_worker.service import WorkerService
from tests.support.unit.asgi import call
from tests.support.unit.tiny_worker import TinyWorker, refused, settings, tiny_worker

POOL = 'namespace="rl",pool="math"'


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[TinyWorker]:
    async with tiny_worker(tmp_path, "--max-queue", "1", rows=1) as worker:
        yield worker


def value(page: str, series: str) -> float:
    [found] = re.findall(rf"^{re.escape(series)} (\S+)$", page, re.MULTILINE)
    return float(found)


def test_every_series_names_its_pool_however_it_is_scraped() -> None:
    worker_telemetry = WorkerTelemetry("math", "rl")
    worker_telemetry.export_info("hf", "1", "tiny")
    worker_telemetry.inter_token_seconds.observe(0.01)
    page = worker_telemetry.render_page("").decode().splitlines()
    series = [line for line in page if not line.startswith("#")]
    assert len(series) > 100
    assert [s for s in series if 'namespace="rl"' not in s or 'pool="math"' not in s] == []
    assert [line for line in series if "_created" in line] == []


def test_a_worker_by_itself_names_no_pool() -> None:
    page = WorkerTelemetry(None, "rl").render_page("").decode()
    assert "pool=" not in page
    assert "namespace=" not in page


def test_refusals_are_there_before_the_first_one() -> None:
    page = WorkerTelemetry("math", "rl").render_page("").decode()
    for slug in REFUSALS:
        assert value(page, f'rollout_worker_refused_total{{{POOL},reason="{slug}"}}') == 0
    # All that a request can be told to try again for; these two are answers to control calls.
    retried = {slug for slug, (status, _) in KINDS.items() if status in (429, 503)}
    retried -= {"auth-unavailable", "engine-refused"}
    assert set(REFUSALS) == retried | {"duplicate-request", "version-not-met", "unknown-media"}


async def test_a_refused_request_is_counted_once_by_its_problem(worker: TinyWorker) -> None:
    await worker.begin("a", 3)
    with refused("duplicate-request"):
        await worker.begin("a", 3)
    with refused("version-not-met"):
        worker.worker.submit_request(GenerateRequest(token_ids=(1,), min_version=9))
    await worker.pause(mode="abort")
    with refused("paused"):
        worker.worker.check_serving()
    with refused("paused"):
        worker.worker.submit_request(GenerateRequest(token_ids=(1,)))
    assert worker.worker.readiness_problem() is not None, "a probe is no request"
    assert by_problem(worker.worker) == {"duplicate-request": 1, "version-not-met": 1, "paused": 2}


def by_problem(worker: WorkerService) -> dict[str, float]:
    page = worker.render_metrics().decode()
    series = 'rollout_worker_refused_total{{reason="{}"}}'
    return {s: n for s in REFUSALS if (n := value(page, series.format(s)))}


async def test_what_is_refused_before_admission_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the model loads, no body is read; nor one too many, or one that memory has no room for."""
    asked = b'{"token_ids": [1]}'
    loading = WorkerService(settings())
    for path in ("/v1/generate", "/v1/completions"):
        answer = await call(make_data_app(loading), path, asked)
        assert (answer.status, answer.slug) == (503, "starting")
    assert by_problem(loading) == {"starting": 2}

    async with tiny_worker(tmp_path) as tiny:
        full = ConcurrencyLimit(make_data_app(tiny.worker), 0, tiny.worker.count_refusal)
        assert (await call(full, "/v1/generate", asked)).status == 429
        monkeypatch.setattr(http_requests, "BODY_BUDGET_BYTES", 1)
        assert (await call(make_data_app(tiny.worker), "/v1/generate", asked)).status == 429
        assert by_problem(tiny.worker) == {"queue-full": 2}


async def test_memory_is_counted_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, counted = threading.Event(), threading.Event()

    def count(pid: int) -> int:
        begun.set()
        counted.wait(5)
        return 7

    monkeypatch.setattr(worker_telemetry, "_proportional_bytes", count)
    async with tiny_worker(tmp_path) as tiny:
        app = make_data_app(tiny.worker)
        scrapes = [asyncio.create_task(call(app, "/metrics", method="GET")) for _ in range(3)]
        assert await asyncio.to_thread(begun.wait, 10)
        assert (await call(app, "/health", method="GET")).status == 200
        assert not any(scrape.done() for scrape in scrapes)
        counted.set()
        for scrape in scrapes:
            page = (await asyncio.wait_for(scrape, 10)).content.decode()
            assert value(page, "rollout_worker_memory_resident_bytes") % 7 == 0
            assert value(page, "rollout_worker_memory_resident_bytes") > 0


async def test_the_time_between_tokens_is_measured_within_an_output(worker: TinyWorker) -> None:
    flight = await worker.runs("r", made=1, tokens=3)
    page = worker.worker.render_metrics().decode()
    assert value(page, "rollout_worker_inter_token_seconds_count") == 0, "there is one token"
    await worker.ends(flight)
    page = worker.worker.render_metrics().decode()
    assert 1 <= value(page, "rollout_worker_inter_token_seconds_count") <= 2
    assert 0 < value(page, "rollout_worker_inter_token_seconds_sum") < 10
