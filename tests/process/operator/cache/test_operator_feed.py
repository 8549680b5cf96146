"""The informer and its feed: a list or an event ends in the store and wakes exactly the pools that it is about."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollout_common.kube import reflector
from rollout_common.kube.reflector import ListedValues
from rollout_operator.api.names import (
    LABEL_MANAGED_BY,
    LABEL_POOL,
    LABEL_SLICE_MANAGER,
    MANAGER_NAME,
)
from rollout_operator.api.objects import Obj, PoolKey
from rollout_operator.cache.object_store import ObjectStore
from rollout_operator.cache.pool_informer import PoolInformer
from rollout_operator.cache.store_feed import StoreFeed
from rollout_operator.cache.workqueue import WorkQueue
from rollout_operator.kube.kube_client import KubeClient
from rollout_operator.operator_telemetry import OperatorTelemetry
from tests.support.loopback import Loopback, kubeconfig, loopback
from tests.support.waiting import until
from tests.support.watched_server import WatchedServer

POOLS = "/apis/rollout.dev/v1alpha1/rolloutreplicas"
PODS = "/api/v1/pods"
SERVICES = "/api/v1/services"
SLICES = "/apis/discovery.k8s.io/v1/endpointslices"
BUDGETS = "/apis/policy/v1/poddisruptionbudgets"
KEY = PoolKey("rl", "math")


class Bench:
    def __init__(self, kube: KubeClient | None = None, *namespaces: str) -> None:
        self.store: ObjectStore[Obj] = ObjectStore(lambda pod: pod)
        self.queue: WorkQueue[PoolKey] = WorkQueue()
        self.telemetry = OperatorTelemetry()
        self.feed = StoreFeed(self.store, self.queue, self.telemetry)
        self.informer = PoolInformer(
            kube or KubeClient(),
            self.feed,
            namespaces=namespaces,
            interval=300,
            relist_seconds=0.05,
            lost=self._count_lost,
        )
        self.lost = 0

    def _count_lost(self) -> None:
        self.lost += 1

    def woken(self) -> list[PoolKey]:
        found = []
        while (key := self.queue.get_due()) is not None:
            self.queue.mark_done(key)
            found.append(key)
        return found

    def pod_names(self) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.store.pool_pods(KEY)]

    def ghosts(self) -> float | None:
        return self.telemetry.registry.get_sample_value("rollout_operator_ghosts_total")


class Followed(Bench):
    """A bench whose informer follows a server."""

    def __init__(self, kube: KubeClient, loop: Loopback, *namespaces: str) -> None:
        super().__init__(kube, *namespaces)
        self.loopback = loop
        self.server = WatchedServer(loop, POOLS, PODS, SERVICES, SLICES, BUDGETS)

    def pool_lists(self) -> int:
        return sum(path.startswith(POOLS) for _, path, _ in self.loopback.requests)


@pytest.fixture
def bench() -> Bench:
    return Bench()


@asynccontextmanager
async def following(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *namespaces: str
) -> AsyncIterator[Followed]:
    """Its `informer` runs as soon as a test has set what the server answers, and waits for nothing."""
    monkeypatch.setattr(reflector, "retry_pause", lambda *_: 0.01)
    async with loopback() as loop:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, loop.url)))
        async with KubeClient() as kube:
            made = Followed(kube, loop, *namespaces)
            running = asyncio.create_task(made.informer.run())
            yield made
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


@pytest.fixture
async def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Followed]:
    async with following(tmp_path, monkeypatch) as made:
        yield made


def pool(version: int, name: str = "math") -> Obj:
    meta = {"namespace": "rl", "name": name, "uid": f"p-{name}", "resourceVersion": str(version)}
    return {"metadata": meta, "spec": {}}


def pod(version: int, pool: str = "math", name: str = "math-0-0", **meta: Any) -> Obj:
    labels = {LABEL_MANAGED_BY: MANAGER_NAME, LABEL_POOL: pool}
    return {
        "metadata": {
            "namespace": "rl",
            "name": name,
            "uid": f"u-{name}",
            "resourceVersion": str(version),
            "labels": labels,
            **meta,
        }
    }


def test_the_time_of_the_last_event_is_shown(bench: Bench) -> None:
    name = "rollout_operator_watch_last_event_timestamp_seconds"
    bench.feed.take_event("pods", "ADDED", bench.store.read_object("pods", pod(1)))
    value = bench.telemetry.registry.get_sample_value(name, {"resource": "pods"})
    assert value is not None
    assert value > 1_700_000_000


async def test_what_is_followed_is_listed_once_and_all_but_pools_are_watched(
    followed: Followed,
) -> None:
    assert followed.informer.oldest_list_age() is None
    followed.server.items[POOLS] = [pool(1)]
    followed.server.items[PODS] = [pod(2)]
    await asyncio.wait_for(followed.informer.wait_listed(), 5)
    assert followed.woken() == [KEY]
    age = followed.informer.oldest_list_age()
    assert age is not None
    assert age < 5
    await until(lambda: len(followed.server.watches) == 4, what="the watches")
    ours = f"{LABEL_MANAGED_BY}={MANAGER_NAME}"
    assert {w["path"]: w["labelSelector"] for w in followed.server.watches} == {
        PODS: ours,
        SERVICES: ours,
        SLICES: f"{LABEL_SLICE_MANAGER}={MANAGER_NAME}",
        BUDGETS: ours,
    }
    assert {w["timeoutSeconds"] for w in followed.server.watches} == {"300"}


async def test_a_pod_that_comes_changes_and_goes_wakes_its_pool(followed: Followed) -> None:
    await asyncio.wait_for(followed.informer.wait_listed(), 5)
    followed.server.send(PODS, "ADDED", pod(100))
    await until(lambda: followed.woken() == [KEY], what="the pod")
    labels = pod(101)["metadata"]["labels"] | {"more": "yes"}
    followed.server.send(PODS, "MODIFIED", pod(101, labels=labels))
    await until(lambda: followed.woken() == [KEY], what="its label")
    [known] = followed.store.pool_pods(KEY)
    assert known["metadata"]["labels"] == labels
    followed.server.send(PODS, "DELETED", pod(102))
    await until(lambda: followed.woken() == [KEY], what="its end")
    assert followed.pod_names() == []
    assert followed.ghosts() == 0


async def test_what_went_while_no_watch_ran_goes_by_the_next_list(followed: Followed) -> None:
    followed.server.items[PODS] = [pod(1), pod(2, name="math-1-0")]
    await asyncio.wait_for(followed.informer.wait_listed(), 5)
    followed.woken()
    followed.server.items[PODS] = [pod(2, name="math-1-0")]
    followed.server.end(PODS)
    await until(lambda: followed.pod_names() == ["math-1-0"], what="the ghost to go")
    assert followed.woken() == [KEY]
    assert followed.ghosts() == 1


async def test_a_watch_whose_version_is_too_old_lists_again(followed: Followed) -> None:
    followed.server.items[PODS] = [pod(1)]
    await asyncio.wait_for(followed.informer.wait_listed(), 5)
    followed.server.items[PODS] = []
    gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
    followed.server.events[PODS].put_nowait(json.dumps({"type": "ERROR", "object": gone}) + "\n")
    await until(lambda: followed.pod_names() == [], what="the list")
    followed.server.send(PODS, "ADDED", pod(100))
    await until(lambda: followed.pod_names() == ["math-0-0"], what="the next watch")


async def test_an_outage_forgets_nothing_and_is_logged_once(
    followed: Followed, caplog: pytest.LogCaptureFixture
) -> None:
    followed.server.items[PODS] = [pod(1)]
    await asyncio.wait_for(followed.informer.wait_listed(), 5)
    await until(lambda: len(followed.server.watches) == 4, what="the watches")
    listing = followed.loopback.answers["GET", PODS]
    followed.loopback.answer("GET", PODS, {"message": "later"}, 503)
    before = len(followed.loopback.requests)
    followed.server.end(PODS)
    await until(lambda: len(followed.loopback.requests) >= before + 3, what="further tries")
    assert followed.pod_names() == ["math-0-0"]
    followed.loopback.answers["GET", PODS] = listing
    followed.server.send(PODS, "ADDED", pod(100, name="math-1-0"))
    await until(lambda: len(followed.pod_names()) == 2, 10, what="the next watch")
    assert caplog.text.count("later") == 1


async def test_kopfs_stream_has_lost_its_place_once_the_api_server_is_back(
    followed: Followed,
) -> None:
    """It may have come back from a backup; only what is watched is listed often enough to tell."""
    await asyncio.wait_for(followed.informer.wait_listed(), 5)
    await until(lambda: len(followed.server.watches) == 4, what="the watches")
    listing = followed.loopback.answers["GET", PODS]
    asked = 0

    async def cut(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    followed.loopback.answers["GET", PODS] = cut
    followed.server.end(PODS)
    # A list asks twice if its first connection was an old one: of five requests, two lists have failed.
    await until(lambda: asked >= 5, what="further tries")
    assert (followed.lost, followed.pool_lists()) == (0, 1)
    followed.loopback.answers["GET", PODS] = listing
    await until(lambda: followed.pool_lists() == 2, 5, what="the list of pools")
    assert followed.lost == 1


async def test_a_list_from_a_backup_has_pools_listed_and_streamed_anew(followed: Followed) -> None:
    await asyncio.wait_for(followed.informer.wait_listed(), 5)
    followed.server.send(PODS, "ADDED", pod(100_000))
    await until(lambda: followed.pod_names() != [], what="the pod")
    followed.server.end(PODS)
    await until(lambda: followed.pod_names() == [], what="the list")
    await until(lambda: followed.pool_lists() == 2, what="the list of pools")
    assert (followed.lost, followed.ghosts()) == (1, 0)


async def test_a_list_of_kopfs_is_followed_by_one_of_ours(followed: Followed) -> None:
    await asyncio.wait_for(followed.informer.wait_listed(), 5)
    followed.informer.take_pool_event(None, pool(100))
    assert followed.store.pool_keys() == [KEY]
    followed.server.lists = 20  # its next version is 210
    await until(lambda: followed.store.pool_keys() == [], what="the ghost to go")
    assert followed.pool_lists() == 2


async def test_a_change_of_a_pool_wakes_it_and_asks_for_no_list(followed: Followed) -> None:
    await asyncio.wait_for(followed.informer.wait_listed(), 5)
    followed.informer.take_pool_event("ADDED", pool(100))
    assert followed.woken() == [KEY]
    await asyncio.sleep(0.3)
    assert followed.pool_lists() == 1


async def test_of_several_wishes_to_list_pools_the_earliest_counts(followed: Followed) -> None:
    await asyncio.wait_for(followed.informer.wait_listed(), 5)
    followed.informer.schedule_pool_list(60)
    followed.informer.schedule_pool_list(0.05)
    followed.informer.schedule_pool_list(30)
    await until(lambda: followed.pool_lists() == 2, what="the list")
    await asyncio.sleep(0.3)
    assert followed.pool_lists() == 2


async def test_pools_are_listed_before_kopfs_stream_starts_again(followed: Followed) -> None:
    await asyncio.wait_for(followed.informer.wait_listed(), 5)
    listing = followed.loopback.answers["GET", POOLS]
    followed.loopback.answer("GET", POOLS, "404 page not found", 404)
    waiting = asyncio.create_task(followed.informer.list_pools())
    await until(lambda: followed.pool_lists() >= 3, what="further tries")
    assert not waiting.done()
    followed.loopback.answers["GET", POOLS] = listing
    await asyncio.wait_for(waiting, 5)


async def test_a_list_whose_continuation_expired_is_begun_again(followed: Followed) -> None:
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

    followed.loopback.answers["GET", PODS] = answer
    await asyncio.wait_for(followed.informer.wait_listed(), 5)
    assert [p["metadata"] for p in followed.store.pool_pods(KEY)] == [pod(11)["metadata"]]
    assert times >= 3


async def test_the_first_list_waits_for_the_api_server_and_tells_why_once(
    followed: Followed, caplog: pytest.LogCaptureFixture
) -> None:
    listing = followed.loopback.answers["GET", POOLS]
    followed.loopback.answer("GET", POOLS, "404 page not found", 404)
    await until(lambda: followed.pool_lists() >= 3, what="further tries")
    assert followed.informer.oldest_list_age() is None
    followed.loopback.answers["GET", POOLS] = listing
    await asyncio.wait_for(followed.informer.wait_listed(), 6)
    assert followed.informer.oldest_list_age() is not None
    assert caplog.text.count("is the CustomResourceDefinition installed?") == 1


async def test_a_list_of_one_namespace_is_silent_about_the_others(bench: Bench) -> None:
    for namespace in ("rl", "other"):
        listed = bench.store.read_object("pods", pod(5, namespace=namespace))
        bench.feed.take_list("pods", ListedValues([listed], "10"), namespace)
    bench.feed.take_list("pods", ListedValues([], "20"), "other")
    assert bench.pod_names() == ["math-0-0"]
    assert bench.store.pool_pods(PoolKey("other", "math")) == []


async def test_a_namespace_that_may_not_be_listed_keeps_no_other_one_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was deleted, and its Role with it, or not made yet: the operator goes on with the others."""
    async with following(tmp_path, monkeypatch, "rl", "gone") as made:
        paths = {
            namespace: [
                f"{prefix}/namespaces/{namespace}/{plural}"
                for prefix, _, plural in (each.rpartition("/") for each in made.server.items)
            ]
            for namespace in ("rl", "gone")
        }
        for path in paths["rl"]:
            made.server.add_path(path)
        made.server.items[paths["rl"][0]] = [pool(1)]
        for path in paths["gone"]:
            made.loopback.answer("GET", path, {"message": "no such role"}, 403)
        await asyncio.wait_for(made.informer.wait_listed(), 5)
        assert made.informer.is_listed("rl")
        assert not made.informer.is_listed("gone")
        assert made.informer.oldest_list_age() is not None
        assert made.informer.streamed_namespaces() == ("rl",)
        assert "no such role" in (made.informer.first_problem() or "")
        assert made.woken() == [KEY]
        later = PoolKey("gone", "late")
        for path in paths["gone"]:
            made.server.add_path(path)
        late = pool(2, "late")
        made.server.items[paths["gone"][0]] = [
            late | {"metadata": late["metadata"] | {"namespace": "gone"}}
        ]
        await until(lambda: made.informer.is_listed("gone"), what="its lists")
        assert later in made.woken()
        assert made.lost == 1, "the stream is to follow it, too"
        assert made.informer.streamed_namespaces() == ("rl", "gone")


async def test_where_nothing_may_be_listed_nothing_begins(followed: Followed) -> None:
    for path in followed.server.items:
        followed.loopback.answer("GET", path, {"message": "no such role"}, 403)
    await until(lambda: followed.pool_lists() >= 3, what="further tries")
    assert followed.informer.oldest_list_age() is None
    assert "no such role" in (followed.informer.first_problem() or "")


async def test_a_watch_that_is_refused_keeps_nothing_from_beginning(followed: Followed) -> None:
    listing = followed.loopback.answers["GET", PODS]
    refused = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal refused
        if "watch" not in request.query:
            assert callable(listing)
            return await listing(request)
        refused += 1
        return web.json_response({"message": "no watch"}, status=403)

    async def late(request: web.Request) -> web.StreamResponse:
        await until(lambda: refused >= 1, what="the refusal")
        followed.server.add_path(SERVICES)
        return web.json_response({"metadata": {"resourceVersion": "9"}, "items": []})

    followed.loopback.answers["GET", PODS] = answer
    followed.loopback.answers["GET", SERVICES] = late
    await asyncio.wait_for(followed.informer.wait_listed(), 5)
    assert followed.informer.oldest_list_age() is not None
