"""Every panel shows something in a real Prometheus, whichever way it scrapes.

The pages are those of a worker that generates, updates and sleeps, and of the operator's telemetry; the
scrape settings are those of the chart's annotations, once as most people honor labels and once as they
don't, and those of its PodMonitors as the Prometheus Operator would write them.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from demo import monitoring
from localkube.debian import unpack_prometheus
from rollout_operator.api.names import LABEL_POOL, LABEL_REPLICA
from rollout_operator.api.objects import PoolKey
from rollout_operator.operator_telemetry import OperatorTelemetry
from rollout_operator.pool_page import FAILED_CALLS, PoolMetrics
from rollout_worker.schemas import GenerateRequest, RequireRequest
from tests.support.charts import CHART, case, every
from tests.support.doc_manifests import manifests_of
from tests.support.unit.tiny_worker import TinyWorker, refused, tiny_worker

POOL = PoolKey("rl", "math")
SECONDS = 60
KV_USAGE = "hf_engine_kv_cache_usage"
"""A metric of an engine, which has no label of ours."""
Job = dict[str, Any]


class Pages:
    """The pages of an operator and of a worker in whose pool things happen."""

    def __init__(self, operator: OperatorTelemetry, worker: TinyWorker) -> None:
        self.operator = operator
        self.worker = worker
        self.version = 0

    async def happen(self) -> None:
        """Let everything happen that a panel shows, again and again."""
        while True:
            self.version += 1
            await self._work()
            self._reconcile()
            await asyncio.sleep(0.2)

    async def _work(self) -> None:
        worker, version = self.worker, self.version
        worker.engine.free = True
        flight = await worker.begin(f"r{version}", 4)
        with refused("version-not-met"):
            worker.worker.submit_request(GenerateRequest(token_ids=(1,), min_version=10**6))
        await worker.ends(flight)
        await worker.update(version, version % 200)  # of bytes
        await worker.sleep()
        await worker.wake()
        worker.worker.runtime.telemetry.turn_residue.labels("GPU 0").set(2**30)

    def _reconcile(self) -> None:
        telemetry, version = self.operator, self.version
        identity = (1, version)
        telemetry.pools.set_figures(
            POOL,
            PoolMetrics(
                desired=1,
                replicas=1,
                ready=1,
                asleep=1,
                unreachable=1,
                restarts=version,
                weights=dict.fromkeys(("target", "committed", "active_min"), identity),
                conditions={"Ready": "True"},
            ),
        )
        telemetry.pools.observe_update(POOL, "Complete", 0.5)
        telemetry.pools.count_event(POOL, FAILED_CALLS, verb="sleep")
        telemetry.leader.set(1)
        telemetry.reconcile_total.labels("ok").inc()
        telemetry.reconcile_duration.observe(0.01)
        telemetry.queue_depth.set(0)
        telemetry.queue_wait.observe(0.01)
        telemetry.note_watch_event("pods")
        telemetry.count_request("get", "pods", 200)
        telemetry.count_request("get", "pods", 503)
        telemetry.ghosts.inc()


@asynccontextmanager
async def served(pages: Pages) -> AsyncIterator[int]:
    """Serve `/operator` and `/worker` on a free port of loopback; yields it."""

    async def operator(_: web.Request) -> web.Response:
        return web.Response(body=pages.operator.render_page(), content_type="text/plain")

    async def worker(_: web.Request) -> web.Response:
        page = pages.worker.worker.render_metrics() + f"{KV_USAGE} 0.5\n".encode()
        return web.Response(body=page, content_type="text/plain")

    app = web.Application()
    app.router.add_get("/operator", operator)
    app.router.add_get("/worker", worker)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


PODS = (
    {"namespace": "rollout-system", "pod": "operator-0", "__metrics_path__": "/operator"},
    {"namespace": "rl", "pod": "math-0-0", "__metrics_path__": "/worker"},
)
"""What Prometheus knows of the two pods before it scrapes them."""


def annotated(port: int, *, honor: bool) -> list[Job]:
    """What the usual job for `prometheus.io/scrape` makes of the pods."""
    static = [{"targets": [f"127.0.0.1:{port}"], "labels": pod} for pod in PODS]
    return [{"job_name": "kubernetes-pods", "honor_labels": honor, "static_configs": static}]


def monitored(port: int) -> list[Job]:
    """What the Prometheus Operator makes of the chart's PodMonitors."""
    jobs = []
    labels: tuple[dict[str, str], ...] = ({}, {LABEL_POOL: "math", LABEL_REPLICA: "0"})
    for monitor, pod, of_pod in zip(
        every(case("monitoring"), "PodMonitor"), PODS, labels, strict=True
    ):
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        found = {
            "__meta_kubernetes_pod_label_" + re.sub(r"[^a-zA-Z0-9]", "_", label): value
            for label, value in of_pod.items()
        }
        job = {
            "job_name": monitor["metadata"]["name"],
            "honor_labels": endpoint.get("honorLabels", False),
            "relabel_configs": [
                {"source_labels": each["sourceLabels"], "target_label": each["targetLabel"]}
                for each in endpoint.get("relabelings", ())
            ],
            "static_configs": [{"targets": [f"127.0.0.1:{port}"], "labels": {**pod, **found}}],
        }
        jobs.append(job)
    return jobs


@contextmanager
def prometheus(folder: Path, jobs: list[Job]) -> Iterator[str]:
    """Run Prometheus with these jobs; yields its address."""
    folder.mkdir()
    settings = {"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}
    with monitoring.run_prometheus(unpack_prometheus() / "prometheus", folder, settings) as address:
        yield address


def panels() -> Iterator[tuple[str, str]]:
    """Yield where each query of a dashboard stands, and the query with its variables filled in."""
    for path in sorted((CHART / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                query = target["expr"].replace("$__rate_interval", "15s")
                query = query.replace("$namespace", "rl").replace("$pool", "math")
                query = query.replace("$job", ".*")
                yield f"{path.stem}: {panel['title']}: {target['refId']}", query


def numbers(address: str, expression: str) -> list[str]:
    """What a query answers at this moment."""
    return [each["value"][1] for each in monitoring.query(address, expression)]


def shows(address: str, query: str) -> bool:
    """Whether a query has a number to show at this moment."""
    return any(number != "NaN" for number in numbers(address, query))


async def still_empty(address: str, queries: dict[str, str], life: asyncio.Task[None]) -> list[str]:
    """Ask every panel until each has shown something; return those that never did."""
    left = dict(queries)
    end = time.monotonic() + SECONDS
    while left and not life.done() and time.monotonic() < end:
        for where, query in list(left.items()):
            if await asyncio.to_thread(shows, address, query):
                del left[where]
        await asyncio.sleep(0.5)
    return sorted(left)


async def test_every_panel_shows_something_however_pods_are_scraped(tmp_path: Path) -> None:
    locks = tmp_path / "locks"
    locks.mkdir()
    flags = ["--pool", "math", "--namespace", "rl", "--weights-roots", str(tmp_path)]
    flags += ["--turn-directory", str(locks), "--turn-devices", "gpu"]
    everything = dict(panels())
    # Without `honor_labels` the operator's series bear the operator's namespace: docs/operate/metrics.md.
    of_workers = {where: query for where, query in everything.items() if "rollout_worker_" in query}
    assert len(of_workers) > 12
    async with tiny_worker(tmp_path, *flags) as worker:
        worker.updates.raise_fence("operator", RequireRequest(epoch=0, min_version=0))
        pages = Pages(OperatorTelemetry(), worker)
        async with served(pages) as port:
            ways = (
                ("annotations", annotated(port, honor=True), everything),
                ("annotations without honor_labels", annotated(port, honor=False), of_workers),
                ("PodMonitors", monitored(port), everything),
            )
            life = asyncio.create_task(pages.happen())
            with ExitStack() as running:
                asked = [
                    still_empty(
                        running.enter_context(prometheus(tmp_path / f"prometheus-{i}", jobs)),
                        queries,
                        life,
                    )
                    for i, (_, jobs, queries) in enumerate(ways)
                ]
                empty = await asyncio.gather(*asked)
            assert not life.done(), life.exception()
            life.cancel()
    found = {way: names for (way, _, _), names in zip(ways, empty, strict=True)}
    assert found == {way: [] for way in found}


async def test_autoscalers_count_the_outputs_that_run_and_wait(tmp_path: Path) -> None:
    """By the queries of docs/autoscaling.md; of a pool that nobody scrapes there is no number, rather than 0."""
    [keda, rules, hpa] = manifests_of("autoscaling.md")
    [trigger], [rule] = keda["spec"]["triggers"], rules["externalRules"]
    [metric] = hpa["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] == rule["name"]["as"]
    assert metric["external"]["target"]["averageValue"] == trigger["metadata"]["threshold"]
    matchers = 'namespace="rl",pool="math"'
    asked = [
        trigger["metadata"]["query"],
        rule["metricsQuery"].replace("<<.LabelMatchers>>", matchers),
        f"count({rule['seriesQuery']}) * 3",
    ]
    flags = ["--pool", "math", "--namespace", "rl", "--weights-roots", str(tmp_path)]
    async with tiny_worker(tmp_path, *flags) as worker:
        worker.updates.raise_fence("operator", RequireRequest(epoch=0, min_version=0))
        running = [await worker.begin(f"r{index}", 4) for index in range(3)]
        async with served(Pages(OperatorTelemetry(), worker)) as port:
            with prometheus(tmp_path / "prometheus", monitored(port)) as address:
                left, end = list(asked), time.monotonic() + SECONDS
                while left and time.monotonic() < end:
                    left = [
                        q for q in left if await asyncio.to_thread(numbers, address, q) != ["3"]
                    ]
                    await asyncio.sleep(0.3)
                assert left == []
                none = await asyncio.to_thread(numbers, address, asked[0].replace("math", "none"))
                assert none == []
        worker.engine.free = True
        for flight in running:
            await worker.ends(flight)
