"""Watches of trainers' pods and claims: who asks for them, whom they wake, what they survive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollout_common.kube.reflector import PAGE_ITEMS
from rollout_operator.api.objects import Obj, PoolKey
from rollout_operator.api.spec_colocation import TrainerSelector
from rollout_operator.cache.neighbour_informer import (
    MAX_SELECTOR_WATCHES,
    NeighbourInformer,
    NeighbourObjects,
)
from rollout_operator.kube.kube_client import KubeClient
from rollout_operator.kube.lease import Leadership
from tests.support.loopback import Loopback, kubeconfig, loopback
from tests.support.waiting import until
from tests.support.watched_server import WatchedServer

KEY, OTHER = PoolKey("rl", "math"), PoolKey("rl", "code")
PODS = "/api/v1/namespaces/rl/pods"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/rl/resourceclaims"

SLICES = "/apis/resource.k8s.io/v1/resourceslices"
NODES = "/api/v1/nodes"


def obj(name: str, value: int | None = 1, **labels: str) -> Obj:
    return {"metadata": {"name": name, "labels": labels}, "value": value}


def job(name: str) -> TrainerSelector:
    return TrainerSelector(match_labels={"job": name})


class Bench:
    def __init__(self, kube: KubeClient, server: Loopback) -> None:
        self.kube = kube
        self.server = server
        self.cluster = WatchedServer(server, PODS, CLAIMS, SLICES, NODES)
        self.woken: list[PoolKey] = []

        def read(found: Obj) -> object | None:
            return None if found["value"] is None else (found["metadata"]["name"], found["value"])

        self.around = NeighbourInformer(
            kube,
            {
                "pods": read,
                "resourceclaims": read,
                "resourceslices": read,
                "members": read,
                "nodes": read,
            },
            self.woken.append,
            seconds=7,
        )

    def look(self, key: PoolKey = KEY, of: str = "a") -> NeighbourObjects:
        return self.around.subscribe_beside(key, job(of))

    async def known(self, **what: Any) -> None:
        """Wait until the pool knows this."""
        await until(
            lambda: self.look() == NeighbourObjects(**what), what=f"{what}, not {self.look()}"
        )


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    async with loopback() as server:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, server.url)))
        async with KubeClient() as kube:
            made = Bench(kube, server)
            running = asyncio.create_task(made.around.run())
            yield made
            running.cancel()
            await asyncio.wait({running})


async def test_nothing_is_asked_for_until_a_pool_looks(bench: Bench) -> None:
    await asyncio.sleep(0)
    assert bench.server.requests == []
    assert bench.look() == NeighbourObjects(unknown="")
    await bench.known()
    assert {w["path"] for w in bench.cluster.watches} <= {PODS, CLAIMS}
    lists = [path for _, path, _ in bench.server.requests if "watch" not in path]
    assert set(lists) == {
        f"{CLAIMS}?limit={PAGE_ITEMS}",
        f"{PODS}?limit={PAGE_ITEMS}&labelSelector=job%3Da",
    }


async def test_slices_are_asked_for_only_by_who_shares_devices_out(bench: Bench) -> None:
    bench.cluster.items[SLICES] = [{"metadata": {"name": "s"}, "value": 1}]
    bench.look(OTHER)

    def shared() -> NeighbourObjects:
        return bench.around.subscribe_beside(KEY, job("a"), slices=True)

    assert shared() == NeighbourObjects(unknown="")
    await until(lambda: shared() == NeighbourObjects(slices=(("s", 1),)), what="the slices")
    assert bench.look(OTHER) == NeighbourObjects()


async def test_only_cordoned_nodes_are_asked_for_and_each_change_wakes_those_who_look(
    bench: Bench,
) -> None:
    bench.cluster.items[NODES] = [{"metadata": {"name": "a"}, "value": 1}]
    assert bench.around.subscribe_cordons(KEY) == NeighbourObjects(unknown="")
    await until(lambda: KEY in bench.woken, what="the list")
    assert bench.around.subscribe_cordons(KEY) == NeighbourObjects(nodes=(("a", 1),))
    lists = [path for _, path, _ in bench.server.requests if "watch" not in path]
    assert lists == [f"{NODES}?limit={PAGE_ITEMS}&fieldSelector=spec.unschedulable%3Dtrue"]
    bench.around.unsubscribe_pool(KEY)
    assert bench.around.subscribe_cordons(OTHER) == NeighbourObjects(unknown="")


async def test_an_object_that_nobody_expected_ends_only_its_own_watch(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.cluster.items[CLAIMS] = [{"metadata": {"name": "without a value"}}]
    bench.look()
    bench.around.subscribe_inside(OTHER, job("b"))
    await until(lambda: "the watch of" in caplog.text, what="the error")
    await until(
        lambda: bench.around.subscribe_inside(OTHER, job("b")).unknown is None, what="the others"
    )
    assert bench.look().unknown == ""


async def test_a_watch_goes_on_where_the_list_ended(bench: Bench) -> None:
    bench.look()
    await until(lambda: len(bench.cluster.watches) == 2, what="both watches")
    pods, claims = sorted(bench.cluster.watches, key=lambda w: w["path"] == CLAIMS)
    assert (pods["labelSelector"], pods["timeoutSeconds"]) == ("job=a", "7")
    assert "labelSelector" not in claims
    assert {pods["resourceVersion"], claims["resourceVersion"]} == {"10", "20"}


async def test_events_change_what_is_known_and_wake_the_pool(bench: Bench) -> None:
    bench.cluster.items[PODS] = [obj("t-0"), obj("ended", None)]
    bench.look()
    await bench.known(pods=(("t-0", 1),))
    assert set(bench.woken) == {KEY}
    bench.woken.clear()
    bench.cluster.send(CLAIMS, "ADDED", obj("c", 1))
    await bench.known(pods=(("t-0", 1),), claims=(("c", 1),))
    assert bench.woken == [KEY]
    bench.cluster.send(PODS, "MODIFIED", obj("t-0", None))
    await bench.known(claims=(("c", 1),))
    bench.cluster.send(CLAIMS, "DELETED", obj("c", 1))
    await bench.known()
    assert bench.woken == [KEY] * 3


async def test_what_changes_nothing_for_a_pass_wakes_nobody(bench: Bench) -> None:
    bench.cluster.items[CLAIMS] = [obj("c")]
    bench.look()
    await bench.known(claims=(("c", 1),))
    bench.woken.clear()
    bench.cluster.send(CLAIMS, "MODIFIED", {**obj("c"), "status": {"reservedFor": []}})
    bench.cluster.send(CLAIMS, "BOOKMARK", obj("bookmark"))
    bench.cluster.send(CLAIMS, "MODIFIED", obj("c", 2))
    await bench.known(claims=(("c", 2),))
    assert bench.woken == [KEY]


async def test_pools_share_their_watches_and_the_last_one_ends_them(bench: Bench) -> None:
    bench.look()
    bench.look(OTHER)
    await bench.known()
    await until(lambda: len(bench.cluster.watches) == 2, what="both watches")
    assert set(bench.woken) == {KEY, OTHER}
    bench.around.unsubscribe_pool(KEY)
    assert bench.look(OTHER) == NeighbourObjects()
    before = bench.cluster.lists
    bench.around.unsubscribe_pool(OTHER)
    await until(lambda: bench.server.at_once == 0, what="the end of the streams")
    assert bench.look() == NeighbourObjects(unknown=""), "it begins anew"
    await until(lambda: bench.cluster.lists == before + 2, what="new lists")


async def test_a_pool_made_again_with_another_selector_follows_that(bench: Bench) -> None:
    bench.look()
    await bench.known()
    assert bench.look(of="b") == NeighbourObjects(unknown="")
    await until(
        lambda: bench.look(of="b") == NeighbourObjects(), what="the pods of another trainer"
    )
    await until(lambda: bench.server.at_once == 2, what="the end of the old stream")


@pytest.mark.parametrize(
    ("status", "fix"),
    [(403, "upgrade its chart"), (404, "does the cluster have resource.k8s.io/v1")],
)
async def test_what_can_not_be_listed_is_told_with_the_fix(
    bench: Bench, status: int, fix: str
) -> None:
    bench.server.answer("GET", CLAIMS, {"message": "no"}, status)
    bench.look()
    await until(lambda: fix in (bench.look().unknown or ""), what=fix)
    assert bench.woken, "the pool tells it"


class SlowToClose(KubeClient):
    """Its streams take 20 ms to close."""

    async def stream_objects(self, *what: Any, **how: Any) -> AsyncGenerator[Obj]:
        try:
            async for event in super().stream_objects(*what, **how):
                yield event
        finally:
            await asyncio.sleep(0.02)


async def test_a_pool_that_comes_back_while_its_watch_ends_gets_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with loopback() as server:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, server.url)))
        async with SlowToClose() as kube:
            bench = Bench(kube, server)
            running = asyncio.create_task(bench.around.run())
            bench.look()
            await bench.known()
            await until(lambda: len(bench.cluster.watches) == 2, what="both watches")
            bench.around.unsubscribe_pool(KEY)
            await asyncio.sleep(0.005)
            bench.cluster.items[PODS] = [obj("t-1")]
            bench.woken.clear()
            assert bench.look() == NeighbourObjects(unknown=""), "not what the ended watch knew"
            await until(lambda: bench.woken, what="the new list")
            await bench.known(pods=(("t-1", 1),))
            await until(lambda: len(bench.cluster.watches) == 4, what="the new watches")
            running.cancel()
            await asyncio.wait({running})


async def test_watches_in_150_namespaces_leave_room_for_the_lease_and_other_requests(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(150):
        for path in (PODS, CLAIMS):
            bench.cluster.add_path(path.replace("/rl/", f"/n{number}/"))
        bench.around.subscribe_beside(PoolKey(f"n{number}", "math"), job("a"))
    await until(lambda: len(bench.cluster.watches) == 300, what="all watches")
    lease = "/apis/coordination.k8s.io/v1/namespaces/rl/leases/operator"
    record = {"metadata": {"resourceVersion": "1"}, "spec": {}}
    bench.server.answer("GET", lease, record)
    bench.server.answer("PATCH", lease, record)
    bench.server.answer("GET", f"{PODS}/a", {"kind": "Pod"})
    monkeypatch.setattr("rollout_operator.kube.lease.RENEW_INTERVAL_SECONDS", 0.01)
    leader = Leadership(bench.kube, namespace="rl", name="operator", identity="me")
    async with asyncio.timeout(10):
        await leader.acquire_lease()
        holding = asyncio.create_task(leader.hold_lease())
        assert await bench.kube.get("pods", "rl", "a") == {"kind": "Pod"}
        sent = bench.server.requests
        await until(lambda: [method for method, *_ in sent].count("PATCH") > 3, what="renewals")
    assert leader.may_write()
    holding.cancel()
    await asyncio.wait({holding})


async def test_a_thousand_selectors_of_a_namespace_share_a_few_watches(bench: Bench) -> None:
    pools = [PoolKey("rl", f"pool-{number}") for number in range(1000)]
    shared = "app.kubernetes.io/managed-by!=rollout-operator"
    bench.cluster.items[PODS] = [obj("t-900", 1, job="900"), obj("other", 1, app="web")]

    def seen(number: int) -> NeighbourObjects:
        return bench.around.subscribe_inside(pools[number], job(str(number)))

    for number in range(1000):
        seen(number)
    await until(lambda: len(bench.cluster.watches) == MAX_SELECTOR_WATCHES + 1, what="the watches")
    queries = {watch["labelSelector"] for watch in bench.cluster.watches}
    assert queries == {shared, *(f"job={number}" for number in range(MAX_SELECTOR_WATCHES))}
    assert seen(900) == NeighbourObjects((("t-900", 1),))
    assert seen(901) == NeighbourObjects()
    for number in range(MAX_SELECTOR_WATCHES):
        bench.around.unsubscribe_pool(pools[number])
    await until(lambda: bench.server.at_once == 1, what="the end of the other watches")
    bench.woken.clear()
    bench.cluster.send(PODS, "MODIFIED", obj("t-900", 1, job="901"))
    await until(lambda: seen(901) == NeighbourObjects((("t-900", 1),)), what="its new label")
    assert seen(900) == NeighbourObjects()
    assert bench.woken == [pools[900], pools[901]], "nobody else"
    bench.around.subscribe_beside(KEY, job("new"))
    assert bench.around.subscribe_inside(PoolKey("rl", "new"), job("5000")).unknown == "", (
        "room for its own"
    )


@pytest.mark.parametrize(
    ("condition", "selected"),
    [
        ({"operator": "In", "values": ["a", "b"]}, [True, False, False]),
        ({"operator": "NotIn", "values": ["a", "b"]}, [False, True, True]),
        ({"operator": "Exists"}, [True, True, False]),
        ({"operator": "DoesNotExist"}, [False, False, True]),
    ],
)
def test_a_selector_means_here_what_it_means_to_the_api_server(
    condition: dict[str, Any], selected: list[bool]
) -> None:
    labels = [{"job": "a"}, {"job": "c"}, {}]
    document = {"matchExpressions": [{"key": "job", **condition}]}
    selector = TrainerSelector.model_validate(document)
    assert [selector.matches_labels(each) for each in labels] == selected
    also = TrainerSelector.model_validate({**document, "matchLabels": {"app": "web"}})
    assert not any(also.matches_labels(each) for each in labels)
    assert [also.matches_labels({**each, "app": "web"}) for each in labels] == selected
