"""The generated CRD: structural, bounded, described, and not stale."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import Field

from rollout_operator.api.crd import (
    UnsupportedSchema,
    custom_resource_definition,
    structural_schema,
)
from rollout_operator.api.schema import ApiModel, cel_rule, config_with_rules, schema_extra

ROOT = Path(__file__).parents[4]
DEFINITION = custom_resource_definition()
VERSION = DEFINITION["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]


def nodes(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key, mark in (("items", "[]"), ("additionalProperties", "[*]")):
        if isinstance(schema.get(key), dict):
            yield from nodes(schema[key], path + mark)


ALL = dict(nodes(SCHEMA, ""))


def test_checked_in_crd_is_the_generated_one() -> None:
    path = ROOT / "operator" / "crd.yaml"
    assert yaml.safe_load(path.read_text()) == DEFINITION
    assert path.stat().st_size <= 256 * 1024


def test_every_field_has_a_type_and_a_description() -> None:
    for path, schema in ALL.items():
        assert "type" in schema or "x-kubernetes-int-or-string" in schema, path
        if not path.endswith("]") and path:
            assert schema.get("description"), path


def test_everything_is_bounded() -> None:
    for path, schema in ALL.items():
        match schema.get("type"):
            case "array":
                assert "maxItems" in schema, path
                assert "x-kubernetes-list-type" in schema, path
            case "string":
                assert {"maxLength", "enum", "format"} & schema.keys(), path
            case "integer" if "enum" not in schema:
                assert {"minimum", "maximum", "format"} <= schema.keys(), path
            case "object" if "additionalProperties" in schema:
                assert "maxProperties" in schema, path


def test_other_defaults_are_told() -> None:
    assert ALL[".spec.drainSeconds"]["description"].endswith("Default: 30.")
    assert ALL[".spec.weights.deadlineSeconds"]["description"].endswith("Default: 600.")


def test_every_rule_says_what_to_change() -> None:
    for path, schema in ALL.items():
        for rule in schema.get("x-kubernetes-validations", []):
            text = rule.get("message") or rule["messageExpression"]
            assert ":" in text, f"{path}: {text}"
            assert "' + " not in text, f"{path}: concatenation is over the cost budget"


def test_every_path_of_the_definition_exists() -> None:
    paths = [c["jsonPath"] for c in VERSION["additionalPrinterColumns"]]
    paths += [f["jsonPath"] for f in VERSION["selectableFields"]]
    paths += list(VERSION["subresources"]["scale"].values())
    for path in paths:
        assert path in ALL or path == ".metadata.creationTimestamp"


def test_status_has_the_fields_of_the_contract() -> None:
    assert set(ALL[".status"]["properties"]) == {
        "observedGeneration",
        "phase",
        "message",
        "replicas",
        "desiredReplicas",
        "readyReplicas",
        "updatedReplicas",
        "asleepReplicas",
        "selector",
        "weights",
        "lastTransition",
        "members",
        "restarts",
        "replacing",
        "lastErrors",
        "conditions",
    }


class Unbounded(ApiModel):
    """A model with an integer that has no upper bound."""

    count: int = Field(default=0, ge=0, description="A count.")


class Either(ApiModel):
    """A model with a union."""

    value: int | str = Field(description="This or that.")


class Endless(ApiModel):
    """A model with a string of any length."""

    text: str = Field(description="Any text.")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Unbounded, "Unbounded.count: give the integer a lower and an upper bound"),
        (Either, "Either.value: a union of 2 types is not possible in a CRD"),
        (Endless, "Endless.text: give the string a maximum length"),
    ],
)
def test_refuses_what_a_structural_schema_cannot_say(model: type[ApiModel], message: str) -> None:
    with pytest.raises(UnsupportedSchema, match=message):
        structural_schema(model)


class Inner(ApiModel):
    """Description of the class."""

    model_config = config_with_rules(cel_rule("self.a > 0", "a: raise it"))
    a: int = Field(ge=0, le=2**40, description="A number.")


class Outer(ApiModel):
    """Outer."""

    inner: Inner | None = Field(
        default=None,
        description="Description of the field.",
        json_schema_extra=schema_extra(cel_rule("self.a < 9", "a: lower it")),
    )


def test_a_field_adds_to_the_model_that_it_refers_to() -> None:
    schema = structural_schema(Outer)["properties"]["inner"]
    assert schema["description"] == "Description of the field."
    assert [r["rule"] for r in schema["x-kubernetes-validations"]] == ["self.a > 0", "self.a < 9"]
    assert schema["properties"]["a"]["format"] == "int64"
