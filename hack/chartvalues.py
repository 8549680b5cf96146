"""Makes the chart's values.schema.json and the table of values in its README.

`VALUES` says for each value what it may be and what it means; the pod templates of the engines
take the schema of the custom resource.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rollout_operator.api.crd import structural
from rollout_operator.api.spec_env import EnvVar
from rollout_operator.api.spec_pod import PodTemplate

Schema = dict[str, Any]

LABEL = "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
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
    """Return a closed object: an unknown key is refused by name."""
    out: Schema = {"type": "object", "additionalProperties": False, "properties": properties}
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
        image=text(f"Image of the {title} worker; {image}. A pool's spec.engine.image goes first."),
        imagePullPolicy=_pull_policy(),
        podTemplate=plain(structural(PodTemplate))
        | {"description": "Overlay on these pods, as spec.podTemplate; the pool's own goes first."},
        env=items("Environment of the worker container, as in a pod.", plain(structural(EnvVar))),
    )


def _pull_policy() -> Schema:
    return text("When the image is pulled.", enum=["Always", "IfNotPresent", "Never"])


def _metrics() -> Schema:
    labels = strings("More labels, for example those that Prometheus selects by.")
    return group(
        podMonitor=group(
            enabled=switch(
                "Make PodMonitors of operator and workers; needs the Prometheus Operator."
            ),
            interval=text("Time between scrapes.", pattern="^[0-9]+(ms|s|m)$"),
            labels=labels,
        ),
        prometheusRule=group(
            enabled=switch("Make a PrometheusRule with the alerts; needs the Prometheus Operator."),
            labels=labels,
        ),
        dashboards=group(
            enabled=switch("Make a ConfigMap with the Grafana dashboards."),
            labels=strings("Labels by which Grafana's sidecar finds it."),
        ),
    )


def _image() -> dict[str, Schema]:
    return {
        "image": group(
            repository=text("Image of the operator.", minLength=1),
            tag=text("Its tag; the chart's appVersion if empty."),
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
            "description": "Operators; one leads, the others stand by.",
        },
        "fullnameOverride": text("Name of the operator's objects; from the release if empty."),
        "engines": group(
            hf=_engine(ENGINES["hf"], "rollout-worker-hf of the chart's appVersion if empty"),
            vllm=_engine(ENGINES["vllm"], "no default"),
            sglang=_engine(ENGINES["sglang"], "no default"),
        ),
    }


def _scope() -> dict[str, Schema]:
    namespaces = {"type": "string", "pattern": LABEL}
    return {
        "watchNamespaces": items(
            "Namespaces whose RolloutReplicas are run; empty: all. Named ones get a Role instead "
            "of a ClusterRole.",
            namespaces,
        ),
        "workers": group(
            namespaces=items(
                "Namespaces in which the account rollout-worker gets its rights; empty: the "
                "watched ones, else the release's own.",
                namespaces,
            ),
            serviceAccount=group(
                create=switch("Make the account rollout-worker there."),
                annotations=strings("Annotations of the account."),
            ),
        ),
        "crds": group(
            install=switch("Install the CRD and upgrade it with the chart."),
            keep=switch(
                "Uninstall leaves the CRD, its objects, running workers and their account; false: "
                "nothing is left."
            ),
        ),
    }


def _rights() -> dict[str, Schema]:
    return {
        "roles": group(
            create=switch("Make the ClusterRoles rollout-viewer, rollout-editor, rollout-trainer.")
        ),
        "admissionPolicy": group(
            enabled=switch(
                "Let changes of spec.weights, spec.state and the rest of spec each need their own "
                "right; without it who may update an object may change all of it."
            )
        ),
        "serviceAccount": group(
            create=switch("Make the operator's account."),
            name=text("Its name; from the release if empty."),
            annotations=strings("Its annotations."),
        ),
    }


def _operator() -> dict[str, Schema]:
    return {
        "metrics": _metrics(),
        "logging": group(
            level=text("Least level.", enum=["DEBUG", "INFO", "WARNING", "ERROR"]),
            format=text("Form of a line.", enum=["json", "text"]),
        ),
        "extraArgs": items(
            "More flags of the operator, see `rollout-operator run --help`.", {"type": "string"}
        ),
        "resources": open_object("Resources of the operator."),
        "podSecurityContext": open_object("Security context of the operator's pods."),
        "securityContext": open_object("Security context of the operator's container."),
        "podAnnotations": strings("More annotations of the operator's pods."),
        "nodeSelector": strings("Node labels for the operator."),
        "tolerations": items("Tolerations of the operator.", {"type": "object"}),
        "affinity": open_object("Affinity of the operator."),
        "priorityClassName": text("PriorityClass of the operator."),
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
    """Yield the values that are set one by one; a pod template counts as one."""
    for name, child in schema["properties"].items():
        if name == "global":
            continue
        if "properties" in child and name != "podTemplate":
            yield from leaves(child, (*path, name))
        else:
            yield (*path, name), child


README = """# Chart rollout-operator

Generated by `make generate` from `hack/chartvalues.py` and `values.yaml`; don't edit.

Installs the CustomResourceDefinition `RolloutReplica`, the operator, the rights of operator and
workers, the roles `rollout-viewer`, `rollout-editor` and `rollout-trainer`, an admission policy, and
where you want them PodMonitors, alerts and dashboards. Helm 3.17 or 4, Kubernetes 1.32 or later.

    helm install rollout charts/rollout-operator --namespace rollout-system --create-namespace

- `helm uninstall` leaves the CRD, its objects, running workers and the account they run as
  (`crds.keep=false` before it: nothing is left). A later install of the same release name and
  namespace takes them over; under another name set `crds.install=false`.
- Upgrades change the CRD too. Changes of the CRD only add fields.
- A change of `engines.*` replaces no running pod; it reaches the pods that are made afterwards
  (docs/decisions/002 says why, and how to roll a pool at once).
- Who may `update` a RolloutReplica still needs, by the admission policy, `update` on
  `rolloutreplicas/weights`, `rolloutreplicas/state` or `rolloutreplicas/spec` for each part of the
  spec. `rollout-trainer` has the first two: a trainer moves weights and state and nothing else.
  `kubectl scale` needs the subresource `rolloutreplicas/scale`, as `rollout-editor` has it.

## Values

@TABLE@
"""
