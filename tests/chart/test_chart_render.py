"""What the chart renders: goldens, and what must hold whatever the values are.

The goldens have everything that these values give, rights among it: a test of a single field of theirs would say it again.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rollout_operator.api.crd import custom_resource_definition
from rollout_operator.api.spec import parse_spec
from rollout_operator.config import parse_config
from rollout_operator.settings import MAX_SHARDS
from tests.support.charts import (
    CHART,
    NAMESPACE,
    VALUES,
    Document,
    case,
    every,
    helm,
    one,
    rendered,
)

GOLDENS = Path(__file__).parent / "goldens"
CASES = sorted(path.stem for path in VALUES.glob("*.yaml"))
NAME = "rollout-rollout-operator"


def shown(documents: list[Document]) -> str:
    """Return what a golden holds: all but the generated texts, which have their own check."""
    out = []
    for document in documents:
        if document["kind"] == "CustomResourceDefinition":
            document = {k: v for k, v in document.items() if k != "spec"}
        if document["metadata"]["name"].endswith("-dashboards"):
            document = document | {"data": sorted(document["data"])}
        if "config.yaml" in document.get("data", {}):
            config = yaml.safe_load(document["data"]["config.yaml"])
            document = document | {"data": {"config.yaml": config}}
        if document["kind"] == "PrometheusRule":
            document = {k: v for k, v in document.items() if k != "spec"}
        out.append(document)
    return yaml.safe_dump_all(out, sort_keys=True, width=100)


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, request: pytest.FixtureRequest) -> None:
    golden = GOLDENS / f"{name}.yaml"
    text = shown(case(name))
    if request.config.getoption("--update-goldens"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text(), "run pytest --update-goldens and review the difference"


@pytest.mark.parametrize("name", CASES)
def test_lints_without_a_warning(name: str) -> None:
    done = helm("lint", "--strict", CHART, "--values", VALUES / f"{name}.yaml")
    assert done.returncode == 0, done.stdout
    assert "WARNING" not in done.stdout


@pytest.mark.parametrize("name", CASES)
def test_selectors_match_the_pods_that_they_mean(name: str) -> None:
    documents = case(name)
    deployment = one(documents, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    selectors = [deployment["spec"]["selector"]["matchLabels"]]
    selectors += [service["spec"]["selector"] for service in every(documents, "Service")]
    for budget in every(documents, "PodDisruptionBudget"):
        selectors.append(budget["spec"]["selector"]["matchLabels"])
    selectors += [
        monitor["spec"]["selector"]["matchLabels"]
        for monitor in every(documents, "PodMonitor")
        if not monitor["metadata"]["name"].endswith("-workers")
    ]
    for selector in selectors:
        assert selector.items() <= labels


@pytest.mark.parametrize("name", CASES)
def test_every_reference_leads_somewhere(name: str) -> None:
    documents = case(name)
    for binding in every(documents, "RoleBinding") + every(documents, "ClusterRoleBinding"):
        role = one(
            [
                d
                for d in documents
                if d["metadata"].get("namespace") in (None, binding["metadata"].get("namespace"))
            ],
            binding["roleRef"]["kind"],
            binding["roleRef"]["name"],
        )
        assert role["rules"]
    pod = one(documents, "Deployment")["spec"]["template"]["spec"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == volumes
    (config,) = (v["configMap"]["name"] for v in pod["volumes"] if v["name"] == "config")
    assert one(documents, "ConfigMap", config)


@pytest.mark.parametrize("name", CASES)
def test_nothing_lies_in_a_namespace_by_accident(name: str) -> None:
    cluster_wide = {
        *("CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding"),
        *("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding", "PersistentVolume"),
    }
    for document in case(name):
        assert ("namespace" in document["metadata"]) == (document["kind"] not in cluster_wide)


@pytest.mark.parametrize("name", CASES)
def test_no_right_is_a_wildcard(name: str) -> None:
    for document in case(name):
        for rule in document.get("rules", []) if "Role" in document["kind"] else []:
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]


def test_every_account_may_review_tokens_if_the_values_say_so() -> None:
    """An admin of a namespace then needs none of the cluster to take it into service."""
    documents = rendered("--set=workers.tokenReviews=any", "--set=workers.namespaces={rl}")
    (subject,) = one(documents, "ClusterRoleBinding", f"{NAME}-worker")["subjects"]
    assert (subject["kind"], subject["name"]) == ("Group", "system:serviceaccounts")
    here = [d for d in documents if d["metadata"].get("namespace") == "rl"]
    assert one(here, "RoleBinding", f"{NAME}-worker")["subjects"][0]["name"] == "rollout-worker"


def container(documents: list[Document]) -> Document:
    (only,) = one(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


@pytest.mark.parametrize("name", CASES)
def test_operator_takes_its_flags_and_its_file(name: str, tmp_path: Path) -> None:
    documents = case(name)
    full = "rollouts" if name == "everything" else NAME
    file = tmp_path / "config.yaml"
    file.write_text(one(documents, "ConfigMap", full)["data"]["config.yaml"])
    args = [
        f"--config={file}" if a.startswith("--config=") else a for a in container(documents)["args"]
    ]
    config = parse_config(args, {"POD_NAMESPACE": NAMESPACE, "POD_NAME": "x"})
    role = one(documents, "Role", f"{full}-own")
    named = {rule["resources"][0]: rule.get("resourceNames") for rule in role["rules"]}
    more = [f"{config.lease_name}-{number}" for number in range(1, MAX_SHARDS)]
    assert named["leases"] == [config.lease_name, *more]
    assert config.shards == (3 if name == "everything" else 1)
    if name == "everything":  # replicaCount: 3
        assert one(documents, "Deployment", full)["spec"]["replicas"] == 5
    assert named["serviceaccounts/token"] == [config.service_account]
    assert config.http_port == 8080
    assert config.leader_elect
    assert config.operator_class == ("blue" if name == "everything" else "")


def test_images_without_a_registry_get_the_global_one_and_engines_without_an_image_none() -> None:
    moved = rendered("--set", "global.imageRegistry=mirror.example", "--set", "global.other=1")
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert container(moved)["image"] == f"mirror.example/rollout-operator:{version}"
    found = yaml.safe_load(one(moved, "ConfigMap", NAME)["data"]["config.yaml"])["engines"]
    assert found["hf"]["image"] == f"mirror.example/rollout-worker-hf:{version}"
    assert "image" not in found["vllm"]


def test_a_new_config_restarts_the_operator_only() -> None:
    def checksum(*arguments: str) -> str:
        pod = one(rendered(*arguments), "Deployment")["spec"]["template"]
        return str(pod["metadata"]["annotations"]["checksum/config"])

    assert checksum() == checksum("--set", "replicaCount=3")
    assert checksum() != checksum("--set", "engines.hf.image=x:1")


def test_crd_is_the_generated_one_and_kept() -> None:
    crd = one(case("default"), "CustomResourceDefinition")
    assert crd["spec"] == custom_resource_definition()["spec"]
    assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert not every(case("minimal"), "CustomResourceDefinition")


def shown_by_install(*settings: str) -> str:
    """What helm says of an installation: the notes, with a first pool in them."""
    where = ("--namespace", NAMESPACE, "--dry-run=client")
    done = helm("install", "rollout", CHART, *where, *(f"--set={each}" for each in settings))
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("NOTES:")[2]


def test_notes_name_the_next_command() -> None:
    notes = shown_by_install("watchNamespaces={rl}")
    assert f"kubectl -n {NAMESPACE} rollout status deployment/{NAME}" in notes
    assert "kubectl -n rl apply -f -" in notes
    assert "set engines.vllm.image" in notes
    assert "set crds.keep=false" in notes
    example = notes.partition("<<END\n")[2].partition("\nEND\n")[0]
    assert parse_spec(yaml.safe_load(example)).replicas == 1


def test_notes_say_what_a_tenant_lacks() -> None:
    """Workers get token reviews and nothing else; without the policy a trainer may do anything."""
    told = shown_by_install("rbac.namespaced=true", "watchNamespaces={rl,rl-2}")
    right = "create clusterrole rollout-worker --verb=create --resource=tokenreviews.authentication.k8s.io"
    assert right in told
    for namespace in ("rl", "rl-2"):
        assert f"--clusterrole=rollout-worker --serviceaccount={namespace}:rollout-worker" in told
    assert "There is no admission policy" in told
    assert "There is no admission policy" in shown_by_install("admissionPolicy.enabled=false")
    assert "There is no admission policy" not in shown_by_install()


@pytest.mark.parametrize(("watched", "warned"), [("{a,b}", True), ("{b}", False)])
def test_notes_warn_of_a_namespace_without_an_account(watched: str, warned: bool) -> None:
    notes = shown_by_install(f"watchNamespaces={watched}", "workers.namespaces={b}")
    assert ("WARNING: namespace a is watched and not in workers.namespaces" in notes) is warned


BAD = {
    "unknown": ("replicas=2", "additional properties 'replicas' not allowed"),
    "nested unknown": ("engines.hf.imag=x", "at '/engines/hf': additional properties 'imag'"),
    "engine": ("engines.trt.image=x", "at '/engines': additional properties 'trt' not allowed"),
    "template": (
        "engines.hf.podTemplate.volumez=x",
        "at '/engines/hf/podTemplate': additional properties 'volumez' not allowed",
    ),
    "count": ("replicaCount=-1", "at '/replicaCount': minimum: got -1, want 0"),
    "type": ("crds.keep=maybe", "at '/crds/keep': got string, want boolean"),
    "level": ("logging.level=LOUD", "at '/logging/level': value must be one of 'DEBUG'"),
    "policy": ("image.pullPolicy=Ever", "at '/image/pullPolicy': value must be one of 'Always'"),
    "namespace": ("watchNamespaces={A_b}", "at '/watchNamespaces/0': 'A_b' does not match pattern"),
    "name": ("fullnameOverride=UPPER", "at '/fullnameOverride': 'UPPER' does not match pattern"),
    "shards": ("shards=17", "at '/shards': maximum: got 17, want 16"),
    "lease": ("extraArgs={--lease-name=x}", "at '/extraArgs/0': 'not' failed"),
    "interval": ("metrics.podMonitor.interval=soon", "at '/metrics/podMonitor/interval': 'soon'"),
    "unknown alert": (
        "metrics.prometheusRule.alerts.RolloutPoolLost.enabled=false",
        "at '/metrics/prometheusRule/alerts",
    ),
    "alert": (
        "metrics.prometheusRule.alerts.RolloutPoolDegraded.for=soon",
        "at '/metrics/prometheusRule/alerts",
    ),
    "setting of the operator's": (
        "engines.hf.env[0].name=ROLLOUT_LOG_LEVEL,engines.hf.env[0].value=debug",
        "at '/engines/hf/env/0/name'",
    ),
    "half of TLS": (
        "workers.controlTLS.secretName=a",
        "set secretName and caSecretName, or neither",
    ),
    "reviews of a tenant": (
        "workers.tokenReviews=any,rbac.namespaced=true",
        "let an admin make it and leave listed",
    ),
    "locks of a tenant": (
        "colocation.enabled=true,rbac.namespaced=true",
        "let an admin make them and set colocation.claim",
    ),
}


@pytest.mark.parametrize(("setting", "message"), BAD.values(), ids=BAD)
def test_refuses_and_names_the_value(setting: str, message: str) -> None:
    done = helm("template", "rollout", CHART, "--set", setting)
    assert done.returncode != 0
    assert message in done.stderr


def test_every_value_is_described() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    table = (CHART / "README.md").read_text()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(values) | {"enabled"} == set(schema["properties"])
    for name in values:
        assert f"| `{name}" in table
