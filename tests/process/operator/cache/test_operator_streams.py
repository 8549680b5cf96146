"""kopf's stream of pools over a server that we play: what it misses, and how it begins anew."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rollout_operator.cache.kopf_streams import KopfStreams
from tests.support.loopback import Loopback, kubeconfig, loopback
from tests.support.waiting import until
from tests.support.watched_server import WatchedServer

POOLS = "/apis/rollout.dev/v1alpha1/rolloutreplicas"


def discoverable(server: Loopback) -> None:
    """Answer what kopf asks about the cluster before it watches anything."""
    version = {"groupVersion": "rollout.dev/v1alpha1", "version": "v1alpha1"}
    group = {"name": "rollout.dev", "versions": [version], "preferredVersion": version}
    resource = {
        "name": "rolloutreplicas",
        "singularName": "rolloutreplica",
        "kind": "RolloutReplica",
        "namespaced": True,
        "verbs": ["list", "watch", "patch"],
    }
    server.answer("GET", "/api", {"versions": ["v1"]})
    namespaces = {
        "name": "namespaces",
        "singularName": "namespace",
        "kind": "Namespace",
        "namespaced": False,
        "verbs": ["list", "watch"],
    }
    server.answer("GET", "/api/v1", {"resources": [namespaces]})
    server.answer("GET", "/apis", {"groups": [group]})
    server.answer("GET", "/apis/rollout.dev/v1alpha1", {"resources": [resource]})


def pool(version: int, name: str) -> dict[str, Any]:
    meta = {"namespace": "rl", "name": name, "uid": f"p-{name}", "resourceVersion": str(version)}
    return {"metadata": meta, "spec": {}}


async def test_a_stream_that_lost_its_place_lists_pools_and_kopf_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str | None, str]] = []
    order: list[str] = []

    def take(event: str | None, obj: Mapping[str, Any]) -> None:
        seen.append((event, obj["metadata"]["name"]))

    async def list_pools() -> None:
        order.append("listed")

    async with loopback() as server:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, server.url)))
        discoverable(server)
        watched = WatchedServer(server, POOLS)
        watched.items[POOLS] = [pool(5, "old")]
        streams = KopfStreams(
            take, namespaces=tuple, spawned=lambda: order.append("spawned"), listed=list_pools
        )
        running = asyncio.create_task(streams.run())
        try:
            await until(lambda: seen == [(None, "old")], 20, what="kopf's list")
            watched.items[POOLS] = [pool(3, "new")]
            streams.restart()
            await until(lambda: (None, "new") in seen, 20, what="kopf's next list")
            assert order == ["spawned", "listed", "spawned"]
        finally:
            streams.stop()
            await asyncio.wait_for(running, 20)
