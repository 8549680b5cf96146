"""The feed: an event ends in the store and wakes exactly the pools that it is about."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollout_operator.api.names import LABEL_MANAGED_BY, LABEL_POOL, MANAGER_NAME
from rollout_operator.api.objects import Obj, PoolKey
from rollout_operator.cache.object_store import ObjectStore
from rollout_operator.cache.resync import Resync
from rollout_operator.cache.watch_events import WatchEventHandler
from rollout_operator.cache.workqueue import WorkQueue
from rollout_operator.kube.kube_client import KubeClient
from rollout_operator.operator_telemetry import OperatorTelemetry
from tests.support.loopback import Loopback, kubeconfig, loopback
from tests.support.waiting import until

LISTS = [
    "/apis/rollout.dev/v1alpha1/rolloutreplicas",
    "/api/v1/pods",
    "/api/v1/services",
    "/apis/discovery.k8s.io/v1/endpointslices",
]
KEY = PoolKey("rl", "math")


class Bench:
    def __init__(self, kube: KubeClient | None = None) -> None:
        self.store = ObjectStore()
        self.queue: WorkQueue[PoolKey] = WorkQueue()
        self.telemetry = OperatorTelemetry()
        self.resync = Resync(
            kube or KubeClient(), self.store, self.queue, self.telemetry, interval=300
        )
        self.feed = WatchEventHandler(
            self.store,
            self.queue,
            self.telemetry,
            self.resync,
            relist_seconds=0.05,
        )

    def woken(self) -> list[PoolKey]:
        found = []
        while (key := self.queue.get_due()) is not None:
            self.queue.mark_done(key)
            found.append(key)
        return found


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Loopback]:
    """Answers lists, empty ones to begin with."""
    async with loopback() as server:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, server.url)))
        for path in LISTS:
            server.answer("GET", path, {"metadata": {"resourceVersion": "10"}, "items": []})
        yield server


def pod(version: int, pool: str = "math", **meta: Any) -> Obj:
    labels = {LABEL_MANAGED_BY: MANAGER_NAME, LABEL_POOL: pool}
    return {
        "metadata": {
            "namespace": "rl",
            "name": "math-0-0",
            "uid": "u1",
            "resourceVersion": str(version),
            "labels": labels,
            **meta,
        }
    }


def test_an_event_wakes_its_pool_once(bench: Bench) -> None:
    bench.feed("pods", "ADDED", pod(1))
    bench.feed("pods", "MODIFIED", pod(2))
    assert bench.woken() == [KEY]
    bench.feed("pods", "MODIFIED", pod(2))
    assert bench.woken() == [], "nothing new"


def test_the_event_of_our_own_write_wakes_nobody(bench: Bench) -> None:
    bench.store.upsert_written("pods", pod(1))
    bench.feed("pods", "ADDED", pod(1))
    assert bench.woken() == [], "the pass that wrote it looks again by itself"


def test_a_pod_that_moves_wakes_both_pools(bench: Bench) -> None:
    bench.feed("pods", "ADDED", pod(1))
    bench.woken()
    bench.feed("pods", "MODIFIED", pod(2, pool="code"))
    assert set(bench.woken()) == {KEY, PoolKey("rl", "code")}


def test_the_time_of_the_last_event_is_shown(bench: Bench) -> None:
    name = "rollout_operator_watch_last_event_timestamp_seconds"
    bench.feed("pods", "ADDED", pod(1))
    value = bench.telemetry.registry.get_sample_value(name, {"resource": "pods"})
    assert value is not None
    assert value > 1_700_000_000


def lists(server: Loopback) -> int:
    """Whole lists of everything that were asked for."""
    return sum(path.startswith(LISTS[-1]) for _, path, _ in server.requests)


async def test_a_stream_that_lists_again_is_followed_by_a_list_of_ours(api: Loopback) -> None:
    async with KubeClient() as kube:
        bench = Bench(kube)
        running = asyncio.create_task(bench.resync.run())
        bench.feed("pods", None, pod(1))
        assert bench.store.pool_pods(KEY)
        await until(lambda: lists(api) == 1, 2)
        await until(lambda: not bench.store.pool_pods(KEY), 2, what="the ghost to go")
        running.cancel()


async def test_of_several_wishes_to_list_soon_the_earliest_counts(api: Loopback) -> None:
    async with KubeClient() as kube:
        bench = Bench(kube)
        running = asyncio.create_task(bench.resync.run())
        bench.resync.schedule_list(60)
        bench.resync.schedule_list(0.05)
        bench.resync.schedule_list(30)
        await until(lambda: lists(api) == 1, 10)
        await asyncio.sleep(0.3)
        assert lists(api) == 1
        running.cancel()


async def test_a_list_whose_continuation_expired_is_begun_again(api: Loopback) -> None:
    page = {"metadata": {"resourceVersion": "10", "continue": "more"}, "items": [pod(5)]}
    expired = {"kind": "Status", "reason": "Expired", "message": "too old"}
    times = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal times
        times += 1
        if "continue" not in request.query:
            last = {"metadata": {"resourceVersion": "12"}, "items": [pod(11)]}
            return web.json_response(page if times == 1 else last)
        return web.json_response(expired, status=410)

    api.answers["GET", "/api/v1/pods"] = answer
    async with KubeClient() as kube:
        bench = Bench(kube)
        await bench.resync.list_everything()
        assert [p["metadata"] for p in bench.store.pool_pods(KEY)] == [pod(11)["metadata"]]
    assert times == 3


async def test_the_first_list_waits_for_the_api_server_and_tells_why_once(
    api: Loopback, caplog: pytest.LogCaptureFixture
) -> None:
    api.answer("GET", LISTS[0], "404 page not found", 404)
    async with KubeClient() as kube:
        bench = Bench(kube)
        first = asyncio.create_task(bench.resync.run_first_list())
        await until(lambda: len(api.requests) >= 2, 6)
        assert bench.resync.last_list_age() is None
        api.answer("GET", LISTS[0], {"metadata": {"resourceVersion": "10"}, "items": []})
        await asyncio.wait_for(first, 6)
        assert bench.resync.last_list_age() is not None
    assert caplog.text.count("is the CustomResourceDefinition installed?") == 1
