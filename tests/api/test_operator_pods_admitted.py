"""Pods as the operator builds them are taken by an API server, whatever the template brings."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from localkube import Cluster
from rollout_operator.api.spec import parse_spec
from rollout_operator.config import EngineDefaults
from rollout_operator.core.pods.builder import PodBuilder
from tests.support.manifests import FULL, Document, pool, text

NAMESPACE = "pods-admitted"
CLASSES: tuple[Document, ...] = (
    {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 7},
    {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "handler": "nvidia"},
)


@pytest.fixture(scope="module")
def cluster(crd: Cluster) -> Iterator[Cluster]:
    crd.kubectl("create", "namespace", NAMESPACE)
    for name in ("workers", "rollout-worker"):
        meta = {"namespace": NAMESPACE, "name": name}
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta}
        # As policies of hardened clusters set it on every account.
        crd.kubectl(
            "create", "-f", "-", input=text(account | {"automountServiceAccountToken": False})
        )
    for name, body in zip(("high", "nvidia"), CLASSES, strict=True):
        crd.kubectl("create", "-f", "-", input=text({**body, "metadata": {"name": name}}))
    yield crd
    for name, body in zip(("high", "nvidia"), CLASSES, strict=True):
        crd.kubectl("delete", body["kind"].lower(), name)
    crd.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("patch", [{}, FULL], ids=["bare", "full"])
def test_a_pod_is_admitted(cluster: Cluster, patch: Document, rank: int) -> None:
    spec = parse_spec(pool("demo", patch))
    builder = PodBuilder("demo", NAMESPACE, "uid", "", spec, EngineDefaults(image="worker:1"))
    body = builder.build_pod(0, rank, 0)
    options = ("--dry-run=server", "--validate=strict", "-o", "json", "-f", "-")
    made = json.loads(cluster.kubectl("create", *options, input=text(body)))
    mounts = {mount["mountPath"] for mount in made["spec"]["containers"][0]["volumeMounts"]}
    assert "/var/run/secrets/kubernetes.io/serviceaccount" in mounts, "it reviews who calls"
