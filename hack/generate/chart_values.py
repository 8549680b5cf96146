"""Makes the chart's values.schema.json and the table of values in its README; one list of values.

`values_schema` says what each value may be and what it means; the engines' pod templates have the
schema of the custom resource.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rollout_operator.api.crd import structural_schema
from rollout_operator.api.names import CONTROL_TLS_NAME
from rollout_operator.api.spec_engine import EnvVar
from rollout_operator.api.spec_pod import PodTemplate

Schema = dict[str, Any]

LABEL = "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
OPTIONAL_NAME = "^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)?$"
DURATION = "^([0-9]+(ms|[smhdwy]))+$"
ONE_VALUE = ("podTemplate", "alerts")
CHART = Path(__file__).resolve().parents[2] / "charts" / "rollout-operator"
ENGINES = {"hf": "Hugging Face", "vllm": "vLLM", "sglang": "SGLang"}


def text(meaning: str, **more: Any) -> Schema:
    return {"type": "string", "description": meaning, **more}


def switch(meaning: str) -> Schema:
    return {"type": "boolean", "description": meaning}


def strings(meaning: str) -> Schema:
    """Return the schema of a map of strings, as for labels."""
    return {
        "type": "object",
        "description": meaning,
        "additionalProperties": {"type": "string"},
    }


def open_object(meaning: str) -> Schema:
    """Return the schema of an object that the API server checks."""
    return {"type": "object", "description": meaning}


def items(meaning: str, item: Schema) -> Schema:
    return {"type": "array", "description": meaning, "items": item}


def group(meaning: str = "", /, **properties: Schema) -> Schema:
    """Return a closed object: an unknown key is refused by name.

    All its keys are required: values.yaml has them, and who sets one to null would remove it.
    """
    out: Schema = {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": list(properties),
    }
    return out | {"description": meaning} if meaning else out


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


def _engine(title: str, image: str) -> Schema:
    return group(
        image=text(f"{title} worker image; {image}. A pool's spec.engine.image takes precedence."),
        imagePullPolicy=_pull_policy(),
        podTemplate=plain(structural_schema(PodTemplate))
        | {
            "description": "Fields merged into this engine's pods, as spec.podTemplate; the pool's "
            "own take precedence."
        },
        env=items(
            "Environment of the worker container, as in a pod spec; `ROLLOUT_*` is the operator's.",
            _environment(),
        ),
    )


def _environment() -> Schema:
    schema = plain(structural_schema(EnvVar))
    schema["properties"]["name"]["not"] = {"pattern": "^ROLLOUT_"}
    return schema


def _pull_policy() -> Schema:
    return text("When the image is pulled.", enum=["Always", "IfNotPresent", "Never"])


def _metrics() -> Schema:
    labels = strings("Additional labels, for example those that Prometheus selects by.")
    return group(
        podMonitor=group(
            enabled=switch(
                "Create PodMonitors for operator and workers; needs the Prometheus Operator. Their pods have no "
                "annotation prometheus.io/scrape then, so that nothing is counted twice."
            ),
            interval=text("Time between scrapes.", pattern="^[0-9]+(ms|s|m)$"),
            scrapeTimeout=text(
                "After which time a scrape fails, at most the interval; if empty, Prometheus' own default.",
                pattern="^([0-9]+(ms|s|m))?$",
            ),
            labels=labels,
        ),
        prometheusRule=group(
            enabled=switch(
                "Create a PrometheusRule with the alerts; needs the Prometheus Operator."
            ),
            labels=labels,
            runbookUrl=text(
                "URL at which docs/runbook.md is published; each alert's runbook_url leads to a section of it. "
                "If empty, alerts have none.",
                pattern="^(https?://[^#]+)?$",
            ),
            alerts=_alerts(),
        ),
        dashboards=group(
            enabled=switch("Create a ConfigMap with the Grafana dashboards."),
            labels=strings("Labels that Grafana's sidecar looks for."),
        ),
    )


def _alerts() -> Schema:
    """Return the schema of what single alerts change, by the names in the chart's rules.yaml."""
    rules = yaml.safe_load((CHART / "rules.yaml").read_text())["groups"]
    changes = group(
        enabled=switch("Whether the alert is installed."),
        severity=text("Its label severity.", minLength=1),
        **{"for": text("How long its condition holds before it fires.", pattern=DURATION)},
    )
    del changes["required"]
    names = [rule["alert"] for each in rules for rule in each["rules"]]
    schema = group(
        "Changes of single alerts: a map of name, such as RolloutPoolNotServing, to `enabled`, `for` and `severity`; "
        "what is left out stays as in rules.yaml.",
        **dict.fromkeys(names, changes),
    )
    del schema["required"]
    return schema


def _image() -> dict[str, Schema]:
    return {
        "image": group(
            repository=text("Operator image.", minLength=1),
            tag=text("Image tag; if empty, the chart's appVersion."),
            digest=text("Image digest, instead of the tag.", pattern="^(sha256:[0-9a-f]{64})?$"),
            pullPolicy=_pull_policy(),
        ),
        "imagePullSecrets": items(
            "Secrets for pulling the operator's image.",
            group(name=text("Name of the Secret.", minLength=1)),
        ),
        "replicaCount": {
            "type": "integer",
            "minimum": 0,
            "maximum": 9,
            "description": "Number of operator pods; one leads, the others stand by.",
        },
        "fullnameOverride": text(
            "Name of the operator's objects; if empty, derived from the release.",
            pattern="^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$",
        ),
        "engines": group(
            hf=_engine(ENGINES["hf"], "if empty, rollout-worker-hf at the chart's appVersion"),
            vllm=_engine(ENGINES["vllm"], "there is no default"),
            sglang=_engine(ENGINES["sglang"], "there is no default"),
        ),
    }


def _scope() -> dict[str, Schema]:
    namespaces = {"type": "string", "pattern": LABEL}
    return {
        "watchNamespaces": items(
            "Namespaces whose RolloutReplicas the operator runs; if empty, all, or with rbac.namespaced "
            "the release's own. Listed namespaces get a Role each instead of one ClusterRole.",
            namespaces,
        ),
        "rbac": group(
            namespaced=switch(
                "Create nothing cluster-wide: no CRD, admission policy, ClusterRole or "
                "ClusterRoleBinding, and Roles instead of the ClusterRoles for people. See above for "
                "what a cluster admin must do first."
            )
        ),
        "workers": group(
            namespaces=items(
                "Namespaces in which the service account rollout-worker gets its permissions; if "
                "empty, the watched ones, else the release's own.",
                namespaces,
            ),
            tokenReviews=text(
                "Who may review tokens, which is a right of the whole cluster and which workers need to know their "
                "callers: `listed`, the accounts rollout-worker of these namespaces; `any`, every service account of the "
                "cluster, so that the admin of a namespace can make the rest alone (docs/runbook.md#service-account-missing). "
                "A review says whose a token is to somebody who has it already.",
                enum=["listed", "any"],
            ),
            serviceAccount=group(
                create=switch("Create the service account rollout-worker in these namespaces."),
                annotations=strings("Annotations of that service account."),
            ),
            dataToken=group(
                secretName=text(
                    "Secret (token) in each namespace with workers; with it their data ports want that token for all but "
                    "health, readiness and metrics (docs/worker.md#a-token-for-the-data-port). If empty, they want none.",
                    pattern=OPTIONAL_NAME,
                )
            ),
            controlTLS=group(
                secretName=text(
                    "Secret (tls.crt, tls.key) in each namespace with workers; with it their control "
                    "ports speak TLS only, and those for weights where a pool requires it. Its "
                    f"certificate is for the name {CONTROL_TLS_NAME}.",
                    pattern=OPTIONAL_NAME,
                ),
                caSecretName=text(
                    "Secret (ca.crt) in the operator's namespace with which it checks those "
                    "certificates; needed with secretName.",
                    pattern=OPTIONAL_NAME,
                ),
            ),
        ),
        "colocation": _colocation(namespaces),
        "crds": group(
            install=switch("Install the CRD and upgrade it with the chart."),
            keep=switch(
                "Keep the CRD, its objects, running workers and their service account on "
                "uninstall; if false, everything is removed."
            ),
        ),
    }


def _colocation(namespace: Schema) -> Schema:
    return group(
        enabled=switch(
            "Make the directory whose locks let colocated trainers and workers take turns: a DaemonSet that "
            "opens it on each node, and a PersistentVolume and claim of it in each namespace listed below."
        ),
        namespaces=items(
            "Namespaces with trainers and colocated workers: they get a claim of the directory, and their service "
            "accounts may list ResourceSlices.",
            namespace,
        ),
        directory=text(
            "The directory on each node, on a local file system.",
            pattern="^(/[A-Za-z0-9][-A-Za-z0-9._]*)+$",
        ),
        claim=text(
            "Name of the lock directory's PersistentVolumeClaims. If empty, rollout-turn if colocation.enabled, else "
            "none: nothing enforces exclusion. Set it without enabled to use claims that somebody else made.",
            pattern=OPTIONAL_NAME,
        ),
        nodeNamespace=text(
            "Existing namespace of the DaemonSet; if empty, the release's. Its pods need the Pod Security level "
            "baseline: an init container runs as root, without any capability.",
            pattern="^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?$",
        ),
        nodeSelector=strings(
            "Labels that a node must have to get the directory; if empty, all do."
        ),
        tolerations=items(
            "Tolerations of the DaemonSet's pods; all taints, as nodes with accelerators often have some.",
            {"type": "object"},
        ),
        priorityClassName=text("PriorityClass of the DaemonSet's pods."),
        resources=open_object("Compute resources of each container of the DaemonSet."),
    )


def _rights() -> dict[str, Schema]:
    return {
        "roles": group(
            create=switch(
                "Create the ClusterRoles rollout-viewer, rollout-editor and rollout-trainer; with "
                "rbac.namespaced they are Roles."
            )
        ),
        "admissionPolicy": group(
            enabled=switch(
                "Require a separate permission to change spec.weights.target, spec.state and the rest of "
                "the object; if false, anyone who may update an object may change all of it."
            )
        ),
        "networkPolicy": _network_policy(),
        "serviceAccount": group(
            create=switch("Create the operator's service account."),
            name=text("Name of the service account; if empty, derived from the release."),
            annotations=strings("Annotations of the service account."),
        ),
    }


def _network_policy() -> Schema:
    peer = {"type": "object"}
    return group(
        enabled=switch(
            "Create a NetworkPolicy for the workers of each namespace with workers, and one for the operator's pods. "
            "The operator reaches the workers' control ports, the namespace's workers reach each other on all "
            "ports (gangs choose theirs), and the peers below what they are for. The network plugin must enforce "
            "policies; another policy can open more and close nothing."
        ),
        dataFrom=items(
            "Peers, as in a NetworkPolicy, that may reach the workers' data port (8000): generation without a "
            "token, and metrics. If empty, everybody may; else these, metricsFrom and trainersFrom.",
            peer,
        ),
        metricsFrom=items(
            "Peers that scrape metrics. They reach the operator's port 8080 (if empty, everybody does) and, where dataFrom "
            "restricts it, the workers' data port, on which the metrics are: they may generate, too.",
            peer,
        ),
        trainersFrom=items(
            "Peers that publish weights or steer workers: they may reach data, control (8001) and weights ports. Without "
            "them `publish_weights(tensors=…)` reaches no worker.",
            peer,
        ),
        controlFrom=items("Peers that may reach control and weights ports only.", peer),
        weightsPorts=items(
            "Ports for pushed weights that the policy opens: add each spec.weights.transport.port that a pool sets.",
            {"type": "integer", "minimum": 1024, "maximum": 65535},
        ),
    )


def _operator() -> dict[str, Schema]:
    return {
        "metrics": _metrics(),
        "operatorClass": text(
            "Act only on RolloutReplicas whose `spec.operatorClass` is this; empty: only on those without one. "
            "Give each operator of a cluster another one if they watch a namespace in common.",
            maxLength=63,
            pattern="^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$",
        ),
        "logging": group(
            level=text("Minimum log level.", enum=["DEBUG", "INFO", "WARNING", "ERROR"]),
            format=text("Log format.", enum=["json", "text"]),
        ),
        "extraArgs": items(
            "Additional operator flags, see `rollout-operator run --help`; none that other values and the RBAC go by.",
            {
                "type": "string",
                "not": {"pattern": "^--(config|http-port|lease-name|service-account)(=|$)"},
            },
        ),
        "extraEnv": items(
            "Additional environment of the operator's container, as in a pod spec.",
            {"type": "object"},
        ),
        "podDisruptionBudget": group(
            enabled=switch("Create a PodDisruptionBudget for the operator's pods."),
            maxUnavailable={
                "type": ["integer", "string"],
                "description": "Maximum number or percentage of operator pods unavailable during evictions.",
                "minimum": 0,
                "pattern": "^[0-9]+%$",
            },
        ),
        "service": group(annotations=strings("Annotations of the metrics Service.")),
        "resources": open_object("Compute resources of the operator's container."),
        "podSecurityContext": open_object("Security context of the operator's pods."),
        "securityContext": open_object("Security context of the operator's container."),
        "podAnnotations": strings("Additional annotations for the operator's pods."),
        "podLabels": strings("Additional labels for the operator's pods."),
        "nodeSelector": strings("Labels that the operator's node must have."),
        "tolerations": items("Tolerations of the operator's pods.", {"type": "object"}),
        "affinity": open_object("Affinity of the operator's pods."),
        "topologySpreadConstraints": items(
            "How the operator's pods are spread; if empty, over the nodes if possible.",
            {"type": "object"},
        ),
        "priorityClassName": text("PriorityClass of the operator's pods."),
    }


def values_schema() -> Schema:
    """Return the JSON schema of values.yaml."""
    schema = group("", **_image(), **_scope(), **_rights(), **_operator())
    # `global` is Helm's own, set where the chart is a part of another.
    schema["properties"]["global"] = {"type": "object"}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema}


def schema_text() -> str:
    return json.dumps(values_schema(), indent=1) + "\n"


def readme(values: Mapping[str, Any]) -> str:
    """Return the chart's README with a row for each value."""
    lines = ["| value | default | meaning |", "|---|---|---|"]
    for path, schema in leaves(values_schema(), ()):
        default: Any = values
        for part in path:
            default = default[part]
        shown = json.dumps(default).replace("|", "\\|")
        lines.append(f"| `{'.'.join(path)}` | `{shown}` | {schema['description']} |")
    return README.replace("@TABLE@", "\n".join(lines))


def leaves(schema: Schema, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Schema]]:
    """Yield the values that are set one by one; a pod template counts as one, alerts do too."""
    for name, child in schema["properties"].items():
        if name == "global":
            continue
        if "properties" in child and name not in ONE_VALUE:
            yield from leaves(child, (*path, name))
        else:
            yield (*path, name), child


README = """# Chart rollout-operator

Generated by `make generate` from `hack/generate/chart_values.py` and `values.yaml`; don't edit.

Installs the CustomResourceDefinition `RolloutReplica`, the operator, the RBAC of operator and
workers, the roles `rollout-viewer`, `rollout-editor` and `rollout-trainer`, an admission policy and,
if you want them, PodMonitors, alerts and dashboards. Needs Helm 3.17 or 4, Kubernetes 1.32 or later.

    helm install rollout-operator charts/rollout-operator --namespace rollout-system --create-namespace

- `helm uninstall` keeps the CRD, its objects, running workers and the service account they run as
  (to remove everything, set `crds.keep=false` first). A later install under the same release name and
  namespace takes them over. One under another name leaves them as they are and uses them: set `crds.install=false`
  then, or let helm hand them over with `--take-ownership`. One under the same name in another namespace needs
  `--take-ownership`: the ClusterRole of the workers has the same name.
- With `rbac.namespaced=true` nothing cluster-wide is created. A cluster admin has applied `operator/crd.yaml` and, since
  workers review the tokens of their callers, run `kubectl create clusterrole rollout-worker --verb=create
  --resource=tokenreviews.authentication.k8s.io`, and for each namespace with workers `kubectl create clusterrolebinding
  rollout-worker-NAMESPACE --clusterrole=rollout-worker --serviceaccount=NAMESPACE:rollout-worker`. Colocated pools with more than
  one slot also need `kubectl create clusterrole rollout-devices --verb=list,watch --resource=resourceslices.resource.k8s.io`, bound to
  the operator's service account and to those of their trainers. Who installs must hold
  the rights that the Roles hand out, or may `escalate` and `bind` roles. **Without the admission policy `rollout-trainer`
  may change all of a RolloutReplica**, its image and its owners too: bind it only to trainers that may.
- An upgrade also upgrades the CRD. CRD changes only add fields.
- A change to `engines.*` replaces no running pod; it applies to pods created afterwards
  (docs/decisions/002 says why, and how to roll a pool at once).
- With the admission policy, permission to `update` a RolloutReplica is not enough: `spec.weights.target` and the
  annotation `rollout.dev/trainer-epoch` also need `update` on `rolloutreplicas/weights`, `spec.state` on
  `rolloutreplicas/state`, and anything else, all other metadata with it, on `rolloutreplicas/spec`. `rollout-trainer` has
  the first two. `kubectl scale` needs `rolloutreplicas/scale`, which `rollout-editor` has.

## Values

@TABLE@
"""
