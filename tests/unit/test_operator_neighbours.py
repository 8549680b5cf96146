"""Watches of trainers' pods and claims: who asks for them, whom they wake, what they survive."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from loopback import Loopback, kubeconfig, loopback
from rollout_operator.api.objects import Key, Obj
from rollout_operator.cache.neighbours import Neighbourhood, Neighbours
from rollout_operator.kube.client import Kube
from waiting import until

KEY, OTHER = Key("rl", "math"), Key("rl", "code")
PODS = "/api/v1/namespaces/rl/pods"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/rl/resourceclaims"

SLICES = "/apis/resource.k8s.io/v1/resourceslices"


def obj(name: str, value: int | None = 1) -> Obj:
    return {"metadata": {"name": name}, "value": value}


class Cluster:
    """What the API server lists, and the events that it sends to whoever watches."""

    def __init__(self, server: Loopback) -> None:
        self.items: dict[str, list[Obj]] = {PODS: [], CLAIMS: [], SLICES: []}
        self.events: dict[str, asyncio.Queue[str | None]] = {p: asyncio.Queue() for p in self.items}
        """Lines of the stream; None ends it."""
        self.watches: list[dict[str, str]] = []
        self.lists = 0
        for path in self.items:
            server.answers["GET", path] = self._answer

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            self.lists += 1
            meta = {"resourceVersion": str(self.lists)}
            return web.json_response({"metadata": meta, "items": self.items[request.path]})
        self.watches.append({"path": request.path, **request.query})
        stream = web.StreamResponse()
        await stream.prepare(request)
        while (line := await self.events[request.path].get()) is not None:
            await stream.write(line.encode())
        return stream

    def send(self, path: str, kind: str, found: Obj) -> None:
        """Send an event, in two pieces, as networks do."""
        line = json.dumps({"type": kind, "object": found}) + "\n"
        self.events[path].put_nowait(line[:9])
        self.events[path].put_nowait(line[9:])

    def end(self, path: str) -> None:
        """End the stream of whoever watches."""
        self.events[path].put_nowait(None)


class Bench:
    def __init__(self, kube: Kube, server: Loopback) -> None:
        self.server = server
        self.cluster = Cluster(server)
        self.woken: list[Key] = []

        def read(found: Obj) -> object | None:
            return None if found["value"] is None else (found["metadata"]["name"], found["value"])

        self.around = Neighbourhood(
            kube,
            {"pods": read, "resourceclaims": read, "resourceslices": read},
            self.woken.append,
            seconds=7,
        )

    def look(self, key: Key = KEY, selector: str = "job=a") -> Neighbours:
        return self.around.look(key, selector)

    async def known(self, **what: Any) -> None:
        """Wait until the pool knows this."""
        await until(lambda: self.look() == Neighbours(**what), what=f"{what}, not {self.look()}")


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    async with loopback() as server:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, server.url)))
        async with Kube() as kube:
            made = Bench(kube, server)
            running = asyncio.create_task(made.around.run())
            yield made
            running.cancel()
            await asyncio.wait({running})


async def test_nothing_is_asked_for_until_a_pool_looks(bench: Bench) -> None:
    await asyncio.sleep(0)
    assert bench.server.requests == []
    assert bench.look() == Neighbours(unknown="")
    await bench.known()
    assert {w["path"] for w in bench.cluster.watches} <= {PODS, CLAIMS}
    lists = [path for _, path, _ in bench.server.requests if "watch" not in path]
    assert set(lists) == {f"{CLAIMS}?limit=500", f"{PODS}?limit=500&labelSelector=job%3Da"}


async def test_slices_are_asked_for_only_by_who_shares_devices_out(bench: Bench) -> None:
    bench.cluster.items[SLICES] = [{"metadata": {"name": "s"}, "value": 1}]
    bench.look(OTHER)

    def shared() -> Neighbours:
        return bench.around.look(KEY, "job=a", slices=True)

    assert shared() == Neighbours(unknown="")
    await until(lambda: shared() == Neighbours(slices=(("s", 1),)), what="the slices")
    assert bench.look(OTHER) == Neighbours()


async def test_a_watch_goes_on_where_the_list_ended(bench: Bench) -> None:
    bench.look()
    await until(lambda: len(bench.cluster.watches) == 2, what="both watches")
    pods, claims = sorted(bench.cluster.watches, key=lambda w: w["path"] == CLAIMS)
    assert (pods["labelSelector"], pods["timeoutSeconds"]) == ("job=a", "7")
    assert "labelSelector" not in claims
    assert {pods["resourceVersion"], claims["resourceVersion"]} == {"1", "2"}


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


async def test_an_event_that_was_missed_is_found_by_the_next_list(bench: Bench) -> None:
    bench.cluster.items[PODS] = [obj("t-0")]
    bench.look()
    await bench.known(pods=(("t-0", 1),))
    await until(lambda: len(bench.cluster.watches) == 2, what="both watches")
    bench.cluster.items[PODS] = [obj("t-0", 2)]
    bench.cluster.end(PODS)
    await bench.known(pods=(("t-0", 2),))


async def test_a_watch_that_came_too_late_lists_again(bench: Bench) -> None:
    bench.look()
    await until(lambda: len(bench.cluster.watches) == 2, what="both watches")
    bench.cluster.items[CLAIMS] = [obj("c")]
    bench.cluster.send(CLAIMS, "ERROR", {"code": 410, "reason": "Expired", "message": "too old"})
    await bench.known(claims=(("c", 1),))


async def test_pools_share_their_watches_and_the_last_one_ends_them(bench: Bench) -> None:
    bench.look()
    bench.look(OTHER)
    await bench.known()
    await until(lambda: len(bench.cluster.watches) == 2, what="both watches")
    assert set(bench.woken) == {KEY, OTHER}
    bench.around.forget(KEY)
    assert bench.look(OTHER) == Neighbours()
    before = bench.cluster.lists
    bench.around.forget(OTHER)
    await until(lambda: bench.server.at_once == 0, what="the end of the streams")
    assert bench.look() == Neighbours(unknown=""), "it begins anew"
    await until(lambda: bench.cluster.lists == before + 2, what="new lists")


async def test_a_pool_made_again_with_another_selector_follows_that(bench: Bench) -> None:
    bench.look()
    await bench.known()
    assert bench.look(selector="job=b") == Neighbours(unknown="")
    await until(
        lambda: bench.look(selector="job=b") == Neighbours(), what="the pods of another trainer"
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


async def test_what_is_known_stays_while_the_api_server_is_away(bench: Bench) -> None:
    bench.cluster.items[PODS] = [obj("t-0")]
    bench.look()
    await bench.known(pods=(("t-0", 1),))
    await until(lambda: len(bench.cluster.watches) == 2, what="both watches")
    bench.woken.clear()
    asked = len(bench.server.requests)
    bench.server.answer("GET", PODS, {"message": "later"}, 503)
    bench.cluster.end(PODS)
    await until(lambda: len(bench.server.requests) > asked, what="a list that fails")
    assert bench.look() == Neighbours(pods=(("t-0", 1),))
    assert bench.woken == []
