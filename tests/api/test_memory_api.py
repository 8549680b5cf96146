"""The API server in memory answers as the real one, in all that the accidents of docs/faults.md rest on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from localkube import Cluster
from rollout_common.kube.access import ClusterAccess
from rollout_common.kube.errors import KubeError
from rollout_common.kube.reflector import list_pages, watch_events
from rollout_operator.api.names import API_VERSION, KIND, PLURAL
from rollout_operator.api.objects import Obj
from rollout_operator.kube.kube_client import KubeClient, resource_collection
from tests.support.faults.memory_api import MemoryApi
from tests.support.faults.memory_wire import Act, MemoryConnections, MemoryServer
from tests.support.manifests import pool

NAMESPACE = "memory"


@pytest.fixture(scope="module")
def cluster(crd: Cluster) -> Iterator[Cluster]:
    crd.kubectl("create", "namespace", NAMESPACE)
    crd.kubectl("-n", NAMESPACE, "create", "serviceaccount", "tester")
    yield crd
    crd.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


@pytest.fixture(params=["memory", "real"])
async def kube(
    request: pytest.FixtureRequest, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[KubeClient]:
    async def send(what: str, act: Act) -> tuple[int, bytes]:
        return act()

    async with KubeClient() as client:
        if request.param == "memory":
            server = MemoryServer(MemoryApi(time.time))
            access = ClusterAccess("memory", None, lambda: None, "x")  # type: ignore[arg-type]
            client._load = lambda: access
            client._connect = lambda access: MemoryConnections(server, send)
        else:
            monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        yield client


def pod(name: str, **spec: Any) -> Obj:
    containers = [{"name": "worker", "image": "localhost/none"}]
    whole = {
        "containers": containers,
        "schedulerName": "nobody",
        "serviceAccountName": "tester",
        **spec,
    }
    meta = {"namespace": NAMESPACE, "name": name, "labels": {"a": "1"}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": whole}


async def code(doing: Any) -> int:
    """The status of a refusal."""
    with pytest.raises(KubeError) as refused:
        await doing
    return refused.value.status


def version(obj: Obj) -> int:
    return int(obj["metadata"]["resourceVersion"])


async def test_versions_generations_and_conflicts(kube: KubeClient) -> None:
    body = pool("math")
    body["metadata"]["namespace"] = NAMESPACE
    made = await kube.create(PLURAL, body)
    assert await code(kube.create(PLURAL, body)) == 409
    assert made["metadata"]["generation"] == 1
    changed = await kube.patch(PLURAL, NAMESPACE, "math", {"spec": {"replicas": 5}})
    assert changed["metadata"]["generation"] == 2
    assert version(changed) > version(made)
    same = await kube.patch(PLURAL, NAMESPACE, "math", {"spec": {"replicas": 5}})
    assert version(same) == version(changed), "it changes nothing"

    async def apply(message: str, **meta: Any) -> Obj:
        about = {"apiVersion": API_VERSION, "kind": KIND, "metadata": meta}
        how: dict[str, Any] = {"kind": "apply", "subresource": "status"}
        said = about | {"status": {"message": message}, "spec": {"replicas": 9}}
        return await kube.patch(PLURAL, NAMESPACE, "math", said, **how)

    told = await apply("one", resourceVersion=str(version(same)))
    assert told["metadata"]["generation"] == 2
    assert told["spec"]["replicas"] == 5
    assert version(await apply("one")) == version(told)
    assert await code(apply("two", resourceVersion=str(version(same)))) == 409
    stale = {"metadata": {"resourceVersion": str(version(same)), "labels": {"a": "1"}}}
    assert await code(kube.patch(PLURAL, NAMESPACE, "math", stale)) == 409
    wrong = {"metadata": {"uid": "another"}}
    assert await code(kube.patch(PLURAL, NAMESPACE, "math", wrong)) == 422
    await kube.delete(PLURAL, NAMESPACE, "math")
    assert await code(kube.get(PLURAL, NAMESPACE, "math")) == 404
    assert await code(kube.delete(PLURAL, NAMESPACE, "math")) == 404


async def test_pods_terminate_and_their_conditions_have_owners(kube: KubeClient) -> None:
    made = await kube.create("pods", pod("free"))
    assert made["status"]["phase"] == "Pending"
    about = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "free"}}
    for kind in ("one", "two"):
        status = {"conditions": [{"type": kind, "status": "True"}]}
        told = await kube.patch(
            "pods",
            NAMESPACE,
            "free",
            about | {"status": status},
            kind="apply",
            subresource="status",
        )
        assert [c["type"] for c in told["status"]["conditions"]] == [kind]
    labels = {"metadata": {"labels": {"b": "2"}}, "spec": {"nodeName": "x"}}
    told = await kube.patch("pods", NAMESPACE, "free", labels, subresource="status")
    assert told["metadata"]["labels"] == {"a": "1", "b": "2"}
    assert "nodeName" not in told["spec"]
    other = {"metadata": {"uid": "another"}}
    assert await code(kube.patch("pods", NAMESPACE, "free", other, subresource="status")) == 422
    status = {"conditions": [{"type": "two", "status": "False"}]}
    apply = about | {"metadata": {"name": "free", "uid": "another"}, "status": status}
    assert (
        await code(kube.patch("pods", NAMESPACE, "free", apply, kind="apply", subresource="status"))
        == 422
    )
    assert await code(kube.delete("pods", NAMESPACE, "free", uid="another")) == 409
    await kube.delete("pods", NAMESPACE, "free", uid=made["metadata"]["uid"])
    assert await code(kube.get("pods", NAMESPACE, "free")) == 404, "it was on no node"
    await kube.create("pods", pod("bound", nodeName="a-node"))
    going = await kube.delete("pods", NAMESPACE, "bound", grace=20)
    assert going["metadata"]["deletionGracePeriodSeconds"] == 20
    again = await kube.delete("pods", NAMESPACE, "bound")
    assert version(again) == version(going), "it terminates already"
    assert await code(kube.create("pods", pod("bound"))) == 409
    await kube.delete("pods", NAMESPACE, "bound", grace=0)
    assert await code(kube.get("pods", NAMESPACE, "bound")) == 404


async def test_lists_have_pages_and_watches_follow_them(kube: KubeClient) -> None:
    for number in range(5):
        await kube.create("pods", pod(f"p{number}", nodeName="a-node"))
    of = resource_collection("pods", NAMESPACE, "a=1")
    pages = [page async for page in list_pages(kube, of, 2)]
    found = [item["metadata"]["name"] for page in pages for item in page.items]
    assert found == [f"p{number}" for number in range(5)]
    assert len(pages) == 3
    assert len({page.resource_version for page in pages}) == 1
    kinds = {(item["apiVersion"], item["kind"]) for page in pages for item in page.items}
    assert kinds == {("v1", "Pod")}

    async def follow() -> list[tuple[str, str]]:
        seen = []
        async for kind, obj in watch_events(kube, of, pages[0].resource_version, 20):
            seen.append((kind, obj["metadata"]["name"]))
            if seen[-1] == ("DELETED", "p1"):
                break
        return seen

    following = asyncio.create_task(follow())
    await kube.patch("pods", NAMESPACE, "p0", {"metadata": {"labels": {"a": "2"}}})
    await kube.create("pods", pod("p9", nodeName="a-node"))
    await kube.delete("pods", NAMESPACE, "p1", grace=0)
    seen = await asyncio.wait_for(following, 25)
    assert [each for each in seen if each[0] != "MODIFIED"] == [
        ("DELETED", "p0"), ("ADDED", "p9"), ("DELETED", "p1"),
    ]  # fmt: skip
