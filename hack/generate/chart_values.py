"""Makes the chart's values.schema.json, and the table of values in its README, from one list of values.

`VALUES` has the meaning of each value and the rules that it obeys; its type is that of its default in
values.yaml. The engines' pod templates have the schema of the custom resource.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rollout_operator.api.crd import structural_schema
from rollout_operator.api.names import CONTROL_TLS_NAME
from rollout_operator.api.spec_engine import EnvVar
from rollout_operator.api.spec_pod import PodTemplate

Schema = dict[str, Any]

CHART = Path(__file__).resolve().parents[2] / "charts" / "rollout-operator"
README = Path(__file__).with_name("chart_readme.md")
ENGINES = {
    "hf": ("Hugging Face", "if empty, rollout-worker-hf at the chart's appVersion"),
    "vllm": ("vLLM", "without a default"),
    "sglang": ("SGLang", "without a default"),
}
TYPES = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
OPTIONAL_NAME = "^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)?$"
OPTIONAL_LABEL = "^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$"
DURATION = "^([0-9]+(ms|[smhdwy]))+$"
PULL_POLICIES = ["Always", "IfNotPresent", "Never"]
STRINGS: Schema = {"additionalProperties": {"type": "string"}}
OBJECTS: Schema = {"items": {"type": "object"}}
NAMESPACES: Schema = {
    "items": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}
}


def value(meaning: str, **rules: Any) -> Schema:
    return {"description": meaning, **rules}


def group(properties: Mapping[str, Schema]) -> Schema:
    """Return a closed object: an unknown key is refused by name.

    All its keys are required: values.yaml has them, and a user who sets one to null would remove it.
    """
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": dict(properties),
        "required": list(properties),
    }


def plain(schema: Mapping[str, Any]) -> Schema:
    """Turn a structural schema into a plain JSON schema with closed objects."""
    out = {
        key: value
        for key, value in schema.items()
        if not key.startswith("x-") and key not in ("format", "default")
    }
    if "properties" in out:
        out["properties"] = {name: plain(child) for name, child in out["properties"].items()}
        out["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    for key in ("items", "additionalProperties"):
        if isinstance(out.get(key), Mapping):
            out[key] = plain(out[key])
    return out


def engine_values(title: str, default: str) -> dict[str, Schema]:
    environment = plain(structural_schema(EnvVar))
    environment["properties"]["name"]["not"] = {"pattern": "^ROLLOUT_"}
    return {
        "image": value(
            f"{title} worker image; {default}. A pool's spec.engine.image takes precedence."
        ),
        "imagePullPolicy": value("When the image is pulled.", enum=PULL_POLICIES),
        "podTemplate": plain(structural_schema(PodTemplate))
        | value(
            "Fields merged into this engine's pods, as spec.podTemplate; the pool's own take precedence."
        ),
        "env": value(
            "Environment of the worker container, as in a pod spec; `ROLLOUT_*` is the operator's.",
            items=environment,
        ),
    }


def alerts() -> Schema:
    """Return the schema of changes to single alerts, by the names in the chart's rules.yaml."""
    change = group(
        {
            "enabled": {"type": "boolean", "description": "Whether the alert is installed."},
            "severity": {"type": "string", "description": "Its label severity.", "minLength": 1},
            "for": {
                "type": "string",
                "description": "How long its condition holds before it fires.",
                "pattern": DURATION,
            },
        }
    )
    del change["required"]
    rules = yaml.safe_load((CHART / "rules.yaml").read_text())["groups"]
    schema = group({rule["alert"]: change for each in rules for rule in each["rules"]})
    del schema["required"]
    return schema | value(
        "Changes of single alerts: a map of name, such as RolloutPoolNotServing, to `enabled`, `for` and "
        "`severity`; what is left out stays as in rules.yaml."
    )


VALUES = {
    "image.repository": value("Operator image.", minLength=1),
    "image.tag": value("Image tag; if empty, the chart's appVersion."),
    "image.digest": value("Image digest, instead of the tag.", pattern="^(sha256:[0-9a-f]{64})?$"),
    "image.pullPolicy": value("When the image is pulled.", enum=PULL_POLICIES),
    "imagePullSecrets": value(
        "Secrets for pulling the operator's image.",
        items=group(
            {"name": {"type": "string", "description": "Name of the Secret.", "minLength": 1}}
        ),
    ),
    "replicaCount": value(
        "Number of operator pods; one leads, the others stand by.", minimum=0, maximum=9
    ),
    "fullnameOverride": value(
        "Name of the operator's objects; if empty, derived from the release.",
        pattern=OPTIONAL_LABEL,
    ),
    **{
        f"engines.{engine}.{name}": schema
        for engine, (title, default) in ENGINES.items()
        for name, schema in engine_values(title, default).items()
    },
    "watchNamespaces": value(
        "Namespaces whose RolloutReplicas the operator runs; if empty, all, or with rbac.namespaced the "
        "release's own. Listed namespaces get a Role each instead of one ClusterRole.",
        **NAMESPACES,
    ),
    "rbac.namespaced": value(
        "Create nothing cluster-wide: no CRD, admission policy, ClusterRole or ClusterRoleBinding, and "
        "Roles instead of the ClusterRoles for people. See above for what a cluster admin must do first."
    ),
    "workers.namespaces": value(
        "Namespaces in which the service account rollout-worker gets its permissions; if empty, the "
        "watched ones, else the release's own.",
        **NAMESPACES,
    ),
    "workers.tokenReviews": value(
        "Accounts that may review tokens, a cluster-wide right by which workers identify their callers: "
        "`listed`, the accounts rollout-worker of these namespaces; `any`, every service account of the "
        "cluster, so that the admin of a namespace can create the rest without a cluster admin "
        "(docs/runbook.md#service-account-missing). A review names the owner of a token that the reviewer "
        "already has.",
        enum=["listed", "any"],
    ),
    "workers.serviceAccount.create": value(
        "Create the service account rollout-worker in these namespaces."
    ),
    "workers.serviceAccount.annotations": value("Annotations of that service account.", **STRINGS),
    "workers.dataToken.secretName": value(
        "Secret (token) in each namespace with workers; with it their data ports require that token for all "
        "but health, readiness and metrics (docs/worker.md#a-token-for-the-data-port). If empty, they "
        "require none.",
        pattern=OPTIONAL_NAME,
    ),
    "workers.controlTLS.secretName": value(
        "Secret (tls.crt, tls.key) in each namespace with workers; with it their control ports speak TLS "
        "only, and their weights ports do if a pool requires it. Its certificate is for the name "
        f"{CONTROL_TLS_NAME}.",
        pattern=OPTIONAL_NAME,
    ),
    "workers.controlTLS.caSecretName": value(
        "Secret (ca.crt) in the operator's namespace, by which it checks those certificates; required with "
        "secretName.",
        pattern=OPTIONAL_NAME,
    ),
    "colocation.enabled": value(
        "Create the directory whose locks let colocated trainers and workers take turns: a DaemonSet that "
        "makes it on each node, and a PersistentVolume and claim of it for each namespace listed below."
    ),
    "colocation.namespaces": value(
        "Namespaces with trainers and colocated workers: they get a claim of the directory, and their "
        "service accounts may list ResourceSlices.",
        **NAMESPACES,
    ),
    "colocation.directory": value(
        "The directory on each node, on a local file system.",
        pattern="^(/[A-Za-z0-9][-A-Za-z0-9._]*)+$",
    ),
    "colocation.claim": value(
        "Name of the lock directory's PersistentVolumeClaims. If empty, rollout-turn if "
        "colocation.enabled, else none, and nothing enforces exclusion. Set it without enabled to use "
        "existing claims.",
        pattern=OPTIONAL_NAME,
    ),
    "colocation.nodeNamespace": value(
        "Existing namespace of the DaemonSet; if empty, the release's. Its pods need the Pod Security "
        "level baseline: an init container runs as root, without any capability.",
        pattern="^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?$",
    ),
    "colocation.nodeSelector": value(
        "Labels that a node must have to get the directory; if empty, all do.", **STRINGS
    ),
    "colocation.tolerations": value(
        "Tolerations of the DaemonSet's pods; by default all taints, since nodes with accelerators often "
        "have some.",
        **OBJECTS,
    ),
    "colocation.priorityClassName": value("PriorityClass of the DaemonSet's pods."),
    "colocation.resources": value("Compute resources of each container of the DaemonSet."),
    "crds.install": value("Install the CRD and upgrade it with the chart."),
    "crds.keep": value(
        "Keep the CRD, its objects, running workers and their service account on uninstall; if false, "
        "everything is removed."
    ),
    "roles.create": value(
        "Create the ClusterRoles rollout-viewer, rollout-editor and rollout-trainer; with rbac.namespaced "
        "they are Roles."
    ),
    "admissionPolicy.enabled": value(
        "Require a separate permission to change spec.weights.target, spec.state and the rest of the "
        "object; if false, anyone who may update an object may change all of it."
    ),
    "networkPolicy.enabled": value(
        "Create a NetworkPolicy for the workers of each namespace with workers, and one for the "
        "operator's pods. The operator reaches the workers' control ports, workers of a namespace reach "
        "each other on all ports (gangs choose theirs), and the peers below reach the ports named there. "
        "The network plugin must enforce policies; other policies can open more, but close nothing."
    ),
    "networkPolicy.dataFrom": value(
        "Peers, as in a NetworkPolicy, that may reach the workers' data port (8000): generation without a "
        "token, and metrics. If empty, all peers may; else these, metricsFrom and trainersFrom.",
        **OBJECTS,
    ),
    "networkPolicy.metricsFrom": value(
        "Peers that scrape metrics. They reach the operator's port 8080 (if empty, all peers do) and, if "
        "dataFrom restricts it, the workers' data port, which serves their metrics: they may also "
        "generate.",
        **OBJECTS,
    ),
    "networkPolicy.trainersFrom": value(
        "Peers that publish weights or steer workers: they reach data, control (8001) and weights ports. "
        "`publish_weights(tensors=…)` reaches workers only from these peers.",
        **OBJECTS,
    ),
    "networkPolicy.controlFrom": value(
        "Peers that may reach control and weights ports only.", **OBJECTS
    ),
    "networkPolicy.weightsPorts": value(
        "Ports for pushed weights that the policy opens: add each spec.weights.transport.port that a pool "
        "sets.",
        items={"type": "integer", "minimum": 1024, "maximum": 65535},
    ),
    "serviceAccount.create": value("Create the operator's service account."),
    "serviceAccount.name": value(
        "Name of the service account; if empty, derived from the release."
    ),
    "serviceAccount.annotations": value("Annotations of the service account.", **STRINGS),
    "metrics.podMonitor.enabled": value(
        "Create PodMonitors for operator and workers; needs the Prometheus Operator. Their pods have no "
        "annotation prometheus.io/scrape then, so that nothing is counted twice."
    ),
    "metrics.podMonitor.interval": value("Time between scrapes.", pattern="^[0-9]+(ms|s|m)$"),
    "metrics.podMonitor.scrapeTimeout": value(
        "Time after which a scrape fails, at most the interval; if empty, the default of Prometheus.",
        pattern="^([0-9]+(ms|s|m))?$",
    ),
    "metrics.podMonitor.labels": value(
        "Additional labels, such as those by which Prometheus selects.", **STRINGS
    ),
    "metrics.prometheusRule.enabled": value(
        "Create a PrometheusRule with the alerts; needs the Prometheus Operator."
    ),
    "metrics.prometheusRule.labels": value(
        "Additional labels, such as those by which Prometheus selects.", **STRINGS
    ),
    "metrics.prometheusRule.runbookUrl": value(
        "URL at which docs/runbook.md is published; each alert's runbook_url leads to a section of it. If "
        "empty, alerts have none.",
        pattern="^(https?://[^#]+)?$",
    ),
    "metrics.prometheusRule.alerts": alerts(),
    "metrics.dashboards.enabled": value("Create a ConfigMap with the Grafana dashboards."),
    "metrics.dashboards.labels": value("Labels that Grafana's sidecar looks for.", **STRINGS),
    "operatorClass": value(
        "Act only on RolloutReplicas with this `spec.operatorClass`; if empty, only on those without one. "
        "Operators that watch the same namespace must have different classes.",
        maxLength=63,
        pattern=OPTIONAL_LABEL,
    ),
    "logging.level": value("Minimum log level.", enum=["DEBUG", "INFO", "WARNING", "ERROR"]),
    "logging.format": value("Log format.", enum=["json", "text"]),
    "extraArgs": value(
        "Additional operator flags, see `rollout-operator run --help`; flags that other values or the RBAC "
        "depend on are refused.",
        items={
            "type": "string",
            "not": {"pattern": "^--(config|http-port|lease-name|service-account)(=|$)"},
        },
    ),
    "extraEnv": value(
        "Additional environment of the operator's container, as in a pod spec.", **OBJECTS
    ),
    "podDisruptionBudget.enabled": value("Create a PodDisruptionBudget for the operator's pods."),
    "podDisruptionBudget.maxUnavailable": value(
        "Maximum number or percentage of operator pods unavailable during evictions.",
        type=["integer", "string"],
        minimum=0,
        pattern="^[0-9]+%$",
    ),
    "service.annotations": value("Annotations of the metrics Service.", **STRINGS),
    "resources": value("Compute resources of the operator's container."),
    "podSecurityContext": value("Security context of the operator's pods."),
    "securityContext": value("Security context of the operator's container."),
    "podAnnotations": value("Additional annotations for the operator's pods.", **STRINGS),
    "podLabels": value("Additional labels for the operator's pods.", **STRINGS),
    "nodeSelector": value("Labels that the operator's node must have.", **STRINGS),
    "tolerations": value("Tolerations of the operator's pods.", **OBJECTS),
    "affinity": value("Affinity of the operator's pods."),
    "topologySpreadConstraints": value(
        "How the operator's pods are spread; if empty, over the nodes if possible.", **OBJECTS
    ),
    "priorityClassName": value("PriorityClass of the operator's pods."),
}


def values_schema(defaults: Mapping[str, Any]) -> Schema:
    """Return the JSON schema of values.yaml, whose content is given.

    Raises:
        SystemExit: A value is not described, or a description has no value.
    """
    described = dict(VALUES)

    def schema_of(default: Any, path: tuple[str, ...]) -> Schema:
        known = described.pop(".".join(path), None)
        if known is not None:
            return {"type": TYPES[type(default)], **known}
        if not isinstance(default, Mapping):
            raise SystemExit(f"describe {'.'.join(path)} in VALUES of {Path(__file__).name}")
        return group({key: schema_of(child, (*path, key)) for key, child in default.items()})

    schema = schema_of(defaults, ())
    if described:
        raise SystemExit(f"values.yaml lacks {', '.join(described)}")
    # `global` is Helm's own, set where the chart is a part of another.
    schema["properties"]["global"] = {"type": "object"}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema}


def schema_text(defaults: Mapping[str, Any]) -> str:
    return json.dumps(values_schema(defaults), indent=1) + "\n"


def readme(defaults: Mapping[str, Any]) -> str:
    """Return the chart's README with a row for each value."""
    lines = ["| value | default | meaning |", "|---|---|---|"]
    for name, schema in VALUES.items():
        default: Any = defaults
        for part in name.split("."):
            default = default[part]
        shown = json.dumps(default).replace("|", "\\|")
        lines.append(f"| `{name}` | `{shown}` | {schema['description']} |")
    return README.read_text().replace("@TABLE@", "\n".join(lines))
