"""What every model of the custom resource shares: base class, CEL rules, bounded types.

The models are the one source of the CRD: `crd.py` turns their JSON schema into a structural one.
What pydantic can't say (CEL rules, list and map types, defaults of the API server) is in
`json_schema_extra`, under the name that the CRD uses; `cel_rule`, `api_default` and the others below
write it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer
from pydantic.alias_generators import to_camel
from pydantic.json_schema import WithJsonSchema

VALIDATIONS_KEYWORD = "x-kubernetes-validations"
API_DEFAULT_KEYWORD = "x-api-default"
"""Marks a field whose default the API server fills in; `crd.py` drops all other defaults."""

INT32_MAX = 2**31 - 1

SchemaExtra = dict[str, Any]


class ApiModel(BaseModel):
    """Base of spec and status: frozen, camelCase on the wire, snake_case in Python.

    The docstring below a field is its description in the CRD.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        use_attribute_docstrings=True,
    )


def cel_rule(
    rule: str, message: str, *, expression: bool = False, path: str | None = None
) -> dict[str, str]:
    """Return one validation rule; `expression`: the message is CEL that makes the text.

    Only `'… %d'.format([…])` fits the server's cost budget in an expression, not `+`.
    """
    out = {"rule": rule, "messageExpression" if expression else "message": message}
    if path is not None:
        out["fieldPath"] = path
    return out


def schema_extra(*validations: dict[str, str], **extra: Any) -> SchemaExtra:
    """Return `json_schema_extra` with these rules and other CRD keywords (`_` stands for `-`)."""
    out: SchemaExtra = {k.replace("_", "-"): v for k, v in extra.items()}
    if validations:
        out[VALIDATIONS_KEYWORD] = list(validations)
    return out


def config_with_rules(*validations: dict[str, str], **extra: Any) -> ConfigDict:
    """Return the `model_config` of a model with these rules; the base's settings stay."""
    return ConfigDict(json_schema_extra=schema_extra(*validations, **extra))


def api_default() -> SchemaExtra:
    """Let the API server fill in the model's default, because people must see the value."""
    return {API_DEFAULT_KEYWORD: True}


def map_list(*keys: str) -> SchemaExtra:
    """Make a list that merges by these keys and refuses duplicates."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


def named_list(path: str) -> SchemaExtra:
    """Make a list that is replaced as a whole and whose entries have names of their own."""
    unique = "self.all(a, self.exists_one(b, b.name == a.name))"
    return schema_extra(
        cel_rule(unique, f"{path}: two entries have the same name: rename one"), **ATOMIC_LIST
    )


ATOMIC_LIST: SchemaExtra = {"x-kubernetes-list-type": "atomic"}
ATOMIC_MAP: SchemaExtra = {"x-kubernetes-map-type": "atomic"}
OPEN_OBJECT: SchemaExtra = {"x-kubernetes-preserve-unknown-fields": True}
"""Kept as given; the API server checks it when the pod is made."""

QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][+-]?[0-9]+)?$"

Quantity = Annotated[
    int | str,
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": QUANTITY_PATTERN,
            "maxLength": 32,
        }
    ),
]
"""An amount of a resource: `2`, `500m`, `16Gi`."""

Dns1123 = Annotated[
    str,
    Field(
        min_length=1,
        max_length=253,
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
    ),
]
"""Name of another object."""

KeyName = Annotated[str, Field(min_length=1, max_length=253)]
Dns1123Label = Annotated[
    str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
]
ExtendedResourceName = Annotated[
    str,
    Field(
        min_length=3,
        max_length=253,
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
    ),
]
SUB_PATH_MEANING = (
    "Folder inside the volume: a relative path without `..`. Defaults to the whole volume."
)
SubPath = Annotated[
    str,
    Field(
        min_length=1,
        max_length=1024,
        json_schema_extra=schema_extra(
            cel_rule(
                r"!self.startsWith('/') && !self.matches('(^|/)[.][.](/|$)')",
                "subPath must be a relative path without '..': name a folder inside the volume",
            )
        ),
    ),
]


def clipped_to(limit: int) -> BeforeValidator:
    """Cut text to `limit` characters: a long error must not make a status invalid."""

    def cut(value: Any) -> Any:
        if isinstance(value, str) and len(value) > limit:
            return value[: limit - 1] + "…"
        return value

    return BeforeValidator(cut)


Message = Annotated[str, clipped_to(1024), Field(max_length=1024)]
LogTail = Annotated[str, clipped_to(4096), Field(max_length=4096)]
ShortMessage = Annotated[str, clipped_to(256), Field(max_length=256)]


def _cut_to_milliseconds(value: datetime) -> datetime:
    value = value.astimezone(UTC)
    return value.replace(microsecond=value.microsecond // 1000 * 1000)


def _to_rfc3339(value: datetime) -> str:
    text = value.astimezone(UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def _to_rfc3339_seconds(value: datetime) -> str:
    return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


Timestamp = Annotated[
    datetime, AfterValidator(_cut_to_milliseconds), PlainSerializer(_to_rfc3339, return_type=str)
]
"""UTC in milliseconds; cut on validation, so that a value survives the way through the API."""

TimestampSeconds = Annotated[
    datetime,
    AfterValidator(lambda value: value.astimezone(UTC).replace(microsecond=0)),
    PlainSerializer(_to_rfc3339_seconds, return_type=str),
]
"""UTC in whole seconds, as Kubernetes writes the times of conditions."""


def field_path(location: tuple[int | str, ...]) -> str:
    """Write pydantic's location as people write it: `spec.engine.env[0].name`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def without_location(
    document: Mapping[str, Any], location: tuple[int | str, ...]
) -> dict[str, Any]:
    """Return a copy of `document` that lacks what stands at `location`; the rest is shared.

    A location that ends inside a value (a branch of a union) removes that value.
    """
    copy = _without_location(document, location)
    return copy if isinstance(copy, dict) else {}


def _without_location(value: Any, location: tuple[int | str, ...]) -> Any:
    head, rest = location[0], location[1:]
    if isinstance(value, Mapping):
        parts: dict[Any, Any] | list[Any] = dict(value)
        known = head in value
    else:
        parts = list(value)
        known = isinstance(head, int) and head < len(value)
    if not known:
        return parts
    inner = parts[head]  # type: ignore[index]
    if rest and isinstance(inner, Mapping | list):
        parts[head] = _without_location(inner, rest)  # type: ignore[index]
    else:
        del parts[head]  # type: ignore[arg-type]
    return parts
