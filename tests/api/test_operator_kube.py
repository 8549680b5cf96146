"""The client, the lists and the events against a real API server."""

from __future__ import annotations

import asyncio
import base64
import json
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from localkube import Cluster
from rollout_common.kube.errors import (
    Conflict,
    FencedError,
    Forbidden,
    Invalid,
    NotFound,
)
from rollout_common.kube.reflector import list_pages
from rollout_operator.api.names import (
    API_VERSION,
    KIND,
    LABEL_MANAGED_BY,
    LABEL_POOL,
    MANAGER_NAME,
    PLURAL,
)
from rollout_operator.api.objects import Obj
from rollout_operator.kube.event_recorder import EventRecorder
from rollout_operator.kube.installed_schema import InstalledSchema
from rollout_operator.kube.kube_client import KubeClient, resource_collection
from tests.support.manifests import pool, text

NAMESPACE = "kube"


@pytest.fixture(scope="module")
def cluster(crd: Cluster) -> Iterator[Cluster]:
    crd.kubectl("create", "namespace", NAMESPACE)
    crd.kubectl("-n", NAMESPACE, "create", "serviceaccount", "operator")
    yield crd
    crd.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


@pytest.fixture
async def kube(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubeClient]:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    async with KubeClient(service_account=(NAMESPACE, "operator")) as client:
        yield client


@pytest.fixture
async def math(kube: KubeClient) -> AsyncIterator[Obj]:
    """A pool of a fresh name each time, called KEY.name in none of the others' lists."""
    name = f"math-{uuid.uuid4().hex[:6]}"
    made = await kube.create(PLURAL, pool_object(name))
    yield made
    await kube.delete(PLURAL, NAMESPACE, name)


def pool_object(name: str) -> Obj:
    made = pool(name)
    made["metadata"]["namespace"] = NAMESPACE
    return made


def service(name: str, of: str = "math") -> Obj:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "namespace": NAMESPACE,
            "name": name,
            "labels": {LABEL_MANAGED_BY: MANAGER_NAME, LABEL_POOL: of},
        },
        "spec": {"ports": [{"port": 8000}]},
    }


def status(made: Obj, **fields: Any) -> Obj:
    meta = {"resourceVersion": made["metadata"]["resourceVersion"]}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": meta, "status": fields}


async def test_wrong_and_unknown_fields_are_invalid_and_named(kube: KubeClient) -> None:
    wrong = service("wrong")
    wrong["spec"]["ports"] = [{"port": 99999}]
    with pytest.raises(Invalid, match=r"spec\.ports\[0\]\.port"):
        await kube.create("services", wrong)
    unknown = service("unknown")
    unknown["spec"]["portz"] = 1
    with pytest.raises(Invalid, match=r'unknown field "spec\.portz"'):
        await kube.create("services", unknown)


def condition(kind: str, value: str) -> Obj:
    return {
        "type": kind,
        "status": value,
        "reason": "Test",
        "message": "as told",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }


async def test_status_apply_keeps_the_conditions_of_others(
    kube: KubeClient, cluster: Cluster, math: Obj
) -> None:
    name = math["metadata"]["name"]
    foreign = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name, "namespace": NAMESPACE},
        "status": {"conditions": [condition("trainer.example/Attached", "True")]},
    }
    cluster.kubectl(
        *("apply", "--server-side", "--subresource=status", "--field-manager=trainer", "-f", "-"),
        input=text(foreign),
    )
    fresh = await kube.get(PLURAL, NAMESPACE, name)
    ours = status(fresh, message="one", conditions=[condition("Ready", "False")])
    await kube.patch(PLURAL, NAMESPACE, name, ours, kind="apply", subresource="status")
    with pytest.raises(Conflict):
        await kube.patch(PLURAL, NAMESPACE, name, ours, kind="apply", subresource="status")
    fresh = await kube.get(PLURAL, NAMESPACE, name)
    ours = status(fresh, conditions=[condition("Ready", "True")])
    answer = await kube.patch(PLURAL, NAMESPACE, name, ours, kind="apply", subresource="status")
    found = {c["type"]: c["status"] for c in answer["status"]["conditions"]}
    assert found == {"trainer.example/Attached": "True", "Ready": "True"}
    assert "message" not in answer["status"], "what we no longer say goes"


async def test_a_token_is_for_its_audience_and_kept(kube: KubeClient) -> None:
    token = await kube.get_token("rollout.dev/kube/math")
    claims = json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))
    assert claims["aud"] == ["rollout.dev/kube/math"]
    assert claims["sub"] == "system:serviceaccount:kube:operator"
    assert claims["exp"] - claims["iat"] == 600
    assert await kube.get_token("rollout.dev/kube/math") == token
    assert await kube.get_token("rollout.dev/kube/code") != token
    kube.forget_token("rollout.dev/kube/math")
    assert await kube.get_token("rollout.dev/kube/math") != token


async def test_without_an_account_there_is_no_token(kube: KubeClient) -> None:
    async with KubeClient() as other:
        with pytest.raises(Forbidden, match="--service-account"):
            await other.get_token("any")


async def test_a_missing_right_is_forbidden(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cluster.service_account_kubeconfig(NAMESPACE, "operator")
    monkeypatch.setenv("KUBECONFIG", str(path))
    async with KubeClient() as other:
        with pytest.raises(Forbidden, match='cannot create resource "services"'):
            await other.create("services", service("no"))


async def test_a_fenced_client_reads_and_does_not_write(kube: KubeClient, math: Obj) -> None:
    name = math["metadata"]["name"]
    kube.fence_with(lambda: 0.0)
    assert await kube.get(PLURAL, NAMESPACE, name)
    with pytest.raises(FencedError):
        await kube.create("services", service("fenced"))
    with pytest.raises(FencedError):
        await kube.patch(PLURAL, NAMESPACE, name, {"metadata": {"labels": {"a": "1"}}})
    with pytest.raises(FencedError):
        await kube.delete(PLURAL, NAMESPACE, name)
    kube.fence_with(lambda: 30.0)
    with pytest.raises(NotFound):
        await kube.get("services", NAMESPACE, "fenced")


async def test_requests_are_counted(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    seen: list[tuple[str, str, int]] = []
    async with KubeClient(on_request=lambda *request: seen.append(request)) as counted:
        with pytest.raises(NotFound):
            await counted.get("pods", NAMESPACE, "none")
        async for _ in list_pages(counted, resource_collection("pods", NAMESPACE)):
            pass
    assert seen == [("get", "pods", 404), ("list", "pods", 200)]


async def test_events_are_posted_once(kube: KubeClient, cluster: Cluster, math: Obj) -> None:
    recorder = EventRecorder(kube, instance="operator-0")
    running = asyncio.create_task(recorder.run())
    name = math["metadata"]["name"]
    for _ in range(3):
        recorder.record_event(math, "Warning", "NameConflict", "pod/x belongs to another")
    recorder.record_event(math, "Normal", "Created", "ü" * 2000)
    await recorder.flush_events(running)
    assert running.done()
    found = json.loads(
        cluster.kubectl(
            *("-n", NAMESPACE, "get", "events.events.k8s.io", "-o", "json"),
            f"--field-selector=regarding.name={name}",
        )
    )["items"]
    notes = {event["reason"]: event["note"] for event in found}
    assert len(found) == 2
    assert notes["NameConflict"] == "pod/x belongs to another"
    assert notes["Created"] == "ü" * 510 + "…"
    described = cluster.kubectl("-n", NAMESPACE, "describe", "rr", name)
    assert "NameConflict" in described


async def test_the_installed_crd_has_every_field_of_status(kube: KubeClient) -> None:
    installed = InstalledSchema(kube)
    for _ in range(60):  # the API server publishes it a moment after the CRD
        if await installed.compare_schema():
            break
        await asyncio.sleep(0.5)
    else:
        pytest.fail(f"its schema is not there: {installed.schema_problem()}")
    assert installed.schema_problem() is None
