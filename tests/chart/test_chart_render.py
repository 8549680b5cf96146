"""What the chart renders: goldens, and what must hold whatever the values are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout_operator.api.crd import custom_resource_definition
from rollout_operator.api.spec_pod import PodTemplate
from rollout_operator.config import ConfigFile
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


def container(documents: list[Document]) -> Document:
    (only,) = one(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def test_operator_is_probed_restricted_and_bounded() -> None:
    documents = case("default")
    deployment = one(documents, "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    it = container(documents)
    assert deployment["spec"]["replicas"] == 2
    assert pod["terminationGracePeriodSeconds"] == 30
    assert it["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert it["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    assert it["ports"] == [{"name": "http", "containerPort": 8080, "protocol": "TCP"}]
    assert it["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert it["resources"]["limits"]["memory"]
    assert {"name": "tmp", "emptyDir": {}} in pod["volumes"]


def test_images_have_a_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    documents = case("default")
    assert container(documents)["image"] == f"rollout-operator:{chart['appVersion']}"
    engines = config_of(documents)["engines"]
    assert engines["hf"]["image"] == f"rollout-worker-hf:{chart['appVersion']}"
    assert "image" not in engines["vllm"]
    assert "image" not in engines["sglang"]


def config_of(documents: list[Document], name: str = NAME) -> dict[str, Any]:
    config = yaml.safe_load(one(documents, "ConfigMap", name)["data"]["config.yaml"])
    assert isinstance(config, dict)
    return config


@pytest.mark.parametrize("name", CASES)
def test_operator_takes_its_flags_and_its_file(name: str, tmp_path: Path) -> None:
    from rollout_operator.config import parse_config
    from rollout_operator.settings import MAX_SHARDS

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


def test_images_without_a_registry_get_the_global_one_and_pods_all_secrets() -> None:
    documents = case("everything")
    assert container(documents)["image"].startswith("registry.example/rollout/operator:")
    engines = config_of(documents, "rollouts")["engines"]
    assert engines["hf"]["image"] == "registry.example/rollout/hf:1.2"
    assert engines["sglang"]["image"] == "mirror.example:5000/all/rollout/sglang:1.2"
    secrets = [{"name": "pull"}, {"name": "mirror"}]
    for kind, name in (("Deployment", "rollouts"), ("DaemonSet", "rollouts-node")):
        pod = one(documents, kind, name)["spec"]["template"]["spec"]
        assert pod["imagePullSecrets"] == secrets
    assert engines["hf"]["podTemplate"]["imagePullSecrets"] == secrets[::-1]
    moved = rendered("--set", "global.imageRegistry=mirror.example", "--set", "global.other=1")
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert container(moved)["image"] == f"mirror.example/rollout-operator:{version}"
    found = config_of(moved)["engines"]
    assert found["hf"]["image"] == f"mirror.example/rollout-worker-hf:{version}"
    assert "image" not in found["vllm"]


def test_engines_reach_the_operator_as_given() -> None:
    documents = case("everything")
    file = ConfigFile.model_validate(config_of(documents, "rollouts"))
    hf = file.engines["hf"]
    assert hf.image == "registry.example/rollout/hf:1.2"
    assert hf.env[0] == {"name": "PYTHONPATH", "value": "/opt/rollout-env/lib"}
    template = PodTemplate.model_validate(hf.pod_template)
    assert template.volume_mounts[0].mount_path == "/opt/rollout-env"
    assert template.annotations["prometheus.io/port"] == "8000"
    assert file.engines["vllm"].image_pull_policy == "Always"


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


def test_what_running_workers_need_is_kept_with_them() -> None:
    def kept(*arguments: str) -> set[str]:
        return {
            f"{d['kind']}/{d['metadata']['name']}"
            for d in rendered(*arguments)
            if "helm.sh/resource-policy" in d["metadata"].get("annotations", {})
        }

    assert kept() == {
        "CustomResourceDefinition/rolloutreplicas.rollout.dev",
        "ServiceAccount/rollout-worker",
        f"ClusterRole/{NAME}-worker",
        f"ClusterRoleBinding/{NAME}-worker",
        f"Role/{NAME}-worker",
        f"RoleBinding/{NAME}-worker",
    }
    assert kept("--set", "crds.keep=false") == set()


def test_notes_name_the_next_command() -> None:
    done = helm(
        *("install", "rollout", CHART, "--namespace", NAMESPACE, "--dry-run=client"),
        *("--set", "watchNamespaces={rl}"),
    )
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    assert f"kubectl -n {NAMESPACE} rollout status deployment/{NAME}" in notes
    assert "kubectl -n rl apply -f -" in notes
    assert "set engines.vllm.image" in notes
    assert "set crds.keep=false" in notes


def test_notes_say_what_a_tenant_lacks() -> None:
    """Workers get token reviews and nothing else; without the policy a trainer may do anything."""

    def notes(*settings: str) -> str:
        done = helm("install", "rollout", CHART, "--dry-run=client", *settings)
        assert done.returncode == 0, done.stderr
        return done.stdout.partition("NOTES:")[2]

    told = notes("--set=rbac.namespaced=true", "--set=watchNamespaces={rl,rl-2}")
    right = "create clusterrole rollout-worker --verb=create --resource=tokenreviews.authentication.k8s.io"
    assert right in told
    for namespace in ("rl", "rl-2"):
        assert f"--clusterrole=rollout-worker --serviceaccount={namespace}:rollout-worker" in told
    assert "There is no admission policy" in told
    assert "There is no admission policy" in notes("--set=admissionPolicy.enabled=false")
    assert "There is no admission policy" not in notes()


def test_notes_warn_of_a_namespace_without_an_account() -> None:
    def notes(watched: str) -> str:
        done = helm(
            *("install", "rollout", CHART, "--dry-run=client"),
            *(f"--set=watchNamespaces={watched}", "--set=workers.namespaces={b}"),
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.partition("NOTES:")[2]

    assert "WARNING: namespace a is watched and not in workers.namespaces" in notes("{a,b}")
    assert "WARNING" not in notes("{b}")


def test_example_of_the_notes_is_a_valid_pool() -> None:
    from rollout_operator.api.spec import parse_spec

    done = helm("install", "rollout", CHART, "--dry-run=client")
    example = done.stdout.partition("<<END\n")[2].partition("  END\n")[0]
    assert parse_spec(yaml.safe_load(example)).replicas == 1


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
}


@pytest.mark.parametrize(("setting", "message"), BAD.values(), ids=BAD)
def test_schema_refuses_and_names_the_value(setting: str, message: str) -> None:
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
