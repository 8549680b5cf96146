"""What single values of the chart do, and that none of them can be taken away."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout_operator.api.names import (
    CONTROL_PORT,
    DATA_PORT,
    LABEL_CLASS,
    LABEL_NAME,
    LABEL_ROLE,
    ROLE_HEAD,
    WEIGHTS_PORT,
    WORKER_APP,
)
from rollout_operator.config import ConfigFile
from rollout_worker.settings import FLAGS
from tests.support.charts import (
    CHART,
    NAMESPACE,
    Document,
    case,
    every,
    helm,
    one,
    rendered,
    template,
)

NAME = "rollout-rollout-operator"
CLAIM = "PersistentVolumeClaim"


class Once(yaml.SafeLoader):
    """Refuses a mapping that has a key twice, as the API server does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"twice: {keys}"
        return super().construct_mapping(node, deep)


def pod(documents: list[Document]) -> Document:
    found: Document = one(documents, "Deployment")["spec"]["template"]
    return found


def paths(values: Mapping[str, Any], schema: Mapping[str, Any], at: str) -> Iterator[str]:
    """Yield every value and group of values that the schema knows by name."""
    for name, value in values.items():
        yield at + name
        inner = schema["properties"][name]
        closed = isinstance(value, Mapping) and inner.get("additionalProperties") is False
        if closed and name != "podTemplate":
            yield from paths(value, inner, f"{at}{name}.")


def test_no_value_can_be_null() -> None:
    """Helm removes what is set to null; a template must not meet the hole."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    known = list(paths(values, schema, ""))
    assert len(known) > 60
    # One render tells them all: a group that is null hides what is in it, so leaves and groups apart.
    groups = {path.rpartition(".")[0] for path in known} - {""}
    for some in (
        sorted(set(known) - groups),
        sorted(groups - {g.rpartition(".")[0] for g in groups}),
    ):
        done = helm("template", "rollout", CHART, *(f"--set={path}=null" for path in some))
        assert done.returncode != 0
        for path in some:
            where, _, name = path.rpartition(".")
            place = "/" + where.replace(".", "/") if where else ""
            lines = [line for line in done.stderr.splitlines() if f"at '{place}'" in line]
            assert any(f"'{name}'" in line and "missing" in line for line in lines), path


@pytest.mark.parametrize("name", ["default", "everything", "tenant", "monitoring"])
def test_no_key_stands_twice(name: str) -> None:
    text = template("--values", CHART.parents[1] / "tests" / "chart" / "values" / f"{name}.yaml")
    assert [document for document in yaml.load_all(text, Once) if document]


def test_no_key_stands_twice_though_a_value_names_one_of_ours() -> None:
    """Flux, whose kustomize renders again what helm has, refuses such a document."""
    ours = r"app\.kubernetes\.io/instance"
    parts = ("podMonitor", "prometheusRule", "dashboards")
    labels = [
        f"--set=metrics.{part}.enabled=true,metrics.{part}.labels.{ours}=own" for part in parts
    ]
    text = template(*labels, r"--set=crds.annotations.helm\.sh/resource-policy=own")
    documents = [document for document in yaml.load_all(text, Once) if document]
    told = [d["metadata"]["labels"]["app.kubernetes.io/instance"] for d in documents]
    assert told.count("own") == 4
    crd = one(documents, "CustomResourceDefinition")["metadata"]["annotations"]
    assert crd["helm.sh/resource-policy"] == "own"


def ports(*numbers: int) -> list[Document]:
    return [{"port": number, "protocol": "TCP"} for number in numbers]


def of_workers(documents: list[Document]) -> list[Document]:
    return [d for d in every(documents, "NetworkPolicy") if d["metadata"]["name"] != NAME]


def test_only_the_operator_reaches_control_ports() -> None:
    assert not every(case("default"), "NetworkPolicy")
    documents = case("everything")
    *policies, own = every(documents, "NetworkPolicy")
    assert [p["metadata"]["namespace"] for p in policies] == ["rl", "rl-2"]
    for policy in policies:
        spec = policy["spec"]
        assert spec["podSelector"] == {"matchLabels": {LABEL_NAME: WORKER_APP, LABEL_CLASS: "blue"}}
        assert spec["policyTypes"] == ["Ingress"]
        data, control, gang = spec["ingress"]
        assert data == {"ports": ports(DATA_PORT)}
        assert control["ports"] == ports(CONTROL_PORT, WEIGHTS_PORT)
        (operator,) = control["from"]
        namespace = operator["namespaceSelector"]["matchLabels"]
        assert namespace == {"kubernetes.io/metadata.name": NAMESPACE}
        labels = pod(documents)["metadata"]["labels"]
        assert operator["podSelector"]["matchLabels"].items() <= labels.items()
        assert gang == {"from": [{"podSelector": {"matchLabels": {LABEL_NAME: WORKER_APP}}}]}
    assert own["metadata"]["namespace"] == NAMESPACE
    assert own["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert own["spec"]["ingress"] == [{"ports": ports(8080)}]


def test_two_releases_in_a_namespace_select_no_worker_of_each_other() -> None:
    options = ("--set=networkPolicy.enabled=true", "--set=metrics.podMonitor.enabled=true")
    without = [{"key": LABEL_CLASS, "operator": "DoesNotExist"}]
    for more, labels, expressions in (
        ((), {}, without),
        (("--set=operatorClass=blue",), {LABEL_CLASS: "blue"}, None),
    ):
        documents = rendered(*options, *more)
        (policy,) = of_workers(documents)
        monitor = one(documents, "PodMonitor", f"{NAME}-workers")
        app = {LABEL_NAME: WORKER_APP}
        for found, also in (
            (policy["spec"]["podSelector"], {}),
            (monitor["spec"]["selector"], {LABEL_ROLE: ROLE_HEAD}),
        ):
            assert found["matchLabels"] == app | also | labels
            assert found.get("matchExpressions") == expressions


def peer(name: str) -> Document:
    return {"podSelector": {"matchLabels": {"app": name}}}


def test_data_ports_are_open_to_whom_the_values_name() -> None:
    def policies(**told: str) -> tuple[list[Document], list[Document]]:
        """Ingress of the workers and of the operator with these peers."""
        set_ = [
            f"--set=networkPolicy.{who}[0].podSelector.matchLabels.app={name}"
            for who, name in told.items()
        ]
        documents = rendered(*set_)  # peers that are named need no other switch
        own = one(documents, "NetworkPolicy", NAME)["spec"]["ingress"]
        return of_workers(documents)[0]["spec"]["ingress"], own

    (data, control, _), (own,) = policies(
        dataFrom="agents", metricsFrom="prometheus", trainersFrom="trainer", controlFrom="debug"
    )
    assert data == {
        "ports": ports(DATA_PORT),
        "from": [peer("agents"), peer("prometheus"), peer("trainer")],
    }
    assert control["ports"] == ports(CONTROL_PORT, WEIGHTS_PORT)
    assert control["from"][1:] == [peer("trainer"), peer("debug")]
    assert own == {"ports": ports(8080), "from": [peer("prometheus")]}
    # Nobody is shut out of the data port by a list of who else may reach it.
    (data, control, _), _ = policies(metricsFrom="prometheus", trainersFrom="trainer")
    assert data == {"ports": ports(DATA_PORT)}
    assert control["from"][1:] == [peer("trainer")]


def test_a_pools_own_port_for_weights_can_be_opened() -> None:
    documents = rendered(
        "--set=networkPolicy.enabled=true", "--set=networkPolicy.weightsPorts={8002,9000}"
    )
    (policy,) = of_workers(documents)
    assert policy["spec"]["ingress"][1]["ports"] == ports(CONTROL_PORT, WEIGHTS_PORT, 9000)


def test_trainers_push_weights_with_the_values_of_the_page_about_gpus(tmp_path: Path) -> None:
    page = (CHART.parents[1] / "docs" / "gpu.md").read_text()
    (block,) = re.findall(r"^```yaml\n(# gpu-values.yaml\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    values = tmp_path / "gpu-values.yaml"
    values.write_text(block)
    (policy,) = of_workers(rendered("--values", values))
    control = policy["spec"]["ingress"][1]
    assert control["ports"] == ports(CONTROL_PORT, WEIGHTS_PORT)
    assert control["from"][1]["podSelector"] == peer("trainer")["podSelector"]


def test_alerts_lead_to_where_the_runbook_is_published() -> None:
    where = "https://docs.example/runbook"
    spec = one(
        rendered(
            "--set=metrics.prometheusRule.enabled=true",
            f"--set=metrics.prometheusRule.runbookUrl={where}",
        ),
        "PrometheusRule",
    )["spec"]
    links = {
        rule["annotations"]["runbook_url"].partition("#")[0]
        for group in spec["groups"]
        for rule in group["rules"]
    }
    assert links == {where}


def test_control_ports_speak_tls_with_both_secrets_only() -> None:
    documents = case("everything")
    defaults = ConfigFile.model_validate(
        yaml.safe_load(one(documents, "ConfigMap", "rollouts")["data"]["config.yaml"])
    ).engines
    for engine in defaults.values():
        mounts = {m["name"]: m["mountPath"] for m in engine.pod_template["volumeMounts"]}
        files = {e["name"]: e["value"] for e in engine.env if "TLS" in e["name"]}
        assert set(files) == {flag.variable_name for flag in FLAGS if "control-tls" in flag.name}
        assert all(file.startswith(mounts["control-tls"]) for file in files.values())
    spec = pod(documents)["spec"]
    [container] = spec["containers"]
    [said] = [a for a in container["args"] if a.startswith("--control-ca-file=")]
    mounted = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    assert said.partition("=")[2] == mounted["control-ca"] + "/ca.crt"


def test_data_ports_want_a_token_with_a_secret_only() -> None:
    def hf(*settings: str) -> Document:
        config = one(rendered(*settings), "ConfigMap", NAME)["data"]["config.yaml"]
        ConfigFile.model_validate(yaml.safe_load(config))
        engine: Document = yaml.safe_load(config)["engines"]["hf"]
        return engine

    assert "volumes" not in hf()["podTemplate"]
    engine = hf("--set=workers.dataToken.secretName=data-token")
    (volume,) = engine["podTemplate"]["volumes"]
    assert volume["secret"]["secretName"] == "data-token"
    (mount,) = engine["podTemplate"]["volumeMounts"]
    (variable,) = engine["env"]
    assert variable == {"name": "ROLLOUT_DATA_TOKEN_FILE", "value": f"{mount['mountPath']}/token"}
    assert variable["name"] in {flag.variable_name for flag in FLAGS}


def colocated(*settings: str) -> list[Document]:
    wanted = ("colocation.enabled=true", "colocation.namespaces={rl,rl-2}", *settings)
    return rendered(*(f"--set={each}" for each in wanted))


def test_the_lock_directory_is_a_claim_in_each_namespace_and_the_same_folder() -> None:
    documents = colocated()
    daemon = one(documents, "DaemonSet")
    claims = {
        (c["metadata"]["namespace"], c["metadata"]["name"]): c for c in every(documents, CLAIM)
    }
    ours = (NAMESPACE, daemon["metadata"]["name"])
    assert set(claims) == {ours, ("rl", "rollout-turn"), ("rl-2", "rollout-turn")}
    volumes = {v["metadata"]["name"]: v["spec"] for v in every(documents, "PersistentVolume")}
    assert len(volumes) == 3
    for key, claim in claims.items():
        volume = volumes[claim["spec"]["volumeName"]]
        assert (volume["claimRef"]["namespace"], volume["claimRef"]["name"]) == key
        assert volume["accessModes"] == claim["spec"]["accessModes"] == ["ReadWriteMany"]
        assert volume["storageClassName"] == claim["spec"]["storageClassName"] == ""
        kind = "DirectoryOrCreate" if key == ours else "Directory"
        assert volume["hostPath"] == {"path": "/var/lib/rollout/turn", "type": kind}
    template = daemon["spec"]["template"]
    (volume,) = template["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == ours[1]
    assert (
        daemon["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    )


def test_the_node_part_takes_a_priority_and_resources() -> None:
    spec = one(colocated(), "DaemonSet")["spec"]["template"]["spec"]
    assert spec["tolerations"] == [{"operator": "Exists"}]
    assert "priorityClassName" not in spec
    (daemon,) = every(
        colocated(
            "colocation.priorityClassName=system-node-critical",
            "colocation.resources.limits.memory=64Mi",
            "colocation.tolerations[0].key=nvidia.com/gpu",
        ),
        "DaemonSet",
    )
    spec = daemon["spec"]["template"]["spec"]
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu"}]
    assert spec["priorityClassName"] == "system-node-critical"
    for each in (*spec["initContainers"], *spec["containers"]):
        assert each["resources"]["limits"] == {"memory": "64Mi"}
        assert each["resources"]["requests"] == {"cpu": "1m", "memory": "8Mi"}


def test_claims_outlive_the_release_as_their_pods_do() -> None:
    def kept(*settings: str) -> set[tuple[str, str]]:
        return {
            (each["kind"], each["metadata"].get("namespace", "*"))
            for each in every(colocated(*settings), CLAIM)
            + every(colocated(*settings), "PersistentVolume")
            if "helm.sh/resource-policy" in each["metadata"].get("annotations", {})
        }

    assert kept() == {(CLAIM, "rl"), (CLAIM, "rl-2"), ("PersistentVolume", "*")}
    assert kept("crds.keep=false") == set()


NUMBERS = {
    "fullnameOverride": "77",
    "serviceAccount.name": "42",
    "priorityClassName": "100",
    "operatorClass": "7",
    "watchNamespaces[0]": "0123",
    "workers.namespaces[0]": "0123",
    "workers.controlTLS.secretName": "1",
    "workers.controlTLS.caSecretName": "2",
    "colocation.enabled": "true",
    "colocation.claim": "3",
    "colocation.nodeNamespace": "4",
    "colocation.namespaces[0]": "0123",
    "colocation.priorityClassName": "5",
    "networkPolicy.enabled": "true",
    "metrics.podMonitor.enabled": "true",
    "metrics.prometheusRule.enabled": "true",
    "metrics.dashboards.enabled": "true",
}
"""Names that YAML takes for numbers, as `--set-string` gives them; Kubernetes allows such names."""


def texts(part: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each name, label and item of a list in a document."""
    if isinstance(part, Mapping):
        for key, value in part.items():
            named = key.lower().endswith(("name", "namespace", "instance"))
            if named or at.endswith(("labels", "matchLabels")):
                yield f"{at}.{key}", value
            yield from texts(value, f"{at}.{key}")
    elif isinstance(part, list):
        for value in part:
            yield at, value
            yield from texts(value, at)


def test_names_that_look_like_numbers_stay_names() -> None:
    options = [
        f"--set{'' if text == 'true' else '-string'}={path}={text}"
        for path, text in NUMBERS.items()
    ]
    done = helm("template", "123", CHART, "--namespace", "2024", *options)
    assert done.returncode == 0, done.stderr
    documents = [each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each]
    documents = [each for each in documents if each["kind"] != "CustomResourceDefinition"]
    assert {"2024", "0123", "4"} == {d["metadata"].get("namespace", "4") for d in documents}
    numbers = {
        (document["kind"], where, value)
        for document in documents
        for where, value in texts(document)
        if isinstance(value, int | float)
    }
    assert not numbers


def test_a_chart_that_depends_on_this_one_may_switch_it(tmp_path: Path) -> None:
    (tmp_path / "charts").mkdir()
    shutil.copytree(CHART, tmp_path / "charts" / CHART.name)
    needed = {"name": CHART.name, "version": "*", "condition": f"{CHART.name}.enabled"}
    chart = {"apiVersion": "v2", "name": "platform", "version": "0.1.0", "dependencies": [needed]}
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(chart))
    for enabled in (True, False):
        values = {"global": {"storageClass": "fast"}, CHART.name: {"enabled": enabled}}
        (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
        done = helm("template", "platform", tmp_path)
        assert done.returncode == 0, done.stderr
        assert ("kind: Deployment" in done.stdout) is enabled
