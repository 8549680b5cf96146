"""Members from EndpointSlices and from DNS."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollout_client import AsyncRolloutPool, Hook, NoReplica
from rollout_client.cluster_client import ClusterClient, load_access
from rollout_client.discovery.dns import DnsDiscovery
from rollout_client.discovery.endpoint_discovery import EndpointDiscovery, members_of_slices
from rollout_client.discovery.pool_members import Discovery, Member, Publish
from tests.support.loopback import Loopback, kubeconfig, loopback
from tests.support.waiting import until

SLICES = "/apis/discovery.k8s.io/v1/namespaces/train/endpointslices"


def endpoint(address: str, pod: str, ready: bool | None = True) -> dict[str, Any]:
    conditions = {} if ready is None else {"ready": ready}
    return {"addresses": [address], "conditions": conditions, "targetRef": {"name": pod}}


def of(name: str, *endpoints: dict[str, Any], port: int = 8000) -> dict[str, Any]:
    ports = [{"name": "data", "port": port}]
    return {"metadata": {"name": name}, "ports": ports, "endpoints": list(endpoints)}


def test_slices_become_members() -> None:
    found = members_of_slices(
        [
            of("b", endpoint("10.0.0.2", "p-1-0", False), endpoint("fd00::3", "p-2-0", None)),
            of("a", endpoint("10.0.0.1", "p-0-0"), endpoint("10.0.0.2", "p-1-0"), port=9000),
            of("c", endpoint("10.0.0.2", "p-1-0", True)),
            {"metadata": {"name": "empty"}, "endpoints": None, "ports": None},
        ]
    )
    assert [(m.name, m.url, m.ready) for m in found] == [
        ("p-0-0", "http://10.0.0.1:9000", True),
        ("p-1-0", "http://10.0.0.2:8000", True),
        ("p-1-0", "http://10.0.0.2:9000", True),
        ("p-2-0", "http://[fd00::3]:8000", True),
    ]
    assert found[3].control_url == "http://[fd00::3]:8001"


@asynccontextmanager
async def running(discovery: Discovery, publish: Publish) -> AsyncIterator[None]:
    """Discover until the end of the block, and wait until that has ended.

    A cancelled task that nobody waits for goes on connecting while the server of the test closes:
    it accepts one more connection, and the next test finds that socket in the garbage.
    """
    task = asyncio.create_task(discovery.run_discovery(publish))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
    assert task.cancelled()


class Recorder:
    def __init__(self) -> None:
        self.sets: list[list[str]] = []

    def __call__(self, members: Sequence[Member]) -> None:
        self.sets.append([member.name for member in members])


def api(server: Loopback, *answers: list[dict[str, Any]] | int) -> None:
    """Lists (as HTTP errors or objects) by turns; each is followed by a watch that ends in 410."""
    turn = iter(answers)
    last: Any = answers[-1]

    async def reply(request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            assert request.query["resourceVersion"] == "5"
            gone = {"type": "ERROR", "object": {"code": 410}}
            added = {"type": "ADDED", "object": of("w", endpoint("10.0.0.9", "watched"))}
            return web.Response(text=json.dumps(added) + "\n" + json.dumps(gone) + "\n")
        answer = next(turn, last)
        if isinstance(answer, int):
            return web.json_response({"message": "not now", "reason": "No"}, status=answer)
        return web.json_response({"metadata": {"resourceVersion": "5"}, "items": answer})

    server.answers["GET", SLICES] = reply


@pytest.fixture
async def server() -> AsyncIterator[Loopback]:
    async with loopback() as server:
        yield server


@asynccontextmanager
async def following(
    server: Loopback, folder: Path
) -> AsyncIterator[tuple[EndpointDiscovery, Recorder]]:
    kube = ClusterClient(load_access(kubeconfig(folder, server.url)))
    discovery, seen = EndpointDiscovery(kube, "math", "train"), Recorder()
    async with running(discovery, seen):
        yield discovery, seen
    await kube.close()


@pytest.fixture
async def pool(server: Loopback, tmp_path: Path) -> AsyncIterator[AsyncRolloutPool]:
    """A pool whose members the server tells."""
    path = kubeconfig(tmp_path, server.url)
    server.answer("GET", SLICES, {"message": "not yet"}, 503)
    async with AsyncRolloutPool.from_cluster("math", "train", kubeconfig=path) as pool:
        yield pool


async def test_a_forgotten_watch_lists_again_and_leaves_no_ghost(
    server: Loopback, tmp_path: Path
) -> None:
    first = [of("a", endpoint("10.0.0.1", "p0"))]
    api(server, first, 500, [of("b", endpoint("10.0.0.2", "p1"))])
    async with following(server, tmp_path) as (_, seen):
        await until(lambda: ["p1"] in seen.sets, what="the second list")
    assert seen.sets[:3] == [["p0"], ["p0", "watched"], ["p1"]]
    listed = [path for _, path, _ in server.requests if "watch" not in path]
    assert "labelSelector=kubernetes.io%2Fservice-name%3Dmath" in listed[0]
    assert server.headers[0]["Authorization"] == "Bearer one"


async def test_trouble_is_told_and_what_was_known_stays(server: Loopback, tmp_path: Path) -> None:
    api(server, [of("a", endpoint("10.0.0.1", "p0"))], 403)
    async with following(server, tmp_path) as (discovery, seen):
        await until(lambda: discovery.trouble, what="trouble")
        assert discovery.trouble == "not now"
        assert seen.sets[-1] == ["p0", "watched"]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("<html>please sign in</html>", "not JSON"),
        (["not", "an", "object"], "not a JSON object"),
        ({"items": [{}], "metadata": {}}, "not a list of objects"),
        ({"items": [of("a") | {"endpoints": [7]}], "metadata": {"resourceVersion": "5"}}, "failed"),
    ],
)
async def test_no_answer_ends_discovery(
    server: Loopback, pool: AsyncRolloutPool, broken: Any, said: str
) -> None:
    """Whatever comes: it is told, what was known stays, and the next good answer counts."""
    server.answer("GET", SLICES, broken)
    await until(lambda: said in pool._discovery_trouble(), what="trouble")
    with pytest.raises(NoReplica, match=said):
        await pool.wait_serving(seconds=0)
    api(server, [of("a", endpoint("10.0.0.1", "p0"))])
    await until(lambda: pool.members, what="the members after it")
    assert said not in pool._discovery_trouble()


async def test_an_unreadable_token_is_told_and_read_again(tmp_path: Path) -> None:
    async with loopback() as server:
        api(server, [of("a", endpoint("10.0.0.1", "p0"))])
        path = kubeconfig(tmp_path, server.url, user={"tokenFile": "token"})
        kube = ClusterClient(load_access(path))
        discovery, seen = EndpointDiscovery(kube, "math", "train"), Recorder()
        async with running(discovery, seen):
            await until(lambda: "token" in discovery.trouble, what="trouble")
            for bad in (b"\xff\xfe", b"two\nlines", "schl\u00fcssel".encode()):
                (tmp_path / "token").write_bytes(bad)
                await until(lambda: "token" in discovery.trouble, what="trouble")
            (tmp_path / "token").write_text("one")
            await until(lambda: seen.sets, what="the members")
        await kube.close()


@pytest.mark.parametrize("status", [401, 403])
async def test_who_may_not_know_the_members_is_told_at_once(
    server: Loopback, pool: AsyncRolloutPool, status: int
) -> None:
    server.answer("GET", SLICES, {"message": "you cannot list endpointslices"}, status)
    for ask in (pool.generate([1]), pool.wait_serving()):
        with pytest.raises(NoReplica, match="cannot list endpointslices"):
            await asyncio.wait_for(ask, 10)
    # Who steers does not wait for members that it may not know.
    for _ in range(2):
        await asyncio.wait_for(pool._get_steering(), 5)
    assert pool._router.is_hopeless


async def test_a_hook_that_raises_does_not_end_discovery() -> None:
    class Odd(Hook):
        calls = 0

        def members(self, present: int, serving: int) -> None:
            self.calls += 1
            if self.calls == 1:
                raise RuntimeError("no room for another series")

    async with AsyncRolloutPool.from_urls(["http://127.0.0.1:9"], hook=Odd()) as pool:
        await until(
            lambda: "no room for another series" in pool._discovery_trouble(), what="trouble"
        )
        await until(lambda: pool._discovery_trouble() == "", what="the second try")


@pytest.mark.parametrize("name", ["a..b", "no-such-host.invalid"], ids=["no name", "nobody's"])
async def test_a_name_that_leads_nowhere_is_said(name: str) -> None:
    discovery = DnsDiscovery(name, ttl_seconds=0.05)
    async with running(discovery, Recorder()):
        await until(lambda: discovery.trouble, what="trouble")
    assert f"{name} can't be resolved" in discovery.trouble


async def test_addresses_of_a_name_must_prove_themselves() -> None:
    async with loopback() as server:
        port = int(server.url.rpartition(":")[2])
        server.answer("GET", "/ready", {"status": "ready"})
        server.answer("GET", "/v1/weights", {}, 404)
        async with AsyncRolloutPool.from_dns("localhost", port=port, ttl_seconds=0.1) as pool:
            assert pool.serving() == []
            found = await pool.wait_serving(seconds=10)
            assert f"http://127.0.0.1:{port}" in {member.url for member in found}
            assert ("GET", "/ready", "") in server.requests


async def test_a_port_that_refuses_does_not_serve() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with loopback() as server, AsyncRolloutPool.from_urls([url, server.url]) as pool:
        server.answer("GET", "/ready", {})
        assert [each.url for each in await pool.wait_serving(seconds=10)] == [server.url]
        await until(lambda: "ConnectError" in pool._router.refusal_reasons(), what="its probe")
        with pytest.raises(NoReplica, match=r"1 of 2 replicas serve \(.*ConnectError"):
            await pool.wait_serving(2, seconds=0)


def of_this_package(tasks: set[asyncio.Task[Any]]) -> list[str]:
    names = [getattr(task.get_coro(), "__qualname__", "") for task in tasks]
    return [name for name in names if name.startswith(("PoolBackground.", "HealthChecker."))]


async def test_a_closed_pool_leaves_nothing_running() -> None:
    """Neither discovery nor a probe that has no answer yet."""
    async with loopback() as server:
        server.delay("GET", "/ready", {}, 30)
        pool = AsyncRolloutPool.from_dns("127.0.0.1", port=int(server.url.rpartition(":")[2]))
        async with pool:
            await until(lambda: server.at_once == 1, what="the probe")
            assert len(of_this_package(asyncio.all_tasks())) == 3
        assert of_this_package(asyncio.all_tasks()) == []
