"""Makes the CustomResourceDefinition from the models; pure.

pydantic's JSON schema becomes a structural one: references are inlined, `null` branches folded,
titles dropped, integers get a format, and only the defaults that people must see stay in it. The
other defaults belong to the operator and are named in the description.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel

from .names import GROUP, KIND, MAX_NAME_LENGTH, PLURAL, SHORT_NAME, VERSION
from .schema import API_DEFAULT_KEYWORD, INT32_MAX, VALIDATIONS_KEYWORD, cel_rule
from .spec import RolloutReplicaSpec
from .status import RolloutReplicaStatus

Schema = dict[str, Any]

CRD_NAME: Final = f"{PLURAL}.{GROUP}"
_KEPT_KEYWORDS: Final = (
    *("type", "format", "description", "enum", "default", "nullable", "pattern"),
    *("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems"),
    *("minProperties", "maxProperties", "required", "items", "properties"),
    *("additionalProperties", "anyOf", "x-kubernetes-int-or-string"),
    *("x-kubernetes-preserve-unknown-fields", "x-kubernetes-map-type", "x-kubernetes-list-type"),
    *("x-kubernetes-list-map-keys", VALIDATIONS_KEYWORD),
)
_LINE_BREAK: Final = re.compile(r"(?<!\n)\n(?!\n)")
"""A line break within a paragraph: the docstrings of fields are wrapped, descriptions are not."""
_DROPPED_KEYWORDS: Final = ("title", API_DEFAULT_KEYWORD, "$defs", "const")

PRINTER_COLUMNS: Final = (
    # name, JSON path, type, priority (1: wide only), description
    ("Mode", ".spec.mode", "string", 0, "Whose accelerators the pool uses."),
    ("Engine", ".spec.engine.type", "string", 0, "Inference engine."),
    ("Desired", ".status.desiredReplicas", "integer", 0, "Replicas that should run."),
    ("Ready", ".status.readyReplicas", "integer", 0, "Replicas that serve."),
    ("Weights", ".status.weights.committed.version", "integer", 0, "Committed version."),
    ("Target", ".spec.weights.target.version", "integer", 0, "Version that the pool must serve."),
    ("Phase", ".status.phase", "string", 0, "Summary of the conditions."),
    ("Age", ".metadata.creationTimestamp", "date", 0, "Time since creation."),
    ("Epoch", ".status.weights.committed.epoch", "integer", 1, "Committed epoch."),
    ("Updated", ".status.updatedReplicas", "integer", 1, "Replicas at the latest revision."),
    ("Asleep", ".status.asleepReplicas", "integer", 1, "Replicas that are asleep."),
    ("Restarts", ".status.restarts", "integer", 1, "Restarts of replicas."),
    ("Message", ".status.message", "string", 1, "What the pool is waiting for, or what is wrong."),
)
SELECTABLE_FIELDS: Final = (".spec.engine.type", ".spec.state", ".status.phase")


class UnsupportedSchema(TypeError):
    """A model uses something that a structural schema can't say; the text names the field."""


def structural_schema(model: type[BaseModel]) -> Schema:
    """Return the structural schema of a model, as the API server demands it."""
    document = model.model_json_schema(by_alias=True, mode="validation")
    return _convert_schema(document, document.get("$defs", {}), model.__name__)


def _convert_schema(node: Mapping[str, Any], definitions: Mapping[str, Any], where: str) -> Schema:
    merged = _inline_references(node, definitions, where)
    out: Schema = {}
    for key in _KEPT_KEYWORDS:
        if key in merged:
            out[key] = merged[key]
    if unknown := merged.keys() - set(_KEPT_KEYWORDS) - set(_DROPPED_KEYWORDS):
        raise UnsupportedSchema(f"{where}: {sorted(unknown)} is not possible in a CRD")
    if "description" in out:
        out["description"] = _LINE_BREAK.sub(" ", out["description"])
    if "properties" in out:
        out["properties"] = {
            name: _convert_schema(child, definitions, f"{where}.{name}")
            for name, child in out["properties"].items()
        }
    if isinstance(out.get("items"), Mapping):
        out["items"] = _convert_schema(out["items"], definitions, f"{where}[]")
    _set_values(out, merged, definitions, where)
    _set_default(out, merged)
    return out


def _inline_references(
    node: Mapping[str, Any], definitions: Mapping[str, Any], where: str
) -> Schema:
    """Inline the reference or the one branch that is not null; what the field says wins."""
    merged = dict(node)
    branches = []
    if "$ref" in merged:
        branches.append(definitions[merged.pop("$ref").rpartition("/")[2]])
    if "anyOf" in merged and "x-kubernetes-int-or-string" not in merged:
        given = [b for b in merged.pop("anyOf") if b.get("type") != "null"]
        if len(given) != 1:
            raise UnsupportedSchema(
                f"{where}: a union of {len(given)} types is not possible in a CRD"
            )
        branches += given
    for branch in branches:
        inner = _inline_references(branch, definitions, where)
        validations = inner.get(VALIDATIONS_KEYWORD, []) + merged.get(VALIDATIONS_KEYWORD, [])
        merged = inner | merged
        if validations:
            merged[VALIDATIONS_KEYWORD] = validations
    return merged


def _set_values(out: Schema, merged: Schema, definitions: Mapping[str, Any], where: str) -> None:
    """Finish what pydantic says of numbers, literals and open or closed objects."""
    if "const" in merged:
        out["enum"] = [merged["const"]]
    values = out.get("additionalProperties")
    if isinstance(values, Mapping):
        out["additionalProperties"] = _convert_schema(values, definitions, f"{where}[*]")
    elif values is not None:
        del out["additionalProperties"]
    if out.get("type") == "integer" and "enum" not in out:
        if "minimum" not in out or "maximum" not in out:
            raise UnsupportedSchema(f"{where}: give the integer a lower and an upper bound")
        out["format"] = "int64" if out["maximum"] > INT32_MAX else "int32"
    if out.get("type") == "string" and not {"maxLength", "enum", "format"} & out.keys():
        raise UnsupportedSchema(f"{where}: give the string a maximum length")


def _set_default(out: Schema, merged: Schema) -> None:
    """Keep a default only if the API server should fill it in; else describe it."""
    default = out.pop("default", None)
    if merged.get(API_DEFAULT_KEYWORD):
        out["default"] = default
    elif isinstance(default, str | int) and default != "" and not isinstance(default, bool):
        out["description"] = f"{out['description']} Default: {default}."


def custom_resource_definition() -> dict[str, Any]:
    """Return the CustomResourceDefinition as a JSON document."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": CRD_NAME},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": [SHORT_NAME],
                "categories": ["all"],
            },
            "versions": [_crd_version()],
        },
    }


def _crd_version() -> dict[str, Any]:
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "selectableFields": [{"jsonPath": path} for path in SELECTABLE_FIELDS],
        "additionalPrinterColumns": [
            {"name": name, "jsonPath": path, "type": kind, "description": text}
            | ({"priority": priority} if priority else {})
            for name, path, kind, priority, text in PRINTER_COLUMNS
        ],
        "schema": {"openAPIV3Schema": _root_schema()},
    }


def _root_schema() -> Schema:
    return {
        "type": "object",
        "description": "A pool of inference engines that serve one model. Failed replicas are "
        "replaced; a trainer updates the weights while it serves.",
        "required": ["spec"],
        VALIDATIONS_KEYWORD: [
            cel_rule(
                f"self.metadata.name.size() <= {MAX_NAME_LENGTH} && "
                "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$') && "
                "!self.metadata.name.endsWith('-heads')",
                f"metadata.name must be a DNS-1035 label (a-z, 0-9 and '-', starting with a letter) of at "
                f"most {MAX_NAME_LENGTH} characters that does not end in -heads: choose another name",
            )
        ],
        "properties": {
            "spec": structural_schema(RolloutReplicaSpec),
            "status": structural_schema(RolloutReplicaStatus),
        },
    }
