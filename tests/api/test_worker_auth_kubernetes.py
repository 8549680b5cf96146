"""`--auth kubernetes` against a real API server: tokens for an audience, rights by RBAC."""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from localkube import Cluster
from rollout_common.wire.problems import ProblemError
from rollout_worker.ports.callers.auth import CONTROL_WORKER, SEE_STATE, STAGE_WEIGHTS, AccessRight
from rollout_worker.ports.callers.kubernetes_auth import HeadTokenReview, KubernetesReview
from rollout_worker.ports.settings import DENIED_SECONDS
from rollout_worker.settings import InvalidSettings, WorkerSettings, add_flags, parse_settings
from tests.support.api.apiclient import PODS, api_of
from tests.support.api.people import add_account, bind_role

NAMESPACE = "worker-auth"
POOL = "math"
AUDIENCE = f"rollout.dev/{NAMESPACE}/{POOL}"


RBAC = "/apis/rbac.authorization.k8s.io/v1"


def grant(cluster: Cluster, name: str, *rules: str) -> None:
    """Make a role, and bind the account of the same name to it; rules: `subresource verb`."""
    listed = [
        {
            "apiGroups": ["rollout.dev"],
            "resources": [f"rolloutreplicas/{subresource}"],
            "verbs": [verb],
        }
        for subresource, verb in (rule.split() for rule in rules)
    ]
    body = {"metadata": {"name": name}, "rules": listed}
    api_of(cluster).create(f"{RBAC}/namespaces/{NAMESPACE}/roles", body)
    bind_role(cluster, NAMESPACE, name, name, "Role")


REVIEWER = f"""
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {{name: {NAMESPACE}}}
rules:
- apiGroups: [authentication.k8s.io]
  resources: [tokenreviews]
  verbs: [create]
- apiGroups: [authorization.k8s.io]
  resources: [localsubjectaccessreviews]
  verbs: [create]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {{name: {NAMESPACE}}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: {NAMESPACE}}}
subjects: [{{kind: ServiceAccount, name: worker, namespace: {NAMESPACE}}}]
"""


@pytest.fixture(scope="module")
def cluster(api_server: Cluster) -> Iterator[Cluster]:
    api_server.kubectl("create", "namespace", NAMESPACE)
    for account in ("worker", "operator", "trainer", "viewer", "stranger", "late"):
        add_account(api_server, NAMESPACE, account)
    api_server.kubectl("apply", "-f", "-", input=REVIEWER)
    grant(api_server, "operator", "control get", "control update", "weights create")
    grant(api_server, "trainer", "weights create")
    grant(api_server, "viewer", "control get")
    yield api_server
    api_server.kubectl("delete", "namespace", NAMESPACE, "--wait=false")
    api_server.kubectl("delete", "clusterrole,clusterrolebinding", NAMESPACE)


def token(cluster: Cluster, account: str, audience: str | None = AUDIENCE) -> str:
    arguments = [] if audience is None else [f"--audience={audience}"]
    return cluster.kubectl("-n", NAMESPACE, "create", "token", account, *arguments).strip()


def settings(
    cluster: Cluster, folder: Path, account: str = "worker", url: str = ""
) -> WorkerSettings:
    config = yaml.safe_load(cluster.kubeconfig.read_text())["clusters"][0]["cluster"]
    ca = folder / "ca.crt"
    if "certificate-authority-data" in config:
        ca.write_bytes(base64.b64decode(config["certificate-authority-data"]))
    else:
        ca = Path(config["certificate-authority"])
    (folder / "token").write_text(token(cluster, account, None))
    parser = argparse.ArgumentParser()
    add_flags(parser)
    flags = ["--model", "m", "--auth", "kubernetes", "--pool", POOL, "--namespace", NAMESPACE]
    flags += ["--kube-api-url", url or config["server"], "--kube-ca", str(ca)]
    return parse_settings(
        parser.parse_args([*flags, "--kube-token-file", str(folder / "token")]), {}
    )


@pytest.fixture
async def review(cluster: Cluster, tmp_path: Path) -> AsyncIterator[KubernetesReview]:
    authorizer = KubernetesReview(settings(cluster, tmp_path))
    yield authorizer
    await authorizer.close()


async def outcome(review: KubernetesReview, bearer: str, right: AccessRight) -> int | str:
    """The caller's name, or the status of the refusal."""
    try:
        return await review.check_caller(f"Bearer {bearer}", right)
    except ProblemError as refusal:
        return refusal.problem.status


@pytest.mark.parametrize(
    ("account", "see", "control", "stage"),
    [
        ("operator", True, True, True),
        ("trainer", False, False, True),
        ("viewer", True, False, False),
        ("stranger", False, False, False),
    ],
)
async def test_rbac_decides(
    cluster: Cluster, review: KubernetesReview, account: str, see: bool, control: bool, stage: bool
) -> None:
    name = f"system:serviceaccount:{NAMESPACE}:{account}"
    bearer = token(cluster, account)
    for right, may in ((SEE_STATE, see), (CONTROL_WORKER, control), (STAGE_WEIGHTS, stage)):
        for _ in range(2):  # the second answer comes from the cache
            assert await outcome(review, bearer, right) == (name if may else 403)


async def test_a_refusal_says_what_to_grant(cluster: Cluster, review: KubernetesReview) -> None:
    with pytest.raises(ProblemError) as refused:
        await review.check_caller(f"Bearer {token(cluster, 'trainer')}", CONTROL_WORKER)
    detail = refused.value.problem.detail
    for part in ("trainer", "update", "rolloutreplicas.rollout.dev/control", POOL, NAMESPACE):
        assert part in detail


@pytest.mark.parametrize("audience", [None, f"rollout.dev/{NAMESPACE}/other"])
async def test_tokens_for_others_count_for_nothing(
    cluster: Cluster, review: KubernetesReview, audience: str | None
) -> None:
    bearer = token(cluster, "operator", audience)
    with pytest.raises(ProblemError) as refused:
        await review.check_caller(f"Bearer {bearer}", SEE_STATE)
    assert refused.value.problem.status == 401
    assert AUDIENCE in refused.value.problem.detail


async def test_garbage_is_nobody(review: KubernetesReview) -> None:
    for bearer in ("x", "a.b.c", "ä"):
        assert await outcome(review, bearer, SEE_STATE) == 401


async def test_a_right_granted_later_counts_soon(
    cluster: Cluster, review: KubernetesReview
) -> None:
    bearer = token(cluster, "late")
    assert await outcome(review, bearer, SEE_STATE) == 403
    grant(cluster, "late", "control get")
    assert await outcome(review, bearer, SEE_STATE) == 403, "remembered"
    moments = itertools.count(time.monotonic() + DENIED_SECONDS, 2 * DENIED_SECONDS)
    review._denials._clock = lambda: next(moments)
    async with asyncio.timeout(10):
        while await outcome(review, bearer, SEE_STATE) == 403:  # noqa: ASYNC110 - bounded
            await asyncio.sleep(0.05)
    assert await outcome(review, bearer, SEE_STATE) == f"system:serviceaccount:{NAMESPACE}:late"


async def test_a_worker_that_may_not_ask_opens_nothing(cluster: Cluster, tmp_path: Path) -> None:
    review = KubernetesReview(settings(cluster, tmp_path, account="stranger"))
    assert await outcome(review, token(cluster, "operator"), SEE_STATE) == 503
    await review.close()


async def test_an_api_server_that_is_away_opens_nothing(cluster: Cluster, tmp_path: Path) -> None:
    review = KubernetesReview(settings(cluster, tmp_path, url="https://127.0.0.1:9"))
    with pytest.raises(ProblemError) as refused:
        await review.check_caller(f"Bearer {token(cluster, 'operator')}", SEE_STATE)
    assert refused.value.problem.status == 503
    assert refused.value.headers["Retry-After"] == "2"
    await review.close()


def test_outside_a_pod_it_does_not_start(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(InvalidSettings, match="KUBERNETES_SERVICE_HOST"):
        KubernetesReview(replace(settings(cluster, tmp_path), kube_api_url=None))
    with pytest.raises(InvalidSettings, match="can't be used"):
        KubernetesReview(replace(settings(cluster, tmp_path), kube_ca=tmp_path / "none"))


# The members of a gang.


@pytest.fixture(scope="module")
def pods(cluster: Cluster) -> Cluster:
    """Heads of two gangs and a member."""
    spec = {"serviceAccountName": "worker", "containers": [{"name": "worker", "image": "none"}]}
    for name in ("math-0-0", "math-0-1", "math-1-0"):
        body = {"metadata": {"name": name}, "spec": spec}
        api_of(cluster).create(PODS.format(NAMESPACE), body)
    return cluster


def bound(cluster: Cluster, pod: str, audience: str = AUDIENCE) -> str:
    """A token as the kubelet projects it into a pod."""
    arguments = [f"--audience={audience}", "--bound-object-kind=Pod", f"--bound-object-name={pod}"]
    return cluster.kubectl("-n", NAMESPACE, "create", "token", "worker", *arguments).strip()


@pytest.fixture
async def member(cluster: Cluster, tmp_path: Path) -> AsyncIterator[HeadTokenReview]:
    """Rank 1 of the first gang."""
    given = replace(settings(cluster, tmp_path), nodes=2, rank=1)
    authorizer = HeadTokenReview(replace(given, leader_address="math-0-0.math-heads"))
    yield authorizer
    await authorizer.close()


async def test_a_member_lets_its_head_in(pods: Cluster, member: HeadTokenReview) -> None:
    assert (
        await member.check_caller(f"Bearer {bound(pods, 'math-0-0')}", CONTROL_WORKER) == "math-0-0"
    )


@pytest.mark.parametrize("pod", ["math-0-1", "math-1-0"])
async def test_a_member_lets_no_other_pod_in(
    pods: Cluster, member: HeadTokenReview, pod: str
) -> None:
    with pytest.raises(ProblemError, match=f"of pod {pod} is not the head of this gang") as refused:
        await member.check_caller(f"Bearer {bound(pods, pod)}", CONTROL_WORKER)
    assert refused.value.problem.status == 403


async def test_a_member_lets_nobody_in_without_a_pod(
    pods: Cluster, member: HeadTokenReview
) -> None:
    """Not even the operator: what it wants it asks the head for."""
    for account in ("worker", "operator"):
        with pytest.raises(ProblemError, match="of pod none is not the head") as refused:
            await member.check_caller(f"Bearer {token(pods, account)}", CONTROL_WORKER)
        assert refused.value.problem.status == 403
    with pytest.raises(ProblemError) as refused:
        await member.check_caller(
            f"Bearer {bound(pods, 'math-0-0', 'rollout.dev/other/math')}", CONTROL_WORKER
        )
    assert refused.value.problem.status == 401
