"""Makes the chart's values.schema.json, and the table of values in its README, from chart_values.yaml.

The engines' pod templates have the schema of the custom resource.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rollout_operator.api.crd import structural_schema
from rollout_operator.api.spec_engine import EnvVar
from rollout_operator.api.spec_pod import PodTemplate

Schema = dict[str, Any]

CHART = Path(__file__).resolve().parents[2] / "charts" / "rollout-operator"
README = Path(__file__).with_name("chart_readme.md")
VALUES = Path(__file__).with_name("chart_values.yaml")
ENGINES = {
    "hf": ("Hugging Face", "if empty, rollout-worker-hf at the chart's appVersion"),
    "vllm": ("vLLM", "without a default"),
    "sglang": ("SGLang", "without a default"),
}
TYPES = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
DURATION = "^([0-9]+(ms|[smhdwy]))+$"
PULL_POLICIES = ["Always", "IfNotPresent", "Never"]


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
    return schema


def values() -> dict[str, Schema]:
    """Return the schema of each value but for its type, by its path with dots, in the order of the README."""
    out: dict[str, Schema] = {}
    for name, schema in yaml.safe_load(VALUES.read_text())["values"].items():
        if name == "engines":
            for engine, words in ENGINES.items():
                out |= {f"engines.{engine}.{k}": v for k, v in engine_values(*words).items()}
        else:
            known = {"description": schema} if isinstance(schema, str) else schema
            out[name] = {
                "description": known["description"],
                **known,
            }  # in front, before what `<<` adds
    out["metrics.prometheusRule.alerts"] = alerts() | out["metrics.prometheusRule.alerts"]
    return out


def values_schema(defaults: Mapping[str, Any]) -> Schema:
    """Return the JSON schema of values.yaml, whose content is given.

    Raises:
        SystemExit: A value is not described, or a description has no value.
    """
    described = values()

    def schema_of(default: Any, path: tuple[str, ...]) -> Schema:
        known = described.pop(".".join(path), None)
        if known is not None:
            return {"type": TYPES[type(default)], **known}
        if not isinstance(default, Mapping):
            raise SystemExit(f"describe {'.'.join(path)} in {VALUES.name}")
        return group({key: schema_of(child, (*path, key)) for key, child in default.items()})

    schema = schema_of(defaults, ())
    if described:
        raise SystemExit(f"values.yaml lacks {', '.join(described)}")
    # Where the chart is a part of another, `global` has that one's values, too, and its `condition` is a value of ours.
    schema["properties"]["global"]["additionalProperties"] = True
    meaning = "For charts that depend on this one: what their `condition` looks at. It changes nothing here."
    schema["properties"]["enabled"] = {"type": "boolean", "description": meaning}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema}


def schema_text(defaults: Mapping[str, Any]) -> str:
    return json.dumps(values_schema(defaults), indent=1) + "\n"


def readme(defaults: Mapping[str, Any]) -> str:
    lines = ["| value | default | meaning |", "|---|---|---|"]
    for name, schema in values().items():
        default: Any = defaults
        for part in name.split("."):
            default = default[part]
        shown = json.dumps(default).replace("|", "\\|")
        lines.append(f"| `{name}` | `{shown}` | {schema['description']} |")
    return README.read_text().replace("@TABLE@", "\n".join(lines))
