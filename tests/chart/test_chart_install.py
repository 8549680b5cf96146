"""The chart on a real API server: admitted, restricted, and what an uninstall leaves."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from localkube import Cluster
from tests.support.api.apiclient import POOLS, api_of
from tests.support.charts import CHART, NAMESPACE, RELEASE, VALUES, Document, case, one
from tests.support.clusters import await_crd, control_plane
from tests.support.manifests import pool
from tests.support.waiting import eventually, until_sync

ROOT = Path(__file__).parents[2]
KIND = "customresourcedefinition/rolloutreplicas.rollout.dev"
PAGES = [
    ROOT / "charts" / "rollout-operator" / "README.md",
    ROOT / "README.md",
    ROOT / "docs" / "gpu.md",
    *sorted((ROOT / "examples").rglob("README.md")),
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.stem != "gpu"),
    *sorted((ROOT / "docs" / "operate").glob("*.md")),
]
_FENCED = re.compile(
    r"^(?:    |\$ )?(helm (?:install|upgrade|uninstall)\b(?:[^\n\\]|\\\n)*)", re.MULTILINE
)
_INLINE = re.compile(r"`(helm (?:install|upgrade|uninstall) [^`]+)`")
NOT_THERE = ("PodMonitor", "PrometheusRule")
"""Kinds of the Prometheus Operator, which this API server does not have."""


ACCOUNT = "/api/v1/namespaces/rl/serviceaccounts/rollout-worker"
BINDINGS = "/apis/rbac.authorization.k8s.io/v1/namespaces/rl/rolebindings"
OTHER, TENANT, ALONE = "rollout-other", "tenant", "alone"


def helm_lines(page: Path) -> list[list[str]]:
    """Return each command of a page that names a chart or a release, as words behind `helm`."""
    text = page.read_text()
    found = [match for pattern in (_FENCED, _INLINE) for match in pattern.finditer(text)]
    commands = [each[1] for each in sorted(found, key=lambda match: match.start())]
    return [shlex.split(each.replace("\\\n", " "))[1:] for each in commands]


def files_of(page: Path) -> dict[str, str]:
    """Return the YAML files that a page shows, by the name in their first line."""
    blocks = re.findall(r"^```yaml\n# (\S+\.yaml)\n(.*?)^```", page.read_text(), re.M | re.S)
    return dict(blocks)


def add_namespace(cluster: Cluster, name: str, level: str) -> None:
    """Make a namespace that enforces this level of pod security."""
    labels = {"pod-security.kubernetes.io/enforce": level}
    api_of(cluster).create("/api/v1/namespaces", {"metadata": {"name": name, "labels": labels}})


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A control plane of its own: the chart's cluster-wide objects meet nobody else's."""
    with control_plane("chart") as cluster:
        for namespace in (OTHER, TENANT, ALONE, "rl", "rl-2", "more", "team-a", "team-b"):
            add_namespace(cluster, namespace, "privileged")
        add_namespace(cluster, NAMESPACE, "restricted")
        yield cluster


@pytest.mark.parametrize("name", sorted(path.stem for path in VALUES.glob("*.yaml")))
def test_the_api_server_takes_every_render(cluster: Cluster, name: str) -> None:
    documents = [d for d in case(name) if d["kind"] not in NOT_THERE]
    cluster.kubectl(
        *("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-"),
        input=yaml.safe_dump_all(documents),
    )


def admit(cluster: Cluster, namespace: str, template: Document) -> None:
    """Have the API server admit a pod of this template, or say why not."""
    meta = {**template.get("metadata", {}), "name": "admitted", "namespace": namespace}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": template["spec"]}
    cluster.kubectl("create", "--dry-run=server", "-f", "-", input=json.dumps(pod))


def operators_pod() -> Document:
    template: Document = one(case("default"), "Deployment")["spec"]["template"]
    template["spec"]["serviceAccountName"] = "default"
    return template


def test_operator_pod_is_admitted_as_restricted(cluster: Cluster) -> None:
    admit(cluster, NAMESPACE, operators_pod())


def test_the_lock_directory_asks_for_baseline_here_and_restricted_there(cluster: Cluster) -> None:
    level = "pod-security.kubernetes.io/enforce=baseline"
    cluster.kubectl("label", "--overwrite", "namespace", "rl-2", level)
    admit(cluster, "rl-2", one(case("everything"), "DaemonSet")["spec"]["template"])
    # What mounts the claim is an ordinary user's: here the operator's own pod does.
    template = operators_pod()
    claim = {"claimName": "rollout-turn"}
    template["spec"]["volumes"].append({"name": "turn", "persistentVolumeClaim": claim})
    admit(cluster, NAMESPACE, template)


def installed(cluster: Cluster) -> set[str]:
    """Return the objects that bear the chart's label, as kind/name."""
    kinds = (
        "crd,clusterroles,clusterrolebindings,validatingadmissionpolicies,"
        "validatingadmissionpolicybindings,serviceaccounts,roles,rolebindings,configmaps,services,"
        "deployments,poddisruptionbudgets,networkpolicies"
    )
    out = cluster.kubectl(
        *("get", kinds, "--all-namespaces", "-o", "name"),
        *("-l", "app.kubernetes.io/name=rollout-operator"),
    )
    parts = [line.partition("/") for line in out.split()]
    return {f"{kind.partition('.')[0]}/{name}" for kind, _, name in parts}


def test_what_an_uninstall_leaves_serves_other_releases_and_its_own_next_one(
    cluster: Cluster,
) -> None:
    where = ("--namespace", NAMESPACE)
    values = ("--set", "workers.namespaces={rl}")
    cluster.helm("install", RELEASE, CHART, *where, *values)
    # Strict validation takes the CRD as soon as it is established.
    await_crd(cluster)
    api_of(cluster).create(POOLS.format(NAMESPACE), pool("demo"))
    everything = installed(cluster)
    assert {kind.partition("/")[0] for kind in everything} >= {"deployment", "service", "configmap"}
    cluster.helm("upgrade", RELEASE, CHART, *where, *values, "--set", "replicaCount=1")
    cluster.helm("uninstall", RELEASE, *where)
    name = "rollout-rollout-operator-worker"
    kinds = ("clusterrole", "clusterrolebinding", "role", "rolebinding")
    left = {
        "customresourcedefinition/rolloutreplicas.rollout.dev",
        "serviceaccount/rollout-worker",
        *(f"{kind}/{name}" for kind in kinds),
    }
    assert installed(cluster) == left
    account = api_of(cluster).get(ACCOUNT)["metadata"]

    # Another release works beside it, and takes nothing of it along.
    other = ("--namespace", OTHER, *values, "--set", "crds.install=false,crds.keep=false")
    cluster.helm("install", "another", CHART, *other)
    cluster.helm("upgrade", "another", CHART, *other, "--set", "replicaCount=1")
    binding = api_of(cluster).get(f"{BINDINGS}/another-rollout-operator-worker")
    assert binding["subjects"][0]["name"] == "rollout-worker"
    cluster.helm("uninstall", "another", "--namespace", OTHER)
    now = api_of(cluster).get(ACCOUNT)["metadata"]
    assert (now["uid"], now["annotations"]) == (account["uid"], account["annotations"])
    assert installed(cluster) == left

    # A new installation takes over what the former one left, and removes it if it is told to.
    cluster.helm("install", RELEASE, CHART, *where, *values, "--set", "crds.keep=false")
    assert installed(cluster) == everything
    assert [p["metadata"]["name"] for p in api_of(cluster).items(POOLS.format(NAMESPACE))] == [
        "demo"
    ]
    cluster.helm("uninstall", RELEASE, *where)
    until_sync(lambda: not installed(cluster), 30, what="nothing to be left")


def await_gone(cluster: Cluster, *leave: str) -> None:
    """Wait until these are gone: the kind goes after its finalizer, which takes a busy API server seconds, and the
    next release would find it."""
    eventually(
        f"{' and '.join(leave)} to be gone",
        lambda: not set(leave) & installed(cluster),
        60,
        seen=lambda: cluster.kubectl("get", "crd", "-o", "yaml", check=False)[-4000:],
    )


def test_a_tenant_installs_in_a_namespace_of_its_own(cluster: Cluster) -> None:
    """Somebody with the rights of a namespace's admin, who may hand out the operator's."""
    where = ("-n", TENANT)
    cluster.kubectl(*where, "create", "serviceaccount", "owner")
    subject = f"--serviceaccount={TENANT}:owner"
    cluster.kubectl(*where, "create", "rolebinding", "owner", "--clusterrole=admin", subject)
    cluster.kubectl(
        *(*where, "create", "role", "hand-out", "--verb=escalate,bind"),
        "--resource=roles.rbac.authorization.k8s.io",
    )
    cluster.kubectl(*where, "create", "rolebinding", "hand-out", "--role=hand-out", subject)
    before = {name for name in installed(cluster) if name.startswith("cluster")}

    owner = str(cluster.service_account_kubeconfig(TENANT, "owner"))
    values = ("--set", "rbac.namespaced=true", "--set", "networkPolicy.enabled=true")
    mine = ("--namespace", TENANT, "--kubeconfig", owner)
    cluster.helm("install", "mine", CHART, *mine, *values)
    found = installed(cluster)
    assert {"deployment/mine-rollout-operator", "role/rollout-trainer"} <= found
    assert "networkpolicy/mine-rollout-operator-workers" in found
    assert {name for name in found if name.startswith("cluster")} == before
    cluster.helm("upgrade", "mine", CHART, *mine, *values, "--set", "replicaCount=1")
    cluster.helm("uninstall", "mine", *mine)
    gone = "deployment/mine-rollout-operator"
    until_sync(lambda: gone not in installed(cluster), 30, what="the operator to be gone")


def stub_crd(plural: str, kind: str) -> dict[str, object]:
    """A kind of the Prometheus Operator that takes whatever it is given."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.monitoring.coreos.com"},
        "spec": {
            "group": "monitoring.coreos.com",
            "names": {"plural": plural, "singular": kind.lower(), "kind": kind},
            "scope": "Namespaced",
            "versions": [version],
        },
    }


def may_check_tokens(cluster: Cluster, namespace: str = "rl") -> bool:
    """Whether the workers of a namespace may ask who calls their control ports."""
    groups = ["system:authenticated", "system:serviceaccounts"]
    who = {
        "user": f"system:serviceaccount:{namespace}:rollout-worker",
        "groups": [*groups, f"system:serviceaccounts:{namespace}"],
    }

    def may_create(group: str, resource: str, **where: str) -> bool:
        asked = {"verb": "create", "group": group, "resource": resource, **where}
        path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        answer = api_of(cluster).create(path, {"spec": {"resourceAttributes": asked, **who}})
        return bool(answer["status"]["allowed"])

    return may_create("authentication.k8s.io", "tokenreviews") and may_create(
        "authorization.k8s.io", "localsubjectaccessreviews", namespace=namespace
    )


def test_an_admin_of_a_namespace_takes_it_into_service_alone(cluster: Cluster) -> None:
    """With the commands of the runbook, once every account may review tokens."""
    page = (CHART.parents[1] / "docs" / "runbook.md").read_text()
    lines = re.findall(r"^kubectl (-n more create .*)$", page, re.MULTILINE)
    where = ("--namespace", OTHER)
    cluster.helm("install", "open", CHART, *where, "--set=workers.tokenReviews=any")
    cluster.kubectl("-n", ALONE, "create", "serviceaccount", "owner")
    owner = ("--clusterrole=admin", "--serviceaccount=alone:owner")
    cluster.kubectl("-n", ALONE, "create", "rolebinding", "owner", *owner)
    for line in lines:
        cluster.kubectl(
            *line.replace("more", ALONE).split(), "--as=system:serviceaccount:alone:owner"
        )
    assert may_check_tokens(cluster, ALONE)
    cluster.helm("upgrade", "open", CHART, *where, "--set=crds.keep=false")
    assert not may_check_tokens(cluster, ALONE), "listed is the default"
    cluster.helm("uninstall", "open", *where)
    await_gone(cluster, KIND)


@pytest.mark.parametrize("page", ["docs/runbook.md", "charts/rollout-operator/README.md"])
def test_an_admin_upgrades_a_crd_that_kubectl_applied(cluster: Cluster, page: str) -> None:
    """Which of kubectl's ways of applying it was first does not matter."""
    text = (ROOT / page).read_text()
    [(render, apply)] = re.findall(r"`helm (template [^`|]+) \| kubectl (apply [^`]+)`", text)
    cluster.kubectl("apply", "-f", ROOT / "operator" / "crd.yaml")
    at = {"charts/rollout-operator": CHART, "CHART": CHART}
    rendered = cluster.helm(*(at.get(word, word) for word in render.split()))
    cluster.kubectl(*apply.split(), input=rendered)
    cluster.kubectl("delete", KIND)
    await_gone(cluster, KIND)


def test_the_helm_lines_of_the_pages_follow_one_another(cluster: Cluster, tmp_path: Path) -> None:
    """Whoever follows one page after the other loses no right of the workers and no image."""
    for plural, kind in (("podmonitors", "PodMonitor"), ("prometheusrules", "PrometheusRule")):
        crd = stub_crd(plural, kind)
        cluster.kubectl("apply", "-f", "-", input=json.dumps(crd))
        cluster.kubectl(
            "wait", "--for=condition=Established", f"crd/{plural}.monitoring.coreos.com"
        )
    where = ("--namespace", NAMESPACE)
    ran: list[str] = []
    rightful = False
    for page in PAGES:
        for name, text_of in files_of(page).items():
            (tmp_path / name).write_text(text_of)
        for verb, *words in helm_lines(page):
            assert "…" not in " ".join(words), f"{page}: give all of the command"
            release = next(word for word in words if not word.startswith("-"))
            assert release == "rollout-operator", f"{page}: one release name on all pages"
            if verb == "install" and ran:
                cluster.helm("uninstall", "rollout-operator", *where)
            at = {
                "charts/rollout-operator": str(CHART),
                "gpu-values.yaml": f"{tmp_path}/gpu-values.yaml",
            }
            cluster.helm(verb, *(at.get(word, word) for word in words))
            ran.append(verb)
            rightful = rightful or "workers.namespaces={rl}" in words
            assert may_check_tokens(cluster) or not rightful, (
                f"{page}: helm {verb} {' '.join(words)}"
            )
            if verb == "upgrade":
                found = api_of(cluster).get(f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments")
                image = "registry.example/rollout-operator:0.2.0"
                assert image in json.dumps(found), f"{page}: the image is kept"
    assert ran[-1] == "uninstall"
    assert ran.count("upgrade") >= 5
