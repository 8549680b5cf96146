"""The environment of the worker container, as in a pod spec."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .schema import ApiModel, Dns1123, KeyName, cel_rule, config_with_rules


class KeyRef(ApiModel):
    """A key of a Secret or ConfigMap in the pool's namespace."""

    name: Dns1123
    """Name of the Secret or ConfigMap."""
    key: KeyName
    """Key in it."""
    optional: bool | None = None
    """If true, the variable is omitted when the key is missing."""


class FieldRef(ApiModel):
    """A field of the pod."""

    field_path: Annotated[str, Field(min_length=1, max_length=256)]
    """Path in the pod, for example `status.podIP`."""


class EnvSource(ApiModel):
    """Where a variable's value comes from; exactly one field is set."""

    model_config = config_with_rules(
        cel_rule(
            "[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef)]"
            ".exists_one(x, x)",
            "valueFrom needs exactly one of secretKeyRef, configMapKeyRef and fieldRef: keep one",
        )
    )

    secret_key_ref: KeyRef | None = None
    """A key of a Secret."""
    config_map_key_ref: KeyRef | None = None
    """A key of a ConfigMap."""
    field_ref: FieldRef | None = None
    """A field of the pod itself."""


class EnvVar(ApiModel):
    """One environment variable of the worker container."""

    model_config = config_with_rules(
        cel_rule(
            "!self.name.startsWith('ROLLOUT_')",
            "env must not set ROLLOUT_*: the operator sets these from the spec; remove the entry",
            path=".name",
        ),
        cel_rule(
            "!(has(self.value) && has(self.valueFrom))",
            "env takes value or valueFrom, not both: remove one",
        ),
    )

    name: Annotated[
        str, Field(min_length=1, max_length=256, pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$")
    ]
    """Name; `ROLLOUT_*` is reserved for the operator and rejected."""
    value: Annotated[str, Field(max_length=4096)] | None = None
    """Literal value."""
    value_from: EnvSource | None = None
    """Source of the value, instead of value."""
