"""The part of the pod template that says on which nodes the pods may run, and how they spread."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .schema import ATOMIC_LIST, INT32_MAX, OPEN_OBJECT, ApiModel, KeyName
from .spec_containers import OpenObject

LabelValue = Annotated[
    str, Field(max_length=63, pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")
]


class Toleration(ApiModel):
    """A taint that the pods tolerate."""

    key: Annotated[str, Field(max_length=316)] | None = None
    """Taint key; if unset, every key (with operator Exists)."""
    operator: Literal["Exists", "Equal"] | None = None
    """How the value is compared; defaults to Equal."""
    value: LabelValue | None = None
    """Taint value, for Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Taint effect; if unset, every effect."""
    toleration_seconds: int | None = Field(default=None, ge=0, le=INT32_MAX)
    """How long a NoExecute taint is tolerated; if unset, forever."""


class TopologySpreadConstraint(ApiModel):
    """How pods are spread across a topology."""

    max_skew: int = Field(ge=1, le=INT32_MAX)
    """Maximum difference in pod count between domains."""
    topology_key: Annotated[str, Field(min_length=1, max_length=316)]
    """Node label that defines the domains."""
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"]
    """What the scheduler does when it can't meet the skew."""
    label_selector: OpenObject | None = Field(default=None, json_schema_extra=OPEN_OBJECT)
    """Pods that are counted."""
    match_label_keys: tuple[KeyName, ...] = Field(
        default=(), max_length=16, json_schema_extra=ATOMIC_LIST
    )
    """Pod labels whose values must also match."""
    min_domains: int | None = Field(default=None, ge=1, le=INT32_MAX)
    """Minimum number of domains."""
    node_affinity_policy: Literal["Honor", "Ignore"] | None = None
    """Whether node affinity decides which nodes count."""
    node_taints_policy: Literal["Honor", "Ignore"] | None = None
    """Whether taints decide which nodes count."""
